"""Learning rate as a function of the number of updates applied."""

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict


def make_schedule(config: ConfigDict) -> optax.Schedule:
    """Linear warm-up from `warmup_from` of the peak, then constant, cosine or linear to `final_fraction` of it.

    The decay ends at `schedule.decay_steps`, counted from step 0, and stays at its end from there on; the decay
    is cut off at `floor_fraction` of the peak (GPT-NeoX decays towards 0 and stops at its `min_lr`).
    """
    c, peak = config.schedule, config.optimizer.learning_rate
    decay_steps = (c.decay_steps or config.steps) - c.warmup_steps
    if c.name == "constant" or decay_steps <= 0:
        main = optax.constant_schedule(peak)
    elif c.name == "cosine":
        main = optax.cosine_decay_schedule(peak, decay_steps, alpha=c.final_fraction)
    else:
        assert c.name == "linear", c.name
        main = optax.linear_schedule(peak, c.final_fraction * peak, decay_steps)

    def floored(count: jax.Array) -> jax.Array:
        return jnp.maximum(main(count), c.floor_fraction * peak)

    if c.warmup_steps == 0:
        return floored
    warmup = optax.linear_schedule(c.warmup_from * peak, peak, c.warmup_steps)
    return optax.join_schedules([warmup, floored], [c.warmup_steps])
