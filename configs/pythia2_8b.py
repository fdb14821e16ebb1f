"""Pythia-2.8B: 2,775,208,960 parameters, 300 billion tokens of the Pile.

    python -m jaxpretrain.main --config=configs/pythia2_8b.py[:deduped] --workdir=runs/pythia2_8b

Hardware: published on 64 A100s; weights, gradients and moments take 44.4 GB over all devices.
Source, data and where the published files and paper disagree: configs/_pythia.py.
"""

from _pythia import recipe


def get_config(arg=""):
    return recipe("2.8b", arg)
