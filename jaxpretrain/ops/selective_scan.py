"""The selective scan of Mamba in plain XLA: linear time, and no array of all states, forward or backward.

Gu & Dao 2023 (arXiv 2312.00752), section 3.3 and algorithm 2: each of C channels has a state h of N numbers,

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t        y_t = C_t . h_t + D u_t

All states of a sequence, [T, N, C], are N times as large as an activation. So one loop goes over time and carries one
state. That alone would be T tiny steps, which a GPU or TPU spends on starting them, so the sequence is cut into n
chunks of L tokens, and the loop takes a step in all of them at once:

  1. the state that each chunk would end in, had it begun with zeros: L steps;
  2. the state it does begin with, as a chunk maps its first state to its last one linearly: n steps;
  3. the outputs, from these first states: L steps.

The gradient of a state comes from the later ones by the same recurrence in reverse, in the same three passes. The
third reads the states in reverse too: they are computed again from states kept once in a segment of S ~ sqrt(L) tokens.
So the forward keeps n states for the backward, and the backward holds 2 sqrt(L) of each chunk.

Shapes: B batch, T sequence, C channels, N state, n chunks, R = B n rows, L tokens of a chunk, S of a segment,
k = L / S segments. Channels are last: they fill the lanes of a TPU and the warps of a GPU.
"""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

RESIDUAL_NAME = "ssm_scan"  # `checkpoint_name` of the output and the chunks' first states, which the backward reads
_CARRY = 2**20  # numbers of the states that a step advances: enough work for an accelerator, within its fast memory


@jax.custom_vjp
def selective_scan(
    u_BxTxC: jax.Array,
    dt_BxTxC: jax.Array,
    A_CxN: jax.Array,
    B_BxTxN: jax.Array,
    C_BxTxN: jax.Array,
    D_C: jax.Array,
    resets_BxT: jax.Array | None = None,
) -> jax.Array:
    """y_BxTxC in the dtype of u; states and their sums are float32. Any length.

    Args:
      dt_BxTxC: time steps, > 0; float32, as a rounded step is a wrong decay at every token.
      A_CxN: < 0.
      resets_BxT: bool, True at tokens before which the state is set to zero; None: only before the first.
    """
    return _forward(u_BxTxC, dt_BxTxC, A_CxN, B_BxTxN, C_BxTxN, D_C, resets_BxT)[0]


def _selective_scan_fwd(*inputs):
    y_BxTxC, starts_RxNxC = checkpoint_name(_forward(*inputs), RESIDUAL_NAME)
    return y_BxTxC, (*inputs, starts_RxNxC)


def _selective_scan_bwd(residuals, dy_BxTxC):
    return *_backward(*residuals, dy_BxTxC), None


selective_scan.defvjp(_selective_scan_fwd, _selective_scan_bwd)


def _forward(u_BxTxC, dt_BxTxC, A_CxN, B_BxTxN, C_BxTxN, D_C, resets_BxT):
    """-> y_BxTxC, the first state of each chunk [R, N, C]."""
    Bs, T, C = u_BxTxC.shape
    n, L, _ = _sizes(*B_BxTxN.shape, C)
    A_NxC, D_C = _float32((A_CxN.T, D_C))
    tokens = u, dt, B, _, keep = _rows((u_BxTxC, dt_BxTxC, B_BxTxN, C_BxTxN, _keep(resets_BxT)), n, L)

    def end(h_RxNxC, token):
        u, dt, B, keep = _float32(token)
        return _next_state(h_RxNxC, u, dt, A_NxC, B, keep), None

    def output(h_RxNxC, token):
        u, dt, B, C, keep = _float32(token)
        h_RxNxC = _next_state(h_RxNxC, u, dt, A_NxC, B, keep)
        return h_RxNxC, ((h_RxNxC * C[:, :, None]).sum(1) + D_C * u).astype(u_BxTxC.dtype)

    # zeros_like also takes over the manual axes that its argument varies over
    starts_RxNxC = jnp.zeros_like(dt[0, :, None, :] * B[0, :, :, None], jnp.float32)
    if n > 1:
        ends_RxNxC, _ = jax.lax.scan(end, starts_RxNxC, (u, dt, B, keep))
        starts_RxNxC = _carried_over(ends_RxNxC, _chunk_decay(dt, A_NxC, keep), Bs)
    _, y_LxRxC = jax.lax.scan(output, starts_RxNxC, tokens)
    return _sequences(y_LxRxC, Bs, T), starts_RxNxC


def _backward(u_BxTxC, dt_BxTxC, A_CxN, B_BxTxN, C_BxTxN, D_C, resets_BxT, starts_RxNxC, dy_BxTxC):
    """-> gradients of u, dt, A, B, C and D."""
    Bs, T, C = u_BxTxC.shape
    n, L, S = _sizes(*B_BxTxN.shape, C)
    A_dtype, D_dtype = A_CxN.dtype, D_C.dtype
    A_NxC, D_C = _float32((A_CxN.T, D_C))
    dtypes = u_BxTxC.dtype, dt_BxTxC.dtype, B_BxTxN.dtype, C_BxTxN.dtype
    tokens = _rows((u_BxTxC, dt_BxTxC, B_BxTxN, C_BxTxN, _keep(resets_BxT), dy_BxTxC), n, L)
    u, dt, B, C, keep, dy = tokens
    segments = jax.tree.map(lambda x: x.reshape(L // S, S, *x.shape[1:]), tokens)

    def start_gradient(g_RxNxC, token):
        dt, C, keep, dy = _float32(token)
        return _decay(dt, A_NxC, keep) * (g_RxNxC + C[:, :, None] * dy[:, None, :]), None

    def states(h_RxNxC, token):
        """The state after the token, and the one before it."""
        u, dt, B, _, keep, _ = _float32(token)
        return _next_state(h_RxNxC, u, dt, A_NxC, B, keep), h_RxNxC

    def token_gradients(carry, token):
        """`g` is the gradient of the state after the token, by what comes later."""
        g_RxNxC, dA_NxC = carry
        u, dt, B, C, keep, dy, before_RxNxC = _float32(token)
        decay_RxNxC, x_RxC = _decay(dt, A_NxC, keep), dt * u
        decayed_RxNxC = decay_RxNxC * before_RxNxC
        g_RxNxC += C[:, :, None] * dy[:, None, :]
        dC_RxN = ((decayed_RxNxC + x_RxC[:, None, :] * B[:, :, None]) * dy[:, None, :]).sum(2)
        dB_RxN = (g_RxNxC * x_RxC[:, None, :]).sum(2)
        dx_RxC = (g_RxNxC * B[:, :, None]).sum(1)
        d_exponent_RxNxC = g_RxNxC * decayed_RxNxC
        d_dt_RxC = (d_exponent_RxNxC * A_NxC).sum(1)
        dA_NxC += (d_exponent_RxNxC * dt[:, None, :]).sum(0)
        gradients = dx_RxC * dt + D_C * dy, dx_RxC * u + d_dt_RxC, dB_RxN, dC_RxN
        return (decay_RxNxC * g_RxNxC, dA_NxC), tuple(x.astype(d) for x, d in zip(gradients, dtypes, strict=True))

    def segment_gradients(carry, segment):
        tokens, start_RxNxC = segment
        _, before_SxRxNxC = jax.lax.scan(states, start_RxNxC, tokens)
        return jax.lax.scan(token_gradients, carry, (*tokens, before_SxRxNxC), reverse=True)

    g_RxNxC = jnp.zeros_like(starts_RxNxC)
    if n > 1:
        g_RxNxC, _ = jax.lax.scan(start_gradient, g_RxNxC, (dt, C, keep, dy), reverse=True)
        g_RxNxC = _carried_over(g_RxNxC, _chunk_decay(dt, A_NxC, keep), Bs, reverse=True)
    _, starts_kxRxNxC = jax.lax.scan(
        lambda h, segment: (jax.lax.scan(states, h, segment)[0], h), starts_RxNxC, segments
    )
    (_, dA_NxC), gradients = jax.lax.scan(
        segment_gradients, (g_RxNxC, jnp.zeros_like(A_NxC)), (segments, starts_kxRxNxC), reverse=True
    )
    gradients = [_sequences(x.reshape(L, *x.shape[2:]), Bs, T) for x in gradients]
    dD_C = (_float32(dy_BxTxC) * u_BxTxC).sum((0, 1))
    du_BxTxC, d_dt_BxTxC, dB_BxTxN, dC_BxTxN = gradients
    return du_BxTxC, d_dt_BxTxC, dA_NxC.T.astype(A_dtype), dB_BxTxN, dC_BxTxN, dD_C.astype(D_dtype)


def _next_state(h_RxNxC, u_RxC, dt_RxC, A_NxC, B_RxN, keep_R):
    return _decay(dt_RxC, A_NxC, keep_R) * h_RxNxC + (dt_RxC * u_RxC)[:, None, :] * B_RxN[:, :, None]


def _decay(dt_RxC, A_NxC, keep_R):
    """[R, N, C]: what is left of the state before a token."""
    decay_RxNxC = jnp.exp(dt_RxC[:, None, :] * A_NxC)
    return decay_RxNxC if keep_R is None else decay_RxNxC * keep_R[:, :, None]


def _chunk_decay(dt_LxRxC, A_NxC, keep_LxRx1):
    """[R, N, C]: what is left of a chunk's first state at its end."""
    return _decay(_float32(dt_LxRxC).sum(0), A_NxC, None if keep_LxRx1 is None else keep_LxRx1.all(0))


def _carried_over(last_RxNxC, decay_RxNxC, Bs, reverse=False):
    """The first state of each chunk, from the last states of chunks that begin with zeros; or in reverse."""

    def step(h_BxNxC, chunk):
        last_BxNxC, decay_BxNxC = chunk
        return decay_BxNxC * h_BxNxC + last_BxNxC, h_BxNxC

    xs = [x.reshape(Bs, -1, *x.shape[1:]).swapaxes(0, 1) for x in (last_RxNxC, decay_RxNxC)]
    _, first_nxBxNxC = jax.lax.scan(step, jnp.zeros_like(xs[0][0]), tuple(xs), reverse=reverse)
    return first_nxBxNxC.swapaxes(0, 1).reshape(last_RxNxC.shape)


def _float32(arrays):
    return jax.tree.map(lambda x: x.astype(jnp.float32), arrays)


def _keep(resets_BxT):
    return None if resets_BxT is None else ~resets_BxT[:, :, None]


def _sizes(Bs: int, T: int, N: int, C: int) -> tuple[int, int, int]:
    """Chunks, tokens of a chunk, tokens of a segment."""
    n = max(1, min(_CARRY // (Bs * N * C), math.isqrt(T)))
    S = math.isqrt(-(-T // n) - 1) + 1
    return n, -(-T // (n * S)) * S, S


def _rows(arrays, n, L):
    """[B, T, ...] -> [L, R, ...]. Zeros pad the end: they add nothing to states, outputs or gradients before them."""

    def rows(x):
        Bs, T, F = x.shape
        x = jnp.pad(x, ((0, 0), (0, n * L - T), (0, 0)))
        return x.reshape(Bs, n, L, F).transpose(2, 0, 1, 3).reshape(L, Bs * n, F)

    return jax.tree.map(rows, arrays)


def _sequences(x_LxRxF, Bs, T):
    """The inverse of `_rows`."""
    L, R, F = x_LxRxF.shape
    return x_LxRxF.reshape(L, Bs, R // Bs, F).transpose(1, 2, 0, 3).reshape(Bs, -1, F)[:, :T]
