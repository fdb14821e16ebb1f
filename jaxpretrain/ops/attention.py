"""Attention: which implementation runs where (`select`), and running it (`attend`).

    xla        plain, O(T^2) memory                               anywhere
    blockwise  plain XLA in blocks, O(T) memory                   anywhere
    cudnn      cuDNN's flash attention                            NVIDIA GPUs from Ampere on
    pallas     Pallas's Triton kernel                             NVIDIA GPUs from Ampere on
    splash     Pallas's TPU kernel                                TPUs from v4 on

B rows, T tokens, H query heads, G key-value heads (H a multiple of G), K head_dim.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpretrain.ops import attention_blockwise, attention_kernels, attention_xla

# `checkpoint_name` of what attention leaves for the backward: the output and, where the implementation
# keeps it, the logsumexp. One name for both, as either alone does not spare the second forward.
RESIDUAL_NAME = "attention"


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation for `attend`, the reason for it in one sentence, and the tokens of a block of "blockwise"."""

    name: str
    why: str
    block: int = attention_blockwise.BLOCK


def attend(
    q_BxTxHxK: jax.Array,
    k_BxTxGxK: jax.Array,
    v_BxTxGxK: jax.Array,
    segment_ids_BxT: jax.Array | None,
    *,
    implementation: str,
    causal: bool = True,
    block: int = attention_blockwise.BLOCK,
) -> jax.Array:
    """Attention within documents -> out_BxTxHxK, in the inputs' dtype; any T.

    A query sees the keys that have its segment id (None: all of them); a causal one only those at and before its own
    position. Id 0, padding, is a segment like the others: every query sees itself, so all of the result is finite.
    Scores are scaled by K**-0.5; softmax is in fp32. The result and the residuals that the backward needs
    are marked RESIDUAL_NAME, but for cuDNN: JAX keeps its logsumexp to itself, and the output alone spares nothing.

    Args:
      segment_ids_BxT: at least 0.
      implementation: name from `select`, which knows where it works.
      causal: False lets queries see what comes after them, as encoders do.
      block: tokens per block, of "blockwise" only.
    """
    arrays = q_BxTxHxK, k_BxTxGxK, v_BxTxGxK
    match implementation:
        case "xla":
            return checkpoint_name(attention_xla.attend(*arrays, segment_ids_BxT, causal=causal), RESIDUAL_NAME)
        case "blockwise":
            return attention_blockwise.attend(
                *arrays, segment_ids_BxT, causal=causal, residual_name=RESIDUAL_NAME, block=block
            )
        case "cudnn":
            assert segment_ids_BxT is None, "select refuses cudnn for documents"
            return attention_kernels.cudnn(*arrays, causal=causal)
        case "pallas":
            return attention_kernels.pallas(*arrays, segment_ids_BxT, causal=causal, residual_name=RESIDUAL_NAME)
        case "splash":
            return attention_kernels.splash(*arrays, segment_ids_BxT, causal=causal, residual_name=RESIDUAL_NAME)
    raise ValueError(f"unknown attention implementation {implementation!r}")


@dataclasses.dataclass(frozen=True)
class _Case:
    """What decides: where attention runs, and on what."""

    platform: str
    device_kind: str
    head_dim: int
    dtype: jnp.dtype
    segmented: bool


# In order of preference. `xla` is never chosen by itself: in blocks attention is faster (on a CPU: 1.3 times at
# 256 tokens, 7 times at 1024) or nearly as fast (TPU v3: 9 against 8 ms, the compiler's estimate at 2048 tokens).
_PREFERENCES = {"gpu": ("cudnn", "pallas", "blockwise"), "tpu": ("splash", "blockwise"), "cpu": ("blockwise",)}


def select(
    name: str, *, platform: str, device_kind: str, head_dim: int, dtype: jnp.dtype, segmented: bool, seq_len: int
) -> Choice:
    """Resolves `kernels.attention`: "auto" takes the best implementation that works, another name must work.

    Args:
      platform: `jax.Device.platform`: cpu, gpu or tpu.
      device_kind: `jax.Device.device_kind`.
      dtype: of queries, keys and values.
      segmented: whether attention gets segment ids.
      seq_len: T.

    Raises:
      ValueError: the implementation cannot work there, with the reason and one that can.
    """
    case = _Case(platform, device_kind, head_dim, jnp.dtype(dtype), segmented)
    candidates = _PREFERENCES[platform]
    passed_over = {candidate: _refusal(candidate, case) for candidate in candidates}
    best = next(candidate for candidate in candidates if passed_over[candidate] is None)
    # 128 tokens stay in a CPU's cache; larger blocks pass over the accumulators less often.
    block = min(seq_len, 128 if platform == "cpu" else attention_blockwise.BLOCK)
    if name == "auto":
        reasons = [f"{other} {reason}" for other, reason in passed_over.items() if reason is not None]
        because = "; ".join(reasons) or ("no kernel for CPUs" if platform == "cpu" else "the fastest that works here")
        return Choice(best, f"attention: {best} on {device_kind} ({because})", block)
    refusal = _refusal(name, case)
    if refusal is not None:
        raise ValueError(f"kernels.attention={name!r} {refusal}: use {best!r}, which 'auto' takes")
    return Choice(name, f"attention: {name} on {device_kind} (as configured)", block)


def _refusal(name: str, case: _Case) -> str | None:
    """Why an implementation does not work there, to be read after its name; None if it does."""
    match name:
        case "xla" | "blockwise":
            return None
        case "cudnn" | "pallas":
            if case.platform != "gpu" or re.search("AMD|Instinct|Radeon|gfx", case.device_kind):
                return f"needs an NVIDIA GPU, this is {case.device_kind}"
            if _is_before_ampere(case.device_kind):
                return f"needs an Ampere GPU or later, this is {case.device_kind}"
            if case.dtype not in (jnp.bfloat16, jnp.float16):
                return f"takes bfloat16 and float16, not {case.dtype}"  # pallas would round it to TF32
            if name == "pallas":
                return _head_dim_refusal(case, 256, 1)
            if case.segmented:
                return "cannot keep packed documents apart"  # but by an O(T^2) mask
            # The backward on Blackwell takes 256 only from cuDNN 9.23 on.
            return _head_dim_refusal(case, 256 if _is_hopper(case.device_kind) else 128, 8)
        case "splash":
            if case.platform != "tpu":
                return f"needs a TPU, this is {case.device_kind}"
            if re.search("v[23]", case.device_kind):
                return f"needs a TPU from v4 on, this is {case.device_kind}"
            if case.dtype == jnp.float16:
                return "takes bfloat16 and float32, not float16"
            return None
    raise ValueError(f"unknown attention implementation {name!r}")


def _head_dim_refusal(case: _Case, largest: int, multiple: int) -> str | None:
    if case.head_dim <= largest and case.head_dim % multiple == 0:
        return None
    multiples = f"multiples of {multiple} " if multiple > 1 else ""
    return f"takes head dims that are {multiples}up to {largest} on {case.device_kind}, not {case.head_dim}"


def _is_before_ampere(device_kind: str) -> bool:
    old = r"K\d\d|M\d\d?|P\d+|T4|T\d00|T\d{4}|V100|GTX|MX\d+|TITAN|Quadro|RTX 20[5-8]0"  # not "RTX 2000 Ada"
    return re.search(rf"\b({old})\b", device_kind) is not None


def _is_hopper(device_kind: str) -> bool:
    return re.search(r"\b(H20|H100|H200|H800|GH200)\b", device_kind) is not None
