import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxpretrain.data import huggingface, megatron

RNG = np.random.default_rng(0)
DOCS = [RNG.integers(0, 1000, n).tolist() for n in (5, 0, 17, 3, 1, 40)]
TEXTS = [f"text {i} é" for i in range(6)]
KEYS = dict(tokens_key="input_ids", text_key="text", tokenizer="bytes", vocab_size=1000)


def write(folder, kind, types, docs=DOCS):
    """Two shards; the arrow ones as `Dataset.save_to_disk` lays them out, the second in several record batches."""
    folder.mkdir(exist_ok=True)
    names = []
    for i, part in enumerate((slice(0, 2), slice(2, 6))):
        table = pa.table({"input_ids": pa.array(docs[part], types), "text": TEXTS[part]})
        # Not in order of name: only state.json says which is first.
        names.append(f"data-{1 - i:05}-of-00002.arrow" if kind == "arrow" else f"train-{i:05}-of-00002.parquet")
        if kind == "parquet":
            pyarrow.parquet.write_table(table, folder / names[-1], row_group_size=3)
        else:
            with pa.ipc.new_stream(str(folder / names[-1]), table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
    if kind == "arrow":
        state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text("{}")
    return folder


def read(prefix):
    pieces = megatron.open_documents(prefix)
    size = pieces.dtype.itemsize
    spans = zip(pieces.starts, pieces.lengths, strict=True)
    return [pieces.files.read(int(a), int(n) * size).view(pieces.dtype).tolist() for a, n in spans]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("types", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16())])
def test_token_columns(tmp_path, kind, types, server):
    """Local and from a bucket. Mutation seen to fail: shards sorted by name."""
    folder = write(tmp_path / "set", kind, types)
    cache = dict(cache_dir=str(tmp_path / "cache"))
    expected = [doc for doc in DOCS if doc]
    prefix = huggingface.cached_tokens(str(folder), **KEYS, **cache)
    assert read(prefix) == expected
    before = (tmp_path / "cache").stat().st_mtime_ns
    assert huggingface.cached_tokens(str(folder), **KEYS, **cache) == prefix
    assert (tmp_path / "cache").stat().st_mtime_ns == before
    name = f"hf-{kind}-{types}"
    for path in folder.iterdir():
        server.files[f"{name}/{path.name}"] = path.read_bytes()
    assert read(huggingface.cached_tokens(f"gs://bucket/{name}", **KEYS, **cache)) == expected


def test_fixed_size_rows_and_nulls(tmp_path):
    """Mutation seen to fail: `fill_null(1)`."""
    rows = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]
    folder = write(tmp_path / "set", "parquet", pa.list_(pa.int32(), 2), rows)
    assert read(huggingface.cached_tokens(str(folder), **KEYS, cache_dir=str(tmp_path / "c"))) == rows
    write(folder, "parquet", pa.list_(pa.int32()), [[1], None, [2, 3], None, [4, 5], [6]])
    prefix = huggingface.cached_tokens(str(folder), **KEYS, cache_dir=str(tmp_path / "c"))
    assert read(prefix) == [[1], [2, 3], [4, 5], [6]]
    write(folder, "parquet", pa.list_(pa.int32()), [[1], [2, None], *DOCS[:4]])
    with pytest.raises(ValueError, match=r"00000-of-00002\.parquet: 'input_ids' holds nulls"):
        huggingface.cached_tokens(str(folder), **KEYS, cache_dir=str(tmp_path / "c"))


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_text_columns(tmp_path, kind):
    folder = write(tmp_path / "set", kind, pa.list_(pa.int32()))
    keys = {**KEYS, "tokens_key": ""}
    prefix = huggingface.cached_tokens(str(folder), **keys, cache_dir=str(tmp_path / "cache"))
    assert [bytes(doc).decode() for doc in read(prefix)] == TEXTS


def test_saved_by_datasets(tmp_path):
    """What the library itself writes."""
    import datasets

    datasets.Dataset.from_dict({"input_ids": DOCS, "text": TEXTS}).save_to_disk(tmp_path / "set", num_shards=2)
    prefix = huggingface.cached_tokens(str(tmp_path / "set"), **KEYS, cache_dir=str(tmp_path / "cache"))
    assert read(prefix) == [doc for doc in DOCS if doc]


def test_refused(tmp_path):
    folder = write(tmp_path / "set", "parquet", pa.list_(pa.int32()))
    path, cache = str(folder), dict(cache_dir=str(tmp_path / "cache"))

    def attempt(path=path, **keys):
        return huggingface.cached_tokens(str(path), **{**KEYS, **keys}, **cache)

    with pytest.raises(ValueError, match=r"no column 'tokens' among input_ids, text; set data\.tokens_key"):
        attempt(tokens_key="tokens")
    with pytest.raises(ValueError, match=r"'text' is string, not a list of integers"):
        attempt(tokens_key="text")
    with pytest.raises(ValueError, match=r"'input_ids' is list<.*>, not text"):
        attempt(tokens_key="", text_key="input_ids")
    with pytest.raises(ValueError, match=r"0000\d-of-00002\.parquet: token id \d+ is outside model\.vocab_size=10"):
        attempt(vocab_size=10)
    with pytest.raises(ValueError, match=r"nothing: no such file, nor files there that end in \.parquet or \.arrow"):
        attempt(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no tokens under 'input_ids'"):
        attempt(write(tmp_path / "empty", "parquet", pa.list_(pa.int32()), [[]] * 6))
    assert not list((tmp_path / "cache").glob("*.idx"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data\.cache_dir='.*file': cannot copy .*can be written"):
        huggingface.cached_tokens(path, **KEYS, cache_dir=str(tmp_path / "file"))
    first = folder / "train-00000-of-00002.parquet"
    first.write_bytes(first.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"train-00000-of-00002\.parquet: damaged or truncated"):
        attempt()
    arrow = write(tmp_path / "arrow", "arrow", pa.list_(pa.int32()))
    shard = arrow / "data-00000-of-00002.arrow"
    shard.write_bytes(shard.read_bytes()[:-400])
    with pytest.raises(ValueError, match=r"data-00000-of-00002\.arrow: damaged or truncated"):
        attempt(arrow)


def test_splits_are_not_mixed(tmp_path):
    folder = write(tmp_path / "set", "parquet", pa.list_(pa.int32()))
    (folder / "test-00000-of-00001.parquet").write_bytes((folder / "train-00000-of-00002.parquet").read_bytes())
    with pytest.raises(ValueError, match=r"set: holds files of the splits test, train; choose one by a glob, such as "):
        huggingface.find_shards(str(folder))
    assert len(huggingface.find_shards(f"{folder}/train-*.parquet")) == 2
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"dict/train and data\.validation_path=.*dict/test"):
        huggingface.find_shards(str(tmp_path / "dict"))
