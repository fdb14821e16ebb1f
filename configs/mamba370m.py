"""Mamba-370m: 371,516,416 parameters, 300 billion tokens.

    python -m jaxpretrain.main --config=configs/mamba370m.py --workdir=runs/mamba370m

Hardware: published on A100s, their number not. Source and data: configs/_mamba.py.
"""

from _mamba import recipe


def get_config():
    return recipe("370m")
