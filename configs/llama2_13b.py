"""Llama 2 13B: 13,015,864,320 parameters, 164 million tokens of C4, as in the Adam-mini study.

    python -m jaxpretrain.main --config=configs/llama2_13b.py --workdir=runs/llama2_13b

Hardware: published on 4 GPUs; weights, gradients and moments take 208 GB over all devices.
Source and data: configs/_llama.py.
"""

from _llama import recipe


def get_config():
    return recipe("llama2-13b")
