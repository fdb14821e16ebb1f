"""Mamba-1.4b: 1,372,178,432 parameters, 300 billion tokens.

    python -m jaxpretrain.main --config=configs/mamba1p4b.py --workdir=runs/mamba1p4b

Hardware: published on A100s, their number not. Source and data: configs/_mamba.py.
"""

from _mamba import recipe


def get_config():
    return recipe("1.4b")
