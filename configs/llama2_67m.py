"""Llama 2 67M: 66,857,472 parameters, 1.76 billion tokens of C4, as in the Adam-mini study.

    python -m jaxpretrain.main --config=configs/llama2_67m.py --workdir=runs/llama2_67m

Hardware: published on 4 A800s; weights, gradients and moments take 1.1 GB per device.
Source and data: configs/_llama.py.
"""

from _llama import recipe


def get_config():
    return recipe("llama2-67m")
