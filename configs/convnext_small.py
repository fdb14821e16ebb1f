"""ConvNeXt-S: 66,250,417 parameters with the 21,841 classes of ImageNet-22k, 50,223,688 with ImageNet's 1,000.

    python -m jaxpretrain.main --config=configs/convnext_small.py[:1k] --workdir=runs/convnext_small

Hardware: published on V100s, their number not. Source and data: configs/_convnext.py.
"""

from _convnext import recipe


def get_config(arg=""):
    return recipe("small", arg)
