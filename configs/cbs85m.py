"""Critical-batch-size model 85M: 84,934,656 parameters in its layers, 162,239,232 with embeddings.

    python -m jaxpretrain.main --config=configs/cbs85m.py[:batch_size=512] --workdir=runs/cbs85m

Hardware: published on 8 GPUs; weights, gradients and moments take 2.6 GB per device.
The study's target, at 1.7 billion tokens of C4 with batch size 256 and averaged weights: a validation
loss of 3.42.
Source and data: configs/_critical_batch_size.py.
"""

from _critical_batch_size import recipe


def get_config(arg=""):
    return recipe("85m", arg)
