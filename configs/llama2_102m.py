"""Llama 2 102M: 101,924,480 parameters, 2.67 billion tokens of C4, as in the Adam-mini study.

    python -m jaxpretrain.main --config=configs/llama2_102m.py --workdir=runs/llama2_102m

Hardware: published on 4 A800s; weights, gradients and moments take 1.6 GB per device.
Source and data: configs/_llama.py.
"""

from _llama import recipe


def get_config():
    return recipe("llama2-102m")
