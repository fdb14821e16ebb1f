"""Batches of images: order, layouts, mixing, evaluation, and the processes that read ahead."""

import functools
import importlib.util
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from jaxpretrain import config as config_lib
from jaxpretrain.data import images
from jaxpretrain.data.images import make_image_dataset, read_in_order

NUM, SIZE = 23, 32
PLAIN = dict(min_crop=1.0, flip=False, eval_crop=1.0)
RECIPE = dict(min_crop=0.3, randaugment_ops=2, erase=0.5, mixup=0.8, cutmix=1.0)


def make_config(path="", batch_size=8, seed=0, source="images", **keys):
    """Keys of data.images, and others by their name with __ for a dot."""
    config = config_lib.default()
    config.model.family, config.seq_len, config.batch_size, config.seed = "vit", 1, batch_size, seed
    config.model.image.size, config.model.image.num_classes = SIZE, NUM
    config.data.source, config.data.path = source, str(path)
    config.data.workers = 0 if source == "synthetic" else 1
    for key, value in keys.items():
        if key in config.data.images:
            config.data.images[key] = value
        else:
            config_lib.override(config, key.replace("__", "."), str(value))
    config_lib.check(config)
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """NUM images, each of a class of its own and of one grey that is ten times its label."""
    root = tmp_path_factory.mktemp("images")
    for i in range(NUM):
        (root / f"{i:02}").mkdir()
        Image.new("RGB", (SIZE, SIZE), (10 * i,) * 3).save(root / f"{i:02}/a.png")
    return root


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """NUM images of noise, each of a class of its own."""
    root = tmp_path_factory.mktemp("noise")
    for i in range(NUM):
        (root / f"{i:02}").mkdir()
        pixels = np.random.default_rng(i).integers(0, 256, (40, 50, 3), np.uint8)
        Image.fromarray(pixels).save(root / f"{i:02}/a.png")
    return root


def train(path, **keys):
    return make_image_dataset(make_config(path, data__validation_fraction=0.0, eval__every=-1, **keys), "train")


def same(a, b):
    return set(a) == set(b) and all(np.array_equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def all_same(batches, expected):
    batches = list(batches)
    return len(batches) == len(expected) and all(map(same, batches, expected))


def joined(parts):
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def test_every_image_once_an_epoch(folder):
    """In another order each epoch and for each seed, also where batches straddle epochs; images keep their labels.

    Mutations seen to fail: the epoch left out of the key; `step * (batch_size - 1)`.
    """
    dataset = train(folder, **PLAIN)
    assert dataset.num_rows == dataset.num_tokens == NUM and dataset.sizes == [[NUM, NUM]]
    rows = joined([dataset.batch(step) for step in range(9)])
    assert rows["images"].shape == (72, SIZE, SIZE, 3) and rows["images"].dtype == np.uint8
    assert rows["labels"].dtype == np.int32 and rows["weights"].dtype == np.float32
    labels = rows["labels"][:, 0]
    assert np.array_equal(labels, rows["labels"][:, 1]) and (rows["weights"] == 1).all()
    assert (rows["images"] == 10 * labels[:, None, None, None]).all()
    epochs = [labels[e * NUM : (e + 1) * NUM] for e in range(3)]
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(NUM)) and not np.array_equal(epoch, np.arange(NUM))
    assert not np.array_equal(epochs[0], epochs[1]) and not np.array_equal(epochs[1], epochs[2])
    assert not np.array_equal(train(folder, seed=1, **PLAIN).batch(0)["labels"], rows["labels"][:8])
    sequential = train(folder, data__order="sequential", **PLAIN)
    assert np.array_equal(sequential.batch(5)["labels"][:, 0], np.arange(40, 48) % NUM)


@pytest.mark.parametrize("recipe", [{}, RECIPE, dict(mixup=0.2), dict(cutmix=1.0)])
@pytest.mark.parametrize("batch_size", [8, 7])
def test_hosts_slices_make_the_batch(noise, recipe, batch_size):
    """Whatever the cuts, also through pairs; at any step, by a dataset that read nothing before.

    Mutations seen to fail: `first = start`; the key of a pair from its place in the slice.
    """
    dataset = train(noise, batch_size=batch_size, **recipe)
    for step in (0, 2, 10**9):
        whole = dataset.batch(step)
        for cuts in ((0, 3, 4, batch_size), (0, 1, 2, 5, batch_size), range(batch_size + 1)):
            fresh = pickle.loads(pickle.dumps(train(noise, batch_size=batch_size, **recipe)))
            slices = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
            assert same(whole, joined([fresh.batch(step, rows) for rows in slices]))
    assert not same(dataset.batch(0), train(noise, batch_size=batch_size, seed=1, **recipe).batch(0))


@pytest.mark.parametrize("kinds", [dict(mixup=0.8), dict(cutmix=1.0), dict(mixup=0.8, cutmix=1.0)])
def test_pairs_are_mixed_as_their_labels_say(folder, kinds):
    """Of images of one grey, the mean of each mixed one is that of its labels, weighted; an odd last one is alone.

    Mutation seen to fail: `labels[k : k + 2, 0]` without `[::-1]`.
    """
    plain, mixed = train(folder, batch_size=7, **PLAIN), train(folder, batch_size=7, **PLAIN, **kinds)
    weights = []
    for step in range(40):
        batch, labels = mixed.batch(step), plain.batch(step)["labels"][:, 0]
        assert np.array_equal(batch["labels"][:, 0], labels)
        assert np.array_equal(batch["labels"][:6, 1], labels[[1, 0, 3, 2, 5, 4]]) and batch["labels"][6, 1] == labels[6]
        weight = batch["weights"].astype(float)
        assert weight[6] == 1 and np.array_equal(weight[0:6:2], weight[1:6:2])
        expected = 10 * (weight * batch["labels"][:, 0] + (1 - weight) * batch["labels"][:, 1])
        assert np.abs(batch["images"].mean((1, 2, 3)) - expected).max() <= 0.501
        weights += weight[0:6:2].tolist()
    assert len(set(weights)) > 80 and 0 <= min(weights) and max(weights) <= 1


def test_an_image_is_changed_anew_every_time(noise):
    """The same image in two epochs, and two images of one grey in one batch, are not changed alike."""
    dataset = train(noise, batch_size=NUM, min_crop=0.2)
    first, second = (dataset.batch(step) for step in (0, 1))
    a, b = (np.argsort(batch["labels"][:, 0]) for batch in (first, second))
    assert all(not np.array_equal(first["images"][i], second["images"][j]) for i, j in zip(a, b, strict=True))


@pytest.mark.parametrize("batch_size", [1, 5, 8, 100])
def test_evaluation_sees_every_image_once(folder, batch_size):
    """In stored order, unchanged; what is missing in the last batch is black, of no class and no weight.

    Mutation seen to fail: `index <= self.num_rows`.
    """
    config = make_config(folder, data__validation_fraction=0.4, **{**RECIPE, **PLAIN})
    valid, others = make_image_dataset(config, "valid"), make_image_dataset(config, "train")
    assert valid.num_rows == 9 and others.num_rows == NUM - 9 and valid.seq_len == 1
    num_batches = valid.num_batches(batch_size)
    assert num_batches == -(-9 // batch_size)
    batches = [valid.eval_batch(i, batch_size) for i in range(num_batches)]
    rows, count = joined(batches), 9
    assert all(len(batch["images"]) == batch_size for batch in batches)
    labels = rows["labels"][:count]
    assert np.array_equal(labels[:, 0], labels[:, 1]) and (np.diff(labels[:, 0]) > 0).all()
    assert (rows["images"][:count] == 10 * labels[:, :1, None, None]).all() and (rows["weights"][:count] == 1).all()
    assert (
        (rows["labels"][count:] == -1).all() and not rows["weights"][count:].any() and not rows["images"][count:].any()
    )
    seen = {label for step in range(4) for label in others.batch(step)["labels"][:, 0].tolist()}
    assert not seen & set(labels[:, 0].tolist())
    for i, batch in enumerate(batches):
        cuts = [0, batch_size // 3, batch_size]
        parts = [valid.eval_batch(i, batch_size, slice(a, b)) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert same(batch, joined(parts))


def test_grey_images(noise):
    """Everything also with one channel. Mutation seen to fail: `_MODES[3]` for all."""
    dataset = train(noise, model__image__num_channels=1, normalize="half", **RECIPE)
    batch = dataset.batch(0)
    assert batch["images"].shape == (8, SIZE, SIZE, 1)
    digits = make_image_dataset(make_config(source="digits", flip=False, min_crop=1.0), "valid")
    assert digits.num_rows == 50 and digits.eval_batch(0, 8)["images"].shape == (8, SIZE, SIZE, 3)


def test_synthetic():
    """The same for the same seed and row; splits and seeds differ."""
    datasets = [
        make_image_dataset(make_config(source="synthetic", seed=s), split)
        for s in (0, 1)
        for split in ("train", "valid")
    ]
    batches = [dataset.batch(3) for dataset in datasets]
    assert all(not same(batches[0], other) for other in batches[1:])
    whole = batches[0]
    assert same(whole, joined([datasets[0].batch(3, slice(0, 3)), datasets[0].batch(3, slice(3, 8))]))
    assert whole["images"].shape == (8, SIZE, SIZE, 3) and abs(whole["images"].mean() - 127.5) < 3
    assert whole["labels"].min() >= 0 and len(set(whole["labels"][:, 0].tolist())) > 3
    assert np.array_equal(whole["labels"][:, 0], whole["labels"][:, 1]) and (whole["weights"] == 1).all()
    last = datasets[1].eval_batch(1, 5)
    assert datasets[1].num_batches(5) == 2 and last["labels"][:, 0].tolist().count(-1) == 2
    assert same(next(datasets[0].batches(3, 5)), whole)


def test_processes_read_the_same_batches(noise, monkeypatch):
    """Two processes and none; from any step, for any rows. Evaluations of few images start none.

    Mutations seen to fail: `grain.MapDataset.range(stop - start)`; no `_FEW_IMAGES`.
    """
    datasets = [train(noise, **RECIPE, data__workers=workers) for workers in (1, 2)]
    expected = [datasets[0].batch(step, slice(3, 7)) for step in range(5, 10)]
    for dataset in datasets:
        assert all_same(dataset.batches(5, 10, slice(3, 7)), expected)
    evaluated = [datasets[0].eval_batch(i, 8, slice(0, 5)) for i in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(images, "_FEW_IMAGES", 3 * 8 - 1)
        assert all(all_same(dataset.eval_batches(3, 8, slice(0, 5)), evaluated) for dataset in datasets)
        patch.setattr(images, "_FEW_IMAGES", 3 * 8)
        patch.setattr(images, "_read_in_processes", None)
        assert all(all_same(dataset.eval_batches(3, 8, slice(0, 5)), evaluated) for dataset in datasets)
    assert list(datasets[1].batches(4, 4)) == []
    assert not multiprocessing.active_children()


def fails_at(bad, i):
    if i == bad:
        raise ValueError(f"a/b.png: a broken image ({i})")
    return {"pid": np.array(os.getpid()), "jax": np.array("jax" in sys.modules and _has_backend()), "i": np.array(i)}


def _has_backend():
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def test_errors_come_in_their_place():
    """The same message, after every batch before it, and no process is left; workers touch no device."""
    reader, seen = read_in_order(functools.partial(fails_at, 7), 3, 100, 2, 0), []
    with pytest.raises(ValueError) as error:
        for batch in reader:
            seen.append(batch)
    assert str(error.value) == "a/b.png: a broken image (7)"
    assert [int(batch["i"]) for batch in seen] == [3, 4, 5, 6]
    pids = {int(batch["pid"]) for batch in seen}
    assert len(pids) == 2 and os.getpid() not in pids and not any(batch["jax"] for batch in seen)
    assert not multiprocessing.active_children()


def is_killed_at(bad, i):
    if i == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"i": np.array(i)}


def test_a_killed_process_is_explained():
    """As the kernel kills for want of memory. Seen to fail: Grain's RuntimeError, which names no key."""
    with pytest.raises(ValueError, match=r"^data\.workers=2: .* was killed, .*exit code -9\)$"):
        list(read_in_order(functools.partial(is_killed_at, 5), 0, 20, 2, 0))
    assert not multiprocessing.active_children()


def large(size, i):
    return {"pid": np.array(os.getpid()), "i": np.array(i), "data": np.full(size, i % 256, np.uint8)}


def test_closing_ends_the_processes():
    """At once, though batches wait that nobody will read; also after signals, which are for the run.

    Mutations seen to fail: `min_shm_size` so large that batches go through pipes (26 s); no SIG_IGN.
    """
    reader = read_in_order(functools.partial(large, 5_000_000), 0, 1_000_000, 2, 0)
    pids = [int(next(reader)["pid"]) for _ in range(4)]
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert [int(next(reader)["i"]) for _ in range(6)] == list(range(4, 10))
    start = time.monotonic()
    reader.close()
    assert time.monotonic() - start < 15
    assert not multiprocessing.active_children()


SCRIPT = """
import os, sys
import numpy as np
from jaxpretrain.data.images import read_in_order

def read(i):
    return {"pid": np.array(os.getpid())}

if __name__ == "__main__":
    reader = read_in_order(read, 0, 1000, 2, 0)
    print(*{int(next(reader)["pid"]) for _ in range(4)}, flush=True)
    sys.stdin.read()
"""


def test_processes_end_with_their_parent(tmp_path):
    """However it ends. Mutation seen to fail: without `leave_with_parent`."""
    (tmp_path / "script.py").write_text(SCRIPT)
    options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, tmp_path / "script.py"], env=environment, **options) as process:
        pids = list(map(int, process.stdout.readline().split()))
        process.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, pids))


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_threads_where_processes_cannot_be(noise, monkeypatch, capsys):
    """Loudly. Mutation seen to fail: `popleft` -> `pop` in read_ahead."""
    dataset = train(noise, **RECIPE, data__workers=3)
    expected = [dataset.batch(step) for step in range(2, 9)]
    with monkeypatch.context() as patch:
        patch.setattr(images, "_free_shared_memory", lambda: 64 << 20)
        patch.setattr(images, "_BATCHES_PER_WORKER", 10_000)
        assert all_same(dataset.batches(2, 9), expected)
        out = capsys.readouterr().out
        assert "threads decode images, as /dev/shm has 64 MiB free, processes need 704: docker run --shm-size" in out
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "grain" else find(name))
    assert all_same(dataset.batches(2, 9), expected)
    assert "as grain is not installed: pip install 'jaxpretrain[images]'" in capsys.readouterr().out
    reader = read_in_order(functools.partial(fails_at, 4), 0, 100, 3, 0)
    assert [int(next(reader)["i"]) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"a/b\.png: a broken image \(4\)"):
        next(reader)


def test_how_many_workers(noise, monkeypatch):
    """Cores by default; none for what is in memory already; no more than batches."""
    used = []
    monkeypatch.setattr(images, "read_in_order", lambda read, start, stop, workers, size: used.append((workers, size)))
    train(noise, data__workers=0).batches(0, 9)
    train(noise, data__workers=3).batches(0, 9, slice(0, 5))
    make_image_dataset(make_config(source="digits", data__workers=0), "train").batches(0, 9)
    size = SIZE * SIZE * 3
    assert used == [(len(os.sched_getaffinity(0)), 8 * size), (3, 5 * size), (1, 8 * size)]


def test_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"model\.image\.num_channels=4: images have 3 channels, or grey ones 1"):
        train(folder, model__image__num_channels=4, normalize="half")
    with pytest.raises(
        ValueError, match=r"data\.images\.cutmix=1\.0 mixes pairs, and batch_size=1 has none; set batch_"
    ):
        train(folder, batch_size=1, cutmix=1.0)
    config = make_config(folder, data__validation_fraction=0.0, eval__every=-1)
    with pytest.raises(ValueError, match=r"data\.validation_fraction=0\.0, and the images are not divided into splits"):
        make_image_dataset(config, "valid")
    with pytest.raises(ValueError, match=r"03/a\.png: label 3 is outside model\.image\.num_classes=3"):
        train(folder, model__image__num_classes=3)
    (tmp_path / "0").mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8)).save(tmp_path / "0/a.jpg")
    whole = (tmp_path / "0/a.jpg").read_bytes()
    for broken, reason in (
        (whole[:1500], r"a broken image \(.*truncated"),
        (b"text", "not an image$"),
        (b"", "not an"),
    ):
        (tmp_path / "0/a.jpg").write_bytes(broken)
        with pytest.raises(ValueError, match=rf"0/a\.jpg: {reason}"):
            train(tmp_path).batch(0)
