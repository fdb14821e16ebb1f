"""A parameter says what it is: the logical names of its axes and its role.

Sharding, weight decay, optimizer blocks and initialisation are derived from these two, never from the
parameter's path.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

# Axes that stack parameters which are applied one at a time: nothing is ever summed or averaged over them.
STACKED_AXES = ("layers", "experts")

_NONE, _FIRST, _LAST, _ALL_BUT_LAST = slice(0, 0), slice(0, 1), slice(-1, None), slice(0, -1)
# role -> which dims are summed over when the parameter is applied (its fan-in), stacked axes left out.
_FAN_IN_DIMS = {
    "query": _FIRST,
    "key": _FIRST,
    "value": _FIRST,
    "query_key_value": _FIRST,  # fused, one after the other along an axis `qkv`
    "attn_out": _ALL_BUT_LAST,
    "mlp_in": _ALL_BUT_LAST,
    "mlp_gate": _ALL_BUT_LAST,
    "mlp_out": _ALL_BUT_LAST,
    "router": _FIRST,
    "embedding": _LAST,
    "unembedding": _LAST,
    "position_embedding": _LAST,
    "patch_embedding": _ALL_BUT_LAST,
    "conv": _ALL_BUT_LAST,  # window and input channels of a group
    "lora_a": _ALL_BUT_LAST,
    "lora_b": _FIRST,
    # Mamba (Gu & Dao 2023), by the names of its own code.
    "ssm_in_proj": _ALL_BUT_LAST,
    "ssm_x_proj": _ALL_BUT_LAST,
    "ssm_dt_proj": _ALL_BUT_LAST,
    "ssm_out_proj": _ALL_BUT_LAST,
    "ssm_a_log": slice(1, None),  # [channels, state]; Mamba-2 has [heads]
    "ssm_d": _NONE,
    "ssm_dt_bias": _NONE,
    "norm_scale": _NONE,
    "bias": _NONE,
}
ROLES = tuple(_FAN_IN_DIMS)


def fan_in(shape: tuple[int, ...], role: str) -> int:
    """Number of inputs that each output of this (unstacked) parameter sums over."""
    return math.prod(shape[_FAN_IN_DIMS[role]])


def own_dims(axes: tuple[str, ...]) -> tuple[int, ...]:
    """The dims of a parameter that stack nothing."""
    return tuple(d for d, axis in enumerate(axes) if axis not in STACKED_AXES)


def fan_in_dims(axes: tuple[str, ...], role: str) -> tuple[int, ...]:
    """The dims, of a parameter that may be stacked, over which each of its outputs sums."""
    return own_dims(axes)[_FAN_IN_DIMS[role]]


def owner(path: tuple, parameters: Mapping[tuple, Any]) -> tuple | None:
    """The path in `parameters` of the parameter that a leaf of a training state belongs to, None if to none.

    What optimizers and averages keep of a parameter has its path within a tree of the state: the end of the leaf's.
    """
    return next((path[i:] for i in range(len(path)) if path[i:] in parameters), None)


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
