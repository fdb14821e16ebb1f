import numpy as np
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.data import megatron
from jaxpretrain.data.dataset import make_dataset

RNG = np.random.default_rng(0)


def make_config(tmp_path, **keys):
    config = config_lib.default()
    config.seq_len, config.batch_size, config.model.vocab_size = 16, 8, 60_000
    for key, value in keys.items():
        config_lib.override(config, key.replace("__", "."), str(value))
    if config.data.source in ("stdlib", "text", "huggingface", "mixture"):
        config.data.cache_dir = str(tmp_path / "cache")
    config_lib.check(config)
    return config


@pytest.fixture
def corpus(tmp_path, pack):
    """A Megatron set of 60 documents in which no token comes twice; its path."""
    lengths = np.random.default_rng(0).integers(0, 80, 60)
    pack(tmp_path / "docs", np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1]))
    return str(tmp_path / "docs")


def targets(batch):
    tokens = batch["tokens"][:, 1:]
    if "segment_ids" in batch:
        segments = batch["segment_ids"]
        return tokens[(segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)]
    return tokens.ravel()


@pytest.mark.parametrize("seed", [0, 1])
def test_every_target_once_an_epoch(tmp_path, corpus, seed):
    """Also where batches straddle epochs; each epoch in another order; steps independent of each other.

    Mutations seen to fail: `fold(self._seed, k)`, the epoch left out; `step * (batch_size - 1)`.
    """
    config = make_config(tmp_path, seed=seed, data__source="megatron", data__path=corpus)
    dataset = make_dataset(config, "train")
    n = dataset.num_rows
    assert n % 8 and n > 16
    steps = range(-(-3 * n // 8))
    rows = np.concatenate([dataset.batch(step)["tokens"] for step in steps])
    epochs = [rows[e * n : (e + 1) * n, 1:].ravel() for e in range(3)]
    for epoch in epochs:
        assert len(np.unique(epoch)) == len(epoch) == dataset.num_tokens
        assert set(epoch) == set(epochs[0])
    assert not np.array_equal(epochs[0], epochs[1]) and not np.array_equal(epochs[1], epochs[2])
    assert not np.array_equal(epochs[0], np.sort(epochs[0]))
    fresh = make_dataset(config, "train")
    for step in reversed(steps):
        assert np.array_equal(fresh.batch(step)["tokens"], rows[8 * step : 8 * step + 8])


def test_seeds_change_the_order_and_not_the_split(tmp_path, corpus):
    """Mutation seen to fail: `_SPLIT_KEY` that depends on the seed."""
    made = [
        [make_dataset(make_config(tmp_path, seed=s, data__source="megatron", data__path=corpus), p) for s in (0, 1)]
        for p in ("train", "valid")
    ]
    train, valid = made
    assert not np.array_equal(train[0].batch(0)["tokens"], train[1].batch(0)["tokens"])
    assert np.array_equal(valid[0].eval_batch(0, 8)["tokens"], valid[1].eval_batch(0, 8)["tokens"])


@pytest.mark.parametrize("isolate", [False, True])
def test_hosts_slices_make_the_batch(tmp_path, corpus, isolate):
    """Mutation seen to fail: `rows` applied to the index and then again to the result."""
    config = make_config(
        tmp_path,
        data__source="megatron",
        data__path=corpus,
        data__isolate_documents=isolate,
        data__validation_fraction=0.5,
    )
    dataset, valid = make_dataset(config, "train"), make_dataset(config, "valid")
    hosts = [slice(0, 3), slice(3, 4), slice(4, 8)]
    for step in (0, 5, 1000, 10**9):
        whole = dataset.batch(step)
        parts = [dataset.batch(step, rows) for rows in hosts]
        assert set(whole) == ({"tokens", "segment_ids"} if isolate else {"tokens"})
        for key in whole:
            assert whole[key].dtype == np.int32 and whole[key].shape == (8, 17)
            assert np.array_equal(whole[key], np.concatenate([part[key] for part in parts]))
    for i in range(valid.num_batches(8)):
        whole = valid.eval_batch(i, 8)
        parts = [valid.eval_batch(i, 8, rows) for rows in hosts]
        for key in whole:
            assert np.array_equal(whole[key], np.concatenate([part[key] for part in parts]))


@pytest.mark.parametrize("batch_size", [1, 3, 8, 1000])
def test_validation_counts_every_token_once(tmp_path, corpus, batch_size):
    """Documents of training and validation together are the corpus; the last row and batch are padded.

    Mutations seen to fail: `pad = False`; `<` -> `<=` where segment_ids are made.
    """
    fraction = dict(data__validation_fraction=0.3)
    config = make_config(tmp_path, data__source="megatron", data__path=corpus, **fraction)
    train, valid = make_dataset(config, "train"), make_dataset(config, "valid")
    batches = [valid.eval_batch(i, batch_size) for i in range(valid.num_batches(batch_size))]
    counted = np.concatenate([targets(batch) for batch in batches])
    assert len(counted) == valid.num_tokens == len(np.unique(counted))
    held_out = np.concatenate([batch["tokens"].ravel() for batch in batches])
    trained = train.eval_batch(0, train.num_rows)["tokens"]
    assert not set(held_out[held_out > 0]) & set(trained.ravel())
    total = megatron.open_documents(corpus).lengths.sum()
    assert total - 18 <= train.num_tokens + valid.num_tokens <= total - 2
    for batch in batches:
        assert batch["tokens"].shape == batch["segment_ids"].shape == (batch_size, 17)
        assert not batch["tokens"][batch["segment_ids"] == 0].any()
    with pytest.raises(AssertionError):
        valid.eval_batch(len(batches), batch_size)


def test_isolated_targets_stay_in_their_document(tmp_path, corpus):
    """All targets but each document's first token. Mutation seen to fail: `segments(np.sort(rows))`."""
    config = make_config(
        tmp_path,
        data__source="megatron",
        data__path=corpus,
        data__isolate_documents=True,
        data__validation_fraction=0.5,
    )
    valid = make_dataset(config, "valid")
    counted = np.concatenate([targets(valid.eval_batch(i, 4)) for i in range(valid.num_batches(4))])
    pieces = megatron.open_documents(corpus)
    starts = set((pieces.starts[pieces.lengths > 0] // 2).tolist())
    assert not set(counted) & starts
    tokens = np.concatenate([valid.eval_batch(i, 4)["tokens"].ravel() for i in range(valid.num_batches(4))])
    assert set(counted) == {t for t in tokens if t not in starts} - {0}


# ---- Pythia's order


@pytest.fixture
def preshuffled(tmp_path, shard):
    """40 rows of 17 in three shards, the first cut in the middle of a row, the second in the middle of a token."""
    rows = RNG.integers(0, 50_000, (40, 17))
    (tmp_path / "pythia").mkdir()
    shard(tmp_path / "pythia", rows, (34 * 13 + 10, 34 * 25 + 7))
    return rows


@pytest.mark.parametrize("first_step", [0, 1, 3])
def test_pythia_order(tmp_path, first_step, preshuffled):
    """Step i is rows 8 i ... 8 i + 7 as published, across shard boundaries, wherever a run starts.

    Mutations seen to fail: shuffled all the same; a stride of row_len - 1; the first two shards swapped.
    """
    rows = preshuffled
    keys = dict(data__row_len=17, data__order="sequential", data__validation_fraction=0.0)
    config = make_config(tmp_path, data__source="megatron", data__path=tmp_path / "pythia", **keys)
    dataset = make_dataset(config, "train")
    assert (dataset.num_rows, dataset.num_tokens) == (40, 40 * 16)
    for step in range(first_step, 5):
        assert np.array_equal(dataset.batch(step)["tokens"], rows[8 * step : 8 * step + 8])
        assert np.array_equal(dataset.batch(step, slice(2, 5))["tokens"], rows[8 * step + 2 : 8 * step + 5])
    assert np.array_equal(dataset.batch(5)["tokens"], rows[:8])  # the second epoch


def test_pythia_order_from_a_bucket(tmp_path, server, preshuffled):
    rows = preshuffled
    for path in (tmp_path / "pythia").iterdir():
        server.files[f"pythia/{path.name}"] = path.read_bytes()
    keys = dict(data__row_len=17, data__order="sequential", data__validation_fraction=0.0)
    config = make_config(tmp_path, data__source="megatron", data__path="gs://bucket/pythia/document", **keys)
    dataset = make_dataset(config, "train")
    assert dataset.read_ahead > 1
    for step in (3, 0, 1):
        assert np.array_equal(dataset.batch(step)["tokens"], rows[8 * step : 8 * step + 8])


def test_pythia_validation_is_the_tail(tmp_path, preshuffled):
    rows = preshuffled
    keys = dict(data__row_len=17, data__order="sequential", data__validation_fraction=0.1)
    config = make_config(tmp_path, data__source="megatron", data__path=tmp_path / "pythia", **keys)
    assert np.array_equal(make_dataset(config, "valid").eval_batch(0, 4)["tokens"], rows[36:])
    assert make_dataset(config, "train").num_rows == 36


# ---- the other sources


def test_token_files(tmp_path):
    """Each file's rows alone, the tail dropped per file; the validation file of its own."""
    a, b = RNG.integers(0, 50_000, 16 * 3 + 1), RNG.integers(0, 50_000, 16 * 2 + 9)
    a.astype("u2").tofile(tmp_path / "a.npy")
    b.astype("u2").tofile(tmp_path / "b.npy")
    keys = dict(data__path=f"{tmp_path}/*.npy", data__order="sequential", data__validation_path=tmp_path / "b.npy")
    for source in ("olmo", "tokens"):
        config = make_config(tmp_path, data__source=source, **keys)
        train, valid = make_dataset(config, "train"), make_dataset(config, "valid")
        expected = [a[0:17], a[16:33], a[32:49], b[0:17], b[16:33]]
        assert np.array_equal(train.eval_batch(0, 5)["tokens"], expected)
        counted = targets(valid.eval_batch(0, 3))
        assert np.array_equal(counted, b[1:])
    config = make_config(tmp_path, data__source="olmo", data__path=tmp_path / "a.npy", data__validation_fraction=0.3)
    assert np.array_equal(make_dataset(config, "valid").eval_batch(0, 1)["tokens"], [a[32:49]])


def test_home_directory(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = dict(data__source="megatron", data__validation_fraction=0.0)
    twice = make_dataset(make_config(tmp_path, data__path="~/docs, ~/docs.bin", **keys), "train")
    once = make_dataset(make_config(tmp_path, data__path=corpus, **keys), "train")
    assert twice.num_rows in (2 * once.num_rows, 2 * once.num_rows + 1)


def test_synthetic(tmp_path):
    """Uniform, the same for the same (seed, step), different otherwise; needs no files.

    Mutation seen to fail: the key left out of SyntheticWindows.read.
    """
    config = make_config(
        tmp_path, data__source="synthetic", model__vocab_size=50, batch_size=64, data__order="sequential"
    )
    dataset = make_dataset(config, "train")
    batches = [dataset.batch(step)["tokens"] for step in range(20)]
    counts = np.bincount(np.concatenate(batches).ravel(), minlength=50)
    assert len(counts) == 50 and np.abs(counts / counts.mean() - 1).max() < 0.2
    assert np.array_equal(batches[3], make_dataset(config, "train").batch(3)["tokens"])
    others = [batches[1], make_dataset(config, "valid").eval_batch(0, 64)["tokens"]]
    config.seed = 1
    others.append(make_dataset(config, "train").batch(0)["tokens"])
    for other in others:
        assert (batches[0] == other).mean() < 0.05
    rows = np.unique(np.concatenate(batches), axis=0)
    assert len(rows) == 64 * 20


def test_mixture(tmp_path, pack):
    """Each source in its share, walking its own epochs; all of every source's validation data.

    Mutation seen to fail: `k` left out of the key (two sources over one file would walk it in step).
    """
    pack(tmp_path / "a", np.split(np.arange(1, 4001), 40))
    pack(tmp_path / "b", np.split(np.arange(10_001, 10_601), 12))
    config = make_config(tmp_path, batch_size=16)
    config.data.source = "mixture"
    for name, weight in (("b", 1.0), ("a", 3.0)):
        config_lib.override(config, f"data.mixture.{name}.weight", str(weight))
        config_lib.override(config, f"data.mixture.{name}.source", "megatron")
        config_lib.override(config, f"data.mixture.{name}.path", str(tmp_path / name))
    config_lib.check(config)
    dataset = make_dataset(config, "train")
    batches = [dataset.batch(step)["tokens"] for step in range(40)]
    for batch in batches:
        assert (batch[:, 0] > 10_000).sum() == 4
    rows = np.concatenate(batches)
    b = rows[rows[:, 0] > 10_000]
    per_epoch = (600 - 50 - 1) // 16
    assert len(np.unique(b[:per_epoch], axis=0)) == per_epoch
    assert np.array_equal(np.unique(b[:per_epoch], axis=0), np.unique(b[per_epoch : 2 * per_epoch], axis=0))
    valid = make_dataset(config, "valid")
    counted = np.concatenate([targets(valid.eval_batch(i, 4)) for i in range(valid.num_batches(4))])
    assert len(counted) == len(set(counted)) == valid.num_tokens == 99 + 49
    twins = config_lib.from_json(config_lib.to_json(config))
    for name in "ab":
        twins.data.mixture[name].update(path=str(tmp_path / "a"), weight=1.0)
    batch = make_dataset(twins, "train").batch(0)["tokens"]
    assert (batch[::2] == batch[1::2]).mean() < 0.5
    again = config_lib.from_json(config_lib.to_json(config))
    assert np.array_equal(make_dataset(again, "train").batch(7)["tokens"], batches[7])
    config.data.validation_path = "x"
    with pytest.raises(ValueError, match=r"data\.validation_path='x' has no effect with data\.source='mixture'"):
        make_dataset(config, "valid")
    config.data.validation_path = ""
    config_lib.override(config, "data.mixture.a.path", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"data\.mixture\.a\.path=.*nothing: no .*tools/tokenize_text\.py"):
        make_dataset(config, "train")


def test_text_and_stdlib(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i}: " + "word " * i)
    config = make_config(tmp_path, data__source="text", data__path=f"{tmp_path}/*.txt", model__vocab_size=256)
    dataset = make_dataset(config, "train")
    text = "".join(map(chr, dataset.eval_batch(0, dataset.num_rows)["tokens"][:, 1:].ravel()))
    assert text.count("ocument ") == 19  # the very first token is no target
    assert make_dataset(config, "valid").num_rows >= 1


# ---- what is refused


@pytest.mark.parametrize(
    "keys, message",
    [
        (dict(data__source="megatron"), r"data\.path is empty.*tokenize_text\.py"),
        (dict(data__source="megatron", data__path="nowhere/x"), r"data\.path=nowhere/x: .*no .*x\.bin.*tokenize_text"),
        (
            dict(data__source="megatron", data__path="nowhere/document", data__row_len=17, data__order="sequential"),
            r"nowhere/document: no such file.*hf download EleutherAI/pile-standard-pythia-preshuffled "
            r"--repo-type dataset --local-dir nowhere$",
        ),
        (
            dict(data__source="megatron", data__path="pile-deduped", data__row_len=17),
            r"hf download EleutherAI/pile-deduped-pythia-preshuffled .*--local-dir pile-deduped$",
        ),
        (dict(data__source="tokens", data__path="nowhere/train.bin"), r"train\.bin: no such file.*prepare\.py"),
        (dict(data__source="olmo", data__path="nowhere/*.npy"), r"\*\.npy: no such file.*data\.paths"),
        (dict(data__source="huggingface", data__path="nowhere"), r"nowhere: no such file.*save_to_disk"),
        (dict(data__source="text", data__path="nowhere"), r"nowhere: "),
        (
            dict(data__source="megatron", data__path="DOCS", data__row_len=18),
            r"data\.row_len=18 holds rows for seq_len=17, not seq_len=16",
        ),
        (dict(data__source="megatron", data__path="DOCS", seq_len=100_000), r"DOCS: \d+ tokens to train, fewer than"),
        (
            dict(data__source="tokens", data__path="BIN", data__isolate_documents=True),
            r"data\.isolate_documents=True, but in data tokens files do not say",
        ),
        (
            dict(data__source="synthetic", data__isolate_documents=True),
            r"data\.isolate_documents=True, but in data synthetic tokens",
        ),
        (
            dict(data__source="tokens", data__path="BIN", seq_len=5000),
            r"tokens\.bin: 0 row\(s\) of seq_len \+ 1 = 5001",
        ),
        (
            dict(data__source="tokens", data__path="BIN", seq_len=5000, data__validation_fraction=0.0),
            r"data\.path=.*tokens\.bin: 1000 tokens to train, fewer than one row of 5001; shorten seq_len=5000",
        ),
    ],
)
def test_refused(tmp_path, corpus, keys, message):
    np.arange(1000, dtype="u2").tofile(tmp_path / "tokens.bin")
    places = {"DOCS": corpus, "BIN": str(tmp_path / "tokens.bin")}
    keys = {key: places.get(value, value) for key, value in keys.items()}
    message = message.replace("DOCS", corpus)
    with pytest.raises(ValueError, match=message) as error:
        make_dataset(make_config(tmp_path, **keys), "train")
    assert "\n" not in str(error.value)


def test_isolation_of_preshuffled_rows_is_refused(tmp_path, preshuffled):
    keys = dict(data__source="megatron", data__path=tmp_path / "pythia", data__row_len=17)
    with pytest.raises(ValueError, match=r"in data preshuffled rows do not say where documents begin"):
        make_dataset(make_config(tmp_path, data__isolate_documents=True, **keys), "train")


def test_no_validation_data(tmp_path, corpus):
    config = make_config(tmp_path, data__source="megatron", data__path=corpus, data__validation_fraction=0.0)
    assert make_dataset(config, "train").num_tokens > 0
    with pytest.raises(ValueError, match=r"data\.validation_fraction=0\.0 .*eval\.every=-1"):
        make_dataset(config, "valid")


def test_empty_corpus(tmp_path, pack):
    pack(tmp_path / "x", [[], []])
    config = make_config(tmp_path, data__source="megatron", data__path=tmp_path / "x")
    with pytest.raises(ValueError, match=r"data\.path=.*x: no tokens in it"):
        make_dataset(config, "train")


def test_one_row_serves_for_ever(tmp_path, pack):
    """n = 1: every row of every batch is that row."""
    pack(tmp_path / "x", [list(range(20)), [1, 2]])
    config = make_config(tmp_path, data__source="megatron", data__path=tmp_path / "x", data__validation_fraction=0.0)
    dataset = make_dataset(config, "train")
    assert dataset.num_rows == 1
    assert np.array_equal(dataset.batch(123)["tokens"], [list(range(17))] * 8)


def test_token_outside_the_vocabulary(tmp_path, corpus):
    config = make_config(tmp_path, data__source="megatron", data__path=corpus, model__vocab_size=100)
    dataset = make_dataset(config, "train")
    with pytest.raises(ValueError, match=r"docs\.bin: token id \d+ at token \d+ .*outside model\.vocab_size=100"):
        dataset.batch(0)
