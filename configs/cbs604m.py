"""Critical-batch-size model 604M: 603,979,776 parameters in its layers, 810,125,312 with embeddings.

    python -m jaxpretrain.main --config=configs/cbs604m.py[:batch_size=512] --workdir=runs/cbs604m

Hardware: published on 8 GPUs; weights, gradients and moments take 13.0 GB per device.
The study's target, at 12.3 billion tokens of C4 with batch size 256 and averaged weights: a validation
loss of 2.92.
Source and data: configs/_critical_batch_size.py.
"""

from _critical_batch_size import recipe


def get_config(arg=""):
    return recipe("604m", arg)
