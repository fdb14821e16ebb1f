"""The device mesh: axes `replica` and `fsdp` carry the data, `tensor` is reserved for splitting matrices."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA_AXES = ("replica", "fsdp")


def make_mesh(strategy: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices along the axis that `parallel.strategy` shards over: `replica` for ddp, `fsdp` for fsdp."""
    devices = jax.devices() if devices is None else list(devices)
    num_fsdp = len(devices) if strategy == "fsdp" else 1
    return jax.make_mesh(
        (len(devices) // num_fsdp, num_fsdp, 1),
        (*DATA_AXES, "tensor"),
        axis_types=(AxisType.Auto,) * 3,
        devices=devices,
    )


def num_data_shards(mesh: Mesh) -> int:
    return mesh.shape["replica"] * mesh.shape["fsdp"]


def rows_per_shard(batch_size: int, mesh: Mesh) -> int:
    """Sequences of a global batch on each data shard. Raises ValueError if they do not divide."""
    num_shards = num_data_shards(mesh)
    if batch_size % num_shards:
        raise ValueError(
            f"batch_size={batch_size} does not divide over {num_shards} devices; "
            f"try {-(-batch_size // num_shards) * num_shards}"
        )
    return batch_size // num_shards


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over all data axes."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXES))
