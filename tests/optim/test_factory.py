"""The optimizer against AdamW written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.models.parameter import Info
from jaxpretrain.optim.factory import make_optimizer
from jaxpretrain.optim.schedules import make_schedule

_ROLES = dict(kernel="mlp_in", scale="norm_scale", bias="bias", embedding="embedding")


def make_config(**optimizer):
    config = config_lib.default()
    config.steps = 10
    config.schedule.warmup_steps = 2
    config.schedule.warmup_from = 0.5
    config.optimizer.update(dict(learning_rate=0.02, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.3), **optimizer)
    config_lib.check(config)
    return config


def follow(config, num_steps=5):
    """Parameters after each step on given gradients: ours, and by the formulas of Loshchilov & Hutter (2019)."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(3, 4)) for name in _ROLES}
    infos = {name: Info((3, 4), jnp.dtype(jnp.float32), ("embed", "mlp"), role) for name, role in _ROLES.items()}
    schedule = make_schedule(config)
    optimizer = make_optimizer(config, schedule, infos)
    ours = jax.tree.map(jnp.float32, params)
    state, update = optimizer.init(ours), jax.jit(optimizer.update)
    c = config.optimizer
    m, v = ({name: np.zeros((3, 4)) for name in params} for _ in range(2))
    for t in range(1, num_steps + 1):
        # Norms around 3.5 and 0.35: some steps are clipped at 1, some are not.
        gradients = {name: rng.normal(size=(3, 4)) * (0.05 if t % 2 else 0.5) for name in params}
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        factor = min(1, c.clip / norm) if c.clip else 1
        for name, g in gradients.items():
            m[name] = c.b1 * m[name] + (1 - c.b1) * g * factor
            v[name] = c.b2 * v[name] + (1 - c.b2) * (g * factor) ** 2
            step = m[name] / (1 - c.b1**t) / (np.sqrt(v[name] / (1 - c.b2**t)) + c.eps)
            if _ROLES[name] not in c.no_decay:
                step = step + c.weight_decay * params[name]
            params[name] = params[name] - float(schedule(t - 1)) * step
        updates, state = update(jax.tree.map(jnp.float32, gradients), state, ours)
        ours = optax.apply_updates(ours, updates)
        yield ours, params


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("no_decay", [("norm_scale", "bias"), ("embedding",), ()])
def test_adamw_equals_the_formulas(clip, no_decay):
    """Fails if decay is coupled, if the clip comes after the moments, or if the mask is inverted (each tried)."""
    for ours, expected in follow(make_config(clip=clip, no_decay=no_decay)):
        for name in expected:
            np.testing.assert_allclose(ours[name], expected[name], atol=2e-6, err_msg=name)


def test_role_that_does_not_exist():
    config = make_config(no_decay=("norm_scales",))
    with pytest.raises(
        ValueError, match=r"^optimizer\.no_decay='norm_scales': no such role; the roles are .*norm_scale"
    ):
        make_optimizer(config, make_schedule(config), {})
