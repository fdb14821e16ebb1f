"""Learning rates against closed forms."""

import math

import numpy as np
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.optim.schedules import make_schedule

PEAK = 3e-3


def rates(steps=100, up_to=150, **schedule):
    config = config_lib.default()
    config.steps, config.optimizer.learning_rate = steps, PEAK
    config.schedule.update(schedule)
    config_lib.check(config)
    schedule = make_schedule(config)
    return np.array([float(schedule(step)) for step in range(up_to)])


def warmed_up(step, num_warmup, warmup_from=0.0):
    return PEAK * (warmup_from + (1 - warmup_from) * step / num_warmup)


def cosine(step, num_warmup, end, final):
    progress = min(1, (step - num_warmup) / (end - num_warmup))
    return PEAK * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)


def linear(step, num_warmup, end, final):
    progress = min(1, (step - num_warmup) / (end - num_warmup))
    return PEAK * (1 - (1 - final) * progress)


@pytest.mark.parametrize("decay", [cosine, linear])
@pytest.mark.parametrize("num_warmup", [0, 10])
@pytest.mark.parametrize("decay_steps", [0, 60, 120])
def test_warmup_then_decay(decay, num_warmup, decay_steps):
    """The decay ends at `decay_steps`, or `steps`, counted from step 0 (Megatron's convention), and stays there.

    Fails if the decay is counted from the end of the warm-up (tried: without `- c.warmup_steps`).
    """
    got = rates(name=decay.__name__, warmup_steps=num_warmup, decay_steps=decay_steps, final_fraction=0.2)
    expected = [
        warmed_up(i, num_warmup) if i < num_warmup else decay(i, num_warmup, decay_steps or 100, 0.2)
        for i in range(len(got))
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-9)
    assert got[decay_steps or 100 :] == pytest.approx(0.2 * PEAK)
    assert got.argmax() == num_warmup


def test_warmup_from_a_fraction():
    got = rates(name="constant", warmup_steps=8, warmup_from=0.25)
    np.testing.assert_allclose(got[:8], [warmed_up(i, 8, 0.25) for i in range(8)], rtol=1e-6)
    np.testing.assert_allclose(got[8:], PEAK, rtol=1e-6)


def test_constant():
    np.testing.assert_allclose(rates(name="constant"), PEAK, rtol=1e-6)


def test_floor_cuts_the_decay_off():
    """GPT-NeoX's cosine goes towards 0 and stops at `min_lr`: not the same curve as a cosine that ends there."""
    got = rates(name="cosine", warmup_steps=10, final_fraction=0.0, floor_fraction=0.1)
    expected = [warmed_up(i, 10) if i < 10 else max(cosine(i, 10, 100, 0), 0.1 * PEAK) for i in range(150)]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert got[9] == pytest.approx(0.9 * PEAK) and got[0] == 0  # the floor is the decay's, not the warm-up's


@pytest.mark.parametrize("steps", [1, 10])
def test_warmup_that_takes_all_steps(steps):
    got = rates(steps=steps, warmup_steps=10, up_to=12)
    np.testing.assert_allclose(got, [*(warmed_up(i, 10) for i in range(10)), PEAK, PEAK], rtol=1e-6)
