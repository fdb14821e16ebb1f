"""What a plan may choose of a run, and on how many devices: hyper-parameters are none of it."""

import dataclasses
import functools

from jax.sharding import AbstractMesh

from jaxpretrain.parallel.mesh import mesh_without_devices


@dataclasses.dataclass(frozen=True)
class Layout:
    """Fields are the keys of `parallel` with these names, and `micro_batch_size`."""

    num_devices: int
    num_nodes: int = 1
    strategy: str = "ddp"
    tensor: int = 1
    remat: str = "none"
    offload: str = "none"
    micro_batch_size: int = 1

    @property
    def mesh(self) -> AbstractMesh:
        """Raises ValueError for numbers that do not divide the devices."""
        return _mesh(self.strategy, self.num_devices, self.num_nodes, self.tensor)

    @property
    def num_data_shards(self) -> int:
        return self.num_devices // self.tensor

    @property
    def overrides(self) -> dict[str, str]:
        """What a command line sets to train so."""
        keys = ("strategy", "tensor", "remat", "offload")
        return {f"parallel.{key}": str(getattr(self, key)) for key in keys} | {
            "micro_batch_size": str(self.micro_batch_size)
        }


@functools.cache
def _mesh(strategy: str, num_devices: int, num_nodes: int, tensor: int) -> AbstractMesh:
    return mesh_without_devices(strategy, num_devices, num_hosts=num_nodes, tensor=tensor)
