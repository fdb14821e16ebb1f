"""Critical-batch-size model 1.2B: 1,207,959,552 parameters in its layers, 1,414,203,392 with embeddings.

    python -m jaxpretrain.main --config=configs/cbs1_2b.py[:batch_size=512] --workdir=runs/cbs1_2b

Hardware: published on 8 GPUs; weights, gradients and moments take 22.6 GB over all devices.
The study's target, at 24.6 billion tokens of C4 with batch size 256 and averaged weights: a validation
loss of 2.736.
Source and data: configs/_critical_batch_size.py.
"""

from _critical_batch_size import recipe


def get_config(arg=""):
    return recipe("1.2b", arg)
