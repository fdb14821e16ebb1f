"""Critical-batch-size proxy 2.4M: 2,359,296 parameters in its layers, 18,812,160 with embeddings.

    python -m jaxpretrain.main --config=configs/cbs2_4m.py --workdir=runs/cbs2_4m

Hardware: one GPU; weights, gradients and moments take 0.3 GB.
Source and data: configs/_critical_batch_size.py.
"""

from _critical_batch_size import proxy


def get_config():
    return proxy("2.4m")
