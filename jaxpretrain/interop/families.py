"""Where each of Hugging Face's classes keeps what of our models."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Family:
    """Where Hugging Face's class keeps what. Its `weight` is our kernel, scale or embedding, its `bias` our bias."""

    prefix: str  # of all but the unembedding; some files leave it out
    modules: dict[str, tuple[str, ...]]  # theirs, with {} for the layer -> ours; three where they are one matrix
    unembed: tuple[str, ...] = ("lm_head.weight",)  # names it has had; the first is written
    outside: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # modules without the prefix
    tensors: dict[str, str] = dataclasses.field(default_factory=dict)  # theirs -> ours where names do not match so
    transposed: bool = True  # matrices are [out, in]
    fused_dim: int = 0  # from the end: where parts are stacked in [..., H, K] of query, key and value, or [in, out]
    extra_dims: int = 0  # of size 1, that those of `tensors` with two dims have in front
    buffers: str = r"$."  # what old files hold that is no parameter


FAMILIES = {
    "gpt_neox": Family(
        prefix="gpt_neox.",
        modules={
            "embed_in": ("embed",),
            "layers.{}.input_layernorm": ("layers.attention_norm",),
            "layers.{}.attention.query_key_value": (
                "layers.attention.query",
                "layers.attention.key",
                "layers.attention.value",
            ),
            "layers.{}.attention.dense": ("layers.attention.out",),
            "layers.{}.post_attention_layernorm": ("layers.mlp_norm",),
            "layers.{}.mlp.dense_h_to_4h": ("layers.mlp.up",),
            "layers.{}.mlp.dense_4h_to_h": ("layers.mlp.down",),
            "final_layer_norm": ("final_norm",),
        },
        unembed=("embed_out.weight", "lm_head.weight"),  # the second since transformers 5, which reads both
        fused_dim=-2,  # [H, 3, K]
        buffers=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    ),
    "gpt2": Family(
        prefix="transformer.",
        modules={
            "wte": ("embed",),
            "wpe": ("position_embed",),
            "h.{}.ln_1": ("layers.attention_norm",),
            "h.{}.attn.c_attn": ("layers.attention.query", "layers.attention.key", "layers.attention.value"),
            "h.{}.attn.c_proj": ("layers.attention.out",),
            "h.{}.ln_2": ("layers.mlp_norm",),
            "h.{}.mlp.c_fc": ("layers.mlp.up",),
            "h.{}.mlp.c_proj": ("layers.mlp.down",),
            "ln_f": ("final_norm",),
        },
        transposed=False,
        fused_dim=-3,  # [3, H, K]
        buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
    ),
    "llama": Family(
        prefix="model.",
        modules={
            "embed_tokens": ("embed",),
            "layers.{}.input_layernorm": ("layers.attention_norm",),
            "layers.{}.self_attn.q_proj": ("layers.attention.query",),
            "layers.{}.self_attn.k_proj": ("layers.attention.key",),
            "layers.{}.self_attn.v_proj": ("layers.attention.value",),
            "layers.{}.self_attn.o_proj": ("layers.attention.out",),
            "layers.{}.post_attention_layernorm": ("layers.mlp_norm",),
            "layers.{}.mlp.up_proj": ("layers.mlp.up",),
            "layers.{}.mlp.gate_proj": ("layers.mlp.gate",),
            "layers.{}.mlp.down_proj": ("layers.mlp.down",),
            "norm": ("final_norm",),
        },
        buffers=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    ),
    "roberta": Family(
        prefix="roberta.",
        modules={
            "embeddings.word_embeddings": ("embed",),
            "embeddings.position_embeddings": ("position_embed",),
            "embeddings.token_type_embeddings": ("type_embed",),
            "embeddings.LayerNorm": ("embed_norm",),
            "encoder.layer.{}.attention.self.query": ("layers.attention.query",),
            "encoder.layer.{}.attention.self.key": ("layers.attention.key",),
            "encoder.layer.{}.attention.self.value": ("layers.attention.value",),
            "encoder.layer.{}.attention.output.dense": ("layers.attention.out",),
            "encoder.layer.{}.attention.output.LayerNorm": ("layers.attention_norm",),
            "encoder.layer.{}.intermediate.dense": ("layers.mlp.up",),
            "encoder.layer.{}.output.dense": ("layers.mlp.down",),
            "encoder.layer.{}.output.LayerNorm": ("layers.mlp_norm",),
        },
        unembed=("lm_head.decoder.weight",),
        outside={
            "lm_head.dense": ("transform.dense",),
            "lm_head.layer_norm": ("transform.norm",),
            "lm_head": ("unembed",),
        },
        # The second bias is tied to the first; the pooler is of classifiers.
        buffers=r"embeddings\.position_ids|lm_head\.decoder\.bias|pooler\.dense\.(weight|bias)",
    ),
    "mamba": Family(
        prefix="backbone.",
        modules={
            "embeddings": ("embed",),
            "layers.{}.norm": ("layers.norm",),
            "layers.{}.mixer.in_proj": ("layers.mixer.input", "layers.mixer.gate"),
            "layers.{}.mixer.conv1d": ("layers.mixer.conv",),
            "layers.{}.mixer.x_proj": ("layers.mixer.x_proj",),
            "layers.{}.mixer.dt_proj": ("layers.mixer.dt_proj",),
            "layers.{}.mixer.out_proj": ("layers.mixer.out",),
            "norm_f": ("final_norm",),
        },
        tensors={
            "layers.{}.mixer.dt_proj.bias": "layers.mixer.dt_bias",
            "layers.{}.mixer.A_log": "layers.mixer.a_log",
            "layers.{}.mixer.D": "layers.mixer.d",
        },
        fused_dim=-2,  # [in, 2, out]
    ),
    "vit": Family(
        prefix="vit.",
        modules={
            "embeddings.patch_embeddings.projection": ("patch_embed",),
            "encoder.layer.{}.layernorm_before": ("layers.attention_norm",),
            "encoder.layer.{}.attention.attention.query": ("layers.attention.query",),
            "encoder.layer.{}.attention.attention.key": ("layers.attention.key",),
            "encoder.layer.{}.attention.attention.value": ("layers.attention.value",),
            "encoder.layer.{}.attention.output.dense": ("layers.attention.out",),
            "encoder.layer.{}.layernorm_after": ("layers.mlp_norm",),
            "encoder.layer.{}.intermediate.dense": ("layers.mlp.up",),
            "encoder.layer.{}.output.dense": ("layers.mlp.down",),
            "layernorm": ("final_norm",),
        },
        unembed=("classifier.weight",),
        outside={"classifier": ("head",)},
        tensors={
            "embeddings.cls_token": "class_token",
            "embeddings.position_embeddings": "position_embed.embedding",
        },
        extra_dims=1,
    ),
    "convnext": Family(
        prefix="convnext.",
        modules={
            "embeddings.patch_embeddings": ("stem",),
            "embeddings.layernorm": ("stem_norm",),
            **{
                f"encoder.stages.{i}.downsampling_layer.{j}": (f"downsample{i}.{part}",)
                for i in (1, 2, 3)
                for j, part in enumerate(("norm", "conv"))
            },
            **{
                f"encoder.stages.{i}.layers.{{}}.{theirs}": (f"stage{i}.{ours}",)
                for i in range(4)
                for theirs, ours in (
                    ("dwconv", "conv"),
                    ("layernorm", "norm"),
                    ("pwconv1", "mlp.up"),
                    ("pwconv2", "mlp.down"),
                )
            },
            "layernorm": ("final_norm",),
        },
        unembed=("classifier.weight",),
        outside={"classifier": ("head",)},
        tensors={f"encoder.stages.{i}.layers.{{}}.layer_scale_parameter": f"stage{i}.layer_scale" for i in range(4)},
    ),
}
