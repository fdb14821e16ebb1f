"""ViT-S/16: 30,074,449 parameters with the 21,841 classes of ImageNet-21k, 22,050,664 with ImageNet's 1,000.

    python -m jaxpretrain.main --config=configs/vit_small.py[:1k] --workdir=runs/vit_small

Hardware: published on a TPU v3 pod. Source and data: configs/_vit.py.
"""

from _vit import recipe


def get_config(arg=""):
    return recipe("small", arg)
