"""ConvNeXt-T: 44,615,857 parameters with the 21,841 classes of ImageNet-22k, 28,589,128 with ImageNet's 1,000.

    python -m jaxpretrain.main --config=configs/convnext_tiny.py[:1k] --workdir=runs/convnext_tiny

Hardware: published on V100s, their number not. Source and data: configs/_convnext.py.
"""

from _convnext import recipe


def get_config(arg=""):
    return recipe("tiny", arg)
