"""GPT-2 small: 124,439,808 parameters, 49 billion tokens of OpenWebText, as in the Adam-mini study.

    python -m jaxpretrain.main --config=configs/gpt2_small.py[:nobias] --workdir=runs/gpt2_small

Hardware: weights, gradients and moments take 2.0 GB per device.
Source, data and nanoGPT's variant: configs/_gpt2.py.
"""

from _gpt2 import recipe


def get_config(arg=""):
    return recipe("small", arg)
