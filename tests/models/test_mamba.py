"""Mamba: documents, precision, parameters, and a task that needs its memory; parity is in tests/interop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util

from jaxpretrain import config as config_lib
from jaxpretrain.models import parameter
from jaxpretrain.models.mamba import Mamba
from jaxpretrain.optim.blocks import VARIANTS, adam_mini_blocks
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.parallel.remat import layer_runner
from jaxpretrain.parallel.strategies import make_strategy

VOCAB = 61


def make_config(**model):
    config = config_lib.default()
    config.seq_len = 24
    sizes = dict(family="mamba", vocab_size=VOCAB, num_layers=3, embed_dim=32, tied_embeddings=True)
    config.model.update({**sizes, **model})
    return config


def make_model(config, seed=0):
    return Mamba(config.model, config.seq_len, jax.random.key(seed))


def params_of(model) -> dict:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def infos_of(config) -> dict:
    return parameter.infos(nnx.eval_shape(lambda: make_model(config)))


def flat(tree) -> dict:
    return traverse_util.flatten_dict(tree, sep=".")


def tokens(*shape):
    return np.random.default_rng(0).integers(0, VOCAB, shape, dtype=np.int32)


def loss_and_gradients(model, params, tokens_BxT1, segment_ids_BxT=None, **options):
    """Mean next-token loss, its gradients and the logits; in the fastest program to compile."""
    graphdef, _ = nnx.split(model)

    def loss(params):
        logits_BxTxV = nnx.merge(graphdef, params)(tokens_BxT1[:, :-1], segment_ids_BxT, **options)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens_BxT1[:, 1:])
        return losses.mean(), logits_BxTxV

    (loss, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return loss, gradients, logits


# --- Documents, layers, precision


def test_documents_of_a_row_are_separate_sequences():
    """The logits are those of the document alone, also where a number comes again.

    Mutations seen to fail: `positions` None in the block for the convolution; `resets_BxT` None for the scan.
    """
    model = make_model(make_config())
    logits = jax.jit(lambda tokens, ids=None: model(tokens, ids))
    row = tokens(1, 24)
    found = logits(row, np.repeat([1, 2, 1, 0], [9, 2, 10, 3])[None])
    for start, end in ((0, 9), (9, 11), (11, 21)):
        np.testing.assert_allclose(found[:, start:end], logits(row[:, start:end]), atol=1e-5)
    assert not np.allclose(found[:, 11:21], logits(row)[:, 11:21], atol=1e-3)


@pytest.fixture(scope="module")
def plain():
    """A model of two layers, packed rows, and their loss and gradients: scanned, nothing recomputed."""
    config = make_config(num_layers=2)
    model = make_model(config)
    batch = params_of(model), tokens(2, 25), np.repeat([[1, 2], [1, 2]], [10, 14], axis=1)
    return config, model, batch, loss_and_gradients(model, *batch)


@pytest.mark.parametrize(
    ("remat", "scan_layers"),
    [
        ("names:ssm_in+ssm_gate+ssm_x+ssm_dt+ssm_scan+ssm_out", True),
        ("none", False),
        pytest.param("full", True, marks=pytest.mark.slow),
        pytest.param("dots", True, marks=pytest.mark.slow),
    ],
)
def test_recomputed_or_unrolled_layers_change_nothing(plain, remat, scan_layers):
    """Fails if what is recomputed is not what was computed (tried: `gathered` in remat.py scaling x)."""
    config, model, batch, (loss, expected, _) = plain
    mesh = make_mesh("ddp", jax.devices()[:1])
    run_layers = layer_runner(make_strategy("ddp", infos_of(config), mesh, jnp.float32), remat, scan_layers)
    found_loss, found, _ = loss_and_gradients(model, *batch, run_layers=run_layers)
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-6)
    for path, gradient in flat(expected).items():
        atol = 2e-5 * np.abs(gradient).max() + 1e-7
        np.testing.assert_allclose(flat(found)[path], gradient, rtol=0, atol=atol, err_msg=path)


def test_bfloat16(plain):
    """Logits are float32, and near those of float32 parameters; gradients are of the parameters' dtype."""
    _, model, (params, *batch), (_, _, expected) = plain
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    _, gradients, logits = loss_and_gradients(model, params, *batch)
    assert logits.dtype == jnp.float32
    assert all(gradient.dtype == jnp.bfloat16 for gradient in jax.tree.leaves(gradients))
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


# --- Parameters


def test_every_parameter_has_axes_and_a_role():
    sizes = dict(vocab=VOCAB, embed=32, layers=3, ssm_channels=64, ssm_state=16, dt_rank=2, dt_b_c=34, window=4)
    sizes["group_channels"] = 1
    config = make_config(tied_embeddings=False)
    for path, info in flat(infos_of(config)).items():
        assert info.shape == tuple(sizes[axis] for axis in info.axes), path
        assert (info.axes[0] == "layers") == path.startswith("layers."), path
    for variant in VARIANTS:
        adam_mini_blocks(infos_of(config), variant)


def test_initial_values():
    """Those of the authors' code. Fails if the residual output is not scaled, or dt is uniform and not log-uniform."""
    config = make_config(num_layers=4, embed_dim=256, vocab_size=2048, tied_embeddings=False)
    params = flat(params_of(make_model(config)))
    mixer = {path.removeprefix("layers.mixer."): value for path, value in params.items()}
    uniform = {  # bounds
        "input.kernel": 256**-0.5,
        "gate.kernel": 256**-0.5,
        "conv.kernel": 4**-0.5,
        "conv.bias": 4**-0.5,
        "x_proj.kernel": 512**-0.5,
        "dt_proj.kernel": 16**-0.5,
        "out.kernel": 512**-0.5 / 2,
    }
    for name, bound in uniform.items():
        assert bound * 0.97 < np.abs(mixer[name]).max() <= bound, name
        np.testing.assert_allclose(
            np.std(mixer[name], axis=tuple(range(1, mixer[name].ndim))), bound / 3**0.5, rtol=0.1
        )
    np.testing.assert_allclose(np.exp(mixer["a_log"]), np.broadcast_to(np.arange(1, 17), (4, 512, 16)), rtol=1e-6)
    np.testing.assert_array_equal(mixer["d"], 1)
    log_dt = np.log(jax.nn.softplus(mixer["dt_bias"]))
    np.testing.assert_allclose(np.quantile(log_dt, [0, 0.5, 1]), np.log([1e-3, 1e-2, 1e-1]), atol=0.2)
    for path in ("embed.embedding", "unembed.kernel"):
        assert np.std(params[path]) == pytest.approx(0.02, rel=0.03)
    assert len({tuple(np.ravel(mixer[name])[:4]) for name in uniform}) == len(uniform), "the same numbers drawn twice"


# --- Memory
@pytest.mark.slow
def test_remembers_a_token_over_a_distance_of_64():
    """Rows are one of 8 facts and 64 tokens of noise; after each token the fact is asked for.

    The convolution sees 3 tokens back: the rest is in the state. Fails without it (tried: `_decay` / 1e3 in the scan).
    """
    num_facts, num_noise, distance = 8, 8, 64
    config = make_config(vocab_size=num_facts + num_noise, num_layers=1, embed_dim=64)
    graphdef, _ = nnx.split(model := make_model(config))
    optimizer = optax.adam(3e-3)

    def rows(key):
        fact_key, noise_key = jax.random.split(key)
        facts_Bx1 = jax.random.randint(fact_key, (16, 1), 0, num_facts)
        noise = jax.random.randint(noise_key, (16, distance), num_facts, num_facts + num_noise)
        return jnp.concatenate([facts_Bx1, noise], axis=1), facts_Bx1

    def fact_logits(params, tokens_BxT):
        return nnx.merge(graphdef, params)(tokens_BxT)[..., :num_facts]

    @jax.jit
    def step(params, opt_state, key):
        tokens_BxT, facts_Bx1 = rows(key)

        def loss(params):
            logits = fact_logits(params, tokens_BxT)
            targets_BxT = jnp.broadcast_to(facts_Bx1, tokens_BxT.shape)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets_BxT).mean()

        updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = params_of(model)
    opt_state = optimizer.init(params)
    for i in range(300):
        params, opt_state = step(params, opt_state, jax.random.key(i))
    tokens_BxT, facts_Bx1 = jax.vmap(rows)(jax.random.split(jax.random.key(1000), 8))
    last = fact_logits(params, tokens_BxT.reshape(-1, distance + 1))[:, -1]
    accuracy = (last.argmax(-1) == facts_Bx1.ravel()).mean()
    print(f"accuracy at distance {distance}: {accuracy:.3f}")
    assert accuracy > 0.95
