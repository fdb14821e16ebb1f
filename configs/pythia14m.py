"""Pythia-14M: 14,067,712 parameters, 300 billion tokens of the Pile.

    python -m jaxpretrain.main --config=configs/pythia14m.py[:deduped] --workdir=runs/pythia14m

Hardware: published on 32 A100s; weights, gradients and moments take 0.2 GB per device.
Source, data and where the published files and paper disagree: configs/_pythia.py.
"""

from _pythia import recipe


def get_config(arg=""):
    return recipe("14m", arg)
