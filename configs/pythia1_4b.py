"""Pythia-1.4B: 1,414,647,808 parameters, 300 billion tokens of the Pile.

    python -m jaxpretrain.main --config=configs/pythia1_4b.py[:deduped] --workdir=runs/pythia1_4b

Hardware: published on 64 A100s; weights, gradients and moments take 22.6 GB over all devices.
Source, data and where the published files and paper disagree: configs/_pythia.py.
"""

from _pythia import recipe


def get_config(arg=""):
    return recipe("1.4b", arg)
