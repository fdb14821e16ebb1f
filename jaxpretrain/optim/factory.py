"""The optimizer that a config names, as one Optax transformation."""

import jax
import optax
from ml_collections import ConfigDict

from jaxpretrain.models.parameter import ROLES


def make_optimizer(config: ConfigDict, schedule: optax.Schedule, infos: dict) -> optax.GradientTransformation:
    """Global-norm clipping, then `optimizer.name`; decoupled weight decay on all roles but `optimizer.no_decay`.

    `infos` is `models.parameter.infos(model)`: which parameter decays follows from its role.
    """
    c = config.optimizer
    unknown = [role for role in c.no_decay if role not in ROLES]
    if unknown:
        raise ValueError(f"optimizer.no_decay={unknown[0]!r}: no such role; the roles are {', '.join(ROLES)}")
    assert c.name == "adamw", c.name
    decays = jax.tree.map(lambda info: info.role not in c.no_decay, infos)
    adamw = optax.adamw(schedule, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(c.clip), adamw) if c.clip else adamw
