"""Exponential weight averaging (EWA): averages of the parameters, with horizons counted in tokens.

After an update to parameters w on a batch of n tokens, for each horizon h, with N the tokens averaged so far:

    a <- a + (1 - exp(-n/h)) (w - a),  a = 0 at first
    average = a / (1 - exp(-N/h))

What the w so far count for in `average` sums to 1 whatever the batch sizes were: each stands for the n tokens that led
to it, and counts e times less after every h tokens. With one batch size this is the average of arXiv 2410.21676 with
decay exp(-n/h), its bias corrected.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class EwaState:
    """The sums `a` and the tokens that they have seen. `averaged` makes weights of them."""

    tokens: jax.Array  # uint32 [2]: low and high word, as float32 stops counting at 2^24 batches, uint32 at 4e9 tokens
    averages: tuple[Any, ...]  # for each horizon a tree like the parameters, float32
    horizons: tuple[float, ...] = dataclasses.field(metadata=dict(static=True))


def ewa(horizons: Sequence[float]) -> optax.GradientTransformationExtraArgs:
    """Averages `params + updates` over `horizons` (tokens, positive); the last of a chain, it changes no update.

    `update` takes `tokens`, the number of valid tokens of the batch, a scalar that is a whole number. Averages are
    float32 whatever the parameters are: in bfloat16 they would freeze once (1 - decay) |w - a| is below 2^-9 |a|. They
    start from zeros, so no buffer is ever both the average's and the parameters', which may be donated.
    """

    def init(params: Any) -> EwaState:
        zeros = tuple(jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params) for _ in horizons)
        return EwaState(jnp.zeros(2, jnp.uint32), zeros, tuple(horizons))

    def update(updates: Any, state: EwaState, params: Any, *, tokens: jax.Array, **_: Any) -> tuple[Any, EwaState]:
        new_params = optax.apply_updates(params, updates)

        def move(averages: Any, horizon: float) -> Any:
            weight = -jnp.expm1(-jnp.asarray(tokens, jnp.float32) / float(horizon))
            return jax.tree.map(lambda a, w: a + weight * (w.astype(jnp.float32) - a), averages, new_params)

        averages = tuple(map(move, state.averages, horizons))
        low, high = state.tokens
        new_low = low + jnp.asarray(tokens).astype(jnp.uint32)
        new_tokens = jnp.stack([new_low, high + (new_low < low)])  # a sum that wrapped around is less than what it was
        return updates, EwaState(new_tokens, averages, state.horizons)

    return optax.GradientTransformationExtraArgs(init, update)


def averaged(state: EwaState, horizon: float, fetch: Callable[[Any], Any] = lambda tree: tree) -> Any:
    """The average over `horizon` tokens, float32; NaN before the first update, as there is none.

    `fetch` brings what is read to where it is computed.

    Raises ValueError if the state has no such horizon.
    """
    if horizon not in state.horizons:
        there = ", ".join(f"{h:,}" for h in state.horizons)
        raise ValueError(f"no average over {horizon:,} tokens; there are averages over {there}")
    low, high = state.tokens.astype(jnp.float32)
    total_weight = -jnp.expm1(-(high * 2.0**32 + low) / float(horizon))
    return jax.tree.map(lambda a: a / total_weight, fetch(state.averages[state.horizons.index(horizon)]))
