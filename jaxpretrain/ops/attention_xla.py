"""Plain attention: two batched matrix products around a softmax, O(T^2) memory."""

import jax
import jax.numpy as jnp


def attend(
    q_BxTxHxK: jax.Array,
    k_BxTxGxK: jax.Array,
    v_BxTxGxK: jax.Array,
    segment_ids_BxT: jax.Array | None,
    *,
    causal: bool,
) -> jax.Array:
    """Shapes, masks and numerics of `attention.attend`.

    The query heads of a key-value head are rows of one matrix product, so no key is repeated; batch and
    heads are one batch dim, which XLA's CPU backend multiplies faster than two.
    """
    B, T, H, K = q_BxTxHxK.shape
    G = k_BxTxGxK.shape[2]
    q_NxRTxK = q_BxTxHxK.transpose(0, 2, 1, 3).reshape(B * G, H // G * T, K)
    k_NxTxK = k_BxTxGxK.transpose(0, 2, 1, 3).reshape(B * G, T, K)
    v_NxTxK = v_BxTxGxK.transpose(0, 2, 1, 3).reshape(B * G, T, K)

    scores_NxRTxT = jax.lax.dot_general(
        q_NxRTxK, k_NxTxK, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    mask = jnp.ones((T, T), bool)
    if causal:
        mask = jnp.tril(mask)
    if segment_ids_BxT is not None:
        mask = mask & (segment_ids_BxT[:, None, None, :, None] == segment_ids_BxT[:, None, None, None, :])
    scores_BxGxRxTxT = jnp.where(mask, scores_NxRTxT.reshape(B, G, H // G, T, T) * K**-0.5, -jnp.inf)
    weights_NxRTxT = jax.nn.softmax(scores_BxGxRxTxT).astype(q_BxTxHxK.dtype).reshape(B * G, H // G * T, T)
    out_NxRTxK = jax.lax.dot_general(weights_NxRTxT, v_NxTxK, (((2,), (1,)), ((0,), (0,))))
    return out_NxRTxK.reshape(B, H, T, K).transpose(0, 2, 1, 3)
