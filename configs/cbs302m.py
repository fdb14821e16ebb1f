"""Critical-batch-size model 302M: 301,989,888 parameters in its layers, 405,111,808 with embeddings.

    python -m jaxpretrain.main --config=configs/cbs302m.py[:batch_size=512] --workdir=runs/cbs302m

Hardware: published on 8 GPUs; weights, gradients and moments take 6.5 GB per device.
The study's target, at 6.1 billion tokens of C4 with batch size 256 and averaged weights: a validation
loss of 3.07.
Source and data: configs/_critical_batch_size.py.
"""

from _critical_batch_size import recipe


def get_config(arg=""):
    return recipe("302m", arg)
