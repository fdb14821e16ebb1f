"""The optimizers: against AdamW written out in float64, against Optax's own, and by what roles and dtypes do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jaxpretrain import config as config_lib
from jaxpretrain.models import registry
from jaxpretrain.models.parameter import Info, infos
from jaxpretrain.optim.adam_mini import adam_mini
from jaxpretrain.optim.blocks import adam_mini_blocks
from jaxpretrain.optim.factory import check_roles, evaluation_params, make_optimizer
from jaxpretrain.optim.schedules import make_schedule
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.schema import CHOICES, OPTIMIZERS_THAT_READ
from jaxpretrain.step import make_train_step

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
        gradients = {name: rng.normal(size=(3, 4)) * (0.05 if t % 2 else 0.5) for name in params}
        for name, g in gradients.items():
            m[name] = c.b1 * m[name] + (1 - c.b1) * g
            v[name] = c.b2 * v[name] + (1 - c.b2) * g**2
            step = m[name] / (1 - c.b1**t) / (np.sqrt(v[name] / (1 - c.b2**t)) + c.eps)
            if _ROLES[name] not in c.no_decay:
                step = step + c.weight_decay * params[name]
            params[name] = params[name] - float(schedule(t - 1)) * step
        updates, state = update(jax.tree.map(jnp.float32, gradients), state, ours)
        ours = optax.apply_updates(ours, updates)
        yield ours, params


@pytest.mark.parametrize("no_decay", [("norm_scale", "bias"), ("embedding",), ()])
def test_adamw_equals_the_formulas(no_decay):
    """Fails if decay is coupled or if the mask is inverted (each tried)."""
    for ours, expected in follow(make_config(no_decay=no_decay)):
        for name in expected:
            np.testing.assert_allclose(ours[name], expected[name], atol=2e-6, err_msg=name)


def test_role_that_does_not_exist():
    config = make_config(no_decay=("norm_scales",))
    with pytest.raises(
        ValueError, match=r"^optimizer\.no_decay='norm_scales': did you mean 'norm_scale'\? The roles are .*norm_scale"
    ):
        check_roles(config, {})


def test_role_that_no_parameter_has():
    """But for the usual pair, which a model without biases may name too. Fails without the comparison."""
    make(config_of("adamw", no_decay=("norm_scale", "bias")), {"up": INFOS["up"]})
    with pytest.raises(ValueError, match=r"^optimizer\.no_decay='unembedding': no parameter of this model"):
        make(config_of("adamw", no_decay=("bias", "unembedding")))


# ---- every optimizer, on a small tree with stacked layers

NAMES = CHOICES["optimizer.name"]
F32 = jnp.dtype(jnp.float32)
INFOS = {
    "embed": Info((20, 8), F32, ("vocab", "embed"), "embedding"),
    "query": Info((2, 8, 2, 4), F32, ("layers", "embed", "heads", "head_dim"), "query"),
    "out": Info((2, 2, 4, 8), F32, ("layers", "heads", "head_dim", "embed"), "attn_out"),
    "up": Info((2, 130, 128), F32, ("layers", "embed", "mlp"), "mlp_in"),  # large enough for Adafactor to factor
    "bias": Info((2, 12), F32, ("layers", "mlp"), "bias"),
    "scale": Info((8,), F32, ("embed",), "norm_scale"),
}
MATRICES = ("query", "out", "up")
RATE, DECAY = 0.02, 0.3


def config_of(name, **optimizer):
    """A checked config at a constant rate; of the other settings those that `name` reads."""
    config = config_lib.default()
    config.schedule.name = "constant"
    settings = dict(b1=0.8, b2=0.9, eps=1e-3, momentum=0.7)
    settings = {key: value for key, value in settings.items() if name in OPTIMIZERS_THAT_READ[key]}
    config.optimizer.update(dict(name=name, learning_rate=RATE, weight_decay=DECAY) | settings, **optimizer)
    config_lib.check(config)
    return config


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: jnp.float32(scale * rng.normal(size=info.shape)) for name, info in INFOS.items()}


def follow_tree(optimizer, params, gradients):
    """(params, state) after all `gradients`, and the updates of the first."""
    state, update, first = optimizer.init(params), jax.jit(optimizer.update), None
    for g in gradients:
        updates, state = update(g, state, params)
        first = updates if first is None else first
        params = optax.apply_updates(params, updates)
    return params, state, first


def make(config, infos=INFOS):
    check_roles(config, infos)
    return make_optimizer(config, make_schedule(config), infos)


def unstacked(tree):
    """The tree with a leaf for each layer."""
    layers = {name: range(2) if INFOS[name].axes[0] == "layers" else (None,) for name in tree}
    return {(name, i): tree[name] if i is None else layer(tree[name], i) for name in tree for i in layers[name]}


def layer(x, i):
    return Info(x.shape[1:], x.dtype, x.axes[1:], x.role) if isinstance(x, Info) else x[i]


def counterpart(name, infos):
    """The optimizer of `config_of(name)` as Optax has it, for a tree of `infos` in which nothing is stacked."""
    decays = {key: info.role not in ("norm_scale", "bias") for key, info in infos.items()}
    own_decay = optax.add_decayed_weights(-RATE * DECAY, decays)
    adam = dict(b1=0.8, b2=0.9, eps=1e-3)
    if name == "adamw":
        return optax.adamw(RATE, **adam, weight_decay=DECAY, mask=decays)
    if name == "adam_mini":
        return adam_mini(RATE, **adam, weight_decay=DECAY, mask=decays, blocks=adam_mini_blocks(infos, "v1_1"))
    if name == "adafactor":
        return optax.adafactor(RATE, momentum=0.8, weight_decay_rate=RATE * DECAY, weight_decay_mask=decays)
    if name == "lion":
        return optax.lion(RATE, 0.8, 0.9, weight_decay=DECAY, mask=decays)
    if name == "lamb":
        return optax.lamb(RATE, **adam, weight_decay=DECAY, mask=decays)
    if name == "sm3":
        sm3 = optax.chain(optax.scale_by_sm3(0.8, eps=1e-3), optax.scale(-RATE))
        return optax.chain(sm3, own_decay)
    if name == "sgd":
        return optax.chain(optax.sgd(RATE, 0.7), own_decay)
    if name == "muon":
        numbers = {"query": ((0,), (1, 2)), "out": ((0, 1), (2,)), "up": ((0,), (1,))}
        numbers = {key: contrib.MuonDimensionNumbers(*numbers[key[0]]) if key[0] in numbers else None for key in infos}
        settings = dict(beta=0.7, eps=1e-3, consistent_rms=0.2, muon_weight_dimension_numbers=lambda _: numbers)
        # Optax's own rest has Nesterov momentum; ours is plain Adam, as in the paper.
        halves = {"muon": contrib.muon(RATE, **settings), "adam": optax.adam(RATE, **adam)}
        labels = {key: "muon" if key[0] in MATRICES else "adam" for key in infos}
        return optax.chain(optax.partition(halves, labels), own_decay)
    assert name == "schedule_free_adamw"
    base = optax.adamw(RATE, b1=0, b2=0.9, eps=1e-3, weight_decay=DECAY, mask=decays)
    return contrib.schedule_free(base, RATE, b1=0.8)


@pytest.mark.parametrize("name", NAMES)
def test_equals_optax_without_stacking(name):
    """Each layer of a stack is updated as a parameter of its own would be by Optax.

    Fails, for lamb, adafactor and sm3, if _over_stacked returns `function`; for muon, if the stacked dim is an output
    (`range(len(info.axes))` for own_dims), or 0.2 becomes 1; for adafactor, if the decay is not times the rate (tried).
    """
    params, gradients = draw(0), [draw(seed, 0.002 * 10**seed) for seed in range(1, 4)]  # norms around 4, 40, 400
    ours, _, _ = follow_tree(make(config_of(name)), params, gradients)
    optimizer = counterpart(name, unstacked(INFOS))
    expected, _, _ = follow_tree(optimizer, unstacked(params), list(map(unstacked, gradients)))
    for key, value in unstacked(ours).items():
        np.testing.assert_allclose(value, expected[key], atol=2e-6, rtol=2e-5, err_msg=str(key))


@pytest.mark.parametrize("name", NAMES)
def test_no_decay_is_by_role(name):
    """Fails if the mask is inverted."""
    params, gradients = draw(0), [draw(1)]
    decayed, _, _ = follow_tree(make(config_of(name, no_decay=("embedding", "mlp_in"))), params, gradients)
    plain, _, _ = follow_tree(make(config_of(name, weight_decay=0.0)), params, gradients)
    same = {key for key in params if (decayed[key] == plain[key]).all()}
    assert same == {"embed", "up"}


@pytest.mark.parametrize("name", NAMES)
def test_lr_multipliers_are_by_role(name):
    """They multiply the whole update, the decay too; 0 freezes a role.

    Fails if the multipliers come before the decay, or, for schedule_free_adamw, after the averaging (tried).
    """
    params, gradients = draw(0), [draw(seed) for seed in (1, 2, 3)]
    with_factors = make(config_of(name, lr_multipliers=dict(embedding=0.5, mlp_in=0.0, bias=1.0)))
    scaled, state, first = follow_tree(with_factors, params, gradients)
    plain, _, first_plain = follow_tree(make(config_of(name)), params, gradients)
    np.testing.assert_allclose(first["embed"], 0.5 * first_plain["embed"], atol=5e-7)
    for weights in (scaled, evaluation_params(state, scaled)):
        np.testing.assert_allclose(weights["up"], params["up"], rtol=1e-6)
    for key in params.keys() - {"embed", "up"}:
        np.testing.assert_allclose(scaled[key], plain[key], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_loss_falls(name):
    """Of a quadratic."""
    target, params = draw(0), draw(1)
    rate = dict(sgd=0.3, adafactor=0.3, sm3=0.3).get(name, 0.03)
    optimizer = make(config_of(name, learning_rate=rate, weight_decay=0.0))
    state, update = optimizer.init(params), jax.jit(optimizer.update)

    def loss(params):
        return sum(float(jnp.square(params[key] - target[key]).mean()) for key in params)

    before = loss(params)
    for _ in range(40):
        gradients = jax.tree.map(jnp.subtract, params, target)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    assert loss(evaluation_params(state, params)) < 0.8 * before


# ---- in the training step


@pytest.mark.parametrize("name", ["adam_mini", "adafactor", "sm3", "muon", "schedule_free_adamw"])
def test_trains_a_sharded_transformer(name):
    """Those whose state is more than a moment or two of the parameters' shapes; the others are laid out as adamw is.

    Loss falls over donated steps, moments are sharded as the parameters are, and so are the weights to evaluate.
    """
    config = config_lib.default()
    config.batch_size, config.seq_len, config.micro_batch_size, config.steps = 8, 16, 1, 100
    config.model.update(dict(vocab_size=32, num_layers=2, embed_dim=16, num_heads=2))
    config.parallel.strategy = "fsdp"
    config.schedule.name = "constant"
    config.optimizer.update(dict(name=name, learning_rate=0.1 if name == "adafactor" else 0.01))
    config_lib.check(config)
    step = make_train_step(config, make_mesh("fsdp"))
    tokens = np.random.default_rng(0).integers(0, 32, (8, 17)).astype(np.int32)
    batch = {"tokens": jax.device_put(tokens, step.batch["tokens"].sharding)}
    state, losses = step.init(), []
    for _ in range(5):
        state, metrics = step.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.02
    weights = jax.jit(evaluation_params)(state.opt_state, state.params)
    assert jax.tree.all(
        jax.tree.map(lambda w, p: w.sharding.is_equivalent_to(p.sharding, p.ndim), weights, state.params)
    )
    sharded = [not x.sharding.is_fully_replicated for x in jax.tree.leaves(state.opt_state) if x.size >= 512]
    assert all(sharded) and len(sharded) >= 6  # the embeddings and four matrices per block


# ---- what is kept of a parameter


def state_of(name, **optimizer):
    """The abstract state of a transformer's optimizer, its infos and its number of parameters."""
    config = config_of(name, **optimizer)
    config.model.update(dict(vocab_size=512, num_layers=2, embed_dim=256, num_heads=8, tied_embeddings=True))
    parameters = infos(registry.build(config))
    shapes = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), parameters)
    state = jax.eval_shape(make(config, parameters).init, shapes)
    return state, parameters, sum(x.size for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    "name, settings, expected",
    [
        ("adamw", {}, 8),
        ("adamw", dict(mu_dtype="bfloat16"), 6),
        ("adamw", dict(mu_dtype="bfloat16", nu_dtype="bfloat16"), 4),
        ("adam_mini", {}, 4),
        ("adam_mini", dict(mu_dtype="bfloat16"), 2),
        ("adam_mini", dict(mu_dtype="int8"), 1.06),  # a scale for each 32 elements of a head
        ("adafactor", {}, 4),
        ("adafactor", dict(mu_dtype="bfloat16"), 2),
        ("adafactor", dict(b1=0.0), 0),
        ("lion", {}, 4),
        ("lion", dict(mu_dtype="bfloat16"), 2),
        ("lamb", dict(mu_dtype="bfloat16"), 6),
        ("sm3", {}, 4),
        ("sgd", {}, 4),
        ("sgd", dict(mu_dtype="bfloat16"), 2),
        ("sgd", dict(momentum=0.0), 0),
        ("muon", {}, 4.33),  # 8 bytes for the 8% that are embeddings, norms and biases here
        ("muon", dict(mu_dtype="bfloat16"), 2.33),
        ("schedule_free_adamw", {}, 8),
    ],
)
def test_state_bytes_and_dtypes(name, settings, expected):
    """The bytes per parameter of docs/optimizers.md; what is not asked to be smaller is float32.

    Fails, for adafactor, if heads of 32 dims are not seen as parts of a matrix."""
    state, _, num_params = state_of(name, **settings)
    leaves = jax.tree.leaves(state)
    assert sum(x.size * x.dtype.itemsize for x in leaves) / num_params == pytest.approx(expected, abs=0.06)
    asked = {settings.get(key, "float32") for key in ("mu_dtype", "nu_dtype")}
    assert {str(x.dtype) for x in leaves if x.size > 2} <= {"float32", *asked}
    assert asked - {"float32"} <= {str(x.dtype) for x in leaves}


def test_state_stays_in_its_dtypes():
    """Fails if update does not cast nu back (`return updates, state`): the state would be float32 after a step."""
    optimizer = make(config_of("adamw", mu_dtype="bfloat16", nu_dtype="bfloat16"))
    before = optimizer.init(draw(0))
    _, after, _ = follow_tree(optimizer, draw(0), [draw(1), draw(2)])
    assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)
    assert after[0].nu["up"].dtype == after[0].mu["up"].dtype == jnp.bfloat16


def test_bfloat16_moments_stay_close():
    """To 1%, of an update of about 1 per step, after 20 steps: rounding once a step, relative 2^-9."""
    gradients = [draw(seed) for seed in range(20)]
    exact, _, _ = follow_tree(make(config_of("adamw")), draw(0), gradients)
    rounded = make(config_of("adamw", mu_dtype="bfloat16", nu_dtype="bfloat16"))
    rounded, _, _ = follow_tree(rounded, draw(0), gradients)
    error = max(float(jnp.abs(exact[key] - rounded[key]).max()) for key in exact)
    assert 0 < error < 20 * RATE * 0.01


def test_muon_gets_exactly_the_matrices():
    """Of the hidden layers of a transformer. Fails if "embedding" joins _MUON_ROLES."""
    state, parameters, _ = state_of("muon")
    inner = state[0].inner_states["muon"].inner_state[0]
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(inner.mu)}
    matrices = ("query", "key", "value", "attn_out", "mlp_in", "mlp_out")
    flat = jax.tree_util.tree_leaves_with_path(parameters)
    assert paths == {jax.tree_util.keystr(path) for path, info in flat if info.role in matrices}
    assert len(paths) == 6
    adam = state[0].inner_states["adam"].inner_state
    assert len(jax.tree.leaves(adam.mu)) == len(flat) - 6


# ---- schedule-free


@pytest.mark.parametrize("num_warmup", [0, 3])
def test_schedule_free_average(num_warmup):
    """The recursion of Defazio et al. 2024 (arXiv 2405.15682, section 2 with AdamW), in float64, on given gradients.

    z is what the base optimizer moves, x the average that is evaluated, y = (1 - b1) z + b1 x the parameters. Weights
    are squares of the largest rate so far; Optax reads the rate one step ahead there.
    Fails if evaluation_params returns `params`, or if the base keeps a momentum (scale_by_adam for scale_by_rms).
    """
    config = config_of("schedule_free_adamw")
    config.schedule.warmup_steps = num_warmup
    schedule = make_schedule(config)
    c, params = config.optimizer, draw(0)
    gradients = [draw(seed) for seed in range(1, 8)]
    y, state, _ = follow_tree(make(config), params, gradients)
    ours = jax.jit(evaluation_params)(state, y)
    for key, info in INFOS.items():
        x = z = np.float64(params[key])
        v, total = 0, 0
        for t, g in enumerate(gradients, 1):
            g, y_t = np.float64(g[key]), (1 - c.b1) * z + c.b1 * x
            v = c.b2 * v + (1 - c.b2) * g**2
            decay = DECAY * y_t if info.role not in c.no_decay else 0
            z = z - float(schedule(t - 1)) * (g / (np.sqrt(v / (1 - c.b2**t)) + c.eps) + decay)
            weight = float(schedule(t)) ** 2
            total += weight
            x = x + weight / total * (z - x)
        np.testing.assert_allclose(ours[key], x, atol=3e-6, err_msg=key)
        np.testing.assert_allclose(y[key], (1 - c.b1) * z + c.b1 * x, atol=3e-6, err_msg=key)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "schedule_free_adamw"])
def test_other_optimizers_evaluate_the_parameters(name):
    params = draw(0)
    assert evaluation_params(make(config_of(name)).init(params), params) is params


# ---- errors, and rules by batch size


def test_multiplier_of_a_role_that_no_parameter_has():
    with pytest.raises(ValueError, match=r"^optimizer\.lr_multipliers\.value=2\.0: no parameter of this model has"):
        make(config_of("adamw", lr_multipliers=dict(value=2.0)))
    with pytest.raises(
        ValueError, match=r"^optimizer\.lr_multipliers='values': did you mean 'value'\? The roles are .*value"
    ):
        make(config_of("adamw", lr_multipliers=dict(values=2.0)))


@pytest.mark.parametrize("name", ["adamw", "adam_mini", "lion", "lamb", "muon", "schedule_free_adamw"])
def test_b2_by_batch_size(name):
    """Four times the batch, b2 to the fourth power: equal to that b2 without a rule. Fails if _direction reads c.b2."""
    config = config_of(name)
    config.batch_size = 32
    config.scaling.base_batch_size, config.scaling.b2 = 8, "tokens"
    gradients = [draw(1), draw(2)]
    ours, _, _ = follow_tree(make(config), draw(0), gradients)
    expected, _, _ = follow_tree(make(config_of(name, b2=0.9**4)), draw(0), gradients)
    for key in ours:
        np.testing.assert_array_equal(ours[key], expected[key])
