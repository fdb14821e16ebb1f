"""ConvNeXt-L: 229,799,953 parameters with the 21,841 classes of ImageNet-22k, 197,767,336 with ImageNet's 1,000.

    python -m jaxpretrain.main --config=configs/convnext_large.py[:1k] --workdir=runs/convnext_large

Hardware: published on V100s, their number not. Source and data: configs/_convnext.py.
"""

from _convnext import recipe


def get_config(arg=""):
    return recipe("large", arg)
