"""Critical-batch-size model 151M: 150,994,944 parameters in its layers, 254,067,712 with embeddings.

    python -m jaxpretrain.main --config=configs/cbs151m.py[:batch_size=512] --workdir=runs/cbs151m

Hardware: published on 8 GPUs; weights, gradients and moments take 4.1 GB per device.
The study's target, at 3.1 billion tokens of C4 with batch size 256 and averaged weights: a validation
loss of 3.24.
Source and data: configs/_critical_batch_size.py.
"""

from _critical_batch_size import recipe


def get_config(arg=""):
    return recipe("151m", arg)
