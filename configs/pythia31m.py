"""Pythia-31M: 30,494,720 parameters, 300 billion tokens of the Pile.

    python -m jaxpretrain.main --config=configs/pythia31m.py[:deduped] --workdir=runs/pythia31m

Hardware: published on 32 A100s; weights, gradients and moments take 0.5 GB per device.
Source, data and where the published files and paper disagree: configs/_pythia.py.
"""

from _pythia import recipe


def get_config(arg=""):
    return recipe("31m", arg)
