"""What of a layer is kept for the backward and what is recomputed."""

from collections.abc import Callable

import jax

from jaxpretrain.parallel.strategies import Strategy

# Primitives that are not worth keeping: gathers of parameters, and what XLA fuses into its readers. Keeping all that
# autodiff asks for takes 2.9 times the memory (GPT-NeoX, 1024 wide, bfloat16, cuDNN, fsdp compiled for 4 x A100: 243
# against 84 MiB per layer of 4096 tokens), most of it float32 inside norms and the pieces of gelu. What a model or an
# operation marks with `checkpoint_name` is kept, else the loop of blockwise attention would run again.
_RECOMPUTED = frozenset(
    "all_gather copy reshape broadcast_in_dim transpose concatenate slice pad convert_element_type select_n "
    "add sub mul div neg max min square integer_pow exp erf erfc tanh logistic rsqrt sqrt".split()
)


def wrap_block(strategy: Strategy, remat: str, scan_layers: bool) -> Callable[[Callable, str], Callable]:
    """The transformation of `block(layer_params, x) -> x`, and the name of its stack of layers among the parameters,
    that gathers its parameters and applies `parallel.remat`.

    none: the results of matrix multiplications, attention and sums are kept, so none is computed twice; elementwise
      work is, and sharded parameters are gathered again.
    full: only the block's input is kept.
    """
    policy = jax.checkpoint_policies.nothing_saveable if remat == "full" else _keep_expensive

    def wrap(block: Callable, stack: str) -> Callable:
        def gathered(layer, x):
            return block(strategy.gather_layer(layer, stack), x)

        # Within a scan the forward and the backward are separate loops: there is nothing to common up.
        return jax.checkpoint(gathered, policy=policy, prevent_cse=not scan_layers)

    return wrap


def _keep_expensive(primitive, *_, **__) -> bool:
    return primitive.name not in _RECOMPUTED
