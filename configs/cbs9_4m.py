"""Critical-batch-size proxy 9.4M: 9,437,184 parameters in its layers, 42,342,912 with embeddings.

    python -m jaxpretrain.main --config=configs/cbs9_4m.py --workdir=runs/cbs9_4m

Hardware: one GPU; weights, gradients and moments take 0.7 GB.
Source and data: configs/_critical_batch_size.py.
"""

from _critical_batch_size import proxy


def get_config():
    return proxy("9.4m")
