"""ViT: parameters, what recomputing and unrolling change (nothing), precision, dropout; parity is in tests/interop."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util

from jaxpretrain import config as config_lib
from jaxpretrain.models import parameter, registry, vit
from jaxpretrain.ops.dropout import row_keys
from jaxpretrain.optim.blocks import VARIANTS, adam_mini_blocks
from jaxpretrain.optim.factory import make_optimizer
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.parallel.remat import layer_runner
from jaxpretrain.parallel.strategies import make_strategy

SIZES = dict(num_layers=3, embed_dim=48, num_heads=4, mlp_dim=80)
IMAGE = dict(size=24, num_channels=2, num_classes=11, patch_size=8)
OPTIONS = {"xla_backend_optimization_level": 0}  # compiles twice as fast


def make_config(image=None, **model):
    config = config_lib.default()
    config.seq_len = 1
    config.data.source, config.data.images.normalize = "synthetic", "half"
    config.model.update({"family": "vit", **SIZES, **model})
    config.model.image.update({**IMAGE, **(image or {})})
    config_lib.check(config)
    return config


def initial_params(config) -> dict:
    def init():
        return nnx.to_pure_dict(nnx.state(registry.make(config), nnx.Param))

    return jax.jit(init, compiler_options=OPTIONS)()


def flat(tree) -> dict:
    return traverse_util.flatten_dict(tree, sep=".")


def perturbed(params):
    """Initial biases, class token and head are 0 and scales 1, which would hide mistakes."""
    rng = np.random.default_rng(9)
    return jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape).astype(np.float32), params)


def images(num_rows=3, seed=0, size=IMAGE["size"], channels=IMAGE["num_channels"]):
    return np.random.default_rng(seed).normal(size=(num_rows, size, size, channels)).astype(np.float32)


def labels(num_rows=3):
    return np.random.default_rng(1).integers(0, IMAGE["num_classes"], num_rows)


def attend(q, k, v, segment_ids):
    """Both ways, straight from the formula."""
    assert segment_ids is None
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)


def loss_and_gradients(config, params, images, labels, **options):
    """Mean cross-entropy, its gradients and the logits."""
    graphdef, _ = nnx.split(registry.build(config))

    def loss(params):
        logits = nnx.merge(graphdef, params)(images, attend=attend, **options)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (loss, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=OPTIONS)(params)
    return float(loss), gradients, logits


# --- Parameters


def test_every_parameter_has_axes_and_a_role():
    config = make_config()
    infos, params = flat(parameter.infos(registry.build(config))), flat(initial_params(config))
    assert infos.keys() == params.keys()
    sizes = dict(vocab=11, position=10, layers=3, embed=48, heads=4, kv_heads=4, head_dim=12, mlp=80)
    sizes |= dict(channels=2, window_height=8, window_width=8, class_token=1)
    for path, info in infos.items():
        assert info.shape == params[path].shape == tuple(sizes[axis] for axis in info.axes), path
        assert params[path].dtype == info.dtype == jnp.float32
        assert (info.axes[0] == "layers") == path.startswith("layers."), path
    for variant in VARIANTS:
        adam_mini_blocks(parameter.infos(registry.build(config)), variant)


@pytest.mark.parametrize("name", ["adam_mini", "muon"])
def test_optimizers_take_the_parameters(name):
    """A step with gradients of zero: what has weight decay shrinks, and nothing else moves."""
    config = make_config(num_layers=1)
    config.optimizer.name = name
    infos = parameter.infos(registry.build(config))
    params = perturbed(jax.tree.map(lambda info: np.zeros(info.shape, np.float32), infos))
    optimizer = make_optimizer(config, optax.constant_schedule(0.1), infos)
    updates = jax.jit(lambda p: optimizer.update(jax.tree.map(jnp.zeros_like, p), optimizer.init(p), p)[0])(params)
    for path, update in flat(updates).items():
        decays = flat(infos)[path].role not in ("norm_scale", "bias")
        assert (np.abs(update).max() > 0) == decays, path


def test_initial_values():
    """Those of the authors' code. Fails if the heads' matrices are scaled by one head (tried: xavier on [D, H, K])."""
    config = make_config(embed_dim=192, num_heads=2, mlp_dim=384, image=dict(size=96, num_classes=16))
    params = flat(initial_params(config))
    matrices = {"layers.mlp.up.kernel": (192, 384), "layers.mlp.down.kernel": (384, 192)}
    matrices |= {f"layers.attention.{name}.kernel": (192, 192) for name in ("query", "key", "value", "out")}
    for path, sides in matrices.items():
        bound = math.sqrt(6 / sum(sides))
        assert 0.98 * bound < np.abs(params[path]).max() <= bound, path
        np.testing.assert_allclose([np.std(layer) for layer in params[path]], bound / math.sqrt(3), rtol=0.02)
    assert np.std(params["patch_embed.kernel"]) == pytest.approx((8 * 8 * 2) ** -0.5, rel=0.03)
    assert np.std(params["position_embed.embedding"]) == pytest.approx(0.02, rel=0.03)
    for path, value in params.items():
        if path.endswith("scale"):
            np.testing.assert_array_equal(value, 1, path)
        elif path in ("layers.mlp.up.bias", "layers.mlp.down.bias"):
            assert np.std(value) == pytest.approx(1e-6, rel=0.1), path
        elif path in ("class_token", "head.kernel") or path.endswith("bias"):
            np.testing.assert_array_equal(value, 0, path)
    drawn = [value.ravel()[:4] for path, value in params.items() if np.abs(value).max() not in (0, 1)]
    assert len({tuple(np.asarray(numbers)) for numbers in drawn}) == len(drawn), "two parameters drew the same numbers"


# --- Layers, precision


@pytest.fixture(scope="module")
def plain():
    """Config, parameters, a batch and keys, and loss and gradients: scanned, nothing recomputed, with dropout."""
    config = make_config(dropout=0.1, drop_path=0.5)
    params, batch, keys = perturbed(initial_params(config)), (images(), labels()), row_keys(0, 0, jnp.arange(3))
    return config, params, batch, keys, loss_and_gradients(config, params, *batch, keys_B=keys)


@pytest.mark.parametrize(
    ("remat", "scan_layers"),
    [("none", False), ("full", True), ("dots", True), ("names:query+mlp_up+mlp_projected", True)],
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
    """Logits are float32 and near those of float32 parameters; gradients have the parameters' dtype."""
    config, params, batch, keys, (_, _, expected) = plain
    bfloat16 = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    _, gradients, logits = loss_and_gradients(config, bfloat16, *batch, keys_B=keys)
    assert logits.dtype == jnp.float32
    assert all(gradient.dtype == jnp.bfloat16 for gradient in jax.tree.leaves(gradients))
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


def test_sums_of_added_parameters_are_float32():
    """Gradients of biases and positions, over 16,384 places. Fails if `add` adds in bfloat16 (tried): they are 512."""
    x = jnp.zeros((64, 16, 16, 8), jnp.bfloat16)
    gradient = jax.grad(lambda p: jnp.sum(vit.add(x, p).astype(jnp.float32)))(jnp.zeros(8, jnp.bfloat16))
    np.testing.assert_allclose(gradient.astype(jnp.float32), 16384, rtol=0.01)


# --- Dropout


def test_dropout_is_of_training_only_and_belongs_to_the_row(plain):
    """Without keys the logits are those of a model without dropout; with them a row's do not depend on the others.

    Fails if a row draws by its place in the batch (tried: `keys_B[0]` for all rows in ops/dropout.py).
    """
    _, params, (pixels, _), keys, (_, _, logits) = plain

    @functools.partial(jax.jit, static_argnames="dropped", compiler_options=OPTIONS)
    def run(pixels, keys=None, dropped=True):
        graphdef, _ = nnx.split(registry.build(make_config(dropout=0.1, drop_path=0.5) if dropped else make_config()))
        return nnx.merge(graphdef, params)(pixels, attend=attend, keys_B=keys)

    expected = run(pixels, dropped=False)
    np.testing.assert_allclose(run(pixels), expected, atol=1e-5)
    assert np.abs(logits - expected).max() > 0.1
    split = np.concatenate([run(pixels[:1], keys[:1]), run(pixels[1:], keys[1:])])
    np.testing.assert_allclose(split, logits, atol=1e-5)


def test_drop_path_grows_to_its_rate_and_keeps_the_mean():
    """How often an image skips each branch of each of 5 layers, seen from what the layer gives for a constant branch.

    Fails if every layer has the whole rate (tried: `rate = c.drop_path`).
    """
    num_rows = 4000
    config = make_config(num_layers=5, embed_dim=4, num_heads=1, mlp_dim=4, drop_path=0.6)
    graphdef, _ = nnx.split(registry.build(config).layers)
    # Each branch adds 1 to everything: both of a layer, 2.
    layers = jax.tree.map(
        lambda info: np.zeros(info.shape, np.float32), parameter.infos(registry.build(config))["layers"]
    )
    for branch in (layers["attention"]["out"], layers["mlp"]["down"]):
        branch["bias"] += 1
    keys, added = row_keys(0, 0, jnp.arange(num_rows)), []
    for i in range(5):
        block = nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], layers))
        x = block(jnp.zeros((num_rows, 2, 4)), lambda q, k, v: v, keys_B=keys, index=jnp.int32(i))
        assert np.ptp(np.asarray(x), axis=(1, 2)).max() == 0
        added.append(np.asarray(x[:, 0, 0]))
    for i, sums in enumerate(added):
        rate = 0.6 * i / 4
        np.testing.assert_allclose(
            np.unique(sums.round(4)), np.arange(3 if i else 1) / (1 - rate) if i else [2], atol=1e-3
        )
        assert np.mean(sums == 0) == pytest.approx(rate**2, abs=0.03)
        assert np.mean(sums) == pytest.approx(2, abs=0.1)
    assert abs(np.corrcoef(added[3], added[4])[0, 1]) < 0.06, "layers drop the same images"
