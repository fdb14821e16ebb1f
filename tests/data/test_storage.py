import re

import numpy as np
import pytest

from jaxpretrain.data import storage

RNG = np.random.default_rng(0)
FILES = {"d/a.bin": RNG.bytes(10_007), "d/b.bin": RNG.bytes(4_096), "d/sub/c.bin": RNG.bytes(1), "d/notes.txt": b"x"}
NAMES = ["d/a.bin", "d/b.bin", "d/sub/c.bin"]


@pytest.fixture(params=["local", "file", "memory", "http", "gs"])
def root(request, tmp_path, server):
    """The root below which FILES lie, in every kind of storage."""
    if request.param in ("local", "file"):
        for name, data in FILES.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
        return str(tmp_path) if request.param == "local" else f"file://{tmp_path}"
    server.files.update(FILES)
    if request.param == "memory":
        store = storage._open_url("memory://store/")
        for name, data in FILES.items():
            store.write(name, data).result()
        return "memory://store"
    return f"http://127.0.0.1:{server.port}" if request.param == "http" else "gs://bucket"


def test_read_and_gather_anywhere(root):
    """Every range of every file and across files equals the bytes that were written.

    Mutation seen to fail: `whole = addresses + length <= self.starts[part + 1] + 1`, and in _start
    `length - n` -> `length` (local and remote).
    """
    files = storage.Files([f"{root}/{name}" for name in NAMES])
    everything = b"".join(FILES[name] for name in NAMES)
    assert files.size == len(everything)
    assert files.remote == ("://" in root)
    assert files.read(0, files.size).tobytes() == everything
    assert files.read(5, 0).size == 0
    assert files.read(files.size, 0).size == 0
    addresses = np.array([0, 10_000, 10_006, 10_007, 9_000, 14_100, 3, 10_007 - 3])
    for length in (1, 3, 4, 3000):
        starts = np.minimum(addresses, files.size - length)
        gathered = files.gather(starts, length)
        assert gathered.shape == (len(starts), length) and gathered.dtype == np.uint8
        for row, start in zip(gathered, starts, strict=True):
            assert row.tobytes() == everything[start : start + length]
    many = files.read_many([10_000, 0, 20], [200, 7, 0])
    assert [m.tobytes() for m in many] == [everything[10_000:10_200], everything[:7], b""]
    assert files.locate(10_006) == (f"{root}/d/a.bin", 10_006)
    assert files.locate(10_007) == (f"{root}/d/b.bin", 0)


def test_long_reads_are_split(root, monkeypatch, server):
    """Mutation seen to fail: `done - address` -> `done` in Files.read."""
    monkeypatch.setattr(storage, "_CHUNK", 100)
    files = storage.Files([f"{root}/{name}" for name in NAMES])
    everything = b"".join(FILES[name] for name in NAMES)
    server.requests.clear()
    assert files.read(7, 12_345).tobytes() == everything[7 : 7 + 12_345]
    if root.startswith(("gs", "http")):
        spans = [re.fullmatch(r"bytes=(\d+)-(\d+)", header).groups() for _, header in server.requests]
        assert max(int(b) - int(a) + 1 for a, b in spans) <= 100
        assert len(spans) >= 123


def test_listing(root):
    if root.startswith("http"):
        assert storage.list_files(f"{root}/d/a.bin") == [f"{root}/d/a.bin"]
        with pytest.raises(ValueError, match="cannot list files; name each"):
            storage.list_files(f"{root}/d/*.bin")
        return
    assert storage.list_files(f"{root}/d", (".bin",)) == [f"{root}/{n}" for n in NAMES]
    assert storage.list_files(f"{root}/d/*.bin") == [f"{root}/d/a.bin", f"{root}/d/b.bin"]
    assert storage.list_files(f"{root}/d/**/*.bin")[-1] == f"{root}/d/sub/c.bin"
    assert storage.list_files(f"{root}/d/b.bin, {root}/d/[a]*") == [f"{root}/d/b.bin", f"{root}/d/a.bin"]
    assert storage.exists(f"{root}/d/a.bin")
    assert not storage.exists(f"{root}/d/A.bin")
    assert not storage.exists(f"{root}/d")
    assert storage.read_file(f"{root}/d/notes.txt") == b"x"


def test_missing_is_named(root):
    with pytest.raises(storage.MissingFile, match=r"d/nothing\.bin: no such file"):
        storage.Files([f"{root}/d/a.bin", f"{root}/d/nothing.bin"])
    if not root.startswith("http"):
        with pytest.raises(storage.MissingFile, match=r"d/x\*: no such file, nor files there that end in \.bin"):
            storage.list_files(f"{root}/d/a.bin,{root}/d/x*", (".bin",))


def test_neighbouring_ranges_are_one_request(server):
    """Rows that follow each other, as in a sequential order, come in one request and not one each."""
    files = storage.Files(["gs://bucket/d/a.bin"])
    server.requests.clear()
    rows = files.gather(np.arange(16) * 100, 100)
    assert rows.tobytes() == FILES["d/a.bin"][:1600]
    assert len(server.requests) == 1


@pytest.mark.parametrize("size", [0, 1, 2, 3, 31, 32, 33, 1023, 1024, 1025, 65_537])
def test_size_of_a_remote_file(size):
    """Mutation seen to fail: `p - 1` -> `p` in the probes."""
    storage._open_url("memory://sizes/").write("f", bytes(size)).result()
    assert storage.Files(["memory://sizes/f"]).size == size


def test_empty_files(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "one").write_bytes(b"1")
    files = storage.Files([str(tmp_path / "empty"), str(tmp_path / "one"), str(tmp_path / "empty")])
    assert files.read(0, 1).tobytes() == b"1"
    assert files.gather(np.array([0]), 1).tobytes() == b"1"
    assert files.locate(0) == (str(tmp_path / "one"), 0)


def test_local_and_remote_mixed(tmp_path, server):
    (tmp_path / "a").write_bytes(b"local-")
    files = storage.Files([str(tmp_path / "a"), "gs://bucket/d/notes.txt", str(tmp_path / "a")])
    assert files.read(0, files.size).tobytes() == b"local-xlocal-"
    assert [row.tobytes() for row in files.gather(np.array([0, 5, 7]), 3)] == [b"loc", b"-xl", b"loc"]


def test_unknown_scheme():
    with pytest.raises(ValueError, match=r"^nonsense://x/y: "):
        storage.Files(["nonsense://x/y"])
