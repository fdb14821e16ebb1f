"""Pythia-70M: 70,426,624 parameters, 300 billion tokens of the Pile.

    python -m jaxpretrain.main --config=configs/pythia70m.py[:deduped] --workdir=runs/pythia70m

Hardware: published on 32 A100s; weights, gradients and moments take 1.1 GB per device.
Source, data and where the published files and paper disagree: configs/_pythia.py.
"""

from _pythia import recipe


def get_config(arg=""):
    return recipe("70m", arg)
