"""ViT-B/16: 102,594,385 parameters with the 21,841 classes of ImageNet-21k, 86,567,656 with ImageNet's 1,000.

    python -m jaxpretrain.main --config=configs/vit_base.py[:1k] --workdir=runs/vit_base

Hardware: published on a TPU v3 pod. Source and data: configs/_vit.py.
"""

from _vit import recipe


def get_config(arg=""):
    return recipe("base", arg)
