"""Where the parameters live, where they are gathered and where gradients are reduced, per named strategy.

Inside the step the data axes are manual (`jax.shard_map`), so a strategy is exactly this:

  ddp   everything replicated; one `psum` of the accumulated gradients per optimizer step.
  fsdp  (ZeRO-3) masters, gradients and optimizer state sharded; the copy in compute precision is gathered
        layer by layer, again in the backward, where the gather's transpose reduce-scatters the gradient, in
        compute precision (half the traffic; on CPUs in float32). The embeddings are gathered whole.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpretrain.parallel.mesh import DATA_AXES

# Roles that stay in float32 in the compute copy: tiny, and only ever used in float32.
_FLOAT32_ROLES = ("norm_scale",)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How the parameters of one model are laid out. Trees have the structure of the parameters."""

    mesh: Mesh
    specs: Any  # PartitionSpec of each stored parameter
    dtypes: Any  # dtype of the compute copy
    stacked: Any  # whether the parameter holds all layers, along a leading dim that is scanned

    @property
    def shardings(self) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)

    def unsharded(self, params: Any) -> dict[str, int]:
        """Path -> bytes of the parameters that every device of `fsdp` holds whole as none of their dims divides."""
        if self.mesh.shape["fsdp"] == 1:
            return {}
        leaves = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(self.specs), strict=True)
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): param.size * param.dtype.itemsize
            for (path, param), spec in leaves
            if not any(spec)
        }

    def state_shardings(self, state: Any, params: Any) -> Any:
        """A NamedSharding for each leaf of a state that holds parameters and what optimizers and averages keep of them.

        What is kept of a parameter is what has its path within a tree of the state, so its whole path is the end of the
        leaf's. It is laid out as the parameter is, in dims that have kept their size: Adam-mini's second moment has
        size 1 in dims that it averages over. What has other dims (Adafactor's rows), and all else, is replicated.
        """
        leaves = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(self.specs), strict=True)
        whole = {path: (param.shape, spec) for (path, param), spec in leaves}

        def sharding(path, leaf):
            shape, spec = next((whole[path[i:]] for i in range(len(path)) if path[i:] in whole), ((), ()))
            if len(leaf.shape) != len(shape):
                return NamedSharding(self.mesh, PartitionSpec())
            kept = [size == before for size, before in zip(leaf.shape, shape, strict=True)]
            return NamedSharding(self.mesh, PartitionSpec(*[a if k else None for a, k in zip(spec, kept, strict=True)]))

        return jax.tree_util.tree_map_with_path(sharding, state)

    def compute_copy(self, params: Any) -> Any:
        """The parameters in compute precision, still laid out as stored: what is cast is what is gathered."""
        return jax.tree.map(lambda param, dtype: param.astype(dtype), params, self.dtypes)

    def gather(self, params: Any) -> Any:
        """Inside shard_map: whole parameters, but for the stacked ones, which `gather_layer` brings one at a time."""
        return jax.tree.map(
            lambda param, spec, stacked: param if stacked else self._gather(param, spec),
            params,
            self.specs,
            self.stacked,
        )

    def gather_layer(self, layer: Any, stack: str) -> Any:
        """Inside shard_map: the whole parameters of one layer of `stack`, whose leading dim has been scanned away."""
        return jax.tree.map(lambda param, spec: self._gather(param, spec[1:]), layer, self.specs[stack])

    def _gather(self, param: jax.Array, spec: Sequence[str | None]) -> jax.Array:
        if "fsdp" not in spec:
            return param
        gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", axis=spec.index("fsdp"), tiled=True)
        if self.mesh.devices.flat[0].platform == "cpu" and param.dtype != jnp.float32:
            # XLA for CPUs (0.10.2) crashes on the 16-bit reduce-scatter that is this gather's transpose.
            return gather(param.astype(jnp.float32)).astype(param.dtype)
        return gather(param)

    def reduce(self, gradients: Any) -> Any:
        """Inside shard_map: sums over the data axes that the transposed gathers have not already summed over."""

        def reduce(gradient, spec):
            axes = tuple(axis for axis in DATA_AXES if axis not in spec and self.mesh.shape[axis] > 1)
            return jax.lax.psum(gradient, axes) if axes else gradient

        return jax.tree.map(reduce, gradients, self.specs)


def make_strategy(infos: dict, mesh: Mesh, compute_dtype: jnp.dtype) -> Strategy:
    """The layout, on a mesh from `make_mesh`, of the parameters that `models.parameter.infos` describes."""
    return Strategy(
        mesh=mesh,
        specs=jax.tree.map(lambda info: storage_spec(info.shape, info.axes, mesh.shape["fsdp"]), infos),
        dtypes=jax.tree.map(
            lambda info: jnp.dtype(jnp.float32) if info.role in _FLOAT32_ROLES else jnp.dtype(compute_dtype), infos
        ),
        stacked=jax.tree.map(lambda info: info.axes[0] == "layers", infos),
    )


def storage_spec(shape: tuple[int, ...], axes: tuple[str, ...], num_shards: int) -> PartitionSpec:
    """Shards the largest dim that `num_shards` divides; the `layers` dim is scanned over and stays whole."""
    dims = [d for d in range(len(shape)) if axes[d] != "layers" and shape[d] % num_shards == 0]
    if num_shards == 1 or not dims:
        return PartitionSpec(*[None] * len(shape))
    largest = max(dims, key=lambda d: shape[d])
    return PartitionSpec(*["fsdp" if d == largest else None for d in range(len(shape))])
