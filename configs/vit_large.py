"""ViT-L/16: 325,688,657 parameters with the 21,841 classes of ImageNet-21k, 304,326,632 with ImageNet's 1,000.

    python -m jaxpretrain.main --config=configs/vit_large.py[:1k] --workdir=runs/vit_large

Hardware: published on a TPU v3 pod. Source and data: configs/_vit.py.
"""

from _vit import recipe


def get_config(arg=""):
    return recipe("large", arg)
