"""Batches of images, each a pure function of (seed, step), and the processes that decode them.

A batch is a dict of `images`, uint8 [B, H, W, C], `labels`, int32 [B, 2], and `weights`, float32 [B]: the target of a
row is its first label with probability `weights`, else its second. Unmixed, both are the same and the weight is 1.
B rows, H = W pixels, C channels.
"""

import functools
import gc
import importlib.util
import io
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxpretrain.data.permutation import fold, permute
from jaxpretrain.data.read_ahead import read_ahead

try:
    from PIL import Image, UnidentifiedImageError

    from jaxpretrain.data import augment, image_sources
except ImportError as error:
    raise ValueError("images need Pillow: pip install 'jaxpretrain[images]'") from error

Batch = dict[str, np.ndarray]

_AUGMENT, _PAIRS, _SYNTHETIC = 0xA06, 0x9A12, 0x57E7  # names of keys, beside those of permutations
_MODES = {1: "L", 3: "RGB"}  # Pillow's, by the number of channels
_BATCHES_PER_WORKER = 3  # in shared memory: one that is written, one that waits, one that was taken
_FEW_IMAGES = 1000  # one core decodes them in the seconds that processes take to start, at every evaluation
_IN_MEMORY = ("digits",)  # sources that cost nothing to read: processes would take longer to start than they save


class ImageDataset:
    """Batches of one split; `make_image_dataset` makes it. `rows` takes a contiguous part, for one host.

    It can be pickled, for processes that read batches ahead.
    """

    seq_len = 1  # an image counts as one token

    def __init__(self, reader: Any, rows: np.ndarray | None, config: ConfigDict, workers: int):
        """`reader`: of image_sources. `rows`: its images that belong to the split, int64 [N]; None: all."""
        data, image = config.data, config.model.image
        self._reader, self._rows, self._workers = reader, rows, workers
        self.num_rows = self.num_tokens = len(reader) if rows is None else len(rows)
        self.batch_size, self._seed, self._shuffled = config.batch_size, config.seed, data.order == "shuffled"
        self._num_classes, self._mode = image.num_classes, _MODES[image.num_channels]
        self._shape = (image.size, image.size, image.num_channels)
        self._mixup, self._cutmix, self._eval_crop = data.images.mixup, data.images.cutmix, data.images.eval_crop
        self._augment = augment.Augmentation(
            size=image.size,
            **{
                key: data.images[key]
                for key in ("min_crop", "flip", "randaugment_ops", "randaugment_magnitude", "erase")
            },
        )

    @property
    def sizes(self) -> list[list[int]]:
        """Rows and images: as they are part of the order, a run must find the same when it resumes."""
        return [[self.num_rows, self.num_rows]]

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of optimizer step `step` (from 0), changed as data.images says.

        Neighbours 2k and 2k + 1 are mixed with each other; the last of an odd number stays as it is.
        Raises ValueError for a broken image and for a label outside model.image.num_classes.
        """
        mixes = self._mixup > 0 or self._cutmix > 0
        start, stop, _ = rows.indices(self.batch_size)
        first = start - start % 2 if mixes else start  # the other halves of pairs that the slice cuts
        last = min(stop + stop % 2, self.batch_size) if mixes else stop
        index = step * self.batch_size + np.arange(first, last, dtype=np.int64)
        images, labels = np.empty((len(index), *self._shape), np.uint8), np.empty((len(index), 2), np.int32)
        for k, (i, row) in enumerate(zip(index.tolist(), self._order(index), strict=True)):
            image, labels[k] = self._load(row)
            images[k] = self._augment(image, _generator(self._seed, _AUGMENT, i))
        weights = np.ones(len(index), np.float32)
        for k in range(0, len(index) - 1, 2) if mixes else ():
            generator = _generator(self._seed, _PAIRS, int(index[k]))
            weights[k : k + 2] = augment.mix_pair(images[k : k + 2], self._mixup, self._cutmix, generator)
            labels[k : k + 2, 1] = labels[k : k + 2, 0][::-1]
        own = slice(start - first, stop - first)
        return {"images": images[own], "labels": labels[own], "weights": weights[own]}

    def num_batches(self, batch_size: int) -> int:
        """Batches of `batch_size` rows that cover the split once."""
        return -(-self.num_rows // batch_size)

    def eval_batch(self, i: int, batch_size: int, rows: slice = slice(None)) -> Batch:
        """Batch `i` of one pass in stored order: every image once, its middle, as it is.

        Rows that are missing in the last batch are black, with labels of -1 and weights of 0.
        """
        assert 0 <= i < self.num_batches(batch_size), i
        index = i * batch_size + np.arange(batch_size, dtype=np.int64)[rows]
        images, labels = np.zeros((len(index), *self._shape), np.uint8), np.full((len(index), 2), -1, np.int32)
        for k, row in enumerate(index[index < self.num_rows]):
            image, labels[k] = self._load(int(row))
            images[k] = augment.center(image, self._shape[0], self._eval_crop)
        return {"images": images, "labels": labels, "weights": (index < self.num_rows).astype(np.float32)}

    def batches(self, start_step: int, stop_step: int, rows: slice = slice(None)) -> Iterator[Batch]:
        """`batch` of each step in turn, read ahead in data.workers processes; close it, or exhaust it."""
        read = functools.partial(self.batch, rows=rows)
        return read_in_order(read, start_step, stop_step, self._workers, self._bytes(self.batch_size, rows))

    def eval_batches(self, num_batches: int, batch_size: int, rows: slice = slice(None)) -> Iterator[Batch]:
        """The first `num_batches` of `eval_batch` in turn, likewise; few images are read by threads."""
        read = functools.partial(self.eval_batch, batch_size=batch_size, rows=rows)
        if num_batches * batch_size <= _FEW_IMAGES:
            return read_ahead(read, 0, num_batches, self._workers)
        return read_in_order(read, 0, num_batches, self._workers, self._bytes(batch_size, rows))

    def _bytes(self, batch_size: int, rows: slice) -> int:
        return len(range(batch_size)[rows]) * math.prod(self._shape)

    def _order(self, index: np.ndarray) -> list[int]:
        """The row of the split that each image of the run is."""
        epoch, row = np.divmod(index, self.num_rows)
        if self._shuffled:
            keys = np.array([fold(self._seed, 0, e) for e in epoch.tolist()], np.uint64)
            row = permute(row, self.num_rows, keys)
        return row.tolist()

    def _load(self, row: int) -> tuple[Image.Image, int]:
        i = row if self._rows is None else int(self._rows[row])
        encoded, label = self._reader.read(i)
        image_sources.check_label(self._reader, i, label, self._num_classes)
        try:
            return decode(encoded, self._mode), label
        except UnidentifiedImageError as error:
            raise ValueError(f"{self._reader.name(i)}: not an image") from error
        except Exception as error:  # decoders raise many kinds
            raise ValueError(f"{self._reader.name(i)}: a broken image ({error})") from error


class SyntheticImages:
    """Uniform noise and labels, the same for the same (seed, row), never changed or mixed; no files."""

    seq_len = 1

    def __init__(self, config: ConfigDict, split: str):
        image = config.model.image
        self.num_rows = self.num_tokens = 1 << 40 if split == "train" else config.batch_size
        self.batch_size, self._num_classes = config.batch_size, image.num_classes
        self._shape = (image.size, image.size, image.num_channels)
        self._key = fold(config.seed, _SYNTHETIC, split == "train")

    sizes, num_batches = ImageDataset.sizes, ImageDataset.num_batches

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        return self._read(step * self.batch_size + np.arange(self.batch_size)[rows])

    def eval_batch(self, i: int, batch_size: int, rows: slice = slice(None)) -> Batch:
        batch = self._read(i * batch_size + np.arange(batch_size)[rows])
        padding = i * batch_size + np.arange(batch_size)[rows] >= self.num_rows
        batch["labels"][padding], batch["weights"][padding] = -1, 0
        return batch

    def batches(self, start_step: int, stop_step: int, rows: slice = slice(None)) -> Iterator[Batch]:
        return (self.batch(step, rows) for step in range(start_step, stop_step))

    def eval_batches(self, num_batches: int, batch_size: int, rows: slice = slice(None)) -> Iterator[Batch]:
        return (self.eval_batch(i, batch_size, rows) for i in range(num_batches))

    def _read(self, index: np.ndarray) -> Batch:
        images, labels = np.empty((len(index), *self._shape), np.uint8), np.empty((len(index), 2), np.int32)
        for k, i in enumerate(index.tolist()):
            generator = _generator(self._key, i)
            images[k] = np.frombuffer(generator.bytes(images[k].size), np.uint8).reshape(self._shape)
            labels[k] = generator.integers(self._num_classes)
        return {"images": images, "labels": labels, "weights": np.ones(len(index), np.float32)}


def make_image_dataset(config: ConfigDict, split: str) -> ImageDataset | SyntheticImages:
    """The dataset of a checked config with a model of images; `split` is "train" or "valid".

    Raises ValueError for images that are missing, broken or not labelled, and for a package that is not installed.
    """
    assert split in ("train", "valid"), split
    data, image, batch_size = config.data, config.model.image, config.batch_size
    if image.num_channels not in _MODES:
        raise ValueError(f"model.image.num_channels={image.num_channels}: images have 3 channels, or grey ones 1")
    for key in ("mixup", "cutmix"):
        if data.images[key] and batch_size < 2:
            raise ValueError(
                f"data.images.{key}={data.images[key]} mixes pairs, and batch_size={batch_size} has none; "
                f"set batch_size=2 or more, or data.images.{key}=0"
            )
    if data.source == "synthetic":
        return SyntheticImages(config, split)
    reader, rows = image_sources.open_split(data, split, image.num_classes)
    if split == "valid" and rows is not None and not len(rows):
        raise ValueError(
            "data.validation_fraction=0.0, and the images are not divided into splits: there is no validation data; "
            "set it, or data.validation_path, or eval.every=-1"
        )
    return ImageDataset(reader, rows, config, data.workers or (1 if data.source in _IN_MEMORY else _num_cores()))


def decode(encoded: image_sources.Encoded, mode: str) -> Image.Image:
    """An encoded image, or Pillow's, in the mode "RGB" or "L"; what it says of its orientation is not looked at."""
    image = Image.open(io.BytesIO(encoded)) if isinstance(encoded, bytes) else encoded
    if image.mode.startswith("I;16"):  # 16 bits of grey, which Pillow would cut off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"an image of mode {image.mode!r}, whose range is not known; save it with 8 or 16 bits")
    return image.convert(mode)


def read_in_order(
    read: Callable[[int], Batch], start: int, stop: int, workers: int, batch_bytes: int
) -> Iterator[Batch]:
    """`read(i)` for i from `start` to `stop` - 1, in order, read ahead by `workers` processes; `read` can be pickled.

    With one worker there is no process: i is read when it is asked for. Where there is no Grain, or too little shared
    memory for batches of `batch_bytes`, threads do the work. What `read` raises is raised where i would come. Closing
    the iterator ends the processes, after what they are reading.
    """
    workers = min(workers, stop - start)
    if workers <= 1:
        return (read(i) for i in range(start, stop))
    needed = workers * _BATCHES_PER_WORKER * batch_bytes
    if importlib.util.find_spec("grain") is None:
        reason = "grain is not installed: pip install 'jaxpretrain[images]'"
    elif (free := _free_shared_memory()) < needed:  # who writes more is killed by the kernel
        reason = f"/dev/shm has {free >> 20} MiB free, processes need {-(-needed >> 20)}: docker run --shm-size"
    else:
        return _read_in_processes(read, start, stop, workers)
    print(f"data.workers: threads decode images, as {reason}", flush=True)
    return read_ahead(read, start, stop, workers)


def _read_in_processes(read: Callable[[int], Batch], start: int, stop: int, workers: int) -> Iterator[Batch]:
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():  # Grain reads its flags, and our command line is not absl's
        flags.FLAGS.mark_as_parsed()
    dataset = grain.MapDataset.range(start, stop).map(read)
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1)
    iterator = iter(dataset.mp_prefetch(options, worker_init_fn=_start_worker))
    try:
        yield from map(_out_of_shared_memory, iterator)
    except RuntimeError as error:
        if "terminated unexpectedly" not in str(error):
            raise
        raise ValueError(
            f"data.workers={workers}: a process that decodes images was killed, probably for want of memory; lower "
            f"data.workers ({str(error).partition('. ')[0]})"
        ) from error
    finally:
        iterator.close()
        del iterator
        gc.collect()  # it is in cycles with the last batches, whose shared memory is then reported as leaked


def _out_of_shared_memory(batch: Batch) -> Batch:
    """A copy, which may live as long as it likes; the batch itself is freed at once."""
    return {key: np.array(value) for key, value in batch.items()}


def _start_worker(index: int, count: int) -> None:
    """In each process, first of all."""
    # Signals are for the run, which finishes its step, saves and then closes its workers.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)

    def leave_with_parent() -> None:  # however it ended
        multiprocessing.parent_process().join()
        os._exit(0)

    threading.Thread(target=leave_with_parent, name="leave with parent", daemon=True).start()
    if "jax" in sys.modules:  # Grain imports it; nothing here may take hold of an accelerator
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def _generator(*words: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=fold(*words)))


def _free_shared_memory() -> float:
    """Bytes; elsewhere than on Linux it is not a folder of limited size."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else float("inf")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
