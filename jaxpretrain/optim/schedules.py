"""Learning rate as a function of the number of updates applied."""

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from jaxpretrain.optim import scaling


def make_schedule(config: ConfigDict) -> optax.Schedule:
    """Linear warm-up from `warmup_from` of the peak, then what `schedule.name` says; docs/optimizers.md has formulas.

    The peak is `optimizer.learning_rate` after `scaling.learning_rate`. A decay ends at `schedule.decay_steps`,
    counted from step 0, and stays at its end from there on; it is cut off at `floor_fraction` of the peak (GPT-NeoX
    decays towards 0 and stops at its `min_lr`). A warm-up that takes all steps is followed by the peak.
    """
    c, peak = config.schedule, scaling.peak_learning_rate(config)
    num_warmup = scaling.warmup_steps(config)
    start, end = scaling.decay_span(config)

    if c.name == "inverse_sqrt":
        main = _inverse_sqrt(peak, num_warmup)
    elif c.name == "constant" or end <= num_warmup:
        main = optax.constant_schedule(peak)
    elif c.name == "cosine":
        main = optax.cosine_decay_schedule(peak, end - start, alpha=c.final_fraction)
    elif c.name == "linear":
        main = optax.linear_schedule(peak, c.final_fraction * peak, end - start)
    else:
        assert c.name == "wsd", c.name
        decay = _DECAYS[c.decay_shape](peak, c.final_fraction, end - start)
        main = optax.join_schedules([optax.constant_schedule(peak), decay], [start - num_warmup])

    def floored(count: jax.Array) -> jax.Array:
        return jnp.maximum(main(count), c.floor_fraction * peak)

    if num_warmup == 0:
        return floored
    warmup = optax.linear_schedule(c.warmup_from * peak, peak, num_warmup)
    return optax.join_schedules([warmup, floored], [num_warmup])


def _inverse_sqrt(peak: float, num_warmup: int) -> optax.Schedule:
    """Vaswani et al. 2017, section 5.3: the peak at the end of the warm-up, then with 1 / sqrt(step)."""
    return lambda count: peak * jax.lax.rsqrt(1 + jnp.maximum(count, 0) / num_warmup)


def _exponential(peak: float, final_fraction: float, num_steps: int) -> optax.Schedule:
    # A final fraction of 0 has no such curve: 0 ** progress is 0 at once, and Optax makes a constant of it.
    assert final_fraction > 0
    return optax.exponential_decay(peak, num_steps, final_fraction, end_value=final_fraction * peak)


def _one_minus_sqrt(peak: float, final_fraction: float, num_steps: int) -> optax.Schedule:
    """Hägele et al. 2024 (arXiv 2405.18392), equation 2."""

    def schedule(count: jax.Array) -> jax.Array:
        return peak * (1 - (1 - final_fraction) * jnp.sqrt(jnp.clip(count / num_steps, 0, 1)))

    return schedule


# schedule.decay_shape -> of the peak, the fraction of it that remains at the end, and the steps in between.
_DECAYS = {
    "linear": lambda peak, final_fraction, num_steps: optax.linear_schedule(peak, final_fraction * peak, num_steps),
    "exponential": _exponential,
    "one_minus_sqrt": _one_minus_sqrt,
}
