"""Where the parameters live, where they are gathered and where gradients are reduced, per named strategy.

Inside the step the data axes are manual (`jax.shard_map`), so a strategy is exactly this:

  ddp    everything replicated; one `psum` of the accumulated gradients per optimizer step.
  zero1  masters and optimizer state sharded; one copy of the parameters in compute precision gathered per optimizer
         step; gradients accumulated whole, and reduce-scattered once per optimizer step, in float32.
  zero2  as zero1, but the accumulated gradients are sharded too: a reduce-scatter per micro-batch.
  fsdp   (ZeRO-3) as zero2, but the copy in compute precision is sharded too, and gathered layer by layer, again in
         the backward, where the gather's transpose is the reduce-scatter. The embeddings are gathered whole.
  hsdp   fsdp within each replica, and one `psum` over the replicas per optimizer step.

A reduce-scatter per micro-batch is in compute precision (half the traffic; on CPUs in float32). Beside all of them the
axis `tensor`, which stays automatic, may split heads, MLP and vocabulary, and between blocks the sequence (Megatron,
arXiv 1909.08053 and 2205.05198).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpretrain.models.parameter import owner
from jaxpretrain.parallel.mesh import DATA_AXES

NAMES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
# Roles that stay in float32 in the compute copy: tiny, and only ever used in float32.
_FLOAT32_ROLES = ("norm_scale", "ssm_a_log", "ssm_d", "ssm_dt_bias")
# Axes that `tensor` splits, as every output of them needs all of the other axes only.
_TENSOR_AXES = ("heads", "kv_heads", "mlp", "ssm_channels", "vocab")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How the parameters of one model are laid out. Trees have the structure of the parameters."""

    name: str
    mesh: Mesh
    specs: Any  # PartitionSpec of each stored parameter
    dtypes: Any  # dtype of the compute copy
    stacked: Any  # whether the parameter holds all layers, along a leading dim that is scanned

    @property
    def shardings(self) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)

    @property
    def manual_axes(self) -> frozenset[str]:
        """Axes that are manual in the step: `tensor` too while it has size 1.

        Beside an automatic axis cuDNN's attention does not compile.
        """
        return frozenset(DATA_AXES if self.mesh.shape["tensor"] > 1 else self.mesh.axis_names)

    @property
    def manual_specs(self) -> Any:
        """The specs as `jax.shard_map` wants them, without the axis that is not manual."""
        return jax.tree.map(lambda spec: _only(spec, DATA_AXES), self.specs)

    @property
    def copy_specs(self) -> Any:
        """PartitionSpecs of the compute copy as it stays during the step: see `gather_for_step`."""
        return self._without_fsdp(self.name in ("zero1", "zero2"))

    @property
    def gradient_specs(self) -> Any:
        """PartitionSpecs of the accumulated gradients."""
        return self._without_fsdp(self.name == "zero1")

    def _without_fsdp(self, gathered: bool) -> Any:
        return jax.tree.map(lambda spec: _only(spec, ("tensor",)) if gathered else spec, self.specs)

    def unsharded(self, infos: Any, params: Any) -> dict[str, int]:
        """Path -> bytes on each device of the parameters that `fsdp`, or `tensor`, would split if a dim divided.

        Args:
          infos, params: of the model; the second of arrays or jax.ShapeDtypeStruct with shardings.
        """
        num_shards, num_tensor = self.mesh.shape["fsdp"], self.mesh.shape["tensor"]
        found = {}
        leaves = zip(
            jax.tree_util.tree_leaves_with_path(params), *map(jax.tree.leaves, (infos, self.specs)), strict=True
        )
        for (path, param), info, spec in leaves:
            should_split = num_tensor > 1 and any(axis in _TENSOR_AXES for axis in info.axes)
            if (num_shards > 1 and "fsdp" not in spec) or (should_split and "tensor" not in spec):
                shard = param.sharding.shard_shape(param.shape)
                found[jax.tree_util.keystr(path, simple=True, separator=".")] = math.prod(shard) * param.dtype.itemsize
        return found

    def state_shardings(self, state: Any, params: Any) -> Any:
        """A NamedSharding for each leaf of a state that holds parameters and what optimizers and averages keep of them.

        What is kept of a parameter is laid out as the parameter is, in dims that have kept their size: Adam-mini's
        second moment has size 1 in dims that it averages over. What has other dims (Adafactor's rows), and what is of
        no parameter, is replicated.
        """
        leaves = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(self.specs), strict=True)
        whole = {path: (param.shape, spec) for (path, param), spec in leaves}

        def sharding(path, leaf):
            shape, spec = whole.get(owner(path, whole), ((), ()))
            if len(leaf.shape) != len(shape):
                return NamedSharding(self.mesh, PartitionSpec())
            kept = [size == before for size, before in zip(leaf.shape, shape, strict=True)]
            return NamedSharding(self.mesh, PartitionSpec(*[a if k else None for a, k in zip(spec, kept, strict=True)]))

        return jax.tree_util.tree_map_with_path(sharding, state)

    def compute_copy(self, params: dict) -> dict:
        """The parameters in compute precision, still laid out as stored: what is cast is what is gathered."""
        return {name: self.cast(name, subtree) for name, subtree in params.items()}

    def cast(self, name: str, subtree: Any) -> Any:
        """What `params[name]` is in compute precision, or one layer of it."""
        return jax.tree.map(lambda param, dtype: param.astype(dtype), subtree, self.dtypes[name])

    # --- Inside shard_map

    def gather_for_step(self, params: Any) -> Any:
        """The compute copy as it stays during the step: whole in zero1 and zero2, else as stored."""
        if self.name not in ("zero1", "zero2"):
            return params
        return jax.tree.map(self._gather, params, self.specs)

    def gather(self, params: Any) -> Any:
        """Whole parameters, but for the stacked ones, which `gather_layer` brings one at a time."""
        return jax.tree.map(
            lambda param, spec, stacked: param if stacked else self._gather_within_step(param, spec),
            params,
            self.specs,
            self.stacked,
        )

    def gather_layer(self, layer: Any, stack: str) -> Any:
        """The whole parameters of one layer of `stack`, whose leading dim has been scanned away."""
        return jax.tree.map(lambda param, spec: self._gather_within_step(param, spec[1:]), layer, self.specs[stack])

    def reduce_micro_batch(self, gradients: Any) -> Any:
        """Gradients of a micro-batch as they are accumulated: zero2's are summed, and what is stored here is kept."""
        return jax.tree.map(self._reduce_scatter, gradients, self.specs) if self.name == "zero2" else gradients

    def reduce(self, gradients: Any) -> Any:
        """Sums accumulated gradients over the data axes that they have not been summed over."""
        if self.name == "zero1":
            gradients = jax.tree.map(self._reduce_scatter, gradients, self.specs)

        def reduce(gradient, spec):
            axes = tuple(axis for axis in DATA_AXES if axis not in spec and self.mesh.shape[axis] > 1)
            return jax.lax.psum(gradient, axes) if axes else gradient

        return jax.tree.map(reduce, gradients, self.specs)

    def split_heads(self, attend: Callable) -> Callable:
        """`attend(q, k, v, segment_ids)` with the heads of q, k, v [B, T, heads, K] split over `tensor`."""
        num_shards = self.mesh.shape["tensor"]
        if num_shards == 1:
            return attend

        def split(q, k, v, segment_ids):
            num_heads, num_kv_heads = q.shape[2], k.shape[2]
            divides = num_heads % num_shards == 0
            if divides and num_kv_heads % num_shards:
                k, v = (jnp.repeat(x, num_heads // num_kv_heads, axis=2) for x in (k, v))
            heads = PartitionSpec(None, None, "tensor" if divides else None, None)
            # Kernels are no operations that XLA could split: in here, `tensor` is manual as well.
            return jax.shard_map(
                attend,
                in_specs=(heads, heads, heads, PartitionSpec()),
                out_specs=heads,
                axis_names={"tensor"},
                check_vma=False,
            )(q, k, v, segment_ids)

        return split

    def split_sequence(self, x_BxTxD: jax.Array) -> jax.Array:
        """Between blocks each device of `tensor` holds a part of the sequence: norms are not computed twice."""
        num_shards = self.mesh.shape["tensor"]
        if num_shards == 1 or x_BxTxD.shape[1] % num_shards:
            return x_BxTxD
        return jax.lax.with_sharding_constraint(x_BxTxD, PartitionSpec(None, "tensor", None))

    def _gather_within_step(self, param: jax.Array, spec: Sequence[str | None]) -> jax.Array:
        """What `gather_for_step` has left to gather."""
        return param if self.name in ("zero1", "zero2") else self._gather(param, spec)

    def _gather(self, param: jax.Array, spec: Sequence[str | None]) -> jax.Array:
        if "fsdp" not in spec:
            return param
        gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", axis=spec.index("fsdp"), tiled=True)
        if self._is_unsupported(param.dtype):
            whole = gather(param.astype(jnp.float32)).astype(param.dtype)
        else:
            whole = gather(param)
        if "tensor" in spec:  # else XLA may choose to gather over this axis, too
            whole = jax.lax.with_sharding_constraint(whole, _only(spec, ("tensor",)))
        return whole

    def _reduce_scatter(self, gradient: jax.Array, spec: Sequence[str | None]) -> jax.Array:
        if "fsdp" not in spec:
            return gradient
        if self._is_unsupported(gradient.dtype):
            gradient = gradient.astype(jnp.float32)
        return jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=spec.index("fsdp"), tiled=True)

    def _is_unsupported(self, dtype: jnp.dtype) -> bool:
        """XLA for CPUs (0.10.2) crashes on 16-bit reduce-scatters, which are also the transposes of gathers."""
        return self.mesh.devices.flat[0].platform == "cpu" and dtype.itemsize == 2


def make_strategy(name: str, infos: dict, mesh: Mesh, compute_dtype: jnp.dtype) -> Strategy:
    """The layout, on a mesh from `make_mesh`, of the parameters that `models.parameter.infos` describes."""
    num_shards, num_tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    return Strategy(
        name=name,
        mesh=mesh,
        specs=jax.tree.map(lambda info: storage_spec(info.shape, info.axes, num_shards, num_tensor), infos),
        dtypes=compute_dtypes(infos, compute_dtype),
        stacked=jax.tree.map(lambda info: info.axes[0] == "layers", infos),
    )


def compute_dtypes(infos: dict, compute_dtype: jnp.dtype) -> dict:
    """The dtype that each parameter has in the compute copy."""
    return jax.tree.map(
        lambda info: jnp.dtype(jnp.float32) if info.role in _FLOAT32_ROLES else jnp.dtype(compute_dtype), infos
    )


def storage_spec(shape: tuple[int, ...], axes: tuple[str, ...], num_shards: int, num_tensor: int = 1) -> PartitionSpec:
    """`tensor` splits heads, MLP or vocabulary if it divides them, `fsdp` the largest dim that it divides.

    Not the same dim, and the `layers` dim, which is scanned over, stays whole.
    """
    spec = [None] * len(shape)
    for d, axis in enumerate(axes):
        if num_tensor > 1 and axis in _TENSOR_AXES and shape[d] % num_tensor == 0:
            spec[d] = "tensor"
            break
    dims = [d for d in range(len(shape)) if axes[d] != "layers" and not spec[d] and shape[d] % num_shards == 0]
    if num_shards > 1 and dims:
        spec[max(dims, key=lambda d: shape[d])] = "fsdp"
    return PartitionSpec(*spec)


def _only(spec: Sequence[str | None], axes: Sequence[str]) -> PartitionSpec:
    return PartitionSpec(*[axis if axis in axes else None for axis in spec])
