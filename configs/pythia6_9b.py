"""Pythia-6.9B: 6,857,302,016 parameters, 300 billion tokens of the Pile.

    python -m jaxpretrain.main --config=configs/pythia6_9b.py[:deduped] --workdir=runs/pythia6_9b

Hardware: published on 128 A100s; weights, gradients and moments take 110 GB over all devices.
Source, data and where the published files and paper disagree: configs/_pythia.py.
"""

from _pythia import recipe


def get_config(arg=""):
    return recipe("6.9b", arg)
