"""Bytes that a training step holds on each device, by arithmetic: nothing is allocated or compiled."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxpretrain.models import registry
from jaxpretrain.models.parameter import Info, infos
from jaxpretrain.parallel.offload import on_host
from jaxpretrain.parallel.strategies import make_strategy
from jaxpretrain.step import abstract_state


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes per device, wherever they are kept, of all that is as large as the parameters."""

    params: int  # the float32 masters
    optimizer: int
    averages: int
    gradients: int  # float32, accumulated over micro-batches
    micro_batch_gradients: int  # of one of them, in compute precision, before they are accumulated
    compute_copy: int  # the parameters in compute precision, as they stay during a step
    undonated: int  # the first three again, where `parallel.donate` is False
    host: int  # of the first three, in the host's memory

    @property
    def device(self) -> int:
        return sum(dataclasses.astuple(self)) - 2 * self.host


def state_bytes(config: ConfigDict, mesh: Mesh) -> StateBytes:
    """Of a checked config on a mesh from `make_mesh`."""
    model_infos = infos(registry.build(config))
    strategy = make_strategy(config.parallel.strategy, model_infos, mesh, jnp.dtype(config.precision.compute))
    state = abstract_state(config, mesh)

    def during_step(specs: Any, dtypes: Any) -> int:
        def leaf(info: Info, spec: PartitionSpec, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(info.shape, dtype, sharding=NamedSharding(mesh, spec))

        return _total(jax.tree.map(leaf, model_infos, specs, dtypes))

    parts = {"params": state.params, "optimizer": state.opt_state, "averages": state.averages}
    sizes = {name: _total(part) for name, part in parts.items()}
    host = _total([leaf for leaf in jax.tree.leaves(state) if on_host(leaf.sharding)])
    # What a copy is gathered as, its gradient comes as: whole, or sharded where layers are gathered one by one.
    compute_copy = during_step(strategy.copy_specs, strategy.dtypes)
    return StateBytes(
        **sizes,
        gradients=during_step(strategy.gradient_specs, jax.tree.map(lambda _: jnp.dtype(jnp.float32), model_infos)),
        micro_batch_gradients=compute_copy,
        compute_copy=compute_copy,
        undonated=0 if config.parallel.donate else sum(sizes.values()) - host,
        host=host,
    )


def bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Of an array with a sharding."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _total(tree: Any) -> int:
    return sum(map(bytes_per_device, jax.tree.leaves(tree)))
