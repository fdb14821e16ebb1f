"""What of a layer is kept for the backward and what is recomputed."""

from collections.abc import Callable

import jax
from jax.extend.core import primitives

from jaxpretrain.parallel.strategies import Strategy


def wrap_block(strategy: Strategy, remat: str, scan_layers: bool) -> Callable[[Callable], Callable]:
    """The transformation of `block(layer_params, x) -> x` that gathers its parameters and applies `parallel.remat`.

    none: everything is kept but the gathered parameters, which the backward gathers again (and reshapes,
    which is free: a kept reshape would keep the gathered parameter under another name).
    full: only the block's input is kept.
    """
    gathers = strategy.mesh.shape["fsdp"] > 1

    def wrap(block: Callable) -> Callable:
        def gathered(layer, x):
            return block(strategy.gather_layer(layer), x)

        if remat == "none" and not gathers:
            return block
        policy = jax.checkpoint_policies.nothing_saveable if remat == "full" else _all_but_gathered
        # Within a scan the forward and the backward are separate loops: there is nothing to common up.
        return jax.checkpoint(gathered, policy=policy, prevent_cse=not scan_layers)

    return wrap


def _all_but_gathered(primitive, *_, **__) -> bool:
    return primitive not in (primitives.all_gather_p, primitives.reshape_p)
