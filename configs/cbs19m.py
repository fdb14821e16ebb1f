"""Critical-batch-size proxy 19M: 18,874,368 parameters in its layers, 51,786,240 with embeddings.

    python -m jaxpretrain.main --config=configs/cbs19m.py --workdir=runs/cbs19m

Hardware: one GPU; weights, gradients and moments take 0.8 GB.
Source and data: configs/_critical_batch_size.py.
"""

from _critical_batch_size import proxy


def get_config():
    return proxy("19m")
