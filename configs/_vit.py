"""ViT as published, on ImageNet-21k, or with the flag `1k` on ImageNet.

Dosovitskiy et al. 2020 (arXiv 2010.11929), table 3: Adam with betas 0.9 and 0.999 in batches of 4,096, clipping at 1,
dropout of 0.1, in float32. ImageNet-21k (14.2 million images, 21,841 classes): 90 epochs at 1e-3, a linear decay,
weight decay 0.03. ImageNet (1.28 million, 1,000 classes): 300 epochs at 3e-3, a cosine, weight decay 0.3. Random crops
and mirroring (Inception's), pixels in [-1, 1].

ImageNet-21k is to be had, after registration, from image-net.org; folders of images, one a class, are read as they
are, other formats: docs/images.md.
"""

from ml_collections import ConfigDict

from jaxpretrain import config as schema

SIZES = {"small": (12, 384, 6), "base": (12, 768, 12), "large": (24, 1024, 16)}  # layers, width, heads


def recipe(size: str, arg: str) -> ConfigDict:
    flags = schema.parse_arg(arg, **{"1k": False})
    imagenet = getattr(flags, "1k")
    config = schema.default()
    config.batch_size = 4096
    config.seq_len = 1

    model = config.model
    model.family = "vit"
    model.num_layers, model.embed_dim, model.num_heads = SIZES[size]
    model.norm_eps = 1e-12  # Hugging Face's; 1e-6 in the authors' code
    model.dropout = 0.1
    model.image.num_classes = 1000 if imagenet else 21_841

    config.data.source = "images"
    config.data.path = "data/imagenet" if imagenet else "data/imagenet21k"
    config.data.images.normalize = "half"

    config.optimizer.learning_rate = 3e-3 if imagenet else 1e-3
    config.optimizer.b1, config.optimizer.b2 = 0.9, 0.999
    config.optimizer.weight_decay = 0.3 if imagenet else 0.03
    config.optimizer.clip = 1.0
    config.schedule.name = "cosine" if imagenet else "linear"
    config.schedule.warmup_steps = 10_000
    config.schedule.final_fraction = 0.0
    config.steps = 93_835 if imagenet else 311_948

    config.precision.compute = "float32"
    return config
