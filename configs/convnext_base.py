"""ConvNeXt-B: 109,953,489 parameters with the 21,841 classes of ImageNet-22k, 88,591,464 with ImageNet's 1,000.

    python -m jaxpretrain.main --config=configs/convnext_base.py[:1k] --workdir=runs/convnext_base

Hardware: published on V100s, their number not. Source and data: configs/_convnext.py.
"""

from _convnext import recipe


def get_config(arg=""):
    return recipe("base", arg)
