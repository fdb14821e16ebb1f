"""Chunked and plain cross-entropy against a float64 reference, value and gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpretrain import losses


def reference(hidden, weight, targets, mask, vocab_size):
    """Loss, and its gradients to hidden and weight, in float64 from the formulas."""
    hidden, weight, mask = (np.asarray(x, np.float64) for x in (hidden, weight, mask))
    logits = hidden @ weight[:vocab_size].T
    logits -= logits.max(-1, keepdims=True)
    total = np.exp(logits).sum(-1, keepdims=True)
    probabilities = np.exp(logits) / total
    rows = np.arange(len(targets))
    loss = (mask * (np.log(total[:, 0]) - logits[rows, targets])).sum()
    probabilities[rows, targets] -= 1
    d_logits = mask[:, None] * probabilities
    d_weight = np.zeros_like(weight)
    d_weight[:vocab_size] = d_logits.T @ hidden
    return loss, d_logits @ weight[:vocab_size], d_weight


def example(num_tokens, embed_dim, num_rows, vocab_size, dtype=jnp.float32):
    rng = np.random.default_rng(num_rows)
    hidden = jnp.asarray(rng.normal(size=(num_tokens, embed_dim)), dtype)
    weight = jnp.asarray(rng.normal(size=(num_rows, embed_dim)), dtype)
    targets = rng.integers(0, vocab_size, num_tokens)
    targets[:2] = 0, vocab_size - 1
    return hidden, weight, jnp.asarray(targets), jnp.asarray(rng.integers(0, 2, num_tokens), jnp.float32)


def value_and_gradients(implementation, hidden, weight, targets, mask, vocab_size):
    loss = functools.partial(losses.cross_entropy, vocab_size=vocab_size, implementation=implementation)
    loss, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight, targets, mask)
    return float(loss), *gradients


@pytest.fixture(params=["plain", "chunked", "whole"])
def implementation(request, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * 37 * 20)  # about 20 rows for the 37 tokens here
    monkeypatch.setattr(losses, "_BLOCK_BYTES", 4 * 97 * 10)  # about 10 tokens of the 37
    return request.param


@pytest.mark.parametrize(
    ("num_rows", "vocab_size"),
    [(97, 97), (100, 100), (104, 97), (128, 41), (13, 13)],  # 41: whole chunks of padding; 13: one chunk
)
def test_equals_float64_reference(implementation, num_rows, vocab_size):
    """Fails if padding rows are not masked, if chunks pick a target outside them, if the mask is left out of the
    backward, or if a block's gradient replaces the sum (each tried)."""
    arguments = example(37, 16, num_rows, vocab_size)
    loss, d_hidden, d_weight = value_and_gradients(implementation, *arguments, vocab_size)
    expected = reference(*arguments, vocab_size)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    np.testing.assert_allclose(d_hidden, expected[1], atol=2e-5)
    np.testing.assert_allclose(d_weight, expected[2], atol=2e-5)
    np.testing.assert_array_equal(d_weight[vocab_size:], 0)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(97, 97), (104, 97), (128, 41)])
def test_a_bias_is_one_more_column(implementation, num_rows, vocab_size):
    """Of the unembedding, where the hidden state is 1. Fails with the mask left out of the plain bias's gradient, with
    the bias left out of the chunks' backward, and with chunks of it in another order (each tried)."""
    hidden, weight, targets, mask = example(37, 16, num_rows, vocab_size)
    bias = jnp.asarray(np.random.default_rng(5).normal(size=num_rows), jnp.float32)
    loss = functools.partial(losses.cross_entropy, vocab_size=vocab_size, implementation=implementation)
    gradients_of = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 4)))
    value, (d_hidden, d_weight, d_bias) = gradients_of(hidden, weight, targets, mask, bias)
    longer = jnp.pad(hidden, ((0, 0), (0, 1)), constant_values=1), jnp.concatenate([weight, bias[:, None]], 1)
    expected = reference(*longer, targets, mask, vocab_size)
    assert float(value) == pytest.approx(expected[0], rel=1e-6)
    np.testing.assert_allclose(d_hidden, expected[1][:, :-1], atol=2e-5)
    np.testing.assert_allclose(d_weight, expected[2][:, :-1], atol=2e-5)
    np.testing.assert_allclose(d_bias, expected[2][:, -1], atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_inputs_lose_no_more_than_a_rounding(implementation, dtype):
    """The loss is float32's, from the rounded inputs: sums over the vocabulary are not in 16 bits."""
    arguments = example(37, 16, 97, 97, dtype)
    loss, d_hidden, d_weight = value_and_gradients(implementation, *arguments, 97)
    expected = reference(*arguments, 97)
    assert d_hidden.dtype == d_weight.dtype == dtype
    assert loss == pytest.approx(expected[0], rel=1e-5)
    rounding = 4 * float(jnp.finfo(dtype).eps)
    for gradient, exact in ((d_hidden, expected[1]), (d_weight, expected[2])):
        np.testing.assert_allclose(np.asarray(gradient, np.float64), exact, atol=rounding * np.abs(exact).max())


@pytest.mark.parametrize("vocab_size", [50257, 70001])  # more than float16's largest number too
def test_float16_gradients_of_a_large_vocabulary(implementation, vocab_size):
    """Scaled as in training. Fails with a _SCALE of 1, where probabilities are subnormal, and of 1e6, where targets
    overflow (both tried)."""
    hidden, weight, targets, mask = example(7, 4, vocab_size, vocab_size, jnp.float16)
    arguments, scale = (hidden / 64, weight, targets, jnp.ones_like(mask)), 2.0**14
    loss = functools.partial(losses.cross_entropy, vocab_size=vocab_size, implementation=implementation)
    gradients = jax.jit(jax.grad(lambda *a: scale * loss(*a), argnums=(0, 1)))(*arguments)
    for gradient, expected in zip(gradients, reference(*arguments, vocab_size)[1:], strict=True):
        expected = scale * expected
        close = dict(rtol=1e-3, atol=1e-3 * np.median(abs(expected)))
        np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, **close)


def test_large_logits_stay_finite(implementation):
    hidden, weight, targets, mask = example(37, 16, 97, 97)
    loss, d_hidden, d_weight = value_and_gradients(implementation, 1e3 * hidden, weight, targets, mask, 97)
    assert loss == pytest.approx(reference(1e3 * hidden, weight, targets, mask, 97)[0], rel=1e-5)
    assert np.isfinite(d_hidden).all() and np.isfinite(d_weight).all()


def test_nothing_counts_where_the_mask_is_0(implementation):
    hidden, weight, targets, mask = example(37, 16, 97, 97)
    for result in value_and_gradients(implementation, hidden, weight, targets, 0 * mask, 97):
        np.testing.assert_array_equal(result, 0)


def test_chunked_holds_one_chunk_of_logits(monkeypatch):
    """The compiler's account, forward and backward; fails if the chunked loss keeps its logits for the backward."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", 2**20)
    num_tokens, num_rows = 1024, 8191
    arguments = [
        jax.ShapeDtypeStruct((num_tokens, 32), jnp.float32),
        jax.ShapeDtypeStruct((num_rows, 32), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
    ]

    def temporaries(implementation):
        loss = functools.partial(losses.cross_entropy, vocab_size=num_rows, implementation=implementation)
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries("plain") > 4 * num_tokens * num_rows
    assert temporaries("chunked") < 4 * 2**20 + 3 * 4 * num_rows * 32


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(50304, 32768), (50257, 2048), (97, 7), (128256, 16384)])
def test_chunks_are_small_enough_and_not_many_more_than_that(num_rows, num_tokens):
    least = math.ceil(4 * num_rows * num_tokens / losses.CHUNK_BYTES)
    num_chunks = losses._num_chunks(num_rows, num_tokens)
    assert least <= num_chunks <= max(1, 1.5 * least)
    if num_rows in (50304, 128256):
        assert num_rows % num_chunks == 0


def test_auto_keeps_small_logits_whole():
    assert losses.choose_cross_entropy("auto", 1024, 50304) == "plain"
    assert losses.choose_cross_entropy("auto", 32768, 50304) == "chunked"
    assert losses.choose_cross_entropy("plain", 32768, 50304) == "plain"
    assert losses.choose_cross_entropy("chunked", 1, 2) == "chunked"


def test_targets_count_within_their_document():
    batch = dict(tokens=jnp.arange(14).reshape(2, 7), segment_ids=jnp.array([[1, 1, 2, 2, 3, 0, 0], [5] * 7]))
    inputs, segment_ids, targets, mask = losses.targets_and_mask(batch)
    np.testing.assert_array_equal(inputs, batch["tokens"][:, :-1])
    np.testing.assert_array_equal(targets, batch["tokens"][:, 1:])
    np.testing.assert_array_equal(segment_ids, batch["segment_ids"][:, :-1])
    np.testing.assert_array_equal(mask, [[1, 0, 1, 0, 0, 0], [1] * 6])
    *_, mask = losses.targets_and_mask(dict(tokens=batch["tokens"]))
    np.testing.assert_array_equal(mask, np.ones((2, 6)))
