"""The device mesh: axes `replica` and `fsdp` carry the data, `tensor` splits matrices and the sequence."""

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

DATA_AXES = ("replica", "fsdp")
AXES = (*DATA_AXES, "tensor")


def make_mesh(
    strategy: str, devices: Sequence[jax.Device] | None = None, *, tensor: int = 1, replicas: int = 0
) -> Mesh:
    """Devices (all by default) as [replica, fsdp, tensor]; parameters are sharded over the last two.

    Args:
      strategy: `parallel.strategy`. ddp replicates, zero1, zero2 and fsdp shard over all data-parallel devices, hsdp
        over those of one replica.
      tensor: `parallel.tensor`, neighbouring devices that share the matrices of a layer.
      replicas: `parallel.replicas`, of hsdp; 0: one per host, or, on one host, the smallest number that divides the
        devices and leaves several for each. Where none does there is one replica, as in fsdp.

    Raises ValueError for numbers that do not divide the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    num_hosts = len({device.process_index for device in devices})
    shape = mesh_shape(strategy, len(devices), num_hosts=num_hosts, tensor=tensor, replicas=replicas)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def mesh_without_devices(
    strategy: str, num_devices: int, *, num_hosts: int = 1, tensor: int = 1, replicas: int = 0
) -> AbstractMesh:
    """The mesh that `make_mesh` would make of so many devices: enough to lay arrays out, not to compile."""
    shape = mesh_shape(strategy, num_devices, num_hosts=num_hosts, tensor=tensor, replicas=replicas)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * 3)


def mesh_shape(strategy: str, num_devices: int, *, num_hosts: int, tensor: int, replicas: int) -> tuple[int, int, int]:
    """Devices along each of AXES; arguments and errors as in `make_mesh`."""
    _check_divides("parallel.tensor", tensor, num_devices, "devices")
    num_data = num_devices // tensor
    if strategy == "ddp":
        replicas = num_data
    elif strategy != "hsdp":
        replicas = 1
    elif replicas == 0:
        first = num_hosts if num_hosts > 1 else 2
        replicas = next((n for n in range(first, num_data) if num_data % n == 0), 1)
    _check_divides("parallel.replicas", replicas, num_data, "data-parallel devices")
    return replicas, num_data // replicas, tensor


def _check_divides(key: str, value: int, count: int, what: str) -> None:
    if count % value:
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ValueError(f"{key}={value} does not divide {count} {what}; set one of {divisors}")


def num_data_shards(mesh: Mesh) -> int:
    return mesh.shape["replica"] * mesh.shape["fsdp"]


def rows_per_shard(batch_size: int, mesh: Mesh) -> int:
    """Sequences of a global batch on each data shard. Raises ValueError if they do not divide."""
    num_shards = num_data_shards(mesh)
    if batch_size % num_shards:
        num_tensor = mesh.shape["tensor"]
        what = "devices" if num_tensor == 1 else f"groups of {num_tensor} devices"
        raise ValueError(
            f"batch_size={batch_size} does not divide over {num_shards} {what}; "
            f"try {-(-batch_size // num_shards) * num_shards}"
        )
    return batch_size // num_shards


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over all data axes."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXES))
