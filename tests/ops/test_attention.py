"""Every implementation that a CPU can run (kernels in interpret mode) against attention written in float64 NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from jaxpretrain.ops import attention, attention_blockwise, attention_kernels, attention_xla

IMPLEMENTATIONS = {
    "xla": attention_xla.attend,
    "blockwise": functools.partial(attention_blockwise.attend, residual_name="attention", block=128),
    "pallas": functools.partial(attention_kernels.pallas, residual_name="attention", interpret=True),
    "splash": functools.partial(attention_kernels.splash, residual_name="attention", interpret=True),
}
LENGTHS = {True: (1, 64, 127, 192, 513), False: (1, 3, 65, 197, 512)}  # causal: ...; 197: ViT, 512: RoBERTa
SHAPES = ((2, 2, 64), (4, 2, 80), (3, 1, 128), (2, 2, 256))  # H, G, K


def _cases():
    """(implementation, T, H, G, K, segmented, causal).

    Quick: every length with and without documents in xla (causal) and blockwise; elsewhere one of each.
    """
    for name, causal in itertools.product(IMPLEMENTATIONS, (True, False)):
        for index, (T, segmented) in enumerate(itertools.product(LENGTHS[causal], (False, True))):
            for shape in SHAPES:
                quick = (T, segmented, shape) in ((192, True, SHAPES[1]), (1, False, SHAPES[0]))
                if not causal:
                    quick = (T, segmented, shape) in ((197, True, SHAPES[1]), (3, False, SHAPES[0]))
                if name == "blockwise" or name == "xla" and causal:
                    quick = shape == SHAPES[(index + index // 4) % 4]
                yield pytest.param(name, T, *shape, segmented, causal, marks=() if quick else pytest.mark.slow)


def _inputs(T, H, G, K, segmented, B=2):
    random = np.random.default_rng(T + K)
    q, k, v, d_out = (random.standard_normal((B, T, heads, K)) for heads in (H, G, G, H))
    segment_ids = np.sort(random.integers(1, 4, (B, T)), axis=1).astype(np.int32)
    segment_ids[0, T - T // 8 :] = 0  # padding at the end of a row
    return q, k, v, d_out, segment_ids if segmented else None


def _numpy_attention(q, k, v, d_out, segment_ids, causal=True):
    """Output and gradients of q, k, v, by the textbook formulas in float64, with keys repeated for each query head."""
    T, H, K, G = *q.shape[1:], k.shape[2]
    mask = np.tril(np.ones((T, T), bool)) if causal else np.ones((T, T), bool)
    if segment_ids is not None:
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    k_H, v_H = (np.repeat(x, H // G, axis=2) for x in (k, v))
    scores = np.where(mask, np.einsum("bqhk,bshk->bhqs", q, k_H) / np.sqrt(K), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = np.einsum("bqhk,bshk->bhqs", d_out, v_H)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(K)

    def sum_groups(x):
        return x.reshape(*x.shape[:2], G, H // G, K).sum(3)

    return (
        np.einsum("bhqs,bshk->bqhk", weights, v_H),
        np.einsum("bhqs,bshk->bqhk", d_scores, k_H),
        sum_groups(np.einsum("bhqs,bqhk->bshk", d_scores, q)),
        sum_groups(np.einsum("bhqs,bqhk->bshk", weights, d_out)),
    )


@functools.partial(jax.jit, static_argnames=("attend", "causal"))
def _output_and_gradients(attend, q, k, v, d_out, segment_ids, causal=True):
    out, backward = jax.vjp(lambda q, k, v: attend(q, k, v, segment_ids, causal=causal), q, k, v)
    return out, *backward(d_out)


def _assert_close(actual, expected, tolerance):
    for name, x, y in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert x.shape == y.shape
        error = np.abs(np.asarray(x, np.float64) - y).max()
        assert error <= tolerance * max(1.0, np.abs(y).max()), f"{name}: {error}"


@pytest.mark.parametrize("name, T, H, G, K, segmented, causal", list(_cases()))
def test_equals_numpy(name, T, H, G, K, segmented, causal):
    """Seen to fail with these changes.

    xla: no K**-0.5. blockwise: `total * correction` -> `total`; no `- delta[i]`; `_pairs` without the diagonal's
    restart (`starts = False`). pallas: sm_scale=1. splash: q not scaled. Both: segment_ids not passed on.

    Not causal: xla with `if True:` before `tril`; blockwise with `T` -> `n * b` in `visible`, with `0` in place of
    `0 if causal else n` in `_pairs`, and with `starts = j == n - 1`, at which a row ends; pallas with `causal=True`;
    splash with CausalMask; both with `constant_values=1`, a document's id, and with None for segment ids of None.
    """
    *arrays, segment_ids = _inputs(T, H, G, K, segmented)
    arrays32 = [np.float32(x) for x in arrays]
    expected = _numpy_attention(*(np.float64(x) for x in arrays32), segment_ids, causal)
    actual = _output_and_gradients(IMPLEMENTATIONS[name], *arrays32, segment_ids, causal)
    _assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize(
    "name, dtype", [*((name, jnp.bfloat16) for name in IMPLEMENTATIONS), ("blockwise", jnp.float16)]
)
def test_half_precision(name, dtype):
    """Errors of the inputs' rounding and no larger, with scores up to 20: sums and softmax are in float32.

    Seen to fail with `preferred_element_type=dtype` in xla and blockwise.
    """
    *arrays, segment_ids = _inputs(192, 4, 2, 64, segmented=True)
    arrays[0] *= 5
    arrays16 = [jnp.asarray(x, dtype) for x in arrays]
    expected = _numpy_attention(*(np.asarray(x, np.float64) for x in arrays16), segment_ids)
    actual = _output_and_gradients(IMPLEMENTATIONS[name], *arrays16, segment_ids)
    # Blockwise gradients read the rounded output, plain ones do not; pallas also multiplies it in bfloat16.
    for x, y, tolerance in zip(actual, expected, (0.4, 1.0, 1.0, 0.4), strict=True):
        assert x.dtype == dtype
        error = np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        assert error < tolerance * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_documents_do_not_see_each_other(name):
    """Other tokens in document 1 change no bit of the outputs and gradients of document 2.

    Seen to fail with the comparison of segment ids replaced by True in xla and blockwise, and with segment_ids=None
    passed to the kernels.
    """
    T, split = 192, 77
    segment_ids = np.where(np.arange(T) < split, 1, 2)[None].astype(np.int32)
    *arrays, _ = (np.float32(x) for x in _inputs(T, 2, 1, 64, segmented=True, B=1))
    others = [np.concatenate([10 - x[:, :split], x[:, split:]], axis=1) for x in arrays]
    run = functools.partial(_output_and_gradients, IMPLEMENTATIONS[name], segment_ids=segment_ids)
    for x, y in zip(run(*arrays), run(*others), strict=True):
        assert np.array_equal(x[:, split:], y[:, split:])
        assert not np.array_equal(x[:, :split], y[:, :split])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_nothing_sees_the_future(name):
    """Seen to fail without the causal mask: `tril` -> `ones` in xla, the mask's `>=` -> `<=` in blockwise."""
    T, split = 192, 130
    q, k, v, d_out, _ = (np.float32(x) if x is not None else None for x in _inputs(T, 2, 2, 64, segmented=False, B=1))
    k_other, v_other = (np.concatenate([x[:, :split], 10 - x[:, split:]], axis=1) for x in (k, v))
    run = functools.partial(_output_and_gradients, IMPLEMENTATIONS[name], d_out=d_out, segment_ids=None)
    assert np.array_equal(run(q, k, v)[0][:, :split], run(q, k_other, v_other)[0][:, :split])


@pytest.mark.parametrize("name", ("blockwise", "pallas", "splash"))
def test_named_residuals_spare_the_second_forward(name):
    """A remat policy that keeps RESIDUAL_NAME runs one kernel (or loop) less than one that keeps nothing.

    Seen to fail without `checkpoint_name` in blockwise and pallas, without `residual_checkpoint_name` in splash.
    """
    x = jnp.ones((1, 256, 2, 64))
    attend = IMPLEMENTATIONS[name]

    def num_calls(policy):
        block = jax.checkpoint(lambda x: attend(x, x, x, None, causal=True).sum(), policy=policy)
        jaxpr, _ = partial_eval.dce_jaxpr(jax.make_jaxpr(jax.value_and_grad(block))(x).jaxpr, [True, True])
        text = str(jaxpr)
        return text.count("scan[") if name == "blockwise" else text.count("pallas_call[")

    policies = jax.checkpoint_policies
    kept = num_calls(policies.save_only_these_names(attention.RESIDUAL_NAME))
    assert kept == num_calls(policies.nothing_saveable) - 1


@pytest.mark.parametrize(
    "name, check_vma", [*((name, False) for name in IMPLEMENTATIONS), ("xla", True), ("blockwise", True)]
)
def test_inside_shard_map(name, check_vma):
    """Rows over two devices with manual axes, within a scan with remat, as in the training step.

    check_vma=True is for the plain ones: the kernels do not carry the types of manual axes.
    Seen to fail with the scan carries of blockwise made by `jnp.zeros(shape)`.
    """
    *arrays, segment_ids = _inputs(150, 4, 2, 64, segmented=True)
    arrays = [np.float32(x) for x in arrays]
    attend = IMPLEMENTATIONS[name]
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows = jax.P("fsdp")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma)
    def sharded(q, k, v, d_out, segment_ids):
        def out_of_two_layers(q, k, v):
            layer = jax.checkpoint(lambda x, _: (x + attend(x, k, v, segment_ids, causal=True), None))
            return jax.lax.scan(layer, q, length=2)[0]

        out, backward = jax.vjp(out_of_two_layers, q, k, v)
        return out, *backward(d_out)

    q, k, v, d_out = arrays
    first = q + _numpy_attention(q, k, v, d_out, segment_ids)[0]
    out, d_first, dk, dv = _numpy_attention(first, k, v, d_out, segment_ids)
    d_first = d_first + d_out
    _, dq, dk_first, dv_first = _numpy_attention(q, k, v, d_first, segment_ids)
    expected = first + out, d_first + dq, dk + dk_first, dv + dv_first
    _assert_close(sharded(*arrays, segment_ids), expected, 2e-5)


@pytest.mark.parametrize("implementation", ("xla", "blockwise", "cudnn", "pallas", "splash"))
def test_attend_runs_what_is_named(implementation, monkeypatch):
    """Causal unless told otherwise. What cuDNN would be asked for, JAX's own implementation in XLA computes.

    Seen to fail with `causal=True` in place of `causal=causal` in each case of `attend`, and in `cudnn` with `lengths`
    of the padded sequence (`jnp.full(B, q.shape[1], ...)`).
    """
    for kernel in ("pallas", "splash"):
        interpreted = functools.partial(getattr(attention_kernels, kernel), interpret=True)
        monkeypatch.setattr(attention_kernels, kernel, interpreted)
    dot_product_attention = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *arrays, implementation, **options: dot_product_attention(*arrays, implementation="xla", **options),
    )
    q, k, v, _, segment_ids = _inputs(70, 4, 2, 64, segmented=implementation != "cudnn")
    arrays = [np.float32(x) for x in (q, k, v)]
    for options in ({}, {"causal": False}):
        expected = _numpy_attention(q, k, v, q, segment_ids, **options)[0]
        attend = jax.jit(functools.partial(attention.attend, implementation=implementation, **options))
        assert np.abs(attend(*arrays, segment_ids) - expected).max() < 1e-5


def test_attend_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="flash3"):
        attention.attend(*[jnp.ones((1, 8, 1, 64))] * 3, None, implementation="flash3")


A100, H100, TURING = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 2080 Ti"


def _select(name, device_kind, head_dim=64, dtype=jnp.bfloat16, segmented=False, seq_len=2048):
    platform = "cpu" if device_kind == "cpu" else "tpu" if "TPU" in device_kind else "gpu"
    return attention.select(
        name,
        platform=platform,
        device_kind=device_kind,
        head_dim=head_dim,
        dtype=dtype,
        segmented=segmented,
        seq_len=seq_len,
    )


@pytest.mark.parametrize(
    "device_kind, options, expected",
    [
        ("cpu", {}, "blockwise"),
        ("cpu", dict(dtype=jnp.float32, segmented=True), "blockwise"),
        (A100, {}, "cudnn"),
        (A100, dict(dtype=jnp.float16, head_dim=80), "cudnn"),
        (A100, dict(head_dim=256), "pallas"),  # Pythia-1B
        (A100, dict(head_dim=100), "pallas"),  # not a multiple of 8
        (A100, dict(segmented=True), "pallas"),
        (A100, dict(dtype=jnp.float32), "blockwise"),
        (A100, dict(head_dim=512), "blockwise"),
        ("NVIDIA GeForce RTX 3090", dict(head_dim=256), "pallas"),
        ("NVIDIA RTX A6000", {}, "cudnn"),
        ("NVIDIA L4", {}, "cudnn"),
        ("NVIDIA B200", dict(head_dim=256), "pallas"),
        (H100, dict(head_dim=256), "cudnn"),
        ("NVIDIA H200", dict(head_dim=256, segmented=True), "pallas"),
        (TURING, dict(dtype=jnp.float16), "blockwise"),
        ("Tesla V100-SXM2-16GB", dict(dtype=jnp.float16), "blockwise"),
        ("Tesla T4", dict(dtype=jnp.float16), "blockwise"),
        ("Quadro RTX 8000", dict(dtype=jnp.float16), "blockwise"),
        ("AMD Instinct MI250X", {}, "blockwise"),
        ("TPU v2", {}, "blockwise"),
        ("TPU v3", dict(head_dim=256), "blockwise"),
        ("TPU v4", dict(head_dim=256, segmented=True), "splash"),
        ("TPU v5 lite", {}, "splash"),
        ("TPU v5", dict(dtype=jnp.float32), "splash"),
        ("TPU v6 lite", dict(head_dim=80), "splash"),
        ("TPU v4", dict(dtype=jnp.float16), "blockwise"),
    ],
)
def test_auto(device_kind, options, expected):
    choice = _select("auto", device_kind, **options)
    assert choice.name == expected
    assert choice.why.startswith(f"attention: {expected} on {device_kind} (")
    assert "\n" not in choice.why
    assert _select(expected, device_kind, **options).name == expected  # and it may be named


def test_auto_says_what_it_passed_over():
    why = _select("auto", A100, head_dim=256).why
    assert "cudnn takes head dims that are multiples of 8 up to 128" in why and "not 256" in why


@pytest.mark.parametrize(
    "name, device_kind, options, message",
    [
        ("cudnn", A100, dict(head_dim=256), "up to 128.*not 256: use 'pallas'"),
        ("cudnn", A100, dict(segmented=True), "packed documents apart: use 'pallas'"),
        ("cudnn", H100, dict(dtype=jnp.float32), "not float32: use 'blockwise'"),
        ("cudnn", TURING, dict(dtype=jnp.float16), "Ampere.*: use 'blockwise'"),
        ("pallas", A100, dict(dtype=jnp.float32), "not float32: use 'blockwise'"),
        ("pallas", "cpu", {}, "needs an NVIDIA GPU, this is cpu: use 'blockwise'"),
        ("splash", A100, {}, "needs a TPU, this is NVIDIA A100.*: use 'cudnn'"),
        ("splash", "TPU v3", {}, "from v4 on, this is TPU v3: use 'blockwise'"),
        ("splash", "TPU v4", dict(dtype=jnp.float16), "not float16: use 'blockwise'"),
        ("cudnn", "TPU v4", {}, "needs an NVIDIA GPU, this is TPU v4: use 'splash'"),
    ],
)
def test_refusals_name_the_key_and_what_works(name, device_kind, options, message):
    with pytest.raises(ValueError, match=f"^kernels.attention='{name}' .*{message}"):
        _select(name, device_kind, **options)


def test_blocks_fit_the_platform():
    assert _select("auto", "cpu").block == 128
    assert _select("auto", "cpu", seq_len=40).block == 40
    assert _select("auto", "TPU v3").block == 512
