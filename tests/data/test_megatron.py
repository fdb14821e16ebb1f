import glob
import os

import numpy as np
import pytest

from jaxpretrain.data import megatron


def documents_of(pieces):
    size = pieces.dtype.itemsize
    return [
        pieces.files.read(int(a), int(n) * size).view(pieces.dtype).tolist()
        for a, n in zip(pieces.starts, pieces.lengths, strict=True)
    ]


DOCS = [[1, 2, 3], [65_000], [], [7, 8, 9, 10, 11]]


@pytest.mark.parametrize("dtype, code", [("<u1", 1), ("<i1", 2), ("<i2", 3), ("<i4", 4), ("<i8", 5), ("<u2", 8)])
def test_reads_every_type(tmp_path, dtype, code, pack):
    """Mutation seen to fail: offset of the document index 12 * S -> 12 * S + 8."""
    docs = [[token % 100 for token in doc] for doc in DOCS]
    pack(tmp_path / "x", docs, dtype=dtype, code=code)
    pieces = megatron.open_documents(str(tmp_path / "x"))
    assert pieces.dtype == np.dtype(dtype)
    assert documents_of(pieces) == docs


def test_documents_of_several_sequences_and_modes(tmp_path, pack):
    """Mutation seen to fail: `ends[documents]` -> `ends`."""
    pack(tmp_path / "x", DOCS, documents=[0, 2, 2, 4], modes=bytes(4))
    assert documents_of(megatron.open_documents(str(tmp_path / "x"))) == [[1, 2, 3, 65_000], [], [7, 8, 9, 10, 11]]


def test_several_sets(tmp_path, server, pack):
    """By prefix, file name, folder, glob, comma, and from a store; document addresses go on across files."""
    pack(tmp_path / "a", DOCS[:2])
    pack(tmp_path / "b", DOCS[2:])
    a, b = f"{tmp_path}/a", f"{tmp_path}/b"
    for paths in (f"{a},{b}", f"{a}.bin, {b}.idx", str(tmp_path), f"{tmp_path}/*", f"{tmp_path}/[ab].bin"):
        assert documents_of(megatron.open_documents(paths)) == DOCS
    assert documents_of(megatron.open_documents(b)) == DOCS[2:]
    for path in glob.glob(f"{tmp_path}/*"):
        server.files["megatron/" + os.path.basename(path)] = open(path, "rb").read()
    assert documents_of(megatron.open_documents("gs://bucket/megatron")) == DOCS
    assert documents_of(megatron.open_documents(f"http://127.0.0.1:{server.port}/megatron/b")) == DOCS[2:]
    pack(tmp_path / "c", DOCS[:1], dtype="<i4", code=4)
    with pytest.raises(ValueError, match=r"c\.idx: its tokens are int32, those of .*a are uint16; .*data\.mixture"):
        megatron.open_documents(f"{a},{tmp_path}/c")


@pytest.mark.parametrize("vocab_size, dtype, code", [(65_499, "<u2", 8), (65_500, "<i4", 4), (256, "<u2", 8)])
def test_writer_writes_the_published_format(tmp_path, vocab_size, dtype, code, pack):
    """Byte for byte what the table says (`pack`). Mutation seen to fail: header `S + 1` -> `S`."""
    docs = [[token % vocab_size for token in doc] for doc in DOCS]
    with megatron.Writer(f"{tmp_path}/new/w", vocab_size) as writer:
        for doc in docs:
            writer.add_document(np.array(doc, np.int64))
        assert not glob.glob(f"{tmp_path}/new/w.*")[0].endswith((".idx", "w.bin"))
    assert (writer.num_documents, writer.num_tokens) == (3, 9)
    pack(tmp_path / "table", [doc for doc in docs if doc], dtype=dtype, code=code)
    for end in ("bin", "idx"):
        assert (tmp_path / f"new/w.{end}").read_bytes() == (tmp_path / f"table.{end}").read_bytes()
    assert sorted(os.listdir(tmp_path / "new")) == ["w.bin", "w.idx"]


def test_writer_refuses_and_cleans_up(tmp_path):
    for bad in (-1, 100, 70_000):
        with pytest.raises(ValueError, match=rf"w: token id {bad} is outside the vocabulary of 100"):
            with megatron.Writer(f"{tmp_path}/w", 100) as writer:
                writer.add_document(np.array([5, 99]))
                writer.add_document(np.array([5, bad]))
    assert os.listdir(tmp_path) == []


def test_nothing_is_half_written(tmp_path, pack):
    """Until close() an older set stays as it was. Mutation seen to fail: writing to `prefix.bin` itself."""
    pack(tmp_path / "w", DOCS)
    writer = megatron.Writer(f"{tmp_path}/w", 256)
    writer.add_document(np.arange(200))
    assert documents_of(megatron.open_documents(f"{tmp_path}/w")) == DOCS
    writer.close()
    assert documents_of(megatron.open_documents(f"{tmp_path}/w")) == [list(range(200))]


def _damage(path, edit):
    data = bytearray(path.read_bytes())
    edited = edit(data)
    path.write_bytes(bytes(data if edited is None else edited))


@pytest.mark.parametrize(
    "file, edit, message",
    [
        ("x.bin", lambda d: d[:-1], r"x\.bin: 17 bytes where its index says 18; it is truncated"),
        ("x.bin", lambda d: d + b"ab", r"x\.bin: 20 bytes where its index says 18; it is of another set"),
        ("x.idx", lambda d: d[:-1], r"x\.idx: \d+ bytes where its header says \d+; truncated"),
        ("x.idx", lambda d: d[:20], r"x\.idx: 20 bytes, less than a Megatron index's header; truncated"),
        ("x.idx", lambda d: d[:0], r"x\.idx: 0 bytes, less than"),
        ("x.idx", lambda d: b"TNTIDX\0\0" + d[8:], r"x\.idx: a legacy index \(TNTIDX\).*mmap"),
        ("x.idx", lambda d: b"PARQUET00" + d[9:], r"x\.idx: not a Megatron index, it starts with b'PARQUET00'"),
        ("x.idx", lambda d: d.__setitem__(9, 2), r"x\.idx: index version 2"),
        ("x.idx", lambda d: d.__setitem__(17, 7), r"x\.idx: type code 7"),
        ("x.idx", lambda d: d.__setitem__(34, 9), r"x\.idx: its sequences do not lie end to end"),
        ("x.idx", lambda d: d.__setitem__(-8, 9), r"x\.idx: its document index does not run from 0 to the 4 sequences"),
    ],
)
def test_damage_is_named(tmp_path, file, edit, message, pack):
    pack(tmp_path / "x", DOCS)
    _damage(tmp_path / file, edit)
    with pytest.raises(ValueError, match=message):
        megatron.open_documents(str(tmp_path / "x"))


def test_missing_is_named(tmp_path, pack):
    with pytest.raises(ValueError, match=r"no .*/x\.bin and .*/x\.idx"):
        megatron.open_documents(str(tmp_path / "x"))
    pack(tmp_path / "x", DOCS)
    os.remove(tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"x\.bin: no such file"):
        megatron.open_documents(str(tmp_path / "x"))
    pack(tmp_path / "x", DOCS)
    os.remove(tmp_path / "x.idx")
    with pytest.raises(ValueError, match=r"x\.idx: no such file"):
        megatron.open_documents(str(tmp_path / "x"))


ROWS = np.random.default_rng(1).integers(0, 50_000, (10, 5))


@pytest.mark.parametrize("cuts", [(), (30, 60), (33, 68), (1, 2, 3, 4, 99), (33,)])
def test_preshuffled_shards(tmp_path, cuts, shard):
    """Cuts at rows, in the middle of rows and in the middle of tokens. Mutation seen to fail: shards in reverse."""
    shard(tmp_path, ROWS, cuts)
    for path in (tmp_path, tmp_path / "document", tmp_path / "document.idx"):
        pieces = megatron.open_rows(str(path), 5)
        assert documents_of(pieces) == [ROWS.ravel().tolist()]


def test_preshuffled_damage_is_named(tmp_path, shard):
    shard(tmp_path, ROWS, (33, 68))
    with pytest.raises(ValueError, match=r"document\.idx: row 0 has 5 tokens, not data\.row_len=6"):
        megatron.open_rows(str(tmp_path), 6)
    last = tmp_path / "document-00002-of-00002.bin"
    data = last.read_bytes()
    last.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"00002\.bin: the 3 \.bin files hold 99 bytes where .*document\.idx says 100"):
        megatron.open_rows(str(tmp_path), 5)
    last.write_bytes(data)
    os.remove(tmp_path / "document-00001-of-00002.bin")
    with pytest.raises(ValueError, match=r"document: shard 1 is missing, .*00002-of-00002\.bin comes in its place"):
        megatron.open_rows(str(tmp_path), 5)
    os.remove(tmp_path / "document-00000-of-00002.bin")
    os.remove(last)
    with pytest.raises(ValueError, match=r"document-00000-of-\.\.\.bin: no such file"):
        megatron.open_rows(str(tmp_path), 5)
    os.remove(tmp_path / "document.idx")
    with pytest.raises(ValueError, match=r"no such file"):
        megatron.open_rows(str(tmp_path), 5)
