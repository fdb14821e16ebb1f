"""Cross-entropy, as a sum over tokens or images: the caller divides once, globally.

Shapes: N tokens, D embed_dim, V rows of the unembedding, n tokens of a block, C rows of one vocabulary chunk.
"""

import functools
import math

import jax
import jax.numpy as jnp

CHUNK_BYTES = 256 * 2**20  # of float32 logits that the chunked loss holds at a time
_PLAIN_BYTES = 2**30  # of float32 logits up to which "auto" computes them once: computing them again costs time
_SCALE = 1024.0  # of the plain loss's gradients by the logits, in [-1, 1]: 1 / vocab_size is too small for float16
_BLOCK_BYTES = 128 * 2**20  # of float32 logits that the plain loss holds at a time: blocks gain from a CPU's cache


def targets_and_mask(batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """A batch of rows [B, T+1] -> inputs, their segment ids or None, targets and the float32 mask that counts, [B, T].

    A target counts if it belongs to the same document as its input; segment 0 is padding.
    """
    tokens, segment_ids = batch["tokens"], batch.get("segment_ids")
    if segment_ids is None:
        return tokens[:, :-1], None, tokens[:, 1:], jnp.ones(tokens[:, 1:].shape, jnp.float32)
    mask = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return tokens[:, :-1], segment_ids[:, :-1], tokens[:, 1:], mask.astype(jnp.float32)


def choose_cross_entropy(name: str, num_tokens: int, vocab_size: int) -> str:
    """`auto` -> plain where the logits of a micro-batch are small, else chunked."""
    if name != "auto":
        return name
    return "plain" if 4 * num_tokens * vocab_size <= _PLAIN_BYTES else "chunked"


def cross_entropy(
    hidden_NxD: jax.Array,
    unembedding_VxD: jax.Array,
    targets_N: jax.Array,
    mask_N: jax.Array,
    bias_V: jax.Array | None = None,
    *,
    vocab_size: int,
    implementation: str,
) -> jax.Array:
    """Sum over the N tokens of mask * -log softmax(hidden @ unembedding.T + bias)[target], nats, float32.

    Args:
      vocab_size: rows beyond it are a layout's padding and get no probability.
      implementation: `plain` holds the logits of a block of tokens at a time, and with them computes the gradients at
        once, in the forward; these are in float32. `chunked` holds a slice of the vocabulary at a time, and computes
        it again in the backward: one more matrix multiplication of the head, but least memory. `whole` holds all
        logits, and leaves the gradients to JAX.
    """
    num_rows, num_tokens = unembedding_VxD.shape[0], hidden_NxD.shape[0]
    if implementation == "whole":
        logits_NxV = _mask_padding(_logits(hidden_NxD, unembedding_VxD, bias_V), 0, vocab_size)
        return jnp.sum(mask_N * (jax.nn.logsumexp(logits_NxV, axis=-1) - _pick(logits_NxV, targets_N)))
    if implementation == "plain":
        num_blocks = max(1, math.ceil(4 * num_rows * num_tokens / _BLOCK_BYTES))
        return _plain(hidden_NxD, unembedding_VxD, bias_V, targets_N, mask_N, num_blocks, vocab_size)
    assert implementation == "chunked", implementation
    num_chunks = _num_chunks(num_rows, num_tokens)
    padding = -num_rows % num_chunks
    unembedding_VxD = jnp.pad(unembedding_VxD, ((0, padding), (0, 0)))
    bias_V = None if bias_V is None else jnp.pad(bias_V, (0, padding))
    return _chunked(hidden_NxD, unembedding_VxD, bias_V, targets_N, mask_N, num_chunks, min(vocab_size, num_rows))


def _num_chunks(num_rows: int, num_tokens: int) -> int:
    """Enough chunks for CHUNK_BYTES; up to half as many again if then the rows divide and need no padding."""
    least = max(1, math.ceil(4 * num_rows * num_tokens / CHUNK_BYTES))
    return next((n for n in range(least, least + least // 2 + 1) if num_rows % n == 0), least)


def _mask_padding(logits: jax.Array, first_row: jax.Array | int, vocab_size: int) -> jax.Array:
    rows = first_row + jnp.arange(logits.shape[-1])
    return jnp.where(rows < vocab_size, logits, -jnp.inf)


def _pick(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """logits[n, targets[n]], 0 where the target is not among the columns."""
    columns = jnp.arange(logits.shape[-1])
    return jnp.sum(jnp.where(columns == targets[:, None], logits, 0), axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _plain(hidden_NxD, unembedding_VxD, bias_V, targets_N, mask_N, num_blocks, vocab_size):
    def block(loss, tokens):
        return loss + _block_loss(*tokens, unembedding_VxD, bias_V, vocab_size)[0], None

    return jax.lax.scan(block, jnp.zeros(()), _split(num_blocks, hidden_NxD, targets_N, mask_N))[0]


def _plain_forward(hidden_NxD, unembedding_VxD, bias_V, targets_N, mask_N, num_blocks, vocab_size):
    """The gradients too: the logits are used while they are there (Liger Kernel, arXiv 2410.10989, section 3.2)."""
    tokens, dtype = _split(num_blocks, hidden_NxD, targets_N, mask_N), hidden_NxD.dtype

    def block(sums, tokens):
        hidden_nxD, targets_n, mask_n = tokens
        block_loss, exp_nxV, sum_n = _block_loss(*tokens, unembedding_VxD, bias_V, vocab_size)
        is_target_nxV = jnp.arange(exp_nxV.shape[1]) == targets_n[:, None]
        softmax_nxV = exp_nxV / sum_n[:, None]
        d_nxV = (_SCALE * jnp.where(is_target_nxV, softmax_nxV - 1, softmax_nxV)).astype(dtype)
        d_hidden_nxD = mask_n[:, None] / _SCALE * _dot(d_nxV, unembedding_VxD, 1, 0)
        masked_nxD = (mask_n[:, None] * hidden_nxD).astype(dtype)
        loss, d_unembedding_VxD, d_bias_V = sums
        d_unembedding_VxD += _dot(d_nxV, masked_nxD, 0, 0) / _SCALE
        if d_bias_V is not None:
            d_bias_V += mask_n @ jnp.where(is_target_nxV, softmax_nxV - 1, softmax_nxV)
        return (loss + block_loss, d_unembedding_VxD, d_bias_V), d_hidden_nxD

    no_bias = None if bias_V is None else jnp.zeros(bias_V.shape, jnp.float32)
    zeros = jnp.zeros(()), jnp.zeros(unembedding_VxD.shape, jnp.float32), no_bias
    (loss, d_unembedding_VxD, d_bias_V), d_hidden = jax.lax.scan(block, zeros, tokens)
    d_hidden_NxD = d_hidden.reshape(-1, hidden_NxD.shape[1])[: hidden_NxD.shape[0]]
    like = hidden_NxD[:0], unembedding_VxD[:0], None if bias_V is None else bias_V[:0]
    return loss, ((d_hidden_NxD, d_unembedding_VxD, d_bias_V), like)


def _plain_backward(num_blocks, vocab_size, residuals, gradient):
    # float32 up to here: in float16 the loss scale, which comes in by `gradient`, keeps them from vanishing.
    gradients = jax.tree.map(lambda d, like: (gradient * d).astype(like.dtype), *residuals)
    return *gradients, None, None


_plain.defvjp(_plain_forward, _plain_backward)


def _block_loss(hidden_nxD, targets_n, mask_n, unembedding_VxD, bias_V, vocab_size):
    """-> sum of the losses; exp(logits - their maximum) [n, V] and its row sums, float32."""
    logits_nxV = _logits(hidden_nxD, unembedding_VxD, bias_V)
    if logits_nxV.shape[1] > vocab_size:
        logits_nxV = _mask_padding(logits_nxV, 0, vocab_size)
    maximum_n = logits_nxV.max(axis=1)
    exp_nxV = jnp.exp(logits_nxV - maximum_n[:, None])
    sum_n = exp_nxV.sum(axis=1)
    target_logit_n = jnp.take_along_axis(logits_nxV, targets_n[:, None], axis=1)[:, 0]
    return jnp.sum(mask_n * (jnp.log(sum_n) + maximum_n - target_logit_n)), exp_nxV, sum_n


def _split(num_blocks: int, *arrays: jax.Array) -> list[jax.Array]:
    """[N, ...] -> [num_blocks, n, ...], filled up with zeros, which the mask leaves out."""
    padding = -len(arrays[0]) % num_blocks
    padded = [jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1))) for x in arrays]
    return [x.reshape(num_blocks, -1, *x.shape[1:]) for x in padded]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _chunked(hidden_NxD, unembedding_VxD, bias_V, targets_N, mask_N, num_chunks, vocab_size):
    return _chunked_forward(hidden_NxD, unembedding_VxD, bias_V, targets_N, mask_N, num_chunks, vocab_size)[0]


def _chunks(unembedding_VxD: jax.Array, bias_V: jax.Array | None, num_chunks: int) -> tuple:
    """The chunks' first rows, the chunks [num_chunks, C, D] and their biases [num_chunks, C] or None."""
    chunk_size = unembedding_VxD.shape[0] // num_chunks
    biases = None if bias_V is None else bias_V.reshape(num_chunks, chunk_size)
    return chunk_size * jnp.arange(num_chunks), unembedding_VxD.reshape(num_chunks, chunk_size, -1), biases


def _chunked_forward(hidden_NxD, unembedding_VxD, bias_V, targets_N, mask_N, num_chunks, vocab_size):
    def body(carry, chunk):
        maximum_N, sum_N, target_logit_N = carry
        first_row, weight_CxD, bias_C = chunk
        logits_NxC = _mask_padding(_logits(hidden_NxD, weight_CxD, bias_C), first_row, vocab_size)
        new_maximum_N = jnp.maximum(maximum_N, logits_NxC.max(axis=-1))
        sum_N = sum_N * jnp.exp(maximum_N - new_maximum_N)
        sum_N += jnp.exp(logits_NxC - new_maximum_N[:, None]).sum(axis=-1)
        target_logit_N += _pick(logits_NxC, targets_N - first_row)
        return (new_maximum_N, sum_N, target_logit_N), None

    num_tokens = hidden_NxD.shape[0]
    start = (jnp.full(num_tokens, -1e30), jnp.zeros(num_tokens), jnp.zeros(num_tokens))
    (maximum_N, sum_N, target_logit_N), _ = jax.lax.scan(body, start, _chunks(unembedding_VxD, bias_V, num_chunks))
    logsumexp_N = maximum_N + jnp.log(sum_N)
    loss = jnp.sum(mask_N * (logsumexp_N - target_logit_N))
    return loss, (hidden_NxD, unembedding_VxD, bias_V, targets_N, mask_N, logsumexp_N)


def _chunked_backward(num_chunks, vocab_size, residuals, gradient):
    hidden_NxD, unembedding_VxD, bias_V, targets_N, mask_N, logsumexp_N = residuals
    weight_N = gradient * mask_N

    def body(hidden_gradient_NxD, chunk):
        first_row, weight_CxD, bias_C = chunk
        logits_NxC = _mask_padding(_logits(hidden_NxD, weight_CxD, bias_C), first_row, vocab_size)
        columns = jnp.arange(logits_NxC.shape[-1])
        one_hot_NxC = columns == (targets_N - first_row)[:, None]
        logits_gradient_NxC = weight_N[:, None] * (jnp.exp(logits_NxC - logsumexp_N[:, None]) - one_hot_NxC)
        to_bias_C = None if bias_C is None else logits_gradient_NxC.sum(axis=0).astype(bias_C.dtype)
        logits_gradient_NxC = logits_gradient_NxC.astype(hidden_NxD.dtype)
        to_weight_CxD = _dot(logits_gradient_NxC, hidden_NxD, 0, 0).astype(weight_CxD.dtype)
        return hidden_gradient_NxD + _dot(logits_gradient_NxC, weight_CxD, 1, 0), (to_weight_CxD, to_bias_C)

    start = jnp.zeros(hidden_NxD.shape, jnp.float32)
    chunks = _chunks(unembedding_VxD, bias_V, num_chunks)
    hidden_gradient_NxD, (weight_gradient, bias_gradient) = jax.lax.scan(body, start, chunks)
    weight_gradient = weight_gradient.reshape(unembedding_VxD.shape)
    bias_gradient = None if bias_gradient is None else bias_gradient.reshape(-1)
    return hidden_gradient_NxD.astype(hidden_NxD.dtype), weight_gradient, bias_gradient, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _logits(hidden: jax.Array, unembedding: jax.Array, bias: jax.Array | None) -> jax.Array:
    logits = _dot(hidden, unembedding, 1, 1)
    return logits if bias is None else logits + bias


def _dot(x: jax.Array, y: jax.Array, x_dim: int, y_dim: int) -> jax.Array:
    """A matrix product with float32 sums and result, whatever the operands are."""

    def contract(x, y):
        dimension_numbers = (((x_dim,), (y_dim,)), ((), ()))
        return jax.lax.dot_general(x, y, dimension_numbers, preferred_element_type=jnp.float32)

    if x.dtype != jnp.float16:
        return contract(x, y)
    # CPUs have no float16 product with a float32 sum.
    return jax.lax.platform_dependent(
        x, y, default=contract, cpu=lambda x, y: contract(x.astype(jnp.float32), y.astype(jnp.float32))
    )
