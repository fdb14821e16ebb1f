"""Llama 2 162M: 162,423,552 parameters, 4.25 billion tokens of C4, as in the Adam-mini study.

    python -m jaxpretrain.main --config=configs/llama2_162m.py --workdir=runs/llama2_162m

Hardware: published on 4 A800s; weights, gradients and moments take 2.6 GB per device.
Source and data: configs/_llama.py.
"""

from _llama import recipe


def get_config():
    return recipe("llama2-162m")
