"""Pythia-410M: 405,334,016 parameters, 300 billion tokens of the Pile.

    python -m jaxpretrain.main --config=configs/pythia410m.py[:deduped] --workdir=runs/pythia410m

Hardware: published on 32 A100s; weights, gradients and moments take 6.5 GB per device.
Source, data and where the published files and paper disagree: configs/_pythia.py.
"""

from _pythia import recipe


def get_config(arg=""):
    return recipe("410m", arg)
