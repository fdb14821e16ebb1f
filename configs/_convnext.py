"""ConvNeXt as published, on ImageNet-22k, or with the flag `1k` on ImageNet.

Liu et al. 2022 (arXiv 2201.03545), table 5: AdamW with betas 0.9 and 0.999 in batches of 4,096 at 4e-3, weight decay
0.05, a cosine to 1e-6, no clipping; RandAugment (2 operations of strength 9), mixup 0.8, CutMix 1.0, random erasing
0.25, label smoothing 0.1, layer scale 1e-6, in float32. ImageNet-22k: 90 epochs, 5 of them warm-up; ImageNet: 300, 20
of them warm-up, more of the blocks dropped, and an average of the weights that decays by 0.9999 a step.

The data: configs/_vit.py and docs/images.md. The head of ImageNet-22k has 21,841 classes.
"""

import math

from ml_collections import ConfigDict

from jaxpretrain import config as schema

# depths, width of the first stage, drop path on ImageNet-22k and on ImageNet
SIZES = {
    "tiny": ((3, 3, 9, 3), 96, 0.0, 0.1),
    "small": ((3, 3, 27, 3), 96, 0.0, 0.4),
    "base": ((3, 3, 27, 3), 128, 0.1, 0.5),
    "large": ((3, 3, 27, 3), 192, 0.1, 0.5),
    "xlarge": ((3, 3, 27, 3), 256, 0.2, 0.5),
}


def recipe(size: str, arg: str) -> ConfigDict:
    flags = schema.parse_arg(arg, **{"1k": False})
    imagenet = getattr(flags, "1k")
    depths, width, *drop_path = SIZES[size]
    config = schema.default()
    config.steps, config.schedule.warmup_steps = (93_600, 6_240) if imagenet else (311_940, 17_330)
    config.batch_size = 4096
    config.seq_len = 1

    model = config.model
    model.family = "convnext"
    model.convnext.depths = depths
    model.convnext.widths = (width, 2 * width, 4 * width, 8 * width)
    model.norm_eps = 1e-6
    model.drop_path = drop_path[imagenet]
    model.image.num_classes = 1000 if imagenet else 21_841

    config.data.source = "images"
    config.data.path = "data/imagenet" if imagenet else "data/imagenet21k"
    images = config.data.images
    images.randaugment_ops, images.randaugment_magnitude = 2, 9.0
    images.mixup, images.cutmix, images.erase = 0.8, 1.0, 0.25
    config.objective.label_smoothing = 0.1

    config.optimizer.learning_rate = 4e-3
    config.optimizer.b1, config.optimizer.b2 = 0.9, 0.999
    config.optimizer.weight_decay = 0.05
    config.optimizer.clip = 0.0
    config.schedule.name = "cosine"
    config.schedule.final_fraction = 1e-6 / 4e-3
    if imagenet:
        config.average.horizons = (round(-config.batch_size / math.log(0.9999)),)  # in images

    config.precision.compute = "float32"
    return config
