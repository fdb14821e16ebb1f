"""The numbers that the optimizer and the schedule run on, with the batch size and the number of steps put in.

Plain Python: config.py checks a config with them and does not load JAX. `config` is a whole checked config.
"""

import math

from ml_collections import ConfigDict


def peak_learning_rate(config: ConfigDict) -> float:
    """`optimizer.learning_rate`, found at `scaling.base_batch_size`, for this batch size.

    sqrt: Malladi et al. 2022 (arXiv 2205.10287), for Adam and its kin. linear: Goyal et al. 2017 (1706.02677), for SGD.
    """
    rule, rate = config.scaling.learning_rate, config.optimizer.learning_rate
    if rule == "none":
        return rate
    ratio = config.batch_size / config.scaling.base_batch_size
    return rate * (math.sqrt(ratio) if rule == "sqrt" else ratio)


def b2(config: ConfigDict) -> float:
    """`optimizer.b2` for this batch size. tokens: the average's half-life in tokens stays (Marek et al. 2025)."""
    if config.scaling.b2 == "none":
        return config.optimizer.b2
    return config.optimizer.b2 ** (config.batch_size / config.scaling.base_batch_size)


def warmup_steps(config: ConfigDict) -> int:
    """Steps of the warm-up, rounded and at least 1 where it is given in tokens."""
    tokens = config.schedule.warmup_tokens
    return max(1, round(tokens / (config.batch_size * config.seq_len))) if tokens else config.schedule.warmup_steps


def decay_span(config: ConfigDict) -> tuple[int, int]:
    """The steps, counted from step 0, at which the decay begins and ends."""
    c = config.schedule
    end = c.decay_steps or config.steps
    if c.name != "wsd":
        return warmup_steps(config), end
    return end - (c.decay_length or max(1, round(c.decay_fraction * end))), end
