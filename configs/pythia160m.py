"""Pythia-160M: 162,322,944 parameters, 300 billion tokens of the Pile.

    python -m jaxpretrain.main --config=configs/pythia160m.py[:deduped] --workdir=runs/pythia160m

Hardware: published on 32 A100s; weights, gradients and moments take 2.6 GB per device.
Source, data and where the published files and paper disagree: configs/_pythia.py.
"""

from _pythia import recipe


def get_config(arg=""):
    return recipe("160m", arg)
