"""Llama 3 8B: 8,030,261,248 parameters, 164 million tokens of C4, as in the Adam-mini study.

    python -m jaxpretrain.main --config=configs/llama3_8b.py[:llama31] --workdir=runs/llama3_8b

Hardware: published on 4 GPUs; weights, gradients and moments take 128 GB over all devices.
Source and data: configs/_llama.py. The flag `llama31` scales the rotary frequencies as Llama 3.1 does, from
8,192 to 131,072 tokens (config.json of meta-llama/Llama-3.1-8B).
"""

from _llama import recipe

from jaxpretrain.config import parse_arg


def get_config(arg=""):
    config = recipe("llama3-8b")
    if parse_arg(arg, llama31=False).llama31:
        config.model.rotary.scaling = "llama3"
        config.model.rotary.factor = 8.0
        config.model.rotary.low_freq_factor = 1.0
        config.model.rotary.high_freq_factor = 4.0
        config.model.rotary.original_max_positions = 8192
    return config
