"""Mamba-130m: 129,135,360 parameters, 300 billion tokens.

    python -m jaxpretrain.main --config=configs/mamba130m.py --workdir=runs/mamba130m

Hardware: published on A100s, their number not. Source and data: configs/_mamba.py.
"""

from _mamba import recipe


def get_config():
    return recipe("130m")
