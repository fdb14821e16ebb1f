"""Mamba-2.8b: 2,768,345,600 parameters, 300 billion tokens.

    python -m jaxpretrain.main --config=configs/mamba2p8b.py --workdir=runs/mamba2p8b

Hardware: published on A100s, their number not. Source and data: configs/_mamba.py.
"""

from _mamba import recipe


def get_config():
    return recipe("2.8b")
