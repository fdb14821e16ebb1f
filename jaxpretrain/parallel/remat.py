"""What of a layer is kept for the backward, what is recomputed, and what waits in the host's memory.

`parallel.remat` is one of

  none         the results of matrix multiplications, attention and sums are kept, so none is computed twice;
               elementwise work is, and sharded parameters are gathered again
  full         only the input of each layer is kept
  full:K       full for K of the layers, evenly spread, none for the others
  dots         the results of products with parameters are kept; those of attention are computed again
  names:a+b    what the model marks with these names (`checkpoint_name`) is kept
  offload:a+b  the same, in pinned host memory: copied there in the forward, and back in the backward
  offload      the inputs of the layers, in pinned host memory: offload:block_input
"""

import difflib
import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpretrain.parallel.strategies import Strategy

BLOCK_INPUT = "block_input"  # the `checkpoint_name` of x at the beginning of a layer

# Primitives that are not worth keeping: gathers of parameters, and what XLA fuses into its readers. Keeping all that
# autodiff asks for takes 2.9 times the memory (GPT-NeoX, 1024 wide, bfloat16, cuDNN, fsdp compiled for 4 x A100: 243
# against 84 MiB per layer of 4096 tokens), most of it float32 inside norms and the pieces of gelu. What a model or an
# operation marks with `checkpoint_name` is kept, else the loop of blockwise attention would run again.
_RECOMPUTED = frozenset(
    "all_gather copy reshape broadcast_in_dim transpose concatenate slice pad convert_element_type select_n "
    "add sub mul div neg max min square integer_pow exp erf erfc tanh logistic rsqrt sqrt sharding_constraint".split()
)


def layer_runner(strategy: Strategy, remat: str, scan_layers: bool) -> Callable:
    """`run_layers(block, layers, x, stack)`: applies `block(layer, x) -> x` to each layer of the stack of this name.

    Each layer's parameters are gathered, and `remat` (see above) says what is kept of it. Without `scan_layers` the
    loop over layers is unrolled. When it is traced it raises ValueError for a name that nothing in the block has, and
    for more layers than there are.
    """
    kind, _, argument = remat.partition(":")

    def run_layers(block: Callable, layers: Any, x: jax.Array, stack: str) -> jax.Array:
        def gathered(layer: Any, x: jax.Array) -> jax.Array:
            if kind in ("names", "offload"):  # elsewhere a name for what is kept anyway could only mislead
                x = checkpoint_name(x, BLOCK_INPUT)
            return strategy.split_sequence(block(strategy.gather_layer(layer, stack), x))

        num_layers = jax.tree.leaves(layers)[0].shape[0]
        if kind in ("names", "offload"):
            one = jax.tree.map(lambda p: p[0], layers)
            _check_names(remat, (argument or BLOCK_INPUT).split("+"), _names_in(gathered, one, x))
        policies = _policies(kind, argument, num_layers)
        num_groups = num_layers // len(policies)
        # Within a loop the forward and the backward are separate: there is nothing to common up.
        prevent_cse = not scan_layers or num_groups == 1
        run_layer = [jax.checkpoint(gathered, policy=policy, prevent_cse=prevent_cse) for policy in policies]

        def group(x: jax.Array, layers: Any) -> tuple[jax.Array, None]:
            for i, run in enumerate(run_layer):
                x = run(jax.tree.map(lambda p, i=i: p[i], layers), x)
            return x, None

        def single(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return run_layer[0](layer, x), None

        if len(policies) == 1:
            body = single  # the gradient of an index would be a copy
        else:
            body = group
            layers = jax.tree.map(lambda p: p.reshape(num_groups, len(policies), *p.shape[1:]), layers)
        return jax.lax.scan(body, strategy.split_sequence(x), layers, unroll=1 if scan_layers else num_groups)[0]

    return run_layers


def _policies(kind: str, argument: str, num_layers: int) -> list[Callable]:
    """What is kept of each layer of a group; the groups follow each other through the stack."""
    policies = jax.checkpoint_policies
    match kind:
        case "none":
            return [_keep_expensive]
        case "full" if argument:
            num_full = int(argument)
            if num_full > num_layers:
                raise ValueError(f"parallel.remat=full:{num_full}: the model has {num_layers} layers; set full")
            num_groups = math.gcd(num_full, num_layers)
            rest = (num_layers - num_full) // num_groups
            return [policies.nothing_saveable] * (num_full // num_groups) + [_keep_expensive] * rest
        case "full":
            return [policies.nothing_saveable]
        case "dots":
            return [policies.dots_with_no_batch_dims_saveable]
        case "names":
            return [policies.save_only_these_names(*argument.split("+"))]
        case "offload":
            return [
                policies.save_and_offload_only_these_names(
                    names_which_can_be_saved=[],
                    names_which_can_be_offloaded=(argument or BLOCK_INPUT).split("+"),
                    offload_src="device",
                    offload_dst="pinned_host",
                )
            ]
    raise AssertionError(kind)


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
            raise ValueError(
                f"parallel.remat={remat}: nothing in this model is marked {name!r}; {hint}There are {', '.join(known)}"
            )
