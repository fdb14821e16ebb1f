"""The training step: the same losses, gradients and updates on any layout, and what it does when numbers overflow."""

import dataclasses
import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpretrain import config as config_lib
from jaxpretrain import losses
from jaxpretrain import step as step_lib
from jaxpretrain.models import registry
from jaxpretrain.models.parameter import infos
from jaxpretrain.ops import attention
from jaxpretrain.parallel.mesh import make_mesh

BATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 8, 16, 61  # a prime number of rows: 8 devices cannot share them
_MODELS = {
    "pythia": dict(parallel_residual=True, init="gpt_neox"),
    "llama": dict(
        norm="rmsnorm",
        norm_bias=False,
        activation="silu",
        gated_mlp=True,
        attention_bias=False,
        mlp_bias=False,
        num_kv_heads=2,
        tied_embeddings=True,
        init="mitchell",
    ),
}


def make_config(model: str, strategy: str, micro_batch_size: int, **overrides):
    config = config_lib.default()
    config.steps, config.batch_size, config.seq_len, config.micro_batch_size = 20, BATCH_SIZE, SEQ_LEN, micro_batch_size
    config.model.update(dict(vocab_size=VOCAB_SIZE, num_layers=2, embed_dim=32, num_heads=4), **_MODELS[model])
    config.data.isolate_documents = True
    config.optimizer.learning_rate = 3e-3
    config.schedule.warmup_steps = 2
    config.parallel.strategy = strategy
    config.precision.compute = "float32"
    for key, value in overrides.items():
        config_lib.override(config, key.replace("__", "."), str(value))
    config_lib.check(config)
    return config


@functools.cache
def train_step_of(model, strategy, num_devices, micro_batch_size, **overrides) -> step_lib.TrainStep:
    """Cached, so that tests of one layout share its compiled step."""
    mesh = make_mesh(strategy, jax.devices()[:num_devices])
    return step_lib.make_train_step(make_config(model, strategy, micro_batch_size, **overrides), mesh)


def make_batch(train_step, i: int) -> dict:
    """Rows of two documents of uneven lengths; the last rows hold little but padding."""
    rng = np.random.default_rng(i)
    tokens = rng.integers(0, VOCAB_SIZE, (BATCH_SIZE, SEQ_LEN + 1))
    index = np.arange(SEQ_LEN + 1)
    segment_ids = 1 + (index >= rng.integers(1, SEQ_LEN, (BATCH_SIZE, 1)))
    lengths = np.array([17, 17, 16, 13, 9, 5, 3, 1])[:, None]
    segment_ids = np.where(index < lengths, segment_ids, 0)
    batch = dict(tokens=tokens, segment_ids=segment_ids)
    return {name: jax.device_put(x.astype(np.int32), train_step.batch[name].sharding) for name, x in batch.items()}


@functools.cache
def run(*layout, **overrides):
    """Losses and gradient norms of 20 steps, and the last state."""
    train_step = train_step_of(*layout, **overrides)
    state, history = train_step.init(), []
    for i in range(20):
        state, metrics = train_step.step(state, make_batch(train_step, i))
        history.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(history).T, state


_ONE = ("ddp", 1, BATCH_SIZE)
_LAYOUTS = [("ddp", 8, 1), ("fsdp", 8, 1)]
_HORIZONS = (100, 5_000)  # a batch has about 70 tokens
_AVERAGES = dict(average__horizons=_HORIZONS)


def host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_bitwise_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, host(one), host(other))


# --- Layouts


@pytest.mark.parametrize("layout", _LAYOUTS, ids=str)
@pytest.mark.parametrize("model", _MODELS)
def test_layouts_give_the_losses_of_one_device(model, layout):
    """Fails if `reduce` forgets an axis, if the tokens counted are not the global batch's, or if what is gathered is
    not in the order of its shards (each tried)."""
    (expected_loss, expected_norm), expected_state = run(model, *_ONE)
    (loss, norm), state = run(model, *layout)
    np.testing.assert_allclose(loss, expected_loss, rtol=0, atol=1e-5)
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected_state.params), strict=True):
        # Adam divides by the gradient's size: where that is near 0, rounding decides the direction.
        np.testing.assert_allclose(np.median(np.abs(np.asarray(a) - np.asarray(b))), 0, atol=1e-6)
    assert loss[-5:].mean() < loss[:5].mean()


def test_initial_state_is_the_same_on_every_layout():
    """Up to the last bit of a multiplication."""
    states = [host(train_step_of("llama", *layout).init()) for layout in (_ONE, *_LAYOUTS)]
    for state in states[1:]:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), state, states[0])


@pytest.mark.parametrize("layout", _LAYOUTS, ids=str)
def test_bfloat16_follows_float32(layout):
    (expected, _), _ = run("llama", *_ONE)
    (loss, _), state = run("llama", *layout, precision__compute="bfloat16")
    np.testing.assert_allclose(loss, expected, rtol=0, atol=0.02)
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state))} == {
        np.dtype(np.float32),
        np.dtype(np.int32),
    }
    kernel = np.asarray(state.params["layers"]["mlp"]["up"]["kernel"])  # masters hold what bfloat16 cannot
    assert (kernel != kernel.astype(jnp.bfloat16)).mean() > 0.9


def test_evaluation_and_logits_on_shards():
    """`evaluate` sums what the step's loss averages, and `logits` needs no rows to spare for 8 devices."""
    one, sharded = train_step_of("llama", *_ONE), train_step_of("llama", "fsdp", 8, 1)
    params = sharded.init().params
    sums = sharded.evaluate(params, make_batch(sharded, 0))
    _, metrics = sharded.step(sharded.init(), make_batch(sharded, 0))
    assert sharded.eval_batch_size == one.eval_batch_size == BATCH_SIZE
    assert float(sums["tokens"]) == float(metrics["num_tokens"])
    assert float(sums["loss"] / sums["targets"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    tokens = jnp.arange(3 * 7).reshape(3, 7)
    logits = sharded.logits(params, tokens)
    assert logits.shape == (3, 7, VOCAB_SIZE) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, one.logits(one.init().params, tokens), atol=1e-5)


# --- Gradients: Adam's first moment is the gradient where b1 is 0.

_CLIP = 0.5
_GRADIENT = dict(optimizer__b1=0.0, optimizer__clip=_CLIP, schedule__warmup_steps=0)


@functools.cache
def one_update(*layout):
    """Loss, gradient norm and clipped gradients of the first step."""
    train_step = train_step_of(*layout, **_GRADIENT)
    state, metrics = train_step.step(train_step.init(), make_batch(train_step, 0))
    (moments,) = [s for s in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(s)]
    return float(metrics["loss"]), float(metrics["grad_norm"]), host(moments.mu)


def _is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)


@functools.cache
def reference_update(model):
    """The same from the model, as one batch and one formula: mean over all valid tokens."""
    config = make_config(model, "ddp", BATCH_SIZE)
    module = registry.make(config)
    graphdef, params = nnx.split(module)
    batch = host(make_batch(train_step_of(model, *_ONE, **_GRADIENT), 0))
    inputs, segment_ids, targets, mask = losses.targets_and_mask(batch)
    attend = functools.partial(attention.attend, implementation="xla")

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        logits = nnx.merge(graphdef, params)(inputs, segment_ids, attend=attend)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return -(picked * mask).sum() / mask.sum()

    loss, gradients = loss(nnx.to_pure_dict(params))
    norm = math.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(gradients)))
    assert norm > _CLIP
    return float(loss), norm, jax.tree.map(lambda g: np.asarray(g) * _CLIP / norm, gradients)


def test_a_small_gradient_is_not_clipped():
    """Fails if the norm is brought up to the clip as well as down to it."""
    train_step = train_step_of("llama", *_ONE, **{**_GRADIENT, "optimizer__clip": 1e6})
    state, metrics = train_step.step(train_step.init(), make_batch(train_step, 0))
    (moments,) = [s for s in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(s)]
    _, norm, clipped = reference_update("llama")
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)
    for ours, expected in zip(jax.tree.leaves(moments.mu), jax.tree.leaves(clipped), strict=True):
        np.testing.assert_allclose(ours, expected * norm / _CLIP, atol=2e-6 * norm)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("llama", ("ddp", 1, micro_batch_size)) for micro_batch_size in (8, 4, 2, 1)),
        *(("llama", layout) for layout in (("ddp", 8, 1), ("fsdp", 8, 1), ("fsdp", 4, 1))),
        ("pythia", ("ddp", 1, 2)),
        ("pythia", ("fsdp", 4, 2)),
    ],
)
def test_gradients_are_those_of_the_whole_batch(model, layout):
    """Micro-batches and shards hold unequal numbers of valid tokens. Fails if each micro-batch is divided by its own
    number of tokens (the mean of means), if only the last one counts, or if one parameter's is 1 % off (each tried)."""
    loss, norm, gradients = one_update(model, *layout)
    expected_loss, expected_norm, expected = reference_update(model)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), gradients, expected)


# --- Memory and compilation


def bytes_of(tree, device) -> int:
    return sum(
        shard.data.nbytes for x in jax.tree.leaves(tree) for shard in x.addressable_shards if shard.device == device
    )


@pytest.mark.parametrize("layout", _LAYOUTS, ids=str)
@pytest.mark.parametrize("model", _MODELS)
def test_bytes_per_device_match_arithmetic(model, layout):
    """Masters and two moments; fails if `init` loses `out_shardings` or moments take no sharding (each tried)."""
    train_step = train_step_of(model, *layout)
    state = train_step.init()
    num_elements = 0
    for info in jax.tree.leaves(infos(registry.build(make_config(model, layout[0], 1)))):
        dims = [size for size, axis in zip(info.shape, info.axes, strict=True) if axis != "layers"]
        divides = layout[0] == "fsdp" and any(size % 8 == 0 for size in dims)
        num_elements += math.prod(info.shape) // (8 if divides else 1)
    for _ in range(2):
        for device in jax.devices():
            assert bytes_of(state.params, device) == 4 * num_elements
            assert bytes_of((state.opt_state, state.params), device) - 3 * 4 * num_elements in (4, 8)  # counts
        state, _ = train_step.step(state, make_batch(train_step, 0))
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, train_step.state)


def test_initial_state_is_never_whole_on_a_device():
    """Each device draws its own part of the numbers; fails without `out_shardings` (tried)."""
    overrides = dict(model__embed_dim=256, model__vocab_size=1021)
    train_step = train_step_of("llama", "fsdp", 8, 1, **overrides)
    whole = sum(4 * math.prod(p.shape) for p in jax.tree.leaves(train_step.state.params))
    memory = train_step.init.lower().compile().memory_analysis()
    assert memory.output_size_in_bytes < 3 * whole / 8 * 1.05
    assert memory.temp_size_in_bytes < whole / 4


@pytest.mark.parametrize("layout", [_ONE, *_LAYOUTS], ids=str)
def test_state_is_donated_and_nothing_compiles_twice(layout):
    """Fails without `donate_argnums` (tried)."""
    train_step = train_step_of("llama", *layout, **_AVERAGES)
    state, batch = train_step.init(), make_batch(train_step, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Some donated buffers were not usable"
        train_step.step.lower(train_step.state, train_step.batch).compile()
        new, _ = train_step.step(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in batch.values())
    train_step.step(train_step.step(new, batch)[0], batch)
    assert train_step.step._cache_size() == 1


# --- Averages


@pytest.mark.parametrize("layout", [("ddp", 1, 2), *_LAYOUTS], ids=str)
def test_averages_of_the_weights(layout):
    """Of all weights there have been, by their tokens; a step counts once however many micro-batches it has (four,
    here on one device), and each device holds no more of an average than of the parameters.

    Fails if padding counts as tokens, or if a horizon takes another's average (each tried).
    """
    train_step = train_step_of("llama", *layout, **_AVERAGES)
    state, history, tokens = train_step.init(), [], []
    for i in range(6):
        state, metrics = train_step.step(state, make_batch(train_step, i))
        history.append(jax.tree.map(lambda x: np.array(x, np.float64), state.params))
        tokens.append(float(metrics["num_tokens"]))
    assert len(set(tokens)) > 1 and state.averages.tokens.tolist() == [sum(tokens), 0]
    since = sum(tokens) - np.cumsum(tokens)
    for horizon in _HORIZONS:
        counts = np.exp(-since / horizon) * (1 - np.exp(-np.array(tokens) / horizon))
        expected = jax.tree.map(lambda *x, counts=counts: np.average(np.stack(x), 0, counts), *history)
        average = step_lib.weights(state, horizon)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), average, expected)
        assert_laid_out(average, train_step.strategy.shardings)
    for average in state.averages.averages:
        assert_laid_out(average, train_step.strategy.shardings)


def assert_laid_out(tree, shardings):
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), tree, shardings)))


def test_weights_are_the_parameters_without_a_copy():
    """Fails if `weights` is jitted (tried)."""
    state = train_step_of("llama", "fsdp", 8, 1).init()
    assert all(map(lambda a, b: a is b, *map(jax.tree.leaves, (step_lib.weights(state), state.params))))
    with pytest.raises(ValueError, match="no average over 100 tokens; average.horizons is empty"):
        step_lib.weights(state, 100)
    state = train_step_of("llama", "fsdp", 8, 1, **_AVERAGES).init()
    with pytest.raises(ValueError, match="no average over 7 tokens; there are averages over 100, 5,000"):
        step_lib.weights(state, 7)


_SCHEDULE_FREE = dict(optimizer__name="schedule_free_adamw", schedule__name="constant", schedule__warmup_steps=0)


def test_schedule_free_weights():
    """They are x, laid out as the parameters y, and both begin at the parameters given to `init`.

    Fails if the optimizer's state begins from parameters drawn anew (tried: they replaced in the initial state).
    """
    train_step = train_step_of("llama", "fsdp", 8, 1, **_SCHEDULE_FREE)
    given = jax.tree.map(lambda x: jax.device_put(jnp.full(x.shape, 0.5), x.sharding), train_step.state.params)
    state = train_step.init(given)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, 0.5, rtol=1e-6), step_lib.weights(state))
    state = train_step.init()
    for i in range(3):
        state, _ = train_step.step(state, make_batch(train_step, i))
    (inner,) = [s for s in jax.tree.leaves(state.opt_state, is_leaf=_is_schedule_free) if _is_schedule_free(s)]
    b1 = float(inner.b1)
    expected = jax.tree.map(lambda y, z: (np.asarray(y) - (1 - b1) * np.asarray(z)) / b1, state.params, inner.z)
    weights = step_lib.weights(state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), weights, expected)
    assert not np.allclose(weights["embed"]["embedding"], state.params["embed"]["embedding"], atol=1e-5)
    assert_laid_out(weights, train_step.strategy.shardings)
    assert_laid_out(inner.z, train_step.strategy.shardings)


def _is_schedule_free(x):
    return isinstance(x, optax.contrib.ScheduleFreeState)


# --- Numbers that overflow


def poison(params):
    """One infinite weight of an MLP: neither the loss nor its gradients are finite."""
    poisoned = jax.tree.map(jnp.copy, params)
    kernel = poisoned["layers"]["mlp"]["down"]["kernel"]
    poisoned["layers"]["mlp"]["down"]["kernel"] = jax.device_put(kernel.at[0, 0, 0].set(jnp.inf), kernel.sharding)
    return poisoned


@pytest.mark.parametrize("layout", [_ONE, ("fsdp", 8, 1)], ids=str)
def test_non_finite_gradients_skip_the_update_and_are_counted(layout):
    """Fails if the optimizer's state, or the averages, are not put back (tried: `jnp.where` without them)."""
    train_step = train_step_of("llama", *layout, **_AVERAGES)
    batch = make_batch(train_step, 0)
    state, _ = train_step.step(train_step.init(), batch)
    good = host(state.params)
    state = dataclasses.replace(state, params=poison(state.params))
    before = host((state.params, state.opt_state, state.averages))
    for bad_steps in (1, 2):
        state, metrics = train_step.step(state, batch)
        assert_bitwise_equal((state.params, state.opt_state, state.averages), before)
        assert int(state.bad_steps) == int(metrics["bad_steps"]) == bad_steps
        assert int(state.skipped) == int(metrics["skipped"]) == bad_steps
        assert int(state.step) == 1 + bad_steps
        assert float(metrics["learning_rate"]) == pytest.approx(1.5e-3)  # the second update's is still to come
    params = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), good, train_step.state.params)
    state, metrics = train_step.step(dataclasses.replace(state, params=params), batch)
    assert (int(state.bad_steps), int(state.skipped), int(state.step)) == (0, 2, 4)
    assert math.isfinite(float(metrics["loss"]))


_FLOAT16 = dict(precision__compute="float16", precision__loss_scale_interval=3, precision__initial_loss_scale=1024)


@pytest.mark.parametrize("layout", [_ONE, ("fsdp", 8, 1)], ids=str)
def test_float16_overflow_halves_the_scale_and_is_no_bad_step(layout):
    train_step = train_step_of("llama", *layout, **_FLOAT16)
    batch = make_batch(train_step, 0)
    state = dataclasses.replace(train_step.init(), loss_scale=jnp.float32(2.0**40), good_steps=jnp.int32(2))
    state = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), state, train_step.state)
    before = host((state.params, state.opt_state))
    for i in (1, 2):
        state, metrics = train_step.step(state, batch)
        assert_bitwise_equal((state.params, state.opt_state), before)
        assert float(state.loss_scale) == float(metrics["loss_scale"]) == 2.0 ** (40 - i)
        assert int(state.skipped) == int(state.overflows) == int(metrics["overflows"]) == i
        assert int(state.bad_steps) == int(state.good_steps) == 0
        assert math.isfinite(float(metrics["loss"]))


def test_float16_scale_grows_after_the_interval_and_follows_float32():
    """Fails if gradients are not divided by the scale again (tried)."""
    train_step = train_step_of("llama", *_ONE, **_FLOAT16)
    (expected, expected_norm), _ = run("llama", *_ONE)
    state, scales = train_step.init(), []
    for i in range(7):
        state, metrics = train_step.step(state, make_batch(train_step, i))
        scales.append(float(metrics["loss_scale"]))
        assert float(metrics["loss"]) == pytest.approx(expected[i], abs=0.01)
        assert float(metrics["grad_norm"]) == pytest.approx(expected_norm[i], rel=0.02)
    assert scales == [1024, 1024, 2048, 2048, 2048, 4096, 4096]
    assert int(state.skipped) == 0


def test_float16_counts_what_no_scale_can_help_as_bad():
    """A loss that is not finite, and gradients that overflow at scale 1."""
    config = make_config("llama", *_ONE[::2], **_FLOAT16)
    zero = jnp.int32(0)

    def count(loss_scale, finite, loss_is_finite):
        state = step_lib.TrainState(zero, None, None, None, zero, zero, jnp.float32(loss_scale), zero, zero)
        state = step_lib._count(state, jnp.bool_(finite), jnp.bool_(loss_is_finite), config)
        return float(state.loss_scale), int(state.skipped), int(state.bad_steps)

    assert count(8, finite=False, loss_is_finite=False) == (4, 1, 1)
    assert count(1, finite=False, loss_is_finite=True) == (1, 1, 1)
    assert count(8, finite=False, loss_is_finite=True) == (4, 1, 0)
    assert count(8, finite=True, loss_is_finite=True) == (8, 0, 0)


# --- What users get wrong


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "message"),
    [
        (12, 1, "batch_size=12 does not divide over 8 devices; try 16"),
        (48, 4, "micro_batch_size=4 does not divide the 6 sequences of each device (batch_size=48 over 8); try 3"),
        (8, 2, "micro_batch_size=2 does not divide the 1 sequences of each device (batch_size=8 over 8); try 1"),
    ],
)
def test_batches_that_do_not_divide(batch_size, micro_batch_size, message):
    config = make_config("llama", "fsdp", micro_batch_size)
    config.batch_size = batch_size
    with pytest.raises(ValueError) as error:
        step_lib.make_train_step(config, make_mesh("fsdp"))
    assert str(error.value) == message
