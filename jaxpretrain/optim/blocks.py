"""Adam-mini's blocks, from what each parameter says it is: the names of its axes and its role, never its path.

The second moment of a parameter is averaged over the dims that `adam_mini_blocks` gives; stacked layers and experts
are parameters of their own, so no block reaches over two of them.
"""

import math
from collections.abc import Iterable

import jax

from jaxpretrain.models.parameter import ROLES, Info, fan_in_dims, own_dims
from jaxpretrain.optim.adam_mini import Blocks, BlockSpec, scale_by_adam_mini

VARIANTS = {
    "v1_1": "a block per head of queries and keys, per output neuron of other matrices, per token, per norm",
    "value_whole": "v1_1 with one block for the values of a layer, which the authors advise below 10-20 thousand steps",
    "v1_0": "the paper's first version: value, attn_out and MLP one block each, embeddings as Adam",
    "fan_out": "v1_1 with a block per input of value, attn_out and MLP (Kalra et al. 2025, arXiv 2503.01843)",
    "slim": "fan_out with a block per output of queries and keys, and norms as Adam: SlimAdam's rule (the same paper)",
    "per_tensor": "one block for every parameter of a layer",
}
_VECTORS = ("bias", "ssm_a_log", "ssm_d", "ssm_dt_bias")  # may have no inputs that are summed over
_MLP = ("mlp_in", "mlp_gate", "mlp_out")


def adam_mini_blocks(infos: dict, variant: str = "v1_1") -> dict:
    """The blocks of `scale_by_adam_mini` for the parameters that `models.parameter.infos` describes.

    v1_1 is version 1.1 of the authors' code (Zhang et al., arXiv 2406.16793) with the shapes it means rather than
    the names it looks for; the others differ as VARIANTS says. A tied embedding has one block per token.

    Raises ValueError for a variant that does not exist, and naming a parameter whose role has no rule or whose axes
    do not say what the rule needs.
    """
    if variant not in VARIANTS:
        raise ValueError(f"no Adam-mini blocks are called {variant!r}: choose one of {', '.join(VARIANTS)}")

    def blocks(path, info: Info) -> BlockSpec:
        try:
            return _blocks(info, variant)
        except ValueError as error:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(f"parameter {name} with axes {info.axes}: {error}") from None

    return jax.tree_util.tree_map_with_path(blocks, infos)


def num_second_moments(infos: dict, blocks: dict) -> int:
    """How many float32 numbers the second moment takes, in place of one for each parameter."""
    params = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), infos)
    nu = jax.eval_shape(scale_by_adam_mini(blocks=blocks).init, params).nu
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nu))


def _blocks(info: Info, variant: str) -> BlockSpec:
    role, axes, whole = info.role, info.axes, own_dims(info.axes)
    if role not in ROLES:
        raise ValueError(f"the role {role!r} has no Adam-mini blocks; the roles are {', '.join(ROLES)}")
    if variant == "per_tensor":
        return whole
    if role == "query_key_value":
        return _fused(info, variant)
    if role in ("query", "key") and variant != "slim":
        return _all_but(axes, _head_dim(axes))
    if role == "norm_scale":
        return () if variant == "slim" else whole
    if variant == "v1_0":
        return () if role in ("embedding", "unembedding", "position_embedding") else whole
    if role == "value" and variant == "value_whole":
        return whole
    fan_in = fan_in_dims(axes, role)
    outputs = [axis for d, axis in enumerate(axes) if d not in fan_in and axis != "layers"]
    if role not in _VECTORS and not (fan_in and outputs):
        raise ValueError(f"a parameter of the role {role!r} needs axes of inputs and of outputs")
    if variant in ("fan_out", "slim") and role in ("value", "attn_out", *_MLP):
        return _all_but(axes, fan_in)
    return fan_in


def _fused(info: Info, variant: str) -> Blocks:
    """Queries, keys and values along the axis `qkv`: the last two indices are a key and a value, the others queries.

    So [D, 3, H, hd], GPT-NeoX's [D, H, 3, hd], and [D, G, R + 2, hd] with R query heads for each of G key heads.
    """
    axes = info.axes
    if "qkv" not in axes:
        raise ValueError("fused queries, keys and values need an axis qkv, as in [embed, qkv, heads, head_dim]")
    qkv = axes.index("qkv")
    num_queries = info.shape[qkv] - 2
    if num_queries < 1:
        raise ValueError(f"the axis qkv has size {info.shape[qkv]}, and needs 3 or more: queries, a key and a value")
    fan_in = fan_in_dims(axes, info.role)
    head = fan_in if variant == "slim" else _all_but(axes, (qkv, *_head_dim(axes)))
    if variant in ("value_whole", "v1_0"):
        value = own_dims(axes)
    elif variant in ("fan_out", "slim"):
        value = _all_but(axes, fan_in)
    else:
        value = fan_in
    common = tuple(d for d in head if d in value)
    further_head, further_value = (tuple(d for d in dims if d not in common) for dims in (head, value))
    segments = ((num_queries, further_head), (1, further_head), (1, further_value))
    return Blocks(reduce=common, axis=qkv, segments=segments)


def _head_dim(axes: tuple[str, ...]) -> tuple[int, ...]:
    heads = tuple(d for d, axis in enumerate(axes) if axis in ("heads", "kv_heads"))
    if not heads:
        raise ValueError("queries and keys need an axis heads or kv_heads, as in [embed, heads, head_dim]")
    return heads


def _all_but(axes: tuple[str, ...], kept: Iterable[int]) -> tuple[int, ...]:
    return tuple(d for d in own_dims(axes) if d not in kept)
