"""Llama 2 7B: 6,738,415,616 parameters, 164 million tokens of C4, in the manner of the Adam-mini study.

    python -m jaxpretrain.main --config=configs/llama2_7b.py --workdir=runs/llama2_7b

Hardware: the study's throughput table is from 2 A800-80GB; weights, gradients and moments take 108 GB over all devices.
Source (the study published no file for this size) and data: configs/_llama.py.
"""

from _llama import recipe


def get_config():
    return recipe("llama2-7b")
