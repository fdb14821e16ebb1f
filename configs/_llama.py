"""What the Llama recipes share: the Llama 2 and 3 models of the Adam-mini study (arXiv 2406.16793).

Sources: sizes, examples/llama/torchtitan/models/llama/__init__.py of github.com/zyushun/Adam-mini;
hyper-parameters, its train_configs/*.toml and train.py, a fork of torchtitan: AdamW that decays every
parameter, a linear warm-up over 1% of the steps, then linear to zero. Its Adam-mini does not decay norms:

    --config.optimizer.name=adam_mini --config.optimizer.no_decay=norm_scale,bias

39M to 1B are its scaling-law runs, about 26 tokens per parameter; 13B and Llama 3 8B its short runs on four
GPUs (for those, --config.optimizer.blocks=value_whole); it publishes no file for 7B, whose recipe is the
13B's (its throughput table trains 7B with --config.batch_size=256).

Data: C4 (allenai/c4, English), tokenised with the model's own tokenizer:

    hf download allenai/c4 --repo-type dataset --include 'en/*' --local-dir data/c4
    hf download meta-llama/Llama-2-7b-hf tokenizer.json --local-dir data/llama2
    python tools/tokenize_text.py --input='data/c4/en/c4-train.*.json.gz' \
        --tokenizer=data/llama2/tokenizer.json --output=data/c4-llama2/train
    python tools/tokenize_text.py --input='data/c4/en/c4-validation.*.json.gz' \
        --tokenizer=data/llama2/tokenizer.json --output=data/c4-llama2/validation

and for Llama 3 the same with meta-llama/Meta-Llama-3-8B and llama3.
"""

from ml_collections import ConfigDict

from jaxpretrain import config as schema

# family: rows of the embedding, key and value heads (0: as many as query heads), rotary base
FAMILIES = {"llama2": (32000, 0, 10_000.0), "llama3": (128_256, 8, 500_000.0)}

# layers, width, heads, width of the MLP: 2/3 of 4 widths, up to a multiple of 256 (Llama 3: times 1.3, of 1024)
MODELS = {
    "llama2-39m": (8, 384, 6, 1024),
    "llama2-67m": (10, 512, 8, 1536),
    "llama2-102m": (12, 640, 10, 1792),
    "llama2-162m": (16, 768, 12, 2048),
    "llama2-271m": (16, 1024, 16, 2816),
    "llama2-1b": (18, 2048, 16, 5632),
    "llama2-7b": (32, 4096, 32, 11008),
    "llama2-13b": (40, 5120, 40, 13824),
    "llama3-8b": (32, 4096, 32, 14336),
}

# sequences, their length, steps, peak rate
RUNS = {
    "llama2-39m": (256, 512, 7_800, 6e-4),
    "llama2-67m": (256, 512, 13_400, 6e-4),
    "llama2-102m": (256, 512, 20_400, 6e-4),
    "llama2-162m": (256, 512, 32_400, 6e-4),
    "llama2-271m": (256, 512, 54_200, 6e-4),
    "llama2-1b": (256, 512, 200_000, 2e-4),
    "llama2-7b": (8, 2048, 10_000, 1e-4),
    "llama2-13b": (8, 2048, 10_000, 1e-4),
    "llama3-8b": (8, 2048, 10_000, 1e-4),
}


def recipe(name: str) -> ConfigDict:
    family = name.partition("-")[0]
    config = schema.default()
    config.batch_size, config.seq_len, config.steps, learning_rate = RUNS[name]

    model = config.model
    model.num_layers, model.embed_dim, model.num_heads, model.mlp_dim = MODELS[name]
    model.vocab_size, model.num_kv_heads, model.rotary.theta = FAMILIES[family]
    model.norm = "rmsnorm"
    model.norm_eps = 1e-5
    model.activation = "silu"
    model.gated_mlp = True
    model.norm_bias = model.attention_bias = model.mlp_bias = False
    model.init = "llama"

    config.data.source = "megatron"
    config.data.path = f"data/c4-{family}/train"
    config.data.validation_path = f"data/c4-{family}/validation"
    config.data.tokenizer = f"data/{family}/tokenizer.json"

    config.optimizer.learning_rate = learning_rate
    config.optimizer.b1, config.optimizer.b2, config.optimizer.eps = 0.9, 0.95, 1e-8
    config.optimizer.weight_decay = 0.1
    config.optimizer.no_decay = ()
    config.optimizer.clip = 1.0
    config.schedule.name = "linear"
    config.schedule.warmup_steps = config.steps // 100
    config.schedule.final_fraction = 0.0

    if model.embed_dim >= 2048:  # from 1B on
        config.parallel.strategy = "fsdp"
    config.eval.every = 1000
    config.eval.max_tokens = 32 * 256 * 512  # the study's 32 batches
    return config
