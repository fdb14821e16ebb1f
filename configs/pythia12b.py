"""Pythia-12B: 11,846,072,320 parameters, 300 billion tokens of the Pile.

    python -m jaxpretrain.main --config=configs/pythia12b.py[:deduped] --workdir=runs/pythia12b

Hardware: published on 256 A100s; weights, gradients and moments take 190 GB over all devices.
Source, data and where the published files and paper disagree: configs/_pythia.py.
"""

from _pythia import recipe


def get_config(arg=""):
    return recipe("12b", arg)
