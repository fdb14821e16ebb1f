"""Llama 2 271M: 271,090,688 parameters, 7.10 billion tokens of C4, as in the Adam-mini study.

    python -m jaxpretrain.main --config=configs/llama2_271m.py --workdir=runs/llama2_271m

Hardware: published on 4 A800s; weights, gradients and moments take 4.3 GB per device.
Source and data: configs/_llama.py.
"""

from _llama import recipe


def get_config():
    return recipe("llama2-271m")
