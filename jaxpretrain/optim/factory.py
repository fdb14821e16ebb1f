"""The optimizer that a config names, as one Optax transformation.

Which parameters do not decay, have another rate or are matrices to Muon follows from their roles. Stacked layers are
parameters of their own: what looks at a parameter as a whole looks at each of them alone.
"""

import difflib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict
from optax import contrib

from jaxpretrain.models.parameter import ROLES, Info, fan_in_dims, own_dims
from jaxpretrain.optim import scaling
from jaxpretrain.optim.adam_mini import scale_by_adam_mini
from jaxpretrain.optim.blocks import adam_mini_blocks

_MIN_FACTORED = 128  # dims of either side of what Adafactor factors: Optax's default
# The matrices of hidden layers, which Muon orthogonalises; everything else it leaves to AdamW.
_MUON_ROLES = (
    *("query", "key", "value", "query_key_value", "attn_out", "mlp_in", "mlp_gate", "mlp_out"),
    *("ssm_in_proj", "ssm_out_proj"),
)


def make_optimizer(config: ConfigDict, schedule: optax.Schedule, infos: dict) -> optax.GradientTransformation:
    """`optimizer.name` at the rate of `schedule`; docs/optimizers.md describes each. The step clips the gradients.

    Weight decay is decoupled: `learning rate * weight_decay * parameter`, on all roles but `optimizer.no_decay`.
    `optimizer.lr_multipliers` multiply the whole update of a role, its decay included, as another learning rate would.

    Args:
      config: a whole checked config.
      infos: `models.parameter.infos(model)`, the tree of the parameters' shapes, axes and roles, or a part of it.
    """
    c = config.optimizer
    multipliers = c.lr_multipliers.to_dict()
    decay = optax.add_decayed_weights(c.weight_decay, jax.tree.map(lambda info: info.role not in c.no_decay, infos))
    rate = optax.scale_by_learning_rate(schedule)

    if c.name == "adafactor":
        steps = _adafactor(config, schedule, infos)
    elif c.name == "lamb":
        steps = [_scale_by_adam(config), decay, _each_alone(optax.scale_by_trust_ratio(), infos), rate]
    else:
        steps = [_direction(config, infos), decay, rate]
    if multipliers:
        steps.append(_scale_each(jax.tree.map(lambda info: multipliers.get(info.role, 1.0), infos)))
    if c.name == "schedule_free_adamw":
        steps = [contrib.schedule_free(optax.chain(*steps), schedule, c.b1)]
    return optax.chain(*steps)


def evaluation_params(opt_state: optax.OptState, params: Any, fetch: Callable[[Any], Any] = lambda tree: tree) -> Any:
    """The weights to evaluate, export and save as the model: `params`, or schedule-free's average of them.

    `opt_state` is any optimizer's of `make_optimizer`; `fetch` brings what is read of the two to where it is computed.
    """
    states = jax.tree.leaves(opt_state, is_leaf=_is_schedule_free)
    states = [state for state in states if _is_schedule_free(state)]
    if not states:
        return fetch(params)
    return contrib.schedule_free_eval_params(states[0]._replace(z=fetch(states[0].z)), fetch(params))


def _is_schedule_free(state: Any) -> bool:
    return isinstance(state, contrib.ScheduleFreeState)


def check_roles(config: ConfigDict, infos: dict) -> None:
    """Raises ValueError for a role of the optimizer's that does not exist, or that no parameter of the model has."""
    no_decay, multipliers = config.optimizer.no_decay, config.optimizer.lr_multipliers.to_dict()
    for key, roles in (("no_decay", no_decay), ("lr_multipliers", multipliers)):
        for role in roles:
            if role not in ROLES:
                match = difflib.get_close_matches(role, ROLES, n=1)
                hint = f"did you mean {match[0]!r}? " if match else ""
                raise ValueError(f"optimizer.{key}={role!r}: {hint}The roles are {', '.join(ROLES)}")
    present = {info.role for info in jax.tree.leaves(infos)}
    for role in no_decay:
        if role not in present and role not in ("norm_scale", "bias"):  # the usual pair, whatever the model
            raise ValueError(
                f"optimizer.no_decay={role!r}: no parameter of this model has that role; it has "
                f"{', '.join(sorted(present))}"
            )
    for role, factor in multipliers.items():
        if role not in present:
            raise ValueError(
                f"optimizer.lr_multipliers.{role}={factor}: no parameter of this model has that role; it has "
                f"{', '.join(sorted(present))}"
            )


def _direction(config: ConfigDict, infos: dict) -> optax.GradientTransformation:
    """What gradients become before decay and learning rate, in the optimizers where that is all there is."""
    c, b2 = config.optimizer, scaling.b2(config)
    if c.name == "adamw":
        return _scale_by_adam(config)
    if c.name == "adam_mini":
        return scale_by_adam_mini(c.b1, b2, c.eps, c.mu_dtype, adam_mini_blocks(infos, c.blocks))
    if c.name == "lion":
        return optax.scale_by_lion(c.b1, b2, c.mu_dtype)
    if c.name == "sm3":
        return _scale_by_sm3(c.b1, c.eps, infos)
    if c.name == "sgd":
        return optax.trace(c.momentum, accumulator_dtype=c.mu_dtype) if c.momentum else optax.identity()
    if c.name == "muon":
        return _scale_by_muon(config, infos)
    assert c.name == "schedule_free_adamw", c.name
    # AdamW without first moment, as optax.contrib.schedule_free_adamw writes it: the averaging takes its place.
    return optax.scale_by_rms(b2, c.eps, eps_in_sqrt=False, bias_correction=True)


def _scale_by_adam(config: ConfigDict) -> optax.GradientTransformation:
    c = config.optimizer
    adam = optax.scale_by_adam(c.b1, scaling.b2(config), c.eps, mu_dtype=c.mu_dtype)
    if c.nu_dtype == "float32":
        return adam

    def init(params: Any) -> optax.ScaleByAdamState:
        state = adam.init(params)
        return state._replace(nu=optax.tree.cast(state.nu, c.nu_dtype))

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        # In float32 until it is stored: b2 * nu in bfloat16 would round once more.
        updates, state = adam.update(updates, state._replace(nu=optax.tree.cast(state.nu, jnp.float32)), params)
        return updates, state._replace(nu=optax.tree.cast(state.nu, c.nu_dtype))

    return optax.GradientTransformation(init, update)


def _adafactor(config: ConfigDict, schedule: optax.Schedule, infos: dict) -> list[optax.GradientTransformation]:
    """optax.adafactor with its defaults (Shazeer & Stern 2018); b1 is the momentum, 0 for none.

    Here, too, the weight decay is times the learning rate; Optax's is not.
    """
    c = config.optimizer
    decays = jax.tree.map(lambda info: info.role not in c.no_decay, infos)
    steps = [
        _scale_by_factored_rms(infos),
        _each_alone(optax.clip_by_block_rms(1.0), infos),
        optax.scale_by_learning_rate(schedule, flip_sign=False),
        _each_alone(optax.scale_by_param_block_rms(), infos),
    ]
    if c.b1:
        steps.append(optax.ema(c.b1, debias=False, accumulator_dtype=c.mu_dtype))
    if c.weight_decay:
        steps.append(optax.add_decayed_weights(lambda count: c.weight_decay * schedule(count), decays))
    return [*steps, optax.scale(-1)]


def _scale_by_muon(config: ConfigDict, infos: dict) -> optax.GradientTransformation:
    """optax.contrib.muon's directions for the matrices of hidden layers, Adam's for everything else.

    The first are given the root mean square that Adam's have, about 0.2 (Liu et al. 2025, arXiv 2502.16982, section
    2.2), so that both halves share AdamW's learning rate and weight decay.
    """
    c = config.optimizer

    def dimension_numbers(info: Info) -> contrib.MuonDimensionNumbers:
        inputs = fan_in_dims(info.axes, info.role)
        # Dims that are neither inputs nor outputs are a batch of matrices: layers, and a fused projection's parts.
        outputs = tuple(d for d in own_dims(info.axes) if d not in inputs and info.axes[d] != "qkv")
        return contrib.MuonDimensionNumbers(inputs, outputs)

    def rms_factor(info: Info) -> float:
        numbers = dimension_numbers(info)
        sizes = [math.prod(info.shape[d] for d in dims) for dims in numbers]
        return 0.2 * math.sqrt(max(sizes))

    is_matrix = jax.tree.map(lambda info: info.role in _MUON_ROLES, infos)
    matrices = jax.tree.map(lambda info, yes: info if yes else optax.MaskedNode(), infos, is_matrix)
    muon = contrib.scale_by_muon(
        beta=c.momentum,
        eps=c.eps,
        mu_dtype=c.mu_dtype,
        weight_dimension_numbers=jax.tree.map(dimension_numbers, matrices),
    )
    labels = jax.tree.map(lambda yes: "muon" if yes else "adam", is_matrix)
    muon = optax.chain(muon, _scale_each(jax.tree.map(rms_factor, matrices)))
    return optax.partition({"muon": muon, "adam": _scale_by_adam(config)}, labels)


def _scale_by_sm3(b1: float, eps: float, infos: dict) -> optax.GradientTransformation:
    """optax.scale_by_sm3, each layer alone."""
    sm3 = optax.scale_by_sm3(b1, eps=eps)

    def pick(pairs: Any, i: int) -> Any:
        return jax.tree.map(lambda _, pair: pair[i], infos, pairs)

    def init(params: Any) -> optax.ScaleBySM3State:
        states = jax.tree.map(lambda info, p: _over_stacked(sm3.init, info)(p), infos, params)
        return optax.ScaleBySM3State(pick(states, 0), pick(states, 1))

    def update(updates: Any, state: optax.ScaleBySM3State, params: Any = None) -> tuple[Any, optax.ScaleBySM3State]:
        del params

        def leaf(info: Info, update: jax.Array, mu: list[jax.Array], nu: jax.Array) -> tuple:
            update, state = _over_stacked(sm3.update, info)(update, optax.ScaleBySM3State(mu, nu))
            return update, *state

        new = jax.tree.map(leaf, infos, updates, state.mu, state.nu)
        return pick(new, 0), optax.ScaleBySM3State(pick(new, 1), pick(new, 2))

    return optax.GradientTransformation(init, update)


def _scale_by_factored_rms(infos: dict) -> optax.GradientTransformation:
    """optax.scale_by_factored_rms, each layer alone, seen as [inputs, outputs]: a head's few dims are no side."""
    rms = optax.scale_by_factored_rms(min_dim_size_to_factor=_MIN_FACTORED)

    def view(info: Info, x: jax.Array) -> jax.Array:
        own, inputs = own_dims(info.axes), fan_in_dims(info.axes, info.role)
        if len(own) < 3 or inputs != own[: len(inputs)]:
            return x
        sides = [math.prod(x.shape[d] for d in dims) for dims in (inputs, own[len(inputs) :])]
        if min(sides) < _MIN_FACTORED:
            return x
        return x.reshape(*x.shape[: x.ndim - len(own)], *sides)

    def pick(results: Any, i: int) -> Any:
        return jax.tree.map(lambda _, result: result[i], infos, results)

    def init(params: Any) -> optax.FactoredState:
        states = jax.tree.map(lambda info, p: tuple(_over_stacked(rms.init, info)(view(info, p))), infos, params)
        return optax.FactoredState(*(pick(states, i) for i in range(len(optax.FactoredState._fields))))

    def update(updates: Any, state: optax.FactoredState, params: Any) -> tuple[Any, optax.FactoredState]:
        def one(update: jax.Array, param: jax.Array, *fields: jax.Array) -> tuple:
            update, new = rms.update(update, optax.FactoredState(*fields), param)
            return update, *new

        def leaf(info: Info, update: jax.Array, param: jax.Array, *fields: jax.Array) -> tuple:
            scaled, *new = _over_stacked(one, info)(view(info, update), view(info, param), *fields)
            return scaled.reshape(update.shape), *new

        results = jax.tree.map(leaf, infos, updates, params, *state)
        updates, *fields = (pick(results, i) for i in range(1 + len(optax.FactoredState._fields)))
        return updates, optax.FactoredState(*fields)

    return optax.GradientTransformation(init, update)


def _each_alone(tx: optax.GradientTransformation, infos: dict) -> optax.GradientTransformation:
    """A stateless `tx` that looks at one parameter at a time, made to look at one layer of it at a time."""

    def leaf(info: Info, update: jax.Array, param: jax.Array) -> jax.Array:
        return _over_stacked(lambda u, p: tx.update(u, optax.EmptyState(), p)[0], info)(update, param)

    return optax.stateless(lambda updates, params: jax.tree.map(leaf, infos, updates, params))


def _over_stacked(function: Callable, info: Info) -> Callable:
    """`function` of one parameter as a function of the stack of them that `info` describes."""
    for _ in range(len(info.axes) - len(own_dims(info.axes))):
        function = jax.vmap(function)
    return function


def _scale_each(factors: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: jax.tree.map(lambda u, factor: factor * u, updates, factors))
