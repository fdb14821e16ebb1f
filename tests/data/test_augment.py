"""Crops, RandAugment, erasing and mixing: sizes, rates and closed forms."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from jaxpretrain.data import augment

PLAIN = augment.Augmentation(size=32, min_crop=1.0, flip=False, randaugment_ops=0, randaugment_magnitude=9.0, erase=0.0)


def rng(key=0):
    return np.random.Generator(np.random.Philox(key=key))


def noise(height=32, width=32, mode="RGB", seed=0):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_nothing_asked_for_is_nothing_done(mode):
    """An image of the right size keeps every pixel, also in evaluation."""
    image = noise(mode=mode)
    expected = np.asarray(image).reshape(32, 32, -1)
    assert np.array_equal(PLAIN(image, rng()), expected)
    assert np.array_equal(augment.center(image, 32, 1.0), expected)
    assert np.array_equal(augment.to_array(augment.rand_augment(image, 0, 9.0, rng())), expected)


def test_without_crops_the_whole_image_is_resized():
    """Mutation seen to fail: `min_crop <= 1`, a crop of all."""
    image = noise(50, 75)
    assert np.array_equal(PLAIN(image, rng()), np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC)))


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (64, 96)])
def test_evaluation_sees_the_middle(size):
    """The shorter side is 64, of which 7/8 is 56, which is 28 pixels twice: a frame around it is not seen.

    Mutation seen to fail: `left` taken from the height.
    """
    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[(height - 56) // 2 : (height + 56) // 2, (width - 56) // 2 : (width + 56) // 2] = 255
    inner = augment.center(Image.fromarray(pixels), 28, 56 / 64)
    assert inner[2:-2, 2:-2].min() == 255  # at the edge bicubic weights reach outside the box
    wider = augment.center(Image.fromarray(pixels), 32, 1.0)
    assert (wider[:, :, 0] > 127).sum() == 28 * 28


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (64, 64)])
def test_crops_have_the_asked_area_and_aspect(size):
    """Area and log aspect within the range and, where every attempt fits, uniform; positions reach every edge.

    Mutation seen to fail: the area's root left out of the width.
    """
    width, height = size
    generator = rng(1)
    boxes = np.array([augment.crop_box(width, height, 0.08, generator) for _ in range(3000)])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes[:, :2].min() == 0 and boxes[:, 2].max() == width and boxes[:, 3].max() == height
    area, aspect = w * h / (width * height), w / h
    assert 0.075 < area.min() < 0.1 and 0.9 < area.max() <= 1.0
    assert 0.7 < aspect.min() < 0.8 and 1.25 < aspect.max() < 1.4
    small = np.sort(np.log(aspect[area < 0.5]))  # these always fit
    expected = np.linspace(np.log(3 / 4), np.log(4 / 3), len(small))
    assert np.abs(small - expected).max() < 0.08
    assert abs(np.mean(area[area < 0.5]) - (0.08 + 0.5) / 2) < 0.02


def test_crops_of_long_images():
    """Nothing of the allowed aspect and most of the area fits: the largest in the middle."""
    assert augment.crop_box(1000, 30, 0.9, rng()) == (480, 0, 520, 30)
    assert augment.crop_box(30, 1000, 0.9, rng()) == (0, 480, 30, 520)


def test_crops_are_cut_out_of_the_image():
    """Of a picture whose colours are its coordinates, a crop is a smaller range of them, in order."""
    x, y = np.meshgrid(np.arange(256), np.arange(256))
    image = Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8))
    for key in range(20):
        box = augment.crop_box(256, 256, 0.08, rng(key))
        crop = dataclasses.replace(PLAIN, min_crop=0.08)(image, rng(key)).astype(int)
        assert np.abs(crop[0, 0, :2] - box[:2]).max() < 10 and np.abs(crop[-1, -1, :2] - box[2:]).max() < 10
        assert (np.diff(crop[:, :, 0], axis=1) >= 0).all() and (np.diff(crop[:, :, 1], axis=0) >= 0).all()


def test_half_of_the_images_are_mirrored():
    """Mutation seen to fail: `ImageOps.flip`."""
    image, flip = noise(), dataclasses.replace(PLAIN, flip=True)
    pixels = np.asarray(image)
    mirrored = []
    for key in range(400):
        result = flip(image, rng(key))
        mirrored.append(np.array_equal(result, pixels[:, ::-1]))
        assert mirrored[-1] or np.array_equal(result, pixels)
    assert abs(np.mean(mirrored) - 0.5) < 4 * 0.5 / 20


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", augment.OPERATIONS)
def test_operations(name, mode):
    """Each keeps size and mode, and all but those without a strength do nothing, or posterize least, at none."""
    image, operation = noise(24, 40, mode), augment.OPERATIONS[name]
    for strength in (0.0, 0.3, 0.9, 1.0):
        for sign in (1, -1):
            result = operation(image, strength, sign)
            assert result.size == (40, 24) and result.mode == mode
    pixels = np.asarray(image)
    none = np.asarray(operation(image, 0.0, 1))
    if name not in ("autocontrast", "equalize"):
        assert np.array_equal(none, pixels & 0xF0 if name == "posterize" else pixels)
    changes = not np.array_equal(np.asarray(operation(image, 0.9, 1)), pixels)
    # Noise has every brightness already; a grey image has no colour to change.
    assert changes == (name not in ("identity", "autocontrast") and (name, mode) != ("color", "L"))


def test_strengths_in_closed_form():
    """At magnitude 9: brightness 1 +- 0.81, solarize from 26 on, one bit, 0.405 of the width, 27 degrees, shear 0.27.

    Mutation seen to fail: `256 * strength` as the threshold, which is not "increasing".
    """
    grey = Image.new("RGB", (100, 100), (100, 100, 100))

    def run(name, image, sign=1):
        return np.asarray(augment.OPERATIONS[name](image, 0.9, sign))

    assert run("brightness", grey)[0, 0, 0] == 181 and run("brightness", grey, -1)[0, 0, 0] == 19
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    values = np.arange(256)
    assert np.array_equal(run("solarize", ramp)[0], np.where(values < 26, values, 255 - values))
    assert np.array_equal(run("posterize", ramp)[0], values & 0x80)
    point = np.zeros((100, 100), np.uint8)
    point[50, 60:63] = 255
    for sign in (1, -1):
        moved = run("translate_x", Image.fromarray(point), sign)[50]
        if sign == 1:  # 40.5 pixels to the left
            assert np.abs(np.flatnonzero(moved[:55]) - 20).max() <= 3 and moved[60:].max() == 128
        else:
            assert (moved[:40] == 128).all()
    line = np.zeros((101, 101), np.uint8)
    line[:, 49:52] = 255
    sheared = run("shear_x", Image.fromarray(line))
    tops = [np.flatnonzero(sheared[row] > 200).mean() for row in (0, 100)]
    assert abs((tops[0] - tops[1]) / 100 - 0.27) < 0.02
    turned = run("rotate", Image.fromarray(line))
    ends = [np.flatnonzero(turned[row, 20:80] > 200).mean() for row in (20, 80)]
    assert abs(abs(ends[0] - ends[1]) / 60 - np.tan(np.deg2rad(27))) < 0.03


def test_operations_are_drawn_uniformly(monkeypatch):
    """Mutation seen to fail: one draw for all of an image's operations."""
    drawn = []
    spies = [lambda image, strength, sign, k=k: drawn.append((k, strength, sign)) or image for k in range(14)]
    monkeypatch.setattr(augment, "_OPERATIONS", spies)
    assert len(augment.OPERATIONS) == 14
    for key in range(1400):
        augment.rand_augment(None, 2, 7.0, rng(key))
    names, strengths, signs = map(np.array, zip(*drawn, strict=True))
    assert len(names) == 2800 and (strengths == 0.7).all()
    counts = np.bincount(names, minlength=14)
    assert np.abs(counts - 200).max() < 5 * np.sqrt(200)
    assert abs((signs == 1).mean() - 0.5) < 4 * 0.5 / np.sqrt(2800)
    together = (names[::2] == names[1::2]).mean()
    assert abs(together - 1 / 14) < 4 * np.sqrt(1 / 14 / 1400)


@pytest.mark.parametrize("num_channels", [1, 3])
def test_erasing(num_channels):
    """One rectangle of 2 to 33 % of the area becomes noise, the rest stays; as often as was asked for.

    Mutation seen to fail: the same noise in every channel.
    """
    areas = []
    for key in range(300):
        pixels = np.full((64, 64, num_channels), 77, np.uint8)
        augment.erase(pixels, rng(key))
        changed = (pixels != 77).any(-1)
        rows, cols = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        inside = pixels[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
        areas.append(inside[..., 0].size / 64**2)
        assert changed.sum() > 0.97 * inside[..., 0].size - 10  # noise may be 77, too
        if num_channels == 3 and inside.size > 300:
            assert not np.array_equal(inside[..., 0], inside[..., 1])
    assert 0.015 < min(areas) < 0.04 and 0.3 < max(areas) < 0.35
    assert abs(np.mean(areas) - (0.02 + 1 / 3) / 2) < 0.03
    image, erase = noise(), dataclasses.replace(PLAIN, erase=0.25)
    erased = [not np.array_equal(erase(image, rng(key)), np.asarray(image)) for key in range(800)]
    assert abs(np.mean(erased) - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 800)


def flat_pair(a=10, b=250, num_channels=3):
    return np.stack([np.full((32, 48, num_channels), value, np.uint8) for value in (a, b)])


def test_mixup_is_a_rounded_mean():
    """weight x + (1 - weight) y and the mirror of it; weights are those of Beta(alpha, alpha).

    Mutations seen to fail: the added half left out; `rng.beta(mixup, 1)`.
    """
    weights = []
    for key in range(2000):
        pair = flat_pair()[:, :2, :2]
        weight = augment.mix_pair(pair, 0.8, 0.0, rng(key))
        weights.append(weight)
        expected = np.rint(np.array([weight * 10 + (1 - weight) * 250, weight * 250 + (1 - weight) * 10]))
        assert np.abs(pair[:, 0, 0, 0] - expected).max() <= (1 if np.abs(expected % 1 - 0.5).min() < 1e-3 else 0)
        assert (pair == pair[:, :1, :1, :1]).all()
    weights = np.array(weights)
    assert 0 <= weights.min() and weights.max() <= 1
    assert abs(weights.mean() - 0.5) < 4 * weights.std() / np.sqrt(2000)
    assert abs(weights.var() - 1 / (4 * (2 * 0.8 + 1))) < 0.01  # of Beta(a, a)
    images = np.stack([np.asarray(noise(seed=seed)) for seed in (1, 2)])
    pair = images.copy()
    weight = augment.mix_pair(pair, 0.8, 0.0, rng())
    assert np.abs(pair[0] - (weight * images[0] + (1 - weight) * images[1])).max() <= 0.501
    assert np.abs(pair.astype(int).sum(0) - images.astype(int).sum(0)).max() <= 1


@pytest.mark.parametrize("num_channels", [1, 3])
def test_cutmix_weighs_by_the_true_area(num_channels):
    """One rectangle changes places; the weight is the part of an image that is still its own, whatever was cut off.

    Mutation seen to fail: the drawn weight returned.
    """
    weights = []
    for key in range(1000):
        pair = flat_pair(num_channels=num_channels)
        weight = augment.mix_pair(pair, 0.0, 1.0, rng(key))
        weights.append(weight)
        for image, own in zip(pair, (10, 250), strict=True):
            assert weight == np.float32((image == own).mean())
        foreign = (pair[0] == 250).all(-1)
        if foreign.any():
            rows, cols = np.flatnonzero(foreign.any(1)), np.flatnonzero(foreign.any(0))
            assert foreign.sum() == (rows[-1] - rows[0] + 1) * (cols[-1] - cols[0] + 1)
        assert np.array_equal(pair[0] == 10, pair[1] == 250)
    assert np.mean(weights) > 0.55 and min(weights) < 0.2 and max(weights) > 0.99


def test_pairs_get_one_of_the_two():
    """Mutation seen to fail: mixup for all of them."""
    kinds = []
    for key in range(400):
        pair = flat_pair()
        augment.mix_pair(pair, 1.0, 1.0, rng(key))
        kinds.append(len(np.unique(pair[0])) == 1 and pair[0, 0, 0, 0] not in (10, 250))
    assert abs(np.mean(kinds) - 0.5) < 4 * 0.5 / 20


def test_the_generator_decides_all():
    image = noise(60, 80)
    everything = augment.Augmentation(
        size=32, min_crop=0.08, flip=True, randaugment_ops=2, randaugment_magnitude=9.0, erase=0.5
    )
    results = [everything(image, rng(key)) for key in (0, 1, 0)]
    assert np.array_equal(results[0], results[2]) and not np.array_equal(results[0], results[1])
    assert results[0].dtype == np.uint8 and results[0].shape == (32, 32, 3)
