"""GPT-2 XL: 1,557,611,200 parameters, 25 billion tokens of OpenWebText, as in the Adam-mini study.

    python -m jaxpretrain.main --config=configs/gpt2_xl.py[:nobias] --workdir=runs/gpt2_xl

Hardware: weights, gradients and moments take 24.9 GB over all devices.
Source, data and nanoGPT's variant: configs/_gpt2.py.
"""

from _gpt2 import recipe


def get_config(arg=""):
    return recipe("xl", arg)
