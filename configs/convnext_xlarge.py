"""ConvNeXt-XL: 392,900,177 parameters with the 21,841 classes of ImageNet-22k, 350,196,968 with ImageNet's 1,000.

    python -m jaxpretrain.main --config=configs/convnext_xlarge.py[:1k] --workdir=runs/convnext_xlarge

Hardware: published on V100s, their number not. Source and data: configs/_convnext.py.
"""

from _convnext import recipe


def get_config(arg=""):
    return recipe("xlarge", arg)
