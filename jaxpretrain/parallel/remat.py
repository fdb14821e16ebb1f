"""What of a layer is kept for the backward, what is recomputed, and what waits in the host's memory.

`parallel.remat` is one of

  none         the results of matrix multiplications, attention and sums are kept, so none is computed twice;
               elementwise work is, and sharded parameters are gathered again
  full         only the input of each layer is kept
  full:K       full for the first K layers of a stack, none for the others
  dots         the results of products with parameters are kept; those of attention are computed again
  names:a+b    what the model marks with these names (`checkpoint_name`) is kept
  offload:a+b  the same, in pinned host memory: copied there in the forward, and back in the backward
  offload      the inputs of the layers, in pinned host memory: offload:block_input
"""

import difflib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpretrain.ops.attention import RESIDUAL_NAME
from jaxpretrain.parallel.strategies import Strategy

BLOCK_INPUT = "block_input"  # the `checkpoint_name` of x at the beginning of a layer

# Primitives that are not worth keeping: gathers of parameters, and what XLA fuses into its readers. Keeping all that
# autodiff asks for takes 2.9 times the memory (GPT-NeoX, 1024 wide, bfloat16, cuDNN, fsdp compiled for 4 x A100: 243
# against 84 MiB per layer of 4096 tokens), most of it float32 inside norms and the pieces of gelu. What a model or an
# operation marks with `checkpoint_name` is kept, else the loop of blockwise attention would run again.
_RECOMPUTED = frozenset(
    "all_gather copy reshape broadcast_in_dim transpose concatenate slice pad convert_element_type select_n "
    "add sub mul div neg max min square integer_pow exp log1p erf erfc tanh logistic rsqrt sqrt "
    "sharding_constraint".split()
)


def layer_runner(strategy: Strategy, remat: str, scan_layers: bool) -> Callable:
    """`run_layers(block, layers, x, stack)`: applies `block(layer, x, index) -> x` to each layer of the named stack.

    Each layer's parameters are gathered, and `remat` (see above) says what is kept of it. Without `scan_layers` the
    loop over layers is unrolled. When it is traced it raises ValueError for a name that nothing in the block has, and
    for more layers than there are.
    """
    kind, _, argument = remat.partition(":")

    def run_layers(block: Callable, layers: Any, x: jax.Array, stack: str) -> jax.Array:
        def gathered(indexed: tuple[Any, jax.Array], x: jax.Array) -> jax.Array:
            layer, index = indexed
            if kind in ("names", "offload"):  # elsewhere a name for what is kept anyway could only mislead
                x = checkpoint_name(x, BLOCK_INPUT)
            return strategy.split_sequence(block(strategy.gather_layer(layer, stack), x, index))

        num_layers = jax.tree.leaves(layers)[0].shape[0]
        layers = layers, jnp.arange(num_layers)
        if kind in ("names", "offload"):
            one = jax.tree.map(lambda p: p[0], layers)
            _check_names(remat, (argument or BLOCK_INPUT).split("+"), _names_in(gathered, one, x))
        x = strategy.split_sequence(x)
        for policy, first, last in _stretches(kind, argument, num_layers, stack):
            # Within a loop the forward and the backward are separate: there is nothing to common up.
            prevent_cse = not scan_layers or last - first == 1
            run = jax.checkpoint(gathered, policy=policy, prevent_cse=prevent_cse)
            part = layers if last - first == num_layers else jax.tree.map(lambda p, i=first, j=last: p[i:j], layers)
            unroll = 1 if scan_layers else last - first
            x, _ = jax.lax.scan(lambda x, layer, run=run: (run(layer, x), None), x, part, unroll=unroll)
        return x

    return run_layers


def _stretches(kind: str, argument: str, num_layers: int, stack: str) -> list[tuple[Callable, int, int]]:
    """(what is kept, first layer, layer after the last) of the stretches that follow each other through a stack."""
    if kind == "full" and argument:
        num_full = int(argument)
        if num_full > num_layers:
            raise ValueError(f"parallel.remat=full:{num_full}: {stack} of the model has {num_layers}; set full")
        # The first ones: what the others keep is gone when the backward comes to them.
        stretches = [(saved_by("full"), 0, num_full), (saved_by("none"), num_full, num_layers)]
        return [(policy, first, last) for policy, first, last in stretches if first < last]
    return [(saved_by(f"{kind}:{argument}"), 0, num_layers)]


def saved_by(remat: str) -> Callable:
    """The policy of `jax.checkpoint` for a block, by a value of `parallel.remat` that is the same for all layers."""
    policies = jax.checkpoint_policies
    kind, _, argument = remat.partition(":")
    match kind:
        case "none":
            return _keep_expensive
        case "full":
            return policies.nothing_saveable
        case "dots":
            return policies.dots_with_no_batch_dims_saveable
        case "names":
            return policies.save_only_these_names(*argument.split("+"))
        case "offload":
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=(argument or BLOCK_INPUT).split("+"),
                offload_src="device",
                offload_dst="pinned_host",
            )
    raise AssertionError(remat)


def _keep_expensive(primitive, *_, **__) -> bool:
    return primitive.name not in _RECOMPUTED


def _names_in(block: Callable, layer: Any, x: jax.Array) -> list[str]:
    """What is marked with `checkpoint_name` in a block or, where operations have their own gradient, in its forward."""
    jaxpr = jax.make_jaxpr(lambda layer, x: jax.vjp(block, layer, x)[0])(layer, x)
    return sorted(set(re.findall(r" name\[name=(\w+)\]", str(jaxpr))))


def _check_names(remat: str, names: list[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            match = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {match[0]!r}? " if match else ""
            if name == RESIDUAL_NAME and "attention_projected" in known:
                hint = "cuDNN keeps what it needs to itself, so set kernels.attention=pallas, or take another: "
            raise ValueError(
                f"parallel.remat={remat}: nothing in this model is marked {name!r}; {hint}there are {', '.join(known)}"
            )
