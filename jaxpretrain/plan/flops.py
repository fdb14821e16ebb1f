"""Parameters and training FLOPs of a decoder, in closed form from its configuration (`config.model`).

L layers, D embed_dim, H heads, G key-value heads, K head_dim, F mlp_dim, V vocab_size, T seq_len.
A multiply-add is 2 FLOPs; the backward pass costs twice the forward.
"""

from ml_collections import ConfigDict


def _sizes(model: ConfigDict) -> tuple[int, int, int]:
    """(H*K, G*K, F), the zeros of the config resolved."""
    head_dim = model.head_dim or model.embed_dim // model.num_heads
    kv_heads = model.num_kv_heads or model.num_heads
    return model.num_heads * head_dim, kv_heads * head_dim, model.mlp_dim or 4 * model.embed_dim


def num_matmul_parameters(model: ConfigDict) -> int:
    """Parameters that multiply every token: projections and the unembedding (tied or not), not the input embedding."""
    heads_dim, kv_dim, mlp_dim = _sizes(model)
    attention = model.embed_dim * (2 * heads_dim + 2 * kv_dim)
    mlp = (3 if model.gated_mlp else 2) * model.embed_dim * mlp_dim
    return model.num_layers * (attention + mlp) + model.vocab_size * model.embed_dim


def num_parameters(model: ConfigDict, seq_len: int) -> int:
    """All parameters; `seq_len` sizes a learned position table where `model.max_positions` is 0."""
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


def train_flops_per_token(model: ConfigDict, seq_len: int) -> int:
    """FLOPs that training one token needs, for `mfu`: 6 x matmul parameters + 6 L (H K) T.

    The second term is causal attention counted once: a token looks at T/2 others on average, and scores and weighted
    sum cost 2 x 2 H K FLOPs for each, three times with the backward pass. Recomputation (remat) is not counted.
    """
    return 6 * num_matmul_parameters(model) + 6 * model.num_layers * _sizes(model)[0] * seq_len


def palm_flops_per_token(model: ConfigDict, seq_len: int) -> int:
    """FLOPs per token for `mfu_palm`: 6 x all parameters + 12 L (H K) T, attention as if it were not causal.

    Chowdhery et al. 2022 (PaLM), appendix B: the convention of most published tables.
    """
    return 6 * num_parameters(model, seq_len) + 12 * model.num_layers * _sizes(model)[0] * seq_len
