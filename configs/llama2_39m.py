"""Llama 2 39M: 38,738,304 parameters, 1.02 billion tokens of C4, as in the Adam-mini study.

    python -m jaxpretrain.main --config=configs/llama2_39m.py --workdir=runs/llama2_39m

Hardware: published on 4 A800s; weights, gradients and moments take 0.6 GB per device.
Source and data: configs/_llama.py.
"""

from _llama import recipe


def get_config():
    return recipe("llama2-39m")
