"""How training images are changed: random crops, flips, RandAugment, erasing, and mixing in pairs.

Images come as Pillow's, "RGB" or "L", and leave as uint8 [H, W, C]. Every function draws from the generator that it is
given and from nothing else, so an image's key decides all.
"""

import dataclasses
import math

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

_CROP_ATTEMPTS = 10
_MIN_ASPECT = 3 / 4  # width to height of a crop: 3/4 to 4/3
_ERASED_AREA = (0.02, 1 / 3)  # part of the image; Zhong et al. go up to 0.4, the recipes of DeiT and ConvNeXt to 1/3
_ERASED_MIN_ASPECT = 0.3  # height to width: 0.3 to 1 / 0.3
_FILL = 128  # what affine operations move into the image


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What is done to one training image; the fields are keys of `data.images`, `size` is model.image.size."""

    size: int
    min_crop: float
    flip: bool
    randaugment_ops: int
    randaugment_magnitude: float
    erase: float

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        """-> uint8 [size, size, C]."""
        box = crop_box(*image.size, self.min_crop, rng) if self.min_crop < 1 else None
        image = image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        if self.flip and rng.random() < 0.5:
            image = ImageOps.mirror(image)
        image = rand_augment(image, self.randaugment_ops, self.randaugment_magnitude, rng)
        pixels = to_array(image)
        if rng.random() < self.erase:
            erase(pixels, rng)
        return pixels


def to_array(image: Image.Image) -> np.ndarray:
    """uint8 [H, W, C], a copy of its own."""
    pixels = np.array(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def center(image: Image.Image, size: int, crop: float) -> np.ndarray:
    """What evaluation sees, uint8 [size, size, C]: the shorter side to size / crop pixels, and of that the middle.

    In one step: the square in the middle whose side is `crop` of the shorter side, resized.
    """
    width, height = image.size
    side = crop * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return to_array(image.resize((size, size), Image.Resampling.BICUBIC, box=box))


def crop_box(width: int, height: int, min_area: float, rng: np.random.Generator) -> Box:
    """A rectangle of `min_area` to all of the image's area, its aspect within 3/4 and 4/3, anywhere in the image.

    Szegedy et al. 2015 ("Going deeper with convolutions", section 6); the aspect is log-uniform. Where ten attempts do
    not fit, the largest rectangle of an allowed aspect in the middle.
    """
    for _ in range(_CROP_ATTEMPTS):
        area = width * height * rng.uniform(min_area, 1)
        aspect = math.exp(rng.uniform(math.log(_MIN_ASPECT), -math.log(_MIN_ASPECT)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, height / _MIN_ASPECT), min(height, width / _MIN_ASPECT)
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def rand_augment(image: Image.Image, num_ops: int, magnitude: float, rng: np.random.Generator) -> Image.Image:
    """`num_ops` of `OPERATIONS`, drawn uniformly, one after the other, all at `magnitude` of 10.

    Cubuk et al. 2020 (arXiv 1909.13719, figure 2). Each gets stronger with the magnitude, up to timm's ranges
    ("increasing"; in the paper's own code some get weaker); directions are drawn.
    """
    for _ in range(num_ops):
        operation = _OPERATIONS[rng.integers(len(_OPERATIONS))]
        sign = 1 if rng.random() < 0.5 else -1
        image = operation(image, magnitude / 10, sign)
    return image


def _rotate(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return image.rotate(sign * strength * 30, Image.Resampling.BILINEAR, fillcolor=_fill(image))


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    """Pixel (x, y) comes from (a x + b y + c, d x + e y + f); `matrix` is a to f."""
    method, resample = Image.Transform.AFFINE, Image.Resampling.BILINEAR
    return image.transform(image.size, method, matrix, resample, fillcolor=_fill(image))


def _fill(image: Image.Image) -> int | tuple[int, ...]:
    return _FILL if image.mode == "L" else (_FILL,) * len(image.getbands())


def _enhance(enhancer: type) -> Image.Image:
    # A factor of 1 leaves the image, 0.1 leaves little of its colour, contrast, ...; 1.9 exaggerates it.
    return lambda image, strength, sign: enhancer(image).enhance(1 + 0.9 * sign * strength)


OPERATIONS = {  # image, strength from 0 to 1, direction -> image
    "identity": lambda image, strength, sign: image,
    "autocontrast": lambda image, strength, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, strength, sign: ImageOps.equalize(image),
    "rotate": _rotate,
    "solarize": lambda image, strength, sign: ImageOps.solarize(image, 256 - int(256 * strength)),
    "color": _enhance(ImageEnhance.Color),
    "posterize": lambda image, strength, sign: ImageOps.posterize(image, max(1, 4 - int(4 * strength))),  # 0: black
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear_x": lambda image, strength, sign: _affine(image, 1, 0.3 * sign * strength, 0, 0, 1, 0),
    "shear_y": lambda image, strength, sign: _affine(image, 1, 0, 0, 0.3 * sign * strength, 1, 0),
    "translate_x": lambda image, strength, sign: _affine(image, 1, 0, 0.45 * sign * strength * image.width, 0, 1, 0),
    "translate_y": lambda image, strength, sign: _affine(image, 1, 0, 0, 0, 1, 0.45 * sign * strength * image.height),
}

_OPERATIONS = list(OPERATIONS.values())


def erase(pixels: np.ndarray, rng: np.random.Generator) -> None:
    """Replaces a rectangle of `pixels`, uint8 [H, W, C], by uniform noise (Zhong et al. 2020, arXiv 1708.04896)."""
    height, width, num_channels = pixels.shape
    for _ in range(_CROP_ATTEMPTS):
        area = height * width * rng.uniform(*_ERASED_AREA)
        aspect = math.exp(rng.uniform(math.log(_ERASED_MIN_ASPECT), -math.log(_ERASED_MIN_ASPECT)))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < h <= height and 0 < w <= width:
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            noise = rng.integers(0, 256, (h, w, num_channels), np.uint8)
            pixels[top : top + h, left : left + w] = noise
            return


def mix_pair(pair: np.ndarray, mixup: float, cutmix: float, rng: np.random.Generator) -> np.float32:
    """Mixes two images, uint8 [2, H, W, C], with each other in place; the weight of each one's own label.

    `mixup` and `cutmix` are the alphas, 0: not; with both, one of the two with equal chances.
    """
    if mixup and (not cutmix or rng.random() < 0.5):
        return _mixup(pair, rng.beta(mixup, mixup))
    return _cutmix(pair, rng.beta(cutmix, cutmix), rng)


def _mixup(pair: np.ndarray, weight: float) -> np.float32:
    """weight x + (1 - weight) y, rounded (Zhang et al. 2018, arXiv 1710.09412, section 2)."""
    weight, own = np.float32(weight), pair.astype(np.float32)
    pair[:] = weight * own + (1 - weight) * own[::-1] + np.float32(0.5)
    return weight


def _cutmix(pair: np.ndarray, weight: float, rng: np.random.Generator) -> np.float32:
    """Swaps a rectangle of 1 - weight of the area; what the edge cuts off counts for the image that is there.

    Yun et al. 2019 (arXiv 1905.04899), section 3.1.
    """
    _, height, width, _ = pair.shape
    side = math.sqrt(1 - weight)
    spans = []
    for length in (height, width):
        middle, half = rng.integers(length), side * length / 2
        spans.append(slice(max(0, round(middle - half)), min(length, round(middle + half))))
    box = pair[:, spans[0], spans[1]]
    box[:] = box[::-1].copy()
    return np.float32(1 - box[0, :, :, 0].size / (height * width))
