"""Critical-batch-size proxy 42M: 42,467,328 parameters in its layers, 91,835,136 with embeddings.

    python -m jaxpretrain.main --config=configs/cbs42m.py --workdir=runs/cbs42m

Hardware: one GPU; weights, gradients and moments take 1.5 GB.
Source and data: configs/_critical_batch_size.py.
"""

from _critical_batch_size import proxy


def get_config():
    return proxy("42m")
