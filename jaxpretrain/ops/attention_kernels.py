"""Flash-attention kernels written by others, behind one signature: cuDNN's, and Pallas's for GPUs and for TPUs.

Each pads the end of the sequence to what its kernel divides. Causality hides the padding from every real query;
without it the sequence's length does, or the padding's own segment id. Under `jax.shard_map` the Pallas kernels need
`check_vma=False` (they do not carry its types). Pallas is imported where it is used: it is no part of a start on a
machine without its devices.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


def cudnn(q_BxTxHxK: jax.Array, k_BxTxGxK: jax.Array, v_BxTxGxK: jax.Array, *, causal: bool) -> jax.Array:
    """cuDNN's kernel, fp16 or bf16; takes grouped heads as they are. It knows no documents.

    Lengths are padded to a multiple of 64: length 1 has no backward, and others gave NaN (pytorch#196678).
    """
    B, T = q_BxTxHxK.shape[:2]
    q, k, v = (_pad(x, 64) for x in (q_BxTxHxK, k_BxTxGxK, v_BxTxGxK))
    lengths = None if causal or q.shape[1] == T else jnp.full(B, T, jnp.int32)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return out[:, :T]


def pallas(
    q_BxTxHxK: jax.Array,
    k_BxTxGxK: jax.Array,
    v_BxTxGxK: jax.Array,
    segment_ids_BxT: jax.Array | None,
    *,
    causal: bool,
    residual_name: str,
    interpret: bool = False,
) -> jax.Array:
    """Pallas's Triton kernel for NVIDIA GPUs from Ampere on, fp16 or bf16, head_dim up to 256.

    It has as many key as query heads: grouped ones are repeated, O(T) memory more.
    """
    T, group = q_BxTxHxK.shape[1], q_BxTxHxK.shape[2] // k_BxTxGxK.shape[2]
    k_BxTxHxK, v_BxTxHxK = (jnp.repeat(x, group, axis=2) for x in (k_BxTxGxK, v_BxTxGxK))
    q, k, v = (_pad(x, 64) for x in (q_BxTxHxK, k_BxTxHxK, v_BxTxHxK))
    segment_ids = _padded_segments(segment_ids_BxT, q_BxTxHxK, 64, causal)
    return _pallas(q, k, v, segment_ids, causal, residual_name, interpret)[:, :T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _pallas(q, k, v, segment_ids, causal, residual_name, interpret):
    return _pallas_forward(q, k, v, segment_ids, causal, interpret)[0]


def _pallas_forward(q, k, v, segment_ids, causal, interpret):
    from jax.experimental.pallas.ops.gpu import attention as pallas_gpu

    options = _pallas_options(q.shape[-1], causal)
    return pallas_gpu.mha(q, k, v, segment_ids, **options, interpret=interpret, return_residuals=True)


def _pallas_fwd(q, k, v, segment_ids, causal, residual_name, interpret):
    out, logsumexp = checkpoint_name(_pallas_forward(q, k, v, segment_ids, causal, interpret), residual_name)
    return out, (q, k, v, segment_ids, out, logsumexp)


def _pallas_bwd(causal, residual_name, interpret, residuals, d_out):
    from jax.experimental.pallas.ops.gpu import attention as pallas_gpu

    options = _pallas_options(d_out.shape[-1], causal)
    # The kernel's own backward rule, called by hand because its forward rule gives residuals no name.
    return pallas_gpu._mha_backward(
        **options,
        backward_pass_impl="triton",
        num_warps=None,
        num_stages=2,
        grid=None,
        interpret=interpret,
        debug=False,
        return_residuals=False,
        res=residuals,
        do=d_out,
    )


_pallas.defvjp(_pallas_fwd, _pallas_bwd)


def _pallas_options(K: int, causal: bool) -> dict:
    """Tiles that fit a consumer GPU's 99 KiB of shared memory; at K = 256 the default ones do not fit an A100's 163."""
    from jax.experimental.pallas.ops.gpu import attention as pallas_gpu

    sizes = pallas_gpu.BlockSizes(64, 64 if K <= 128 else 32, 32, 32, 32, 32)
    return dict(sm_scale=K**-0.5, causal=causal, block_sizes=sizes)


def splash(
    q_BxTxHxK: jax.Array,
    k_BxTxGxK: jax.Array,
    v_BxTxGxK: jax.Array,
    segment_ids_BxT: jax.Array | None,
    *,
    causal: bool,
    residual_name: str,
    interpret: bool = False,
) -> jax.Array:
    """Pallas's kernel for TPUs from v4 on; takes grouped heads as they are."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    T, H, K = q_BxTxHxK.shape[1:]
    lanes = 128
    q, k, v = (_pad(x, lanes).swapaxes(1, 2) for x in (q_BxTxHxK * K**-0.5, k_BxTxGxK, v_BxTxGxK))
    padded = q.shape[2]
    # The largest multiple of the lanes up to 512 that divides the length.
    block = max(size for size in range(lanes, 512 + 1, lanes) if padded % size == 0)
    mask = splash_attention.CausalMask if causal else splash_attention.FullMask
    kernel = splash_attention.make_splash_mha_single_device(
        splash_attention.MultiHeadMask([mask((padded, padded))] * H),
        block_sizes=splash_attention.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        residual_checkpoint_name=residual_name,
        interpret=interpret,
    )
    segment_ids = _padded_segments(segment_ids_BxT, q_BxTxHxK, lanes, causal)
    if segment_ids is None:
        out_BxHxTxK = jax.vmap(lambda q, k, v: kernel(q, k, v))(q, k, v)
    else:
        out_BxHxTxK = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, splash_attention.SegmentIds(ids, ids)))(
            q, k, v, segment_ids
        )
    return out_BxHxTxK.swapaxes(1, 2)[:, :T]


def _padded_segments(
    segment_ids_BxT: jax.Array | None, q_BxTxHxK: jax.Array, multiple: int, causal: bool
) -> jax.Array | None:
    """Segment ids of the padded sequence, whose padding is a segment of its own; None where none are needed."""
    B, T = q_BxTxHxK.shape[:2]
    if segment_ids_BxT is None and (causal or T % multiple == 0):
        return None
    if segment_ids_BxT is None:
        segment_ids_BxT = jnp.zeros((B, T), jnp.int32)
    return jnp.pad(segment_ids_BxT, ((0, 0), (0, -T % multiple)), constant_values=-1)


def _pad(x: jax.Array, multiple: int) -> jax.Array:
    """Zeros at the end of dim 1 up to a multiple."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2))
