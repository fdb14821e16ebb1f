"""GPT-2 medium: 354,823,168 parameters, 25 billion tokens of OpenWebText, as in the Adam-mini study.

    python -m jaxpretrain.main --config=configs/gpt2_medium.py[:nobias] --workdir=runs/gpt2_medium

Hardware: weights, gradients and moments take 5.7 GB per device.
Source, data and nanoGPT's variant: configs/_gpt2.py.
"""

from _gpt2 import recipe


def get_config(arg=""):
    return recipe("medium", arg)
