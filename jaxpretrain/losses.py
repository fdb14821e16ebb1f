"""Next-token cross-entropy, as a sum over tokens and their number: the caller divides once, globally.

Shapes: N tokens, D embed_dim, V rows of the unembedding, C rows of one vocabulary chunk.
"""

import functools
import math

import jax
import jax.numpy as jnp

_CHUNK_BYTES = 256 * 2**20  # of float32 logits that the chunked loss holds at a time
_PLAIN_BYTES = 2**30  # of float32 logits up to which "auto" keeps them whole: recomputing them costs time


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
    *,
    vocab_size: int,
    implementation: str,
) -> jax.Array:
    """Sum over the N tokens of mask * -log softmax(hidden @ unembedding.T)[target], nats, float32.

    Args:
      vocab_size: rows beyond it are a layout's padding and get no probability.
      implementation: `plain` holds all logits; `chunked` a slice of the vocabulary at a time, and computes
        them again in the backward (one more matrix multiplication of the head).
    """
    if implementation == "plain":
        logits_NxV = _matmul_f32(hidden_NxD, unembedding_VxD)
        if unembedding_VxD.shape[0] > vocab_size:
            logits_NxV = _mask_padding(logits_NxV, 0, vocab_size)
        return jnp.sum(mask_N * (jax.nn.logsumexp(logits_NxV, axis=-1) - _pick(logits_NxV, targets_N)))
    assert implementation == "chunked", implementation
    num_rows = unembedding_VxD.shape[0]
    num_chunks = _num_chunks(num_rows, hidden_NxD.shape[0])
    padding = -num_rows % num_chunks
    unembedding_VxD = jnp.pad(unembedding_VxD, ((0, padding), (0, 0)))
    return _chunked(hidden_NxD, unembedding_VxD, targets_N, mask_N, num_chunks, min(vocab_size, num_rows))


def _num_chunks(num_rows: int, num_tokens: int) -> int:
    """Enough chunks for _CHUNK_BYTES; up to half as many again if then the rows divide and need no padding."""
    least = max(1, math.ceil(4 * num_rows * num_tokens / _CHUNK_BYTES))
    return next((n for n in range(least, least + least // 2 + 1) if num_rows % n == 0), least)


def _mask_padding(logits: jax.Array, first_row: jax.Array | int, vocab_size: int) -> jax.Array:
    rows = first_row + jnp.arange(logits.shape[-1])
    return jnp.where(rows < vocab_size, logits, -jnp.inf)


def _pick(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """logits[n, targets[n]], 0 where the target is not among the columns; a fused compare, as a gather's
    gradient is a slow scatter."""
    columns = jnp.arange(logits.shape[-1])
    return jnp.sum(jnp.where(columns == targets[:, None], logits, 0), axis=-1)


@jax.custom_vjp
def _matmul_f32(hidden_NxD: jax.Array, weight_VxD: jax.Array) -> jax.Array:
    """hidden @ weight.T with a float32 result, and a backward in the operands' own dtype."""
    contract = functools.partial(
        jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    if hidden_NxD.dtype != jnp.float16:
        return contract(hidden_NxD, weight_VxD)
    # CPUs have no float16 product with a float32 sum.
    return jax.lax.platform_dependent(
        hidden_NxD,
        weight_VxD,
        default=contract,
        cpu=lambda h, w: contract(h.astype(jnp.float32), w.astype(jnp.float32)),
    )


def _matmul_forward(hidden_NxD, weight_VxD):
    return _matmul_f32(hidden_NxD, weight_VxD), (hidden_NxD, weight_VxD)


def _matmul_backward(residuals, gradient_NxV):
    hidden_NxD, weight_VxD = residuals
    gradient_NxV = gradient_NxV.astype(hidden_NxD.dtype)
    return gradient_NxV @ weight_VxD, jax.lax.dot_general(gradient_NxV, hidden_NxD, (((0,), (0,)), ((), ())))


_matmul_f32.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _chunked(hidden_NxD, unembedding_VxD, targets_N, mask_N, num_chunks, vocab_size):
    return _chunked_forward(hidden_NxD, unembedding_VxD, targets_N, mask_N, num_chunks, vocab_size)[0]


def _chunks(unembedding_VxD: jax.Array, num_chunks: int) -> tuple[jax.Array, jax.Array]:
    """The chunks' first rows, and the chunks [num_chunks, C, D]."""
    chunk_size = unembedding_VxD.shape[0] // num_chunks
    return chunk_size * jnp.arange(num_chunks), unembedding_VxD.reshape(num_chunks, chunk_size, -1)


def _chunked_forward(hidden_NxD, unembedding_VxD, targets_N, mask_N, num_chunks, vocab_size):
    def body(carry, chunk):
        maximum_N, sum_N, target_logit_N = carry
        first_row, weight_CxD = chunk
        logits_NxC = _mask_padding(_matmul_f32(hidden_NxD, weight_CxD), first_row, vocab_size)
        new_maximum_N = jnp.maximum(maximum_N, logits_NxC.max(axis=-1))
        sum_N = sum_N * jnp.exp(maximum_N - new_maximum_N)
        sum_N += jnp.exp(logits_NxC - new_maximum_N[:, None]).sum(axis=-1)
        target_logit_N += _pick(logits_NxC, targets_N - first_row)
        return (new_maximum_N, sum_N, target_logit_N), None

    num_tokens = hidden_NxD.shape[0]
    start = (jnp.full(num_tokens, -1e30), jnp.zeros(num_tokens), jnp.zeros(num_tokens))
    (maximum_N, sum_N, target_logit_N), _ = jax.lax.scan(body, start, _chunks(unembedding_VxD, num_chunks))
    logsumexp_N = maximum_N + jnp.log(sum_N)
    loss = jnp.sum(mask_N * (logsumexp_N - target_logit_N))
    return loss, (hidden_NxD, unembedding_VxD, targets_N, mask_N, logsumexp_N)


def _chunked_backward(num_chunks, vocab_size, residuals, gradient):
    hidden_NxD, unembedding_VxD, targets_N, mask_N, logsumexp_N = residuals
    weight_N = gradient * mask_N

    def body(hidden_gradient_NxD, chunk):
        first_row, weight_CxD = chunk
        logits_NxC = _mask_padding(_matmul_f32(hidden_NxD, weight_CxD), first_row, vocab_size)
        columns = jnp.arange(logits_NxC.shape[-1])
        one_hot_NxC = columns == (targets_N - first_row)[:, None]
        logits_gradient_NxC = weight_N[:, None] * (jnp.exp(logits_NxC - logsumexp_N[:, None]) - one_hot_NxC)
        to_hidden, to_weight = _matmul_backward((hidden_NxD, weight_CxD), logits_gradient_NxC)
        return hidden_gradient_NxD + to_hidden.astype(jnp.float32), to_weight

    start = jnp.zeros(hidden_NxD.shape, jnp.float32)
    hidden_gradient_NxD, weight_gradient = jax.lax.scan(body, start, _chunks(unembedding_VxD, num_chunks))
    weight_gradient = weight_gradient.reshape(unembedding_VxD.shape)
    return hidden_gradient_NxD.astype(hidden_NxD.dtype), weight_gradient, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)
