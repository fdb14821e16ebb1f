"""Pythia-1B: 1,011,781,632 parameters, 300 billion tokens of the Pile.

    python -m jaxpretrain.main --config=configs/pythia1b.py[:deduped] --workdir=runs/pythia1b

Hardware: published on 64 A100s; weights, gradients and moments take 16.2 GB over all devices.
Source, data and where the published files and paper disagree: configs/_pythia.py.
"""

from _pythia import recipe


def get_config(arg=""):
    return recipe("1b", arg)
