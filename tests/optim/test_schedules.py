"""Learning rates against closed forms."""

import math

import numpy as np
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.optim import scaling
from jaxpretrain.optim.schedules import make_schedule

PEAK = 3e-3


def make_config(steps=100, **schedule):
    config = config_lib.default()
    config.steps, config.optimizer.learning_rate = steps, PEAK
    config.schedule.update(schedule)
    config_lib.check(config)
    return config


def rates(steps=100, up_to=150, **schedule):
    schedule = make_schedule(make_config(steps, **schedule))
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


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [dict(warmup_steps=12), dict(warmup_tokens=12 * 8 * 256)])
def test_joins_without_a_jump(name, warmup):
    """No step changes the rate by more than the steepest part of the curve does, and the peak is reached at step 12."""
    got = rates(name=name, **warmup, **dict(decay_fraction=0.2) if name == "wsd" else {})
    assert got.argmax() == 12 and got[12] == pytest.approx(PEAK)
    assert np.abs(np.diff(got)).max() <= PEAK / 12 * 1.001
    assert got[0] == 0 and got.min() >= 0 and np.isfinite(got).all()


def test_inverse_sqrt():
    """Vaswani et al. 2017: min(step / w, sqrt(w / step)) of the peak; without end."""
    got = rates(name="inverse_sqrt", warmup_steps=16, up_to=400)
    expected = [PEAK * min(step / 16, math.sqrt(16 / max(step, 1))) for step in range(400)]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert got[64] == pytest.approx(PEAK / 2)
    floored = rates(name="inverse_sqrt", warmup_steps=16, floor_fraction=0.4, up_to=400)
    np.testing.assert_allclose(floored[16:], np.maximum(expected, 0.4 * PEAK)[16:], rtol=1e-5)


DECAYS = {
    "linear": lambda u, final: 1 - (1 - final) * u,
    "exponential": lambda u, final: final**u,
    "one_minus_sqrt": lambda u, final: 1 - (1 - final) * math.sqrt(u),
}


@pytest.mark.parametrize("shape", DECAYS)
@pytest.mark.parametrize(
    "settings, start, end",
    [
        (dict(decay_fraction=0.3), 70, 100),
        (dict(decay_length=25), 75, 100),
        (dict(decay_fraction=0.5, decay_steps=80), 40, 80),
        (dict(decay_fraction=0.004), 99, 100),  # at least one step
        (dict(decay_fraction=0.9), 10, 100),  # no stable phase
    ],
)
def test_wsd(shape, settings, start, end):
    """Warm-up, the peak up to `start`, the shape from there to `end`, its last value beyond.

    Fails if the decay begins as many steps late as the warm-up has (`[start]` for `[start - num_warmup]`).
    """
    got = rates(name="wsd", warmup_steps=10, decay_shape=shape, final_fraction=0.05, **settings)
    progress = [min(1, max(0, (i - start) / (end - start))) for i in range(len(got))]
    expected = [warmed_up(i, 10) if i < 10 else PEAK * DECAYS[shape](progress[i], 0.05) for i in range(len(got))]
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-9)
    np.testing.assert_allclose(got[10 : start + 1], PEAK, rtol=1e-6)
    np.testing.assert_allclose(got[end:], 0.05 * PEAK, rtol=1e-5)


@pytest.mark.parametrize("shape", ["linear", "one_minus_sqrt"])
def test_wsd_to_zero(shape):
    """Reaches 0 at the end and not before: the curve is seen at its middle."""
    got = rates(name="wsd", decay_fraction=0.4, decay_shape=shape, final_fraction=0.0)
    assert got[80] == pytest.approx(PEAK * DECAYS[shape](0.5, 0), rel=1e-5)
    assert (got[:100] > 0).all() and np.abs(got[100:]).max() < 1e-9


def test_exponential_decay_to_zero_is_refused():
    """0 ** progress is 0 from the first step of the decay on, a defect of the study's release (its WSD baseline)."""
    with pytest.raises(ValueError, match=r"^schedule\.final_fraction=0\.0 .*fall to 0 at once"):
        rates(name="wsd", decay_shape="exponential", final_fraction=0.0)
    got = rates(name="wsd", decay_fraction=0.4, decay_shape="exponential", final_fraction=1e-6, floor_fraction=0.01)
    expected = [PEAK * max(1e-6 ** min(1, max(0, (i - 60) / 40)), 0.01) for i in range(150)]
    np.testing.assert_allclose(got, expected, rtol=1e-4)


@pytest.mark.parametrize("batch_size, steps", [(4, 100), (8, 50), (64, 6), (4096, 1)])
def test_warmup_in_tokens_does_not_depend_on_the_batch_size(batch_size, steps):
    """102,400 tokens of sequences of 256. Fails if the tokens are counted without the sequence length."""
    config = make_config(steps=1000)
    config.schedule.warmup_tokens, config.batch_size = 102_400, batch_size
    config_lib.check(config)
    assert scaling.warmup_steps(config) == steps
    assert np.argmax([float(make_schedule(config)(i)) for i in range(110)]) == steps


@pytest.mark.parametrize("rule, factor", [("none", 1), ("sqrt", 4), ("linear", 16)])
@pytest.mark.parametrize("name", ["constant", "cosine", "wsd", "inverse_sqrt"])
def test_learning_rate_by_batch_size(rule, factor, name):
    """16 times the batch: the whole schedule is multiplied. Fails if make_schedule reads optimizer.learning_rate."""
    config = make_config(name=name, warmup_steps=10)
    before = np.array([float(make_schedule(config)(i)) for i in range(0, 130, 10)])
    config.batch_size = 128
    config.scaling.update(dict(base_batch_size=8, learning_rate=rule, b2="tokens"))
    config_lib.check(config)
    after = np.array([float(make_schedule(config)(i)) for i in range(0, 130, 10)])
    np.testing.assert_allclose(after, factor * before, rtol=1e-5)
    assert config.optimizer.learning_rate == PEAK  # the config says what was asked for


@pytest.mark.parametrize("batch_size", [2, 8, 256])
def test_b2_keeps_its_half_life_in_tokens(batch_size):
    """b2 ** (tokens / tokens per step) is the same for any batch; without the rule it is not."""
    config = make_config()
    config.optimizer.b2, config.batch_size = 0.999, batch_size
    config.scaling.update(dict(base_batch_size=8, b2="tokens"))
    config_lib.check(config)
    half_life = math.log(0.5) / math.log(scaling.b2(config)) * batch_size
    assert half_life == pytest.approx(math.log(0.5) / math.log(0.999) * 8)
    config.scaling.update(dict(base_batch_size=0, b2="none"))
    assert scaling.b2(config) == 0.999
