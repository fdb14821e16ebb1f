"""Parameters and training FLOPs in closed form from the configuration, for each family of models.

L layers, D embed_dim, H heads, G key-value heads, K head_dim, F mlp_dim, V vocab_size or classes, T seq_len or patches,
E inner channels of Mamba, N its states. A multiply-add is 2 FLOPs; the backward pass costs twice the forward.
Norms, activations, softmax and the like are not counted, recomputation (remat) neither.
"""

import math

from ml_collections import ConfigDict

from jaxpretrain.config import num_masked_tokens


def _sizes(model: ConfigDict) -> tuple[int, int, int]:
    """(H*K, G*K, F), the zeros of the config resolved."""
    head_dim = model.head_dim or model.embed_dim // model.num_heads
    kv_heads = model.num_kv_heads or model.num_heads
    return model.num_heads * head_dim, kv_heads * head_dim, model.mlp_dim or 4 * model.embed_dim


def _layer_parameters(model: ConfigDict) -> int:
    """Of the matrices of a transformer's layer."""
    heads_dim, kv_dim, mlp_dim = _sizes(model)
    return model.embed_dim * (2 * heads_dim + 2 * kv_dim + (3 if model.gated_mlp else 2) * mlp_dim)


def num_matmul_parameters(model: ConfigDict) -> int:
    """Of a decoder, those that multiply every token: projections and the unembedding (tied or not)."""
    return model.num_layers * _layer_parameters(model) + model.vocab_size * model.embed_dim


def num_parameters(model: ConfigDict, seq_len: int) -> int:
    """All of a decoder's; `seq_len` sizes a learned position table where `model.max_positions` is 0."""
    heads_dim, kv_dim, mlp_dim = _sizes(model)
    norm = model.embed_dim * (2 if model.norm_bias else 1)
    per_layer = 2 * norm
    if model.qk_norm:
        per_layer += heads_dim + kv_dim
    if model.attention_bias:
        per_layer += heads_dim + 2 * kv_dim + model.embed_dim
    if model.mlp_bias:
        per_layer += (2 if model.gated_mlp else 1) * mlp_dim + model.embed_dim
    other = norm  # the final one
    if not model.tied_embeddings:
        other += model.vocab_size * model.embed_dim
    if model.positions == "learned":
        other += (model.max_positions or seq_len) * model.embed_dim
    return num_matmul_parameters(model) + model.num_layers * per_layer + other


def train_flops_per_token(config: ConfigDict) -> int:
    """FLOPs that training one token, or one image, needs: three times those of the forward, for `mfu`."""
    return 3 * _FORWARD[config.model.family](config)


def _decoder(config: ConfigDict) -> int:
    """2 x matmul parameters + 2 L (H K) T: causal attention counted once, as a token looks at T/2 others on average."""
    model = config.model
    return 2 * num_matmul_parameters(model) + 2 * model.num_layers * _sizes(model)[0] * config.seq_len


def _encoder(config: ConfigDict) -> int:
    """2 x the layers' matrices + 4 L D T of attention + the head on masked tokens only, 2 (D^2 + V D) each."""
    model, d = config.model, config.model.embed_dim
    layer = 2 * _layer_parameters(model) + 4 * d * config.seq_len
    head = 2 * (d * d + model.vocab_size * d)
    return model.num_layers * layer + round(head * num_masked_tokens(config) / config.seq_len)


def _mamba(config: ConfigDict) -> int:
    """Projections, the convolution, 9 E N of the scan (decay, input and output of each state), and the unembedding."""
    model, d = config.model, config.model.embed_dim
    c = model.mamba
    inner, rank = c.expand * d, c.dt_rank or math.ceil(d / 16)
    matrices = d * 2 * inner + inner * (rank + 2 * c.state_dim) + rank * inner + inner * d
    layer = 2 * matrices + 2 * inner * c.conv_width + 9 * inner * c.state_dim
    return model.num_layers * layer + 2 * model.vocab_size * d


def _vit(config: ConfigDict) -> int:
    """Of an image: patches, T = patches + 1 tokens with full attention, and the head on one of them."""
    model, image, d = config.model, config.model.image, config.model.embed_dim
    num_patches = (image.size // image.patch_size) ** 2
    num_tokens = num_patches + 1
    patches = 2 * num_patches * image.patch_size**2 * image.num_channels * d
    layer = 2 * d * (4 * d + 2 * (model.mlp_dim or 4 * d)) + 4 * d * num_tokens
    return patches + model.num_layers * num_tokens * layer + 2 * d * image.num_classes


def _convnext(config: ConfigDict) -> int:
    """Of an image: stem, 7 x 7 depthwise convolutions, the MLPs of 4 times the width, halving between stages, head."""
    image, c = config.model.image, config.model.convnext
    side, channels, total = image.size // 4, image.num_channels * 4 * 4, 0
    for stage, (depth, width) in enumerate(zip(c.depths, c.widths, strict=True)):
        side = side if stage == 0 else side // 2
        total += 2 * side**2 * (channels * width + depth * (49 * width + 8 * width**2))
        channels = width * 2 * 2
    return total + 2 * c.widths[-1] * image.num_classes


_FORWARD = {"decoder": _decoder, "encoder": _encoder, "mamba": _mamba, "vit": _vit, "convnext": _convnext}


def palm_flops_per_token(config: ConfigDict) -> int | None:
    """FLOPs per token for `mfu_palm`: 6 x all parameters + 12 L (H K) T, attention as if it were not causal.

    Chowdhery et al. 2022 (PaLM), appendix B: the convention of most published tables. None but for decoders.
    """
    model = config.model
    if model.family != "decoder":
        return None
    return 6 * num_parameters(model, config.seq_len) + 12 * model.num_layers * _sizes(model)[0] * config.seq_len


def definition(config: ConfigDict) -> str:
    """What `train_flops_per_token` counts, in words for a log."""
    model = config.model
    if model.family != "decoder":
        return "matrix products and convolutions of the forward, three times (jaxpretrain/plan/flops.py)"
    return (
        f"a token costs 6 x {num_matmul_parameters(model):,} matmul parameters (without the input embedding) + 6 L d T "
        f"(causal attention, once). mfu_palm: 6 x {num_parameters(model, config.seq_len):,} (all) + 12 L d T"
    )
