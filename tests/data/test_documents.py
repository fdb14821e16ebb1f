"""Files to documents: every format, cut anywhere, and what is refused."""

import gzip
import json
import os
import pathlib

import pytest

from jaxpretrain.data import documents
from jaxpretrain.data.documents import Piece, find_files, read, split

pa = pytest.importorskip("pyarrow", reason="needs jaxpretrain[hf]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs jaxpretrain[hf]")
zstandard = pytest.importorskip("zstandard", reason="needs jaxpretrain[hf]")

TEXTS = ["one", "zwei\nZeilen", "naïve — €", "x" * 300, 'a "quoted" \\ word', "last"]


def json_lines(texts=TEXTS) -> bytes:
    return b"".join(json.dumps({"id": i, "text": t}, ensure_ascii=False).encode() + b"\n" for i, t in enumerate(texts))


def write(path: pathlib.Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def read_all(path: str, **options) -> list[str]:
    return list(read(Piece(path), **options))


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


# ---- finding ----


def test_find_files(tmp_path, monkeypatch):
    for name in (
        "b.txt",
        "a.md",
        "sub/c.py",
        "sub/deep/d",
        ".hidden/e.txt",
        ".f.txt",
        "__pycache__/g.txt",
        "with,comma.txt",
    ):
        write(tmp_path / "corpus" / name, b"text")
    monkeypatch.chdir(tmp_path)
    everything = ["a.md", "b.txt", "sub/c.py", "sub/deep/d", "with,comma.txt"]
    assert find_files("corpus") == [f"corpus/{name}" for name in everything]
    assert find_files("corpus/*.txt") == ["corpus/b.txt", "corpus/with,comma.txt"]
    assert find_files("corpus/**/*.py, corpus/b.txt,corpus/*.txt") == [
        "corpus/sub/c.py",
        "corpus/b.txt",
        "corpus/with,comma.txt",
    ]
    assert find_files(["corpus/with,comma.txt", "corpus/a.md,corpus/b.txt"]) == [
        "corpus/with,comma.txt",
        "corpus/a.md",
        "corpus/b.txt",
    ]
    (tmp_path / "empty").mkdir()
    for path, message in [
        ("corpus/no.txt", "corpus/no.txt: no such file"),
        ("corpus/a.md,nothing*", r"nothing\*: no such file, folder or glob"),
        ("empty", "empty: holds no file"),
        ("", "no input"),
    ]:
        with pytest.raises(ValueError, match=message):
            find_files(path)


def test_identity_changes_with_the_file(tmp_path):
    path = write(tmp_path / "a.txt", b"text")
    before = documents.identity([path])
    assert before == documents.identity([path])
    os.utime(path, ns=(1, 1))
    assert before != documents.identity([path])
    with pytest.raises(ValueError, match="gone.txt: No such file"):
        documents.identity(["gone.txt"])


# ---- reading ----


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd, lambda c: zstd(c[:99]) + zstd(b"") + zstd(c[99:])])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
def test_json_lines(tmp_path, name, pack):
    """The last of the packings is zstd in several frames. Mutation seen to fail: stop after the first frame."""
    suffix = {bytes: "", gzip.compress: ".gz"}.get(pack, ".zst")
    path = write(tmp_path / (name + suffix), pack(json_lines()))
    assert read_all(path) == TEXTS
    assert read_all(write(tmp_path / f"bom.jsonl{suffix}", pack(b"\xef\xbb\xbf" + json_lines()))) == TEXTS
    # No newline at the end, Windows line ends, blank lines, empty texts and nulls.
    odd = b'{"text": "a"}\r\n\n{"text": ""}\n{"text": null}\n{"text": "b"}'
    assert read_all(write(tmp_path / f"odd.jsonl{suffix}", pack(odd))) == ["a", "b"]
    assert read_all(write(tmp_path / f"key.jsonl{suffix}", pack(b'{"content": "c"}')), text_key="content") == ["c"]


def test_text(tmp_path):
    for pack, suffix in [(bytes, ""), (gzip.compress, ".gz"), (zstd, ".zst")]:
        path = write(tmp_path / f"a.txt{suffix}", pack("één\r\n\n\ntwee\n<|end|>drie".encode()))
        assert read_all(path) == ["één\r\n\n\ntwee\n<|end|>drie"]
        assert read_all(path, separator="<|end|>") == ["één\r\n\n\ntwee\n", "drie"]
        assert read_all(path, separator="\n\n") == ["één\r", "\ntwee\n<|end|>drie"]
    assert read_all(write(tmp_path / "bom.md", b"\xef\xbb\xbfx")) == ["x"]
    assert read_all(write(tmp_path / "empty.txt", b"")) == []


def parquet(path: pathlib.Path, rows: dict, **options) -> str:
    pq.write_table(pa.table(rows), path, **options)
    return str(path)


def test_parquet(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"id": range(8), "text": [*TEXTS, None, ""]}, row_group_size=2)
    assert read_all(path) == TEXTS
    assert [list(read(piece)) for piece in split(path, os.path.getsize(path), 1)] == [
        TEXTS[:2],
        TEXTS[2:4],
        TEXTS[4:],
        [],
    ]
    large = pa.array(TEXTS, pa.large_string())
    assert read_all(parquet(tmp_path / "b.parquet", {"body": large}), text_key="body") == TEXTS


def test_pieces_together_are_the_file(tmp_path, monkeypatch):
    """Cut anywhere, read in chunks of any size. Mutations seen to fail: a piece that begins reading at `start` and not
    a separator before it; one that takes a record, or an unended last one, that begins at `stop`; a search that begins
    at the end of what was left over of a chunk (a separator of two bytes across chunks is missed)."""
    lines = write(tmp_path / "a.jsonl", json_lines())
    marked = write(tmp_path / "a.txt", "€§".join([*TEXTS, "", "", "ü" * 40]).encode() + "€§".encode())
    open_end = write(tmp_path / "b.jsonl", json_lines().rstrip())
    whole = [*TEXTS, "ü" * 40]
    for chunk_bytes in (1, 2, 7, 64, 1 << 20):
        monkeypatch.setattr(documents, "_CHUNK_BYTES", chunk_bytes)
        for piece_bytes in (1, 2, 3, 10, 41, 100, 1000):
            for path, separator, expected in [(lines, None, TEXTS), (open_end, None, TEXTS), (marked, "€§", whole)]:
                size = os.path.getsize(path)
                pieces = split(path, size, piece_bytes, separator)
                assert len(pieces) == -(-size // piece_bytes)
                assert sum(piece.num_bytes for piece in pieces) == size
                found = [text for piece in pieces for text in read(piece, separator=separator)]
                assert found == expected, (chunk_bytes, piece_bytes)


def test_what_cannot_be_entered_in_the_middle_is_one_piece(tmp_path):
    for name, separator in [
        ("a.jsonl.gz", None),
        ("a.jsonl.zst", None),
        ("a.txt", None),
        ("a.txt", "\n\n"),
        ("a.txt", "aba"),
    ]:
        assert split(str(tmp_path / name), 1000, 10, separator) == [Piece(str(tmp_path / name), num_bytes=1000)]
    assert len(split(str(tmp_path / "a.txt"), 1000, 10, "ab")) == 100


def test_remote(tmp_path):
    """Through TensorStore's file:// driver, as gs:// is read."""
    contents = {
        "a.jsonl": json_lines(),
        "b.jsonl.gz": gzip.compress(json_lines()),
        "c.jsonl.zst": zstd(json_lines()),
        "d.txt": "één".encode(),
    }
    for name, content in contents.items():
        write(tmp_path / name, content)
    parquet(tmp_path / "e.parquet", {"text": TEXTS})
    files = find_files(f"file://{tmp_path}")
    assert [file.rsplit("/", 1)[1] for file in files] == [*contents, "e.parquet"]
    assert [read_all(file) for file in files] == [TEXTS, TEXTS, TEXTS, ["één"], TEXTS]
    described = documents.identity(files)
    assert described[0] == (files[0], len(contents["a.jsonl"]), 0)
    pieces = split(files[0], described[0][1], 50)
    assert len(pieces) > 5 and [text for piece in pieces for text in read(piece)] == TEXTS


# ---- what is refused ----

BAD_LINES = [
    (b'{"text": "a"}\n\n{"text": "b"\n', "line 3: invalid JSON"),
    (b'{"text": "a"}\n["b"]\n', "line 2: a JSON list, not an object"),
    (b'{"body": "a", "id": 1}\n', r"line 1: no 'text' among its keys body, id: set data.text_key \(--text-key\)"),
    (b'{"text": "a"}\n{"text": 7}\n', "line 2: 'text' is int, not text"),
    (b'{"text": "a"}\n{"text": "\xe9"}\n', "line 2: byte 24 of the file is not UTF-8"),
    (b'{"text": "a"}\n{"text": "ab\\ud83d"}\n', "line 2: 'text' holds half a surrogate pair at character 2"),
]


@pytest.mark.parametrize(("content", "message"), BAD_LINES)
def test_bad_lines(tmp_path, content, message):
    for pack, suffix in [(bytes, ""), (gzip.compress, ".gz"), (zstd, ".zst")]:
        path = write(tmp_path / f"a.jsonl{suffix}", pack(content))
        with pytest.raises(ValueError, match=f"a.jsonl{suffix}: {message}"):
            read_all(path)


def test_the_line_is_counted_from_the_start_of_the_file(tmp_path, monkeypatch):
    """Also from a piece in the middle. Mutation seen to fail: no `[: offset - seen]`."""
    path = write(tmp_path / "a.jsonl", json_lines() + b"broken\n" + json_lines())
    for chunk_bytes in (5, 1 << 20):
        monkeypatch.setattr(documents, "_CHUNK_BYTES", chunk_bytes)
        with pytest.raises(ValueError, match=f"line {len(TEXTS) + 1}: invalid JSON"):
            for piece in split(path, os.path.getsize(path), 50)[3:]:
                list(read(piece))


def test_text_that_is_not_utf8(tmp_path):
    path = write(tmp_path / "a.txt", b"ab|cd|e\xff")
    for separator in (None, "|"):
        with pytest.raises(ValueError, match=r"a.txt: byte 7 \(0xff\) is not UTF-8; convert"):
            read_all(path, separator=separator)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.zst", "a.parquet"])
def test_truncated_or_damaged(tmp_path, name):
    """zstandard's own stream reader takes a truncated file for a shorter one. Mutation seen to fail: without the check
    of `frame` at the end."""
    content = os.urandom(200_000).hex().encode()
    path = tmp_path / name
    if name == "a.parquet":
        parquet(path, {"text": [content.decode()]})
    else:
        write(path, (gzip.compress if name.endswith("gz") else zstd)(content))
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"x" * 100):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{name}: .*(truncated|damaged)"):
            read_all(str(path))


def test_bad_parquet(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"body": ["a"], "id": [1]})
    with pytest.raises(ValueError, match="no 'text' among its keys body, id"):
        read_all(path)
    with pytest.raises(ValueError, match="'id' is int64, not text"):
        read_all(path, text_key="id")


def test_file_that_vanished_or_may_not_be_read(tmp_path):
    for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        with pytest.raises(ValueError, match=f"{name}: No such file"):
            read_all(str(tmp_path / name))
