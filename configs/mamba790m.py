"""Mamba-790m: 793,204,224 parameters, 300 billion tokens.

    python -m jaxpretrain.main --config=configs/mamba790m.py --workdir=runs/mamba790m

Hardware: published on A100s, their number not. Source and data: configs/_mamba.py.
"""

from _mamba import recipe


def get_config():
    return recipe("790m")
