"""Blockwise attention in plain XLA: O(T) memory forward and backward, for devices without a kernel.

FlashAttention-2 (arXiv 2307.08691, algorithms 1 and 2): softmax over blocks of keys with a running maximum;
the backward keeps only the output and the logsumexp and recomputes the weights. The loop is one `scan`
over the pairs of blocks: the program stays small at any length and its trip count is known to the compiler.
Causal attention takes the pairs on and below the diagonal only, so nothing above it is computed.

n blocks of b tokens; N = batch x key-value heads; the R query heads of a key-value head are rows of one
matrix product, so keys are never repeated.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

BLOCK = 512  # tokens
_MASKED = -1e30  # finite: exp(_MASKED - maximum) is 0 without inf - inf


def attend(
    q_BxTxHxK: jax.Array,
    k_BxTxGxK: jax.Array,
    v_BxTxGxK: jax.Array,
    segment_ids_BxT: jax.Array | None,
    *,
    causal: bool,
    residual_name: str,
    block: int = BLOCK,
) -> jax.Array:
    """Shapes, masks and numerics of `attention.attend`; any length.

    Args:
      residual_name: `checkpoint_name` of the output and logsumexp that the backward reads.
      block: tokens of the largest block; scores of one pair of blocks are in memory at a time.
    """
    return _attend(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, segment_ids_BxT, causal, residual_name, block)


def _attend(q, k, v, segment_ids, causal, residual_name, block):
    return _forward(q, k, v, segment_ids, causal, block)[0]


def _attend_fwd(q, k, v, segment_ids, causal, residual_name, block):
    out, logsumexp = checkpoint_name(_forward(q, k, v, segment_ids, causal, block), residual_name)
    return out, (q, k, v, segment_ids, out, logsumexp)


def _attend_bwd(causal, residual_name, block, residuals, d_out):
    return *_backward(*residuals, d_out, causal, block), None


_attend = jax.custom_vjp(_attend, nondiff_argnums=(4, 5, 6))
_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, segment_ids_BxT, causal, block):
    """-> out_BxTxHxK, logsumexp_BxTxH (fp32, natural, of the scaled scores)."""
    B, T, H, K = q_BxTxHxK.shape
    G = k_BxTxGxK.shape[2]
    n, b = _blocks(T, block)
    q_nxNxRbxK, k_nxNxbxK, v_nxNxbxK = (_split(x, G, n, b) for x in (q_BxTxHxK, k_BxTxGxK, v_BxTxGxK))
    mask_of = _make_mask(segment_ids_BxT, causal, T, n, b, G, H // G)

    def step(carry, pair):
        (maximum, total, out), (out_nxNxRbxK, logsumexp_nxNxRb) = carry
        i, j = pair
        scores = _dot(q_nxNxRbxK[i], k_nxNxbxK[j], 2, 2) * K**-0.5
        scores = jnp.where(mask_of(i, j), scores, _MASKED)
        # A row of blocks starts at its diagonal, where each query sees itself: the maximum is real at once.
        # (Padding after the end may see nothing where nothing is causal: finite all the same, and `_join` drops it.)
        starts = i == j
        new_maximum = jnp.maximum(jnp.where(starts, _MASKED, maximum), scores.max(-1))
        correction = jnp.where(starts, 0.0, jnp.exp(maximum - new_maximum))
        weights = jnp.exp(scores - new_maximum[..., None])
        total = total * correction + weights.sum(-1)
        out = out * correction[..., None] + _dot(weights.astype(q_BxTxHxK.dtype), v_nxNxbxK[j], 2, 1)
        # Written at every pair: the last one of the row stays.
        out_nxNxRbxK = out_nxNxRbxK.at[i].set((out / total[..., None]).astype(out_nxNxRbxK.dtype))
        logsumexp_nxNxRb = logsumexp_nxNxRb.at[i].set(new_maximum + jnp.log(total))
        return ((new_maximum, total, out), (out_nxNxRbxK, logsumexp_nxNxRb)), None

    row = jnp.zeros_like(q_nxNxRbxK[0], jnp.float32)  # zeros_like also takes over the manual axes it varies over
    results = jnp.zeros_like(q_nxNxRbxK), jnp.zeros_like(q_nxNxRbxK[..., 0], jnp.float32)
    (_, (out, logsumexp)), _ = jax.lax.scan(step, ((row[..., 0], row[..., 0], row), results), _pairs(n, causal))
    return _join(out, B, T, b), _join(logsumexp[..., None], B, T, b)[..., 0]


def _backward(
    q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, segment_ids_BxT, out_BxTxHxK, logsumexp_BxTxH, d_out_BxTxHxK, causal, block
):
    """-> gradients of q, k and v."""
    B, T, H, K = q_BxTxHxK.shape
    G, dtype = k_BxTxGxK.shape[2], q_BxTxHxK.dtype
    n, b = _blocks(T, block)
    delta_BxTxH = (out_BxTxHxK.astype(jnp.float32) * d_out_BxTxHxK.astype(jnp.float32)).sum(-1)
    q, k, v, d_out = (_split(x, G, n, b) for x in (q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, d_out_BxTxHxK))
    k_nxNxKxb = k.swapaxes(2, 3)
    logsumexp, delta = (_split(x[..., None], G, n, b)[..., 0] for x in (logsumexp_BxTxH, delta_BxTxH))
    mask_of = _make_mask(segment_ids_BxT, causal, T, n, b, G, H // G)

    # Everything is transposed, keys by queries: then no product contracts the rows of both its operands, which XLA
    # for CPUs computes at a third of the speed.
    def step(gradients, pair):
        dq, dk, dv = gradients
        i, j = pair
        scores = _dot(k[j], q[i], 2, 2) * K**-0.5
        weights = jnp.where(mask_of(i, j).swapaxes(-1, -2), jnp.exp(scores - logsumexp[i][:, None]), 0.0)
        d_scores = weights * (_dot(v[j], d_out[i], 2, 2) - delta[i][:, None]) * K**-0.5
        d_scores = d_scores.astype(dtype)
        dq = dq.at[i].add(_dot(k_nxNxKxb[j], d_scores, 2, 1))
        dk = dk.at[j].add(_dot(d_scores, q[i], 2, 1))
        dv = dv.at[j].add(_dot(weights.astype(dtype), d_out[i], 2, 1))
        return (dq, dk, dv), None

    zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (q.swapaxes(2, 3), k, v))
    (dq_nxNxKxRb, dk, dv), _ = jax.lax.scan(step, zeros, _pairs(n, causal))
    return tuple(_join(x.astype(dtype), B, T, b) for x in (dq_nxNxKxRb.swapaxes(2, 3), dk, dv))


def _blocks(T: int, block: int) -> tuple[int, int]:
    """Number and length of the blocks. Equal blocks leave less padding than full ones and a rest."""
    n = -(-T // block)
    b = -(-T // n)
    return n, b if n == 1 else -(-b // 8) * 8  # 8: rows of a TPU's vector register


def _pairs(n: int, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """(query block, key block), row by row, each from the diagonal to the left and then, if not causal, the right."""
    pairs = [(i, j) for i in range(n) for j in (*range(i, -1, -1), *range(i + 1, 0 if causal else n))]
    return tuple(np.array(pairs, np.int32).T)


def _make_mask(segment_ids_BxT, causal, T, n, b, G, R):
    """-> mask_of(i, j), bool, broadcasts to N x Rb x b. No query before the end sees the padding after it."""
    rows, columns = np.tile(np.arange(b), R)[:, None], np.arange(b)[None]

    def visible(i, j):
        return i * b + rows >= j * b + columns if causal else j * b + columns < T

    if segment_ids_BxT is None:
        return visible
    ids_nxNxb = _split(jnp.repeat(segment_ids_BxT[:, :, None, None], G, axis=2), G, n, b)[..., 0]

    def mask_of(i, j):
        same = jnp.tile(ids_nxNxb[i], R)[:, :, None] == ids_nxNxb[j][:, None, :]
        return same & visible(i, j)

    return mask_of


def _split(x_BxTxHxK, G, n, b):
    """-> n x N x Rb x K: blocks lead, and the heads of a group are rows. Pads the end with zeros."""
    B, T, H, K = x_BxTxHxK.shape
    x = jnp.pad(x_BxTxHxK, ((0, 0), (0, n * b - T), (0, 0), (0, 0)))
    return x.reshape(B, n, b, G, H // G, K).transpose(1, 0, 3, 4, 2, 5).reshape(n, B * G, H // G * b, K)


def _join(x_nxNxRbxK, B, T, b):
    """The inverse of `_split`."""
    n, N, Rb, K = x_nxNxRbxK.shape
    x = x_nxNxRbxK.reshape(n, B, N // B, Rb // b, b, K).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(B, n * b, N // B * (Rb // b), K)[:, :T]


def _dot(x, y, x_dim, y_dim):
    """Batched over dim 0, fp32 sums."""
    return jax.lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((0,), (0,))), preferred_element_type=jnp.float32)
