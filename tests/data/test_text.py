"""The token cache: what is in it, when it holds, and that neither a kill nor two processes at once spoil it."""

import gzip
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tokenizers

from jaxpretrain.data import megatron
from jaxpretrain.data.text import _BATCH_DOCUMENTS, tokenize_to_cache, tokenized

ROOT = pathlib.Path(__file__).parents[2]
DATA_FILES = ROOT / "tests" / "data_files"


@pytest.fixture(scope="module")
def pythia_path(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("pythia") / "tokenizer.json"
    path.write_bytes(gzip.decompress((DATA_FILES / "pythia_tokenizer.json.gz").read_bytes()))
    return str(path)


def stored(prefix: str) -> list[list[int]]:
    """The documents of a Megatron set."""
    dtype, offsets, lengths = megatron.read_index(prefix + ".idx", os.path.getsize(prefix + ".bin"))
    tokens = np.fromfile(prefix + ".bin", dtype)
    starts = offsets // dtype.itemsize
    return [tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]


def test_bytes_of_files(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("één\n")
    (tmp_path / "corpus" / "b.jsonl").write_text('{"body": "b1"}\n{"body": ""}\n{"body": "b2"}\n')
    prefix = tokenized("text", str(tmp_path / "corpus"), "body", cache_dir=str(tmp_path / "cache"), vocab_size=256)
    assert stored(prefix) == [list("één\n".encode()), list(b"b1"), list(b"b2")]


def test_documents_end_with_the_tokenizers_token(tmp_path, pythia_path):
    """More documents than a batch, against the `tokenizers` library. Mutations seen to fail: no end token; the last
    batch not yielded."""
    reference = tokenizers.Tokenizer.from_file(pythia_path)
    texts = [f"document {i}, " * (i % 5) for i in range(_BATCH_DOCUMENTS + 7)] + ["long " * 5000]
    prefix = tokenize_to_cache(texts, name="x", identity=1, tokenizer=pythia_path, cache_dir=str(tmp_path))
    assert stored(prefix) == [[*reference.encode(text).ids, 0] for text in texts if text]


def test_stdlib_and_its_report(tmp_path, capsys):
    prefix = tokenized("stdlib", cache_dir=str(tmp_path), vocab_size=256)
    documents = stored(prefix)
    digest = hashlib.sha256(pathlib.Path(prefix + ".bin").read_bytes()).hexdigest()[:16]
    counts = f"{len(documents):,} documents, {sum(map(len, documents)):,} tokens, sha256 {digest}"
    assert counts in capsys.readouterr().out
    assert tokenized("stdlib", cache_dir=str(tmp_path), vocab_size=256) == prefix
    assert capsys.readouterr().out == ""


def test_the_cache_holds_while_nothing_changed(tmp_path, pythia_path):
    """Mutations seen to fail: the fingerprint without the tokenizer's digest; without the identity."""

    def prefix(tokenizer="bytes", text_key="text") -> str:
        return tokenized("text", str(path), text_key, tokenizer=tokenizer, cache_dir=str(tmp_path / "cache"))

    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab", "other": "cd"}')
    first = prefix()
    modified = os.stat(first + ".bin").st_mtime_ns
    assert prefix() == first and os.stat(first + ".bin").st_mtime_ns == modified
    assert len({first, prefix(text_key="other"), prefix(tokenizer=pythia_path)}) == 3
    path.write_text('{"text": "changed"}')
    assert stored(prefix()) == [list(b"changed")]
    # A tokenizer with the same path and other content.
    changed = tmp_path / "tokenizer.json"
    seen = set()
    for vocabulary in ({"a": 0, "b": 1}, {"a": 1, "b": 0}):
        tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a")).save(str(changed))
        seen.add(prefix(tokenizer=str(changed)))
    assert len(seen) == 2


def test_cached_texts_are_not_read(tmp_path):
    def texts():
        yield "a"
        nonlocal reads
        reads += 1

    reads = 0
    for _ in range(2):
        tokenize_to_cache(texts(), name="x", identity=["x", 1], cache_dir=str(tmp_path))
    assert reads == 1


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prefix = tokenize_to_cache(["a"], name="x", identity=1)
    assert prefix.startswith(str(tmp_path / "xdg" / "jaxpretrain" / "tokens") + "/")
    monkeypatch.delenv("XDG_CACHE_HOME")
    prefix = tokenize_to_cache(["a"], name="x", identity=1)
    assert prefix.startswith(str(tmp_path / "home" / ".cache" / "jaxpretrain" / "tokens") + "/")


def test_mistakes(tmp_path, pythia_path):
    cache = str(tmp_path / "cache")
    with pytest.raises(ValueError, match="data.source='text' needs data.path"):
        tokenized("text", cache_dir=cache)
    with pytest.raises(ValueError, match="none.txt: no such file"):
        tokenized("text", "none.txt", cache_dir=cache)
    with pytest.raises(ValueError, match="50277 ids but model.vocab_size=256"):
        tokenized("stdlib", tokenizer=pythia_path, cache_dir=cache, vocab_size=256)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"data.path='.*empty.txt': holds no text"):
        tokenized("text", str(tmp_path / "empty.txt"), cache_dir=cache)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="latin.txt: byte 3"):
        tokenized("text", str(tmp_path / "latin.txt"), cache_dir=cache)
    # Nothing is left but locks: no later run takes any of these for done.
    assert not [name for name in os.listdir(cache) if not name.endswith(".lock")]
    # A file in the place of the folder: what a folder without write permission is to an ordinary user.
    with pytest.raises(ValueError, match=r"data.cache_dir='.*empty.txt/cache': cannot keep tokens there: Not a dir"):
        tokenize_to_cache(["a"], name="x", identity=1, cache_dir=str(tmp_path / "empty.txt" / "cache"))


# ---- two processes at once; kill -9 ----

# Tokenises two documents; between them it touches MARK and waits for the file FOR.
SLOW = """
import fcntl, pathlib, sys, time
from jaxpretrain.data.text import tokenize_to_cache
cache, mark, wait_for, locks = sys.argv[1:]
if locks == "no-locks":
    def flock(*_): raise OSError("no locks here")
    fcntl.flock = flock
def texts():
    yield "first " * 1000
    pathlib.Path(mark).touch()
    deadline = time.monotonic() + 60
    while not pathlib.Path(wait_for).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield "second"
print(tokenize_to_cache(texts(), name="corpus", identity=["corpus"], cache_dir=cache))
"""
EXPECTED = [list(b"first " * 1000), list(b"second")]


def start_slow(cache, mark, wait_for, locks="locks") -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, *map(str, (cache, mark, wait_for, locks))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.splitlines()[-1]


def test_the_second_process_waits_for_the_first(tmp_path):
    """And does not tokenise again. Mutation seen to fail: no check of `_complete` under the lock."""
    first = start_slow(tmp_path / "cache", tmp_path / "first", tmp_path / "go")
    wait_until((tmp_path / "first").exists)
    second = start_slow(tmp_path / "cache", tmp_path / "second", tmp_path / "go")
    assert "waiting" in second.stdout.readline()
    (tmp_path / "go").touch()
    prefix = finish(first)
    assert finish(second) == prefix and not (tmp_path / "second").exists()
    assert stored(prefix) == EXPECTED


def test_without_locks_two_may_write_at_once(tmp_path):
    """Each is in the middle of its files when the other is too."""
    first = start_slow(tmp_path / "cache", tmp_path / "first", tmp_path / "second", "no-locks")
    second = start_slow(tmp_path / "cache", tmp_path / "second", tmp_path / "first", "no-locks")
    prefix = finish(first)
    assert finish(second) == prefix
    assert stored(prefix) == EXPECTED
    assert sorted(os.listdir(tmp_path / "cache")) == [
        os.path.basename(prefix) + e for e in (".bin", ".idx", ".json", ".lock")
    ]


def test_a_killed_process_leaves_nothing_that_counts(tmp_path):
    """Mutation seen to fail: no removal of stale files."""
    killed = start_slow(tmp_path / "cache", tmp_path / "mark", tmp_path / "never")
    wait_until((tmp_path / "mark").exists)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert [name for name in os.listdir(tmp_path / "cache") if name.endswith(".tmp")]
    (tmp_path / "go").touch()
    prefix = finish(start_slow(tmp_path / "cache", tmp_path / "again", tmp_path / "go"))
    assert (tmp_path / "again").exists() and stored(prefix) == EXPECTED
    assert not [name for name in os.listdir(tmp_path / "cache") if name.endswith(".tmp")]


@pytest.mark.parametrize("missing", [".bin", ".idx", ".json"])
def test_an_incomplete_set_is_made_again(tmp_path, missing):
    make = dict(name="x", identity=1, cache_dir=str(tmp_path))
    prefix = tokenize_to_cache(["a", "b"], **make)
    os.remove(prefix + missing)
    assert stored(tokenize_to_cache(["a", "b"], **make)) == [list(b"a"), list(b"b")]
