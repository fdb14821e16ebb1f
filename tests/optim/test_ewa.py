"""Weight averages against closed forms, exact recursions and what has gone wrong elsewhere."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpretrain.optim.ewa import averaged, ewa


def follow(points, tokens, horizons):
    """The state after the parameters were each of `points` [T, ...], reached by `tokens` [T] each."""
    transformation = ewa(horizons)
    start = jnp.zeros_like(points[0])

    def step(carry, x):
        params, state = carry
        point, n = x
        _, state = transformation.update(point - params, state, params, tokens=n)
        return (point, state), None

    (_, state), _ = jax.lax.scan(step, (start, transformation.init(start)), (points, jnp.asarray(tokens)))
    return state


def closed_form(points, tokens, horizon):
    """In float64: each point stands for the tokens that led to it, discounted by e for every horizon since."""
    points, tokens = np.asarray(points, np.float64), np.asarray(tokens, np.float64)
    since = tokens.sum() - np.cumsum(tokens)
    weights = np.exp(-since / horizon) * -np.expm1(-tokens / horizon)
    return (weights @ points) / weights.sum()


def test_batch_size_that_changes():
    """Fails if each update counts for one token, or with 1 - exp(-x) in the place of expm1, in either line (each
    tried)."""
    rng = np.random.default_rng(0)
    points = rng.standard_normal((60, 5)).astype(np.float32) + 3
    tokens = np.repeat([100, 3200, 1, 800], 15)
    horizons = (50.0, 5e3, 1e6, 1e11)
    state = follow(points, tokens, horizons)
    for horizon in horizons:
        np.testing.assert_allclose(averaged(state, horizon), closed_form(points, tokens, horizon), rtol=2e-6)
    # The longest is the mean over tokens; the shortest forgets all but the last batch.
    np.testing.assert_allclose(averaged(state, 1e11), np.average(points, 0, tokens), rtol=2e-6)
    np.testing.assert_allclose(averaged(state, 50.0), points[-1], rtol=1e-5)


def test_an_average_of_one_point_is_the_point():
    """From the first update on, as nothing is left of where it started (timm#1182: no correction; nanochat#818: the
    exponent one off). Fails without the correction (tried)."""
    points = np.full((100, 3), 1.7, np.float32)
    for count in (1, 2, 100):
        for horizon in (1.0, 1e4, 1e9):
            np.testing.assert_allclose(
                averaged(follow(points[:count], [512] * count, [horizon]), horizon), 1.7, rtol=2e-6
            )


def test_tokens_are_counted_exactly():
    """Past 2^24 batches' worth and 2^32 alike. Fails with a float32 sum, and without the carry (each tried)."""
    num_steps, n = 3000, 2**22 + 1
    state = follow(jnp.zeros((num_steps, 1)), jnp.full(num_steps, n), ())
    low, high = map(int, state.tokens)
    assert (high << 32) + low == num_steps * n > 2**33
    one = follow(jnp.zeros((1, 1)), jnp.ones(1), ())  # metrics count in float32
    state = ewa(()).update(jnp.zeros(1), state, jnp.zeros(1), tokens=jnp.float32(1))[1]
    assert [int(x) for x in state.tokens] == [low + 1, high] and [int(x) for x in one.tokens] == [1, 0]


@pytest.mark.parametrize("decay", [0.99, 0.9995])
def test_bfloat16_parameters_have_an_average_that_moves(decay):
    """An average at 1 is pulled to 1.25 for 20,000 steps; in bfloat16 it stays at exactly 1 (sd_dreambooth_extension
    #1415, ema-pytorch#18). Fails with averages of the parameters' dtype (tried)."""
    n, num_steps = 64, 20_000
    horizon = -n / math.log(decay)
    transformation = ewa([horizon])
    params, state = jnp.ones(4, jnp.bfloat16), transformation.init(jnp.ones(4, jnp.bfloat16))
    for _ in range(3):
        updates, state = transformation.update(jnp.zeros_like(params), state, params, tokens=n)
        assert updates.dtype == jnp.bfloat16
    np.testing.assert_allclose(averaged(state, horizon), 1, rtol=1e-6)

    def step(state, _):
        return transformation.update(jnp.full(4, 0.25, jnp.bfloat16), state, params, tokens=n)[1], None

    state, _ = jax.lax.scan(step, state, length=num_steps)
    assert averaged(state, horizon).dtype == jnp.float32
    expected = closed_form([1] * 3 + [1.25] * num_steps, [n] * (num_steps + 3), horizon)
    np.testing.assert_allclose(averaged(state, horizon), expected, rtol=1e-4)


def test_what_is_averaged_is_what_the_parameters_become():
    """Rounded to their dtype, after the update, the last of a chain, and the updates pass unchanged.

    Fails if the parameters before the update are averaged, and if the updates are (optax.ema; each tried).
    """
    params = {"a": jnp.float32([1.0, 2.0]), "b": jnp.bfloat16([1.0])}
    optimizer, plain = optax.chain(optax.sgd(0.1), ewa([1e-3])), optax.sgd(0.1)
    gradients = {"a": jnp.float32([1.0, -1.0]), "b": jnp.bfloat16([0.01])}
    updates, state = optimizer.update(gradients, optimizer.init(params), params, tokens=1)
    expected, _ = plain.update(gradients, plain.init(params))
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    jax.tree.map(np.testing.assert_array_equal, averaged(state[-1], 1e-3), optax.apply_updates(params, updates))


def test_a_horizon_that_is_not_there():
    state = ewa([100, 2_000]).init(jnp.zeros(1))
    with pytest.raises(ValueError, match="no average over 200 tokens; there are averages over 100, 2,000"):
        averaged(state, 200)
    assert np.isnan(averaged(state, 100))


def test_optax_sees_the_parameters_in_the_state():
    params = {"a": jnp.ones(3), "b": {"c": jnp.ones(2)}}
    transformation = ewa([1.0, 2.0])
    names = {"a": "a", "b": {"c": "c"}}
    mapped = optax.tree.map_params(transformation, lambda _, name: name, transformation.init(params), names)
    assert mapped.averages == (names, names)


def test_no_buffer_is_shared_with_the_parameters():
    """State and parameters are donated together, twice over (optax#1059, flax#5461). Fails if the average starts from
    the parameters themselves (tried)."""
    transformation = ewa([10.0, 20.0])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = transformation.update(jnp.ones_like(params), state, params, tokens=4)
        return optax.apply_updates(params, updates), state

    params = jnp.zeros(3)
    state = transformation.init(params)
    for count in (1, 2):
        old = jax.tree.leaves((params, state))
        params, state = step(params, state)
        assert all(x.is_deleted() for x in old)
        points = np.arange(1, count + 1)
        np.testing.assert_allclose(averaged(state, 20.0), closed_form(points, [4] * count, 20.0), rtol=1e-6)


# --- Least squares with a power-law spectrum: research/critical_batch_size.md, V3.
#
# Loss 1/2 sum_i l_i d_i^2 with x ~ N(0, diag(l)), targets with noise of variance s2, d = w - w*, batches of B rows.

_NUM_DIMS, _NOISE, _BATCH, _RATE, _DECAY = 30, 0.25, 4, 0.15, 0.9
_SPECTRUM = np.arange(1, _NUM_DIMS + 1) ** -1.5
_START = -np.sqrt(np.arange(1, _NUM_DIMS + 1) ** -2.0 / _SPECTRUM)  # l_i w*_i^2 = i^-2, w = 0 at first


def expected_losses(num_steps, noise, inverse_batch):
    """Expected loss of the last weights and of their average, in float64, by the recursion over second moments."""
    rate, tau, spectrum = _RATE, _DECAY, _SPECTRUM
    c, p, q = _START**2, np.zeros(_NUM_DIMS), np.zeros(_NUM_DIMS)
    for _ in range(num_steps):
        shrink = 1 - rate * spectrum
        variance = rate**2 * inverse_batch * spectrum * (spectrum @ c + noise + spectrum * c)
        new_c = shrink**2 * c + variance
        q = tau**2 * q + 2 * tau * (1 - tau) * shrink * p + (1 - tau) ** 2 * new_c
        p = tau * shrink * p + (1 - tau) * new_c
        c = new_c
    return 0.5 * spectrum @ c, 0.5 * spectrum @ q / (1 - tau**num_steps) ** 2


@functools.partial(jax.jit, static_argnums=(1, 2))
def simulate(key, num_steps, batch):
    """One run with our EWA in the chain: losses of the last weights and of their average. Batch 0: all data."""
    horizon = -(batch or 1) / math.log(_DECAY)
    optimizer = optax.chain(optax.sgd(_RATE), ewa([horizon]))
    spectrum, optimum = jnp.asarray(_SPECTRUM, jnp.float32), jnp.asarray(-_START, jnp.float32)

    def gradient(w, key):
        if not batch:
            return spectrum * (w - optimum)
        x_key, noise_key = jax.random.split(key)
        x_BxD = jax.random.normal(x_key, (batch, _NUM_DIMS)) * jnp.sqrt(spectrum)
        noise_B = math.sqrt(_NOISE) * jax.random.normal(noise_key, (batch,))
        return x_BxD.T @ (x_BxD @ (w - optimum) - noise_B) / batch

    def step(carry, key):
        w, state = carry
        updates, state = optimizer.update(gradient(w, key), state, w, tokens=batch or 1)
        return (optax.apply_updates(w, updates), state), None

    w = jnp.zeros(_NUM_DIMS)
    (w, state), _ = jax.lax.scan(step, (w, optimizer.init(w)), jax.random.split(key, num_steps))
    return tuple(0.5 * spectrum @ (x - optimum) ** 2 for x in (w, averaged(state[-1], horizon)))


@pytest.mark.parametrize("num_steps", [1, 20, 200])
def test_recursion_without_noise(num_steps):
    """The whole gradient: the recursion is of one trajectory, which the average follows to float32's precision.

    Fails if the exponent of the correction is one off (tried).
    """
    losses = simulate(jax.random.key(0), num_steps, 0)
    np.testing.assert_allclose(losses, expected_losses(num_steps, 0.0, 0.0), rtol=0, atol=1e-6)


def test_recursion_over_moments_is_what_the_average_does():
    """Exact though the data is random: the average is linear, so `ewa` over both times of E[d_s d_t] gives E[a^2],
    which the recursion has as q. Fails if the correction's exponent is one off, or with a decay 1 % off (each tried).
    """
    num_steps, tau, n = 50, _DECAY, 3
    horizon = -n / math.log(tau)
    shrink = 1 - _RATE * _SPECTRUM
    c = [_START**2]
    for _ in range(num_steps):
        variance = _RATE**2 / _BATCH * _SPECTRUM * (_SPECTRUM @ c[-1] + _NOISE + _SPECTRUM * c[-1])
        c.append(shrink**2 * c[-1] + variance)
    times = np.arange(1, num_steps + 1)
    lag = np.abs(times[:, None] - times)
    # E d_s d_t = shrink^|t-s| c_min(s,t), as the gradient's noise has mean zero given the past.
    covariance_TxTxD = shrink ** lag[..., None] * np.stack(c)[np.minimum(times[:, None], times)]
    once = averaged(follow(jnp.asarray(covariance_TxTxD, jnp.float32), [n] * num_steps, [horizon]), horizon)
    twice = averaged(follow(once, [n] * num_steps, [horizon]), horizon)
    loss = 0.5 * _SPECTRUM @ np.asarray(twice, np.float64)
    assert loss == pytest.approx(expected_losses(num_steps, _NOISE, 1 / _BATCH)[1], rel=1e-6)


@pytest.mark.parametrize("num_steps", [20, 200])
def test_recursion_with_noise(num_steps):
    """Mean loss of 4000 runs of random batches, within three standard errors. The note's own figures agree.

    Fails if the updates are averaged in the place of the weights (tried).
    """
    expected = expected_losses(num_steps, _NOISE, 1 / _BATCH)
    published = {20: (0.12894, 0.17294), 200: (0.02150, 0.01993)}[num_steps]
    np.testing.assert_allclose(expected, published, atol=1e-5)
    keys = jax.random.split(jax.random.key(1), 4000)
    losses = np.asarray(jax.vmap(lambda key: jnp.stack(simulate(key, num_steps, _BATCH)))(keys), np.float64)
    error = losses.std(0) / math.sqrt(len(keys))
    assert (np.abs(losses.mean(0) - expected) < 3 * error).all()
