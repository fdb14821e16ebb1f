"""How a model runs a stack of layers: parameters stacked along a leading `layers` axis, one block for all."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

Block = Callable[[dict, jax.Array, jax.Array], jax.Array]  # (one layer's parameters, x, its index in the stack) -> x
RunLayers = Callable[[Block, dict, jax.Array, str], jax.Array]  # (block, stacked parameters, x, their name) -> x


def scan_layers(block: Block, layers: dict, x: jax.Array, stack: str = "") -> jax.Array:
    """One block after the other; `parallel/remat.py` has one that also gathers and recomputes."""
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    return jax.lax.scan(lambda x, layer: (block(layer[0], x, layer[1]), None), x, (layers, jnp.arange(num_layers)))[0]


def stack_layers(make: Callable[[jax.Array, jax.Array], nnx.Module], key: jax.Array, num_layers: int) -> nnx.Module:
    """`make(key, index)` for each layer, as one module whose parameters have a leading `layers` axis."""
    layers = nnx.vmap(make)(jax.random.split(key, num_layers), jnp.arange(num_layers))
    for _, leaf in nnx.to_flat_state(nnx.state(layers, nnx.Param)):
        leaf.set_metadata("axes", ("layers", *leaf.axes))
    return layers
