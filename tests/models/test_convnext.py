"""ConvNeXt: parameters, what recomputing and unrolling change (nothing), precision, drop path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util

from jaxpretrain import config as config_lib
from jaxpretrain.models import parameter, registry
from jaxpretrain.ops.dropout import row_keys
from jaxpretrain.optim.blocks import VARIANTS, adam_mini_blocks
from jaxpretrain.optim.factory import make_optimizer
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.parallel.remat import layer_runner
from jaxpretrain.parallel.strategies import make_strategy

DEPTHS, WIDTHS = (1, 2, 2, 1), (6, 8, 10, 12)
IMAGE = dict(size=64, num_channels=2, num_classes=5)
OPTIONS = {"xla_backend_optimization_level": 0}  # compiles twice as fast


def make_config(image=None, convnext=None, **model):
    config = config_lib.default()
    config.seq_len = 1
    config.data.source, config.data.images.normalize = "synthetic", "half"
    config.model.update({"family": "convnext", **model})
    config.model.convnext.update({"depths": DEPTHS, "widths": WIDTHS, **(convnext or {})})
    config.model.image.update({**IMAGE, **(image or {})})
    config_lib.check(config)
    return config


def initial_params(config) -> dict:
    def init():
        return nnx.to_pure_dict(nnx.state(registry.make(config), nnx.Param))

    return jax.jit(init, compiler_options=OPTIONS)()


def flat(tree) -> dict:
    return traverse_util.flatten_dict(tree, sep=".")


def random_params(config) -> dict:
    """Of the size that they have in training: initial biases are 0 and layer scales 1e-6, which would hide mistakes."""
    rng = np.random.default_rng(9)

    def draw(info):
        noise = rng.normal(size=info.shape).astype(np.float32)
        if info.role in ("norm_scale", "bias"):
            return 0.3 * noise + (info.role == "norm_scale")
        stacked = info.axes[0] == "layers"
        return noise * parameter.fan_in(info.shape[stacked:], info.role) ** -0.5

    return jax.tree.map(draw, parameter.infos(registry.build(config)))


def images(num_rows=3):
    shape = (num_rows, IMAGE["size"], IMAGE["size"], IMAGE["num_channels"])
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def labels(num_rows=3):
    return np.random.default_rng(1).integers(0, IMAGE["num_classes"], num_rows)


def loss_and_gradients(config, params, images, labels, **options):
    """Mean cross-entropy, its gradients and the logits."""
    graphdef, _ = nnx.split(registry.build(config))

    def loss(params):
        logits = nnx.merge(graphdef, params)(images, **options)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (loss, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=OPTIONS)(params)
    return float(loss), gradients, logits


# --- Parameters


def test_every_parameter_has_axes_and_a_role():
    config = make_config()
    infos, params = flat(parameter.infos(registry.build(config))), flat(initial_params(config))
    assert infos.keys() == params.keys()
    for path, info in infos.items():
        assert info.shape == params[path].shape, path
        assert params[path].dtype == info.dtype == jnp.float32
        sizes = dict(zip(info.axes, info.shape, strict=True))
        stage = next((i for i in range(4) if f"{i}." in path), 3 if path.startswith(("head", "final")) else 0)
        width = WIDTHS[stage - 1] if path.startswith("downsample") and ".norm." in path else WIDTHS[stage]
        expected = dict(layers=DEPTHS[stage], embed=width, embed_before=WIDTHS[stage - 1], mlp=4 * width)
        expected |= dict(vocab=5, channels=2, group_channels=1)
        window = dict(stem=4, down=2).get(path[:4], 7)
        expected |= dict(window_height=window, window_width=window)
        assert sizes == {axis: expected[axis] for axis in info.axes}, path
        assert (info.axes[0] == "layers") == path.startswith("stage"), path
    for variant in VARIANTS:
        adam_mini_blocks(parameter.infos(registry.build(config)), variant)


@pytest.mark.parametrize("name", ["adam_mini", "muon"])
def test_optimizers_take_the_parameters(name):
    """A step with gradients of zero: what has weight decay shrinks, and nothing else moves; layer scales do not."""
    config = make_config(convnext=dict(depths=(1, 1, 1, 1)))
    config.optimizer.name = name
    infos, params = parameter.infos(registry.build(config)), random_params(config)
    optimizer = make_optimizer(config, optax.constant_schedule(0.1), infos)
    updates = jax.jit(lambda p: optimizer.update(jax.tree.map(jnp.zeros_like, p), optimizer.init(p), p)[0])(params)
    for path, update in flat(updates).items():
        assert (np.abs(update).max() > 0) == path.endswith(".kernel"), path


def test_initial_values():
    """Those of the authors' code."""
    config = make_config(convnext=dict(widths=(32, 48, 64, 96), layer_scale=1e-4), image=dict(num_classes=50))
    params = flat(initial_params(config))
    for path, value in params.items():
        if path.endswith("kernel"):
            assert np.std(value) == pytest.approx(0.02, rel=0.08), path
        else:
            end = path.rsplit(".", 1)[-1]
            np.testing.assert_array_equal(value, dict(scale=1, bias=0, layer_scale=np.float32(1e-4))[end], path)
    drawn = [tuple(np.ravel(value)[:4]) for path, value in params.items() if path.endswith("kernel")]
    assert len(set(drawn)) == len(drawn), "two parameters drew the same numbers"


# --- Layers, precision


@pytest.fixture(scope="module")
def plain():
    """Config, parameters, a batch and keys, and loss and gradients: scanned, nothing recomputed, with drop path."""
    config = make_config(drop_path=0.5)
    params, batch, keys = random_params(config), (images(), labels()), row_keys(0, 0, jnp.arange(3))
    return config, params, batch, keys, loss_and_gradients(config, params, *batch, keys_B=keys)


@pytest.mark.parametrize(
    ("remat", "scan_layers"),
    [("none", False), ("full", True), ("names:conv+mlp_up", True)],
)
def test_recomputed_or_unrolled_layers_change_nothing(plain, remat, scan_layers):
    """Fails if what is recomputed is not what was computed (tried: `gathered` in remat.py scaling x)."""
    config, params, batch, keys, (loss, expected, _) = plain
    infos, mesh = parameter.infos(registry.build(config)), make_mesh("ddp", jax.devices()[:1])
    run_layers = layer_runner(make_strategy("ddp", infos, mesh, jnp.float32), remat, scan_layers)
    found_loss, found, _ = loss_and_gradients(config, params, *batch, keys_B=keys, run_layers=run_layers)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    for path, gradient in flat(expected).items():
        atol = 2e-5 * np.abs(gradient).max() + 1e-6
        np.testing.assert_allclose(flat(found)[path], gradient, rtol=0, atol=atol, err_msg=path)


def test_bfloat16(plain):
    """As in training: norms and layer scales stay float32. Logits are float32 and near those of float32 parameters."""
    config, params, batch, keys, (_, _, expected) = plain
    infos = parameter.infos(registry.build(config))
    copy = make_strategy("ddp", infos, make_mesh("ddp", jax.devices()[:1]), jnp.bfloat16).compute_copy(params)
    _, gradients, logits = loss_and_gradients(config, copy, *batch, keys_B=keys)
    assert logits.dtype == jnp.float32
    for path, gradient in flat(gradients).items():
        assert gradient.dtype == (jnp.float32 if path.endswith("scale") else jnp.bfloat16), path
    assert np.abs(logits - expected).max() < 0.1 * np.abs(expected).max()


# --- Drop path


def test_drop_path_is_of_training_only_and_belongs_to_the_row(plain):
    """Without keys the logits are those of a model without drop path; with them a row's do not depend on the others.

    Fails if a row draws by its place in the batch (tried: `keys_B[0]` for all rows in ops/dropout.py).
    """
    _, params, (pixels, _), keys, (_, _, logits) = plain

    @functools.partial(jax.jit, static_argnames="drop_path", compiler_options=OPTIONS)
    def run(pixels, keys=None, drop_path=0.5):
        graphdef, _ = nnx.split(registry.build(make_config(drop_path=drop_path)))
        return nnx.merge(graphdef, params)(pixels, keys_B=keys)

    expected = run(pixels, drop_path=0.0)
    np.testing.assert_allclose(run(pixels), expected, atol=1e-5)
    assert np.abs(logits - expected).max() > 0.1
    split = np.concatenate([run(pixels[i : i + 1], keys[i : i + 1]) for i in range(3)])
    np.testing.assert_allclose(split, logits, atol=1e-5)


def test_drop_path_grows_over_all_stages_and_keeps_the_mean():
    """How often images skip each of the six blocks, each of which adds 1 to everything.

    Fails if the rate begins anew in each stage (tried: `num_before = 0`), or if all blocks draw the same (tried: site
    0 for `index`).
    """
    num_rows, rates = 4000, 0.6 * np.arange(6) / 5
    config = make_config(drop_path=0.6, convnext=dict(widths=(1, 1, 1, 1)), image=dict(size=32))
    params = jax.tree.map(np.zeros_like, random_params(config))
    for stage in range(4):
        blocks = params[f"stage{stage}"]
        blocks["layer_scale"] += 1
        blocks["mlp"]["down"]["bias"] += 1
    added = []

    def run_layers(block, layers, x, stack):
        for i in range(len(layers["layer_scale"])):
            x = block(jax.tree.map(lambda p, i=i: p[i], layers), jnp.zeros_like(x), jnp.int32(i))
            added.append(x)
        return x

    graphdef, _ = nnx.split(registry.build(config))
    pixels, keys = jnp.zeros((num_rows, 32, 32, 2)), row_keys(0, 0, jnp.arange(num_rows))

    def all_added(params):
        nnx.merge(graphdef, params)(pixels, keys_B=keys, run_layers=run_layers)
        return [x[:, 0, 0, 0] for x in added]

    found = np.array(jax.jit(all_added, compiler_options=OPTIONS)(params))
    for sums, rate in zip(found, rates, strict=True):
        assert np.mean(sums == 0) == pytest.approx(rate, abs=0.03)
        np.testing.assert_allclose(sums[sums != 0], 1 / (1 - rate), rtol=1e-5)
        assert np.mean(sums) == pytest.approx(1, abs=0.06)
    assert np.abs(np.corrcoef(found[1:]) - np.eye(5)).max() < 0.06, "blocks drop the same images"
