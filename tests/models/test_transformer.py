"""The decoder against independent formulas, and against itself where two ways must give one result."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util

from jaxpretrain import config as config_lib
from jaxpretrain import losses
from jaxpretrain.models import parameter, registry, transformer
from jaxpretrain.ops import attention
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.parallel.remat import layer_runner
from jaxpretrain.parallel.strategies import make_strategy

_FAMILIES = {
    "gpt_neox": dict(parallel_residual=True, init="gpt_neox"),
    "gpt2": dict(positions="learned", activation="gelu_tanh", tied_embeddings=True, init="gpt2"),
    "llama": dict(
        norm="rmsnorm",
        norm_bias=False,
        activation="silu",
        gated_mlp=True,
        attention_bias=False,
        mlp_bias=False,
        num_kv_heads=2,
        init="llama",
    ),
    "olmo": dict(norm_bias=False, qk_norm=True, attention_bias=False, mlp_bias=False, init="mitchell"),
}
_ROTARY = {"gpt_neox": dict(fraction=0.25), "llama": dict(scaling="llama3", theta=5e5, original_max_positions=16)}


def family_config(family: str, **model):
    config = config_lib.default()
    config.seq_len = 24
    sizes = dict(vocab_size=61, num_layers=3, embed_dim=32, num_heads=4)
    config.model.update({**sizes, **_FAMILIES[family], **model})
    config.model.rotary.update(_ROTARY.get(family, {}))
    config_lib.check(config)
    return config


def make_model(config, seed: int = 0):
    return transformer.Transformer(config.model, config.seq_len, jax.random.key(seed))


def params_of(model) -> dict:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def random_biases(params):
    """Initial biases are 0 and scales 1, which would hide mistakes."""
    keys = iter(jax.random.split(jax.random.key(9), 100))
    return jax.tree.map(lambda p: p + 0.05 * jax.random.normal(next(keys), p.shape), params)


def packed_batch(config, num_rows: int = 2):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.model.vocab_size, (num_rows, config.seq_len + 1)).astype(np.int32)
    ends = rng.integers(5, config.seq_len - 5, (num_rows, 1))
    segment_ids = (1 + (np.arange(config.seq_len + 1) >= ends)).astype(np.int32)
    segment_ids[1, -4:] = 0
    return dict(tokens=jnp.asarray(tokens), segment_ids=jnp.asarray(segment_ids))


def loss_and_gradients(config, **options):
    """Of packed rows, in float32, as the training step computes them."""
    model = make_model(config)
    graphdef, _ = nnx.split(model)
    inputs, segment_ids, targets, mask = losses.targets_and_mask(packed_batch(config))
    attend = functools.partial(attention.attend, implementation="xla")

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        model = nnx.merge(graphdef, params)
        hidden = model.hidden(inputs, segment_ids, attend=attend, **options)
        return losses.cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            model.unembedding(),
            targets.reshape(-1),
            mask.reshape(-1),
            vocab_size=config.model.vocab_size,
            implementation="plain",
        )

    loss, gradients = loss(random_biases(params_of(model)))
    return float(loss), gradients


def assert_same(one, other, tolerance=2e-5):
    """Losses, and gradients up to `tolerance` of each one's largest entry."""
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    for path, a in jax.tree_util.tree_leaves_with_path(one[1]):
        b = dict(jax.tree_util.tree_leaves_with_path(other[1]))[path]
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max() + 1e-6, err_msg=str(path))


@pytest.fixture(scope="module", params=_FAMILIES)
def family(request):
    """A family's config, and loss and gradients of its plain model: scanned, nothing recomputed."""
    config = family_config(request.param)
    return config, loss_and_gradients(config)


def runner(config, remat="none", scan_layers=True):
    model_infos = parameter.infos(registry.build(config))
    strategy = make_strategy("ddp", model_infos, make_mesh("ddp", jax.devices()[:1]), jnp.float32)
    return layer_runner(strategy, remat, scan_layers)


def test_unrolled_equals_scanned(family):
    """Fails if the layers are reversed where they are unrolled (tried: `reverse=not scan_layers`)."""
    config, expected = family
    assert_same(loss_and_gradients(config, run_layers=runner(config, scan_layers=False)), expected)


@pytest.mark.parametrize(
    "remat", ["none", "full", "full:1", "dots", "names:attention+mlp_up", "offload", "offload:query+attention"]
)
def test_remat_changes_nothing(family, remat):
    """Fails if what is recomputed is not what was computed (tried: `gathered` scaling x)."""
    config, expected = family
    assert_same(loss_and_gradients(config, run_layers=runner(config, remat)), expected)


@pytest.mark.parametrize("remat", ["none", "full:2"])
@pytest.mark.parametrize("scan_layers", [True, False])
def test_stretches_of_layers_keep_their_order(remat, scan_layers):
    """Of six layers, two of which are recomputed. Fails if the second stretch comes first (tried)."""
    config = family_config(next(iter(_FAMILIES)))
    config.model.num_layers = 6
    expected = loss_and_gradients(config)
    assert_same(loss_and_gradients(config, run_layers=runner(config, remat, scan_layers)), expected)


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        ("names:atention", r"names:atention: nothing in this model is marked 'atention'; did you mean 'attention'\?"),
        ("offload:mlp_up+nothing", "offload:mlp_up.nothing: nothing in this model is marked 'nothing'; there are "),
        ("full:99", "full:99: layers of the model has [0-9]+; set full"),
    ],
)
def test_remat_of_what_is_not_there(remat, message):
    config = family_config(next(iter(_FAMILIES)))
    with pytest.raises(ValueError, match=f"^parallel.remat={message}"):
        loss_and_gradients(config, run_layers=runner(config, remat))


# --- Documents of a row


def test_document_positions():
    ids = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0], [4, 4, 4, 4, 4, 4, 4, 4], [1, 2, 1, 1, 2, 0, 0, 0]])
    expected = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 0, 0, 1, 2]]
    np.testing.assert_array_equal(transformer.document_positions(8, ids), expected)
    np.testing.assert_array_equal(transformer.document_positions(4, None), [[0, 1, 2, 3]])


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_documents_of_a_row_do_not_see_each_other(name, implementation):
    """Each document's logits are those of the document alone in a row, whatever stands before it.

    Fails if positions do not restart (tried: `document_positions(T, None)` in `hidden`), or if attention gets no
    segment ids (tried: `attend(q, k, v, None)`).
    """
    config = family_config(name)
    model = make_model(config)
    nnx.update(model, random_biases(params_of(model)))
    attend = functools.partial(attention.attend, implementation=implementation, block=8)
    logits = jax.jit(lambda tokens, ids: model(tokens, ids, attend=attend))
    tokens = np.random.default_rng(1).integers(0, 61, (1, 24)).astype(np.int32)
    ids = np.repeat([1, 2, 0], [10, 11, 3])[None].astype(np.int32)
    packed = logits(tokens, ids)

    changed = tokens.copy()
    changed[0, :10] = (changed[0, :10] + 7) % 61
    np.testing.assert_array_equal(logits(changed, ids)[0, 10:21], packed[0, 10:21])

    alone = np.zeros((1, 24), np.int32)
    alone[0, :11] = tokens[0, 10:21]
    alone_ids = np.repeat([1, 0], [11, 13])[None].astype(np.int32)
    np.testing.assert_allclose(logits(alone, alone_ids)[0, :11], packed[0, 10:21], atol=1e-5)


# --- Rotary


def reference_frequencies(c, head_dim):
    """In float64, loop and branches as in Meta's llama-models (`apply_scaling`)."""
    num_rotated = int(c.fraction * head_dim)
    frequencies = []
    for i in range(0, num_rotated, 2):
        frequency = 1.0 / c.theta ** (i / num_rotated)
        if c.scaling == "linear":
            frequency /= c.factor
        elif c.scaling == "llama3":
            wavelength = 2 * math.pi / frequency
            if wavelength > c.original_max_positions / c.low_freq_factor:
                frequency /= c.factor
            elif wavelength > c.original_max_positions / c.high_freq_factor:
                smooth = (c.original_max_positions / wavelength - c.low_freq_factor) / (
                    c.high_freq_factor - c.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / c.factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


@pytest.mark.parametrize(
    "rotary",
    [
        dict(),
        dict(fraction=0.25),
        dict(scaling="linear", factor=4.0),
        dict(scaling="llama3", theta=5e5, factor=8.0, original_max_positions=8192),
        dict(scaling="llama3", theta=1e4, factor=32.0, original_max_positions=256),
    ],
)
def test_rotary_is_a_rotation_of_pairs(rotary):
    """Fails if `kept` is not clipped, if `low` and `high` change places, or if neighbours are paired."""
    config = family_config("olmo", num_heads=2, embed_dim=128)
    config.model.rotary.update(rotary)
    c = transformer._resolved(config.model, 512)
    positions = np.array([[0, 1, 5, 100, 511]])
    frequencies = reference_frequencies(c.rotary, 64)
    angles = positions[..., None] * frequencies
    cos, sin = transformer.rotary_tables(c, jnp.asarray(positions))
    np.testing.assert_allclose(cos[:, :, 0], np.cos(angles), atol=1e-4)
    np.testing.assert_allclose(sin[:, :, 0], np.sin(angles), atol=1e-4)

    x = np.random.default_rng(0).normal(size=(1, 5, 2, 64))
    half = len(frequencies)
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)[:, :, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)
    np.testing.assert_allclose(transformer.rotate(jnp.asarray(x, jnp.float32), cos, sin), expected, atol=1e-3)


# --- Parameters


def flat_infos(config):
    return traverse_util.flatten_dict(parameter.infos(registry.build(config)), sep=".")


@pytest.mark.parametrize("name", _FAMILIES)
def test_every_parameter_has_axes_and_a_role(name):
    config = family_config(name)
    infos = flat_infos(config)
    params = traverse_util.flatten_dict(params_of(make_model(config)), sep=".")
    assert infos.keys() == params.keys()
    sizes = dict(vocab=61, position=24, layers=3, embed=32, heads=4, head_dim=8, mlp=128)
    sizes |= dict(kv_heads=2 if name == "llama" else 4, heads_head_dim=32, kv_heads_head_dim=32)
    for path, info in infos.items():
        assert info.role in parameter.ROLES
        assert info.shape == params[path].shape == tuple(sizes[axis] for axis in info.axes), path
        assert params[path].dtype == info.dtype == jnp.float32
        assert (info.axes[0] == "layers") == path.startswith("layers."), path


def test_parameter_without_a_role_stops_with_its_path():
    class Inner(nnx.Module):
        def __init__(self, **metadata):
            self.kernel = nnx.Param(jnp.zeros((2, 3)), **metadata)

    class Outer(nnx.Module):
        def __init__(self, **metadata):
            self.good = parameter.parameter(jnp.zeros(2), ("embed",), "bias")
            self.inner = Inner(**metadata)

    for metadata in [{}, dict(axes=("embed", "mlp")), dict(axes=("embed",), role="bias"), dict(role="weight")]:
        with pytest.raises(ValueError, match=r"^parameter inner\.kernel has no axes or role: [^\n]*$"):
            parameter.infos(Outer(**metadata))


@pytest.mark.parametrize(
    ("recipe", "count"),
    [  # as published with the weights
        ("pythia14m", 14_067_712),
        ("pythia1b", 1_011_781_632),
        ("pythia12b", 11_846_072_320),
        ("gpt2_small", 124_439_808),
        ("gpt2_xl", 1_557_611_200),
        ("llama2_7b", 6_738_415_616),
        ("llama3_8b", 8_030_261_248),
    ],
)
def test_published_parameter_counts(recipe, count):
    config = config_lib.load(f"configs/{recipe}.py", [("data.source", "synthetic")])
    assert sum(math.prod(info.shape) for info in flat_infos(config).values()) == count


# --- Initial values

_CUT_AT_3 = 0.98658  # standard deviation of a unit normal that is cut off at 3
_EXPECTED_STD = {  # D = 128, F = 512, L = 4; of layer i from 0; (family, role) -> standard deviation
    "gpt_neox": lambda i: {
        **dict.fromkeys(("embedding", "unembedding", "query", "key", "value", "mlp_in"), math.sqrt(2 / (5 * 128))),
        **dict.fromkeys(("attn_out", "mlp_out"), 2 / (4 * math.sqrt(128))),
    },
    "gpt2": lambda i: {
        **dict.fromkeys(("embedding", "position_embedding", "query", "key", "value", "mlp_in"), 0.02),
        **dict.fromkeys(("attn_out", "mlp_out"), 0.02 / math.sqrt(8)),
    },
    "llama": lambda i: {
        "embedding": 1.0,
        "unembedding": _CUT_AT_3 / math.sqrt(128),
        **dict.fromkeys(("query", "key", "value", "mlp_gate"), 0.02),
        **dict.fromkeys(("attn_out", "mlp_out", "mlp_in"), 0.02 / math.sqrt(2 * (i + 1))),
    },
    "olmo": lambda i: {
        **dict.fromkeys(("embedding", "unembedding", "query", "key", "value", "mlp_in"), _CUT_AT_3 / math.sqrt(128)),
        "attn_out": _CUT_AT_3 / math.sqrt(2 * 128 * (i + 1)),
        "mlp_out": _CUT_AT_3 / math.sqrt(2 * 512 * (i + 1)),
    },
}


@pytest.mark.parametrize("name", _FAMILIES)
def test_initial_standard_deviations(name):
    """Of each role in each layer, to 3 %; fails if the layer's number is left out of `depth`."""
    config = family_config(name, embed_dim=128, num_layers=4, vocab_size=512)
    config.seq_len = 256
    params = traverse_util.flatten_dict(params_of(make_model(config)), sep=".")
    seen = set()
    for path, info in flat_infos(config).items():
        for i, value in enumerate(params[path] if info.axes[0] == "layers" else params[path][None]):
            if info.role in ("bias", "norm_scale"):
                np.testing.assert_array_equal(value, float(info.role == "norm_scale"))
                continue
            expected = _EXPECTED_STD[name](i)
            seen |= {info.role}
            assert np.std(value) == pytest.approx(expected[info.role], rel=0.03), (path, i)
            assert abs(np.mean(value)) < 5 * np.std(value) / math.sqrt(value.size), (path, i)
            if name == "olmo":
                assert np.abs(value).max() <= 3.0001 / _CUT_AT_3 * expected[info.role]
    assert seen == _EXPECTED_STD[name](0).keys()
    kernels = [np.ravel(value) for path, value in params.items() if path.endswith("kernel")]
    assert len({tuple(kernel[:4]) for kernel in kernels}) == len(kernels), "two parameters drew the same numbers"


# --- Precision


def test_embedding_gradient_is_summed_in_float32():
    """A token that occurs 10,000 times; a bfloat16 sum of ones stops at 256 (tried: `table[ids]` alone)."""
    table = jnp.zeros((5, 4), jnp.bfloat16)
    ids = jnp.full((10, 1000), 3)
    gradient = jax.grad(lambda table: transformer.embedding_lookup(table, ids).sum(dtype=jnp.float32))(table)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient[3].astype(np.float32), np.float32(jnp.bfloat16(10_000)))
    np.testing.assert_array_equal(gradient[jnp.array([0, 1, 2, 4])].astype(np.float32), 0)


@pytest.mark.parametrize("name", ["olmo", "llama"])
def test_norms_compute_in_float32(name):
    """float16 squares of 300 overflow, and a float16 mean of 4096 numbers is off by more than a rounding
    (tried: without the cast to float32)."""
    norm = transformer.Norm(transformer._resolved(family_config(name).model, 24), 4096)
    x = jnp.asarray(np.random.default_rng(0).normal(300, 5, (2, 4096)), jnp.float16)
    x64 = np.asarray(x, np.float64)
    centred = x64 if norm.rms else x64 - x64.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    out = norm(x)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=1e-3, atol=1e-3)


def test_logits_are_float32_whatever_the_compute_dtype():
    model = make_model(family_config("gpt_neox"))
    nnx.update(model, jax.tree.map(lambda p: p.astype(jnp.bfloat16), params_of(model)))
    attend = functools.partial(attention.attend, implementation="xla")
    assert model(jnp.zeros((1, 8), jnp.int32), attend=attend).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_gelu_keeps_its_tail(dtype):
    """To two roundings of the exact value. Fails in 16 bits if it is computed in them: 1 + erf cancels below -2."""
    x = np.asarray(jnp.linspace(-3.5, 3.5, 701, dtype=dtype), np.float64)
    exact = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x]
    ours = np.asarray(transformer._ACTIVATIONS["gelu"](jnp.asarray(x, dtype)), np.float64)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(ours, exact, rtol=2 * max(eps, 2e-4), atol=2 * float(jnp.finfo(dtype).tiny))
