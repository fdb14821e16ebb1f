"""Llama 2 1B: 1,055,991,808 parameters, 26.21 billion tokens of C4, as in the Adam-mini study.

    python -m jaxpretrain.main --config=configs/llama2_1b.py --workdir=runs/llama2_1b

Hardware: published on 4 A800s; weights, gradients and moments take 16.9 GB over all devices.
Source and data: configs/_llama.py.
"""

from _llama import recipe


def get_config():
    return recipe("llama2-1b")
