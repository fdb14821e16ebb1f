"""A parameter says what it is: the logical names of its axes and its role.

Sharding, weight decay, optimizer blocks and initialisation are derived from these two, never from the
parameter's path.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

# role -> which dims are summed over when the parameter is applied (its fan-in), stacked axes left out.
_FAN_IN_DIMS = {
    "query": (0,),
    "key": (0,),
    "value": (0,),
    "attn_out": (0, 1),
    "mlp_in": (0,),
    "mlp_gate": (0,),
    "mlp_out": (0,),
    "embedding": (1,),
    "unembedding": (1,),
    "position_embedding": (1,),
    "norm_scale": (),
    "bias": (),
}
ROLES = tuple(_FAN_IN_DIMS)


def fan_in(shape: tuple[int, ...], role: str) -> int:
    """Number of inputs that each output of this (unstacked) parameter sums over."""
    return math.prod(shape[dim] for dim in _FAN_IN_DIMS[role])


def parameter(value: jax.Array, axes: tuple[str, ...], role: str) -> nnx.Param:
    assert len(axes) == value.ndim, (axes, value.shape)
    assert role in ROLES, role
    return nnx.Param(value, axes=axes, role=role)


@dataclasses.dataclass(frozen=True)
class Info:
    """What is known of a parameter without its value."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str, ...]
    role: str


def infos(model: nnx.Module) -> dict:
    """The nested dict of a model's parameters, which `nnx.merge` takes back, with an `Info` for each.

    Raises ValueError naming a parameter that says no axes or no role.
    """
    flat = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        metadata = leaf.get_metadata()
        if metadata.get("role") not in ROLES or len(metadata.get("axes", ())) != len(leaf.shape):
            raise ValueError(f"parameter {'.'.join(map(str, path))} has no axes or role: build it with parameter()")
        flat[path] = Info(leaf.shape, jnp.dtype(leaf.dtype), metadata["axes"], metadata["role"])
    return traverse_util.unflatten_dict(flat)
