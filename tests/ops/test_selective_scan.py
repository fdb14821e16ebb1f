"""The chunked scan against the recurrence it stands for, one token after the other, and against its autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpretrain.ops import selective_scan as scan_lib
from jaxpretrain.ops.selective_scan import selective_scan

NAMES = ("y", "du", "d_dt", "dA", "dB", "dC", "dD")


def recurrence(u_BxTxC, dt_BxTxC, A_CxN, B_BxTxN, C_BxTxN, D_C, resets_BxT=None):
    """The paper's equations (2), discretised as its section 3.3 says, in float32."""
    keep_BxT = jnp.ones(u_BxTxC.shape[:2]) if resets_BxT is None else 1.0 - resets_BxT

    def step(h_BxCxN, token):
        u, dt, B, C, keep = token
        h_BxCxN = jnp.exp(dt[..., None] * A_CxN) * keep[:, None, None] * h_BxCxN
        h_BxCxN += (dt * u)[..., None] * B[:, None]
        return h_BxCxN, jnp.einsum("bcn,bn->bc", h_BxCxN, C)

    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (u_BxTxC, dt_BxTxC, B_BxTxN, C_BxTxN, keep_BxT))
    h_BxCxN = jnp.zeros((u_BxTxC.shape[0], *A_CxN.shape))
    return jax.lax.scan(step, h_BxCxN, tokens)[1].swapaxes(0, 1) + D_C * u_BxTxC


def inputs(T, Bs=2, C=6, N=4):
    """Inputs, the gradient of y, and some resets. Decays of a token are between 0.999 and 0.0001."""
    random = np.random.default_rng(T)

    def normal(*shape):
        return random.standard_normal(shape).astype(np.float32)

    dt = np.exp(random.uniform(np.log(1e-3), np.log(0.5), (Bs, T, C))).astype(np.float32)
    A = -np.exp(random.uniform(0, np.log(16), (C, N))).astype(np.float32)
    x = normal(Bs, T, C), dt, A, normal(Bs, T, N), normal(Bs, T, N), normal(C)
    return jax.tree.map(jnp.asarray, (x, normal(Bs, T, C), random.random((Bs, T)) < 0.1))


@functools.partial(jax.jit, static_argnames="scan")
def output_and_gradients(scan, x, dy, resets):
    y, backward = jax.vjp(lambda *x: scan(*x, resets), *x)
    return y, *backward(dy.astype(y.dtype))


def assert_close(found, expected, tolerance=1e-5):
    for name, x, y in zip(NAMES, found, expected, strict=True):
        assert x.shape == y.shape, name
        error = jnp.abs(x.astype(jnp.float32) - y).max()
        assert error <= tolerance * max(1, jnp.abs(y).max()), f"{name}: {error}"


@pytest.mark.parametrize("with_resets", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("T", [1, 2, 3, 7, 64, 65, 128, 257, 1000])
def test_equals_the_recurrence(T, with_resets):
    """Mutations seen to fail: `h_BxNxC + last_BxNxC` in `_carried_over`; no `keep` in `_decay`, or in `_chunk_decay`
    alone; segments of the backward not in reverse; `g` that starts at zero in every chunk.
    """
    x, dy, resets = inputs(T)
    resets = resets if with_resets else None
    assert_close(output_and_gradients(selective_scan, x, dy, resets), output_and_gradients(recurrence, x, dy, resets))


def test_one_chunk(monkeypatch):
    """What large batches get. Fails if the loop begins with ones (tried: `jnp.ones_like` for `starts_RxNxC`)."""
    monkeypatch.setattr(scan_lib, "_CARRY", 1)
    assert scan_lib._sizes(2, 30, 4, 6)[0] == 1
    x, dy, resets = inputs(30)
    assert_close(output_and_gradients(selective_scan, x, dy, resets), output_and_gradients(recurrence, x, dy, resets))


def test_states_are_float32_in_bfloat16():
    """Results are within a rounding or two of the exact ones for the same rounded inputs.

    Fails if states are in the inputs' dtype (tried: `_next_state` rounded to bfloat16).
    """
    x, dy, resets = jax.tree.map(lambda x: x if x.dtype == bool else x.astype(jnp.bfloat16), inputs(257))
    found = output_and_gradients(selective_scan, x, dy, resets)
    assert all(value.dtype == jnp.bfloat16 for value in found)
    x, dy = jax.tree.map(lambda x: x.astype(jnp.float32), (x, dy))
    assert_close(found, output_and_gradients(recurrence, x, dy, resets), tolerance=2**-8)


def test_in_shard_map_in_a_scan_recomputed():
    """As in the training step: rows over manual mesh axes, layers in a scan, each recomputed in the backward.

    Fails if chunks of one row begin with another's states (tried: `xs` in `_carried_over` reshaped to chunks, rows).
    """
    x, dy, resets = inputs(65, Bs=8)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))

    def two_layers(scan, u, dt, A, B, C, D, resets):
        layer = jax.checkpoint(lambda u, D: (jnp.tanh(scan(u, dt, A, B, C, D, resets)), None))
        return jax.lax.scan(layer, u, jnp.stack([D, -D]))[0]

    def local(scan, x, dy, resets):
        y, *gradients = output_and_gradients(functools.partial(two_layers, scan), x, dy, resets)
        return y, *(g if g.ndim == 3 else jax.lax.psum(g, "data") for g in gradients)

    rows, whole = jax.P("data"), jax.P()
    specs = rows, rows, whole, rows, rows, whole
    manual = jax.shard_map(
        functools.partial(local, selective_scan),
        mesh=mesh,
        in_specs=(specs, rows, rows),
        out_specs=(rows, *specs),
        check_vma=False,
    )
    expected = output_and_gradients(functools.partial(two_layers, recurrence), x, dy, resets)
    assert_close(jax.jit(manual)(x, dy, resets), expected)
