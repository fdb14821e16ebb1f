"""Mamba as published, on the Pile: 300 billion tokens in batches of half a million.

Gu & Dao 2023 (arXiv 2312.00752), appendix E.2: AdamW with betas 0.9 and 0.95, weight decay 0.1 but on A, D, norms and
biases, clipping at 1, bfloat16, a linear warm-up of a tenth and a cosine decay to 1e-5; peak rates are five times
those of GPT-3 of the same size. Rows of 4,096 tokens as the academic benchmark (arXiv 2410.23261) has them; the paper's
are of 2,048, twice as many in a batch (:seq_len=2048,batch_size=256).

The data is the Pile with GPT-NeoX's tokenizer; configs/_pythia.py says how to fetch it in the order that Pythia saw.
"""

from ml_collections import ConfigDict

from jaxpretrain import config as schema

# layers, width, peak rate
SIZES = {
    "130m": (24, 768, 3e-3),
    "370m": (48, 1024, 1.5e-3),
    "790m": (48, 1536, 1.25e-3),
    "1.4b": (48, 2048, 1e-3),
    "2.8b": (64, 2560, 8e-4),
}


def recipe(size: str) -> ConfigDict:
    config = schema.default()
    config.steps = 572_204
    config.batch_size = 128
    config.seq_len = 4096

    model = config.model
    model.family = "mamba"
    model.vocab_size = 50280
    model.num_layers, model.embed_dim, learning_rate = SIZES[size]
    model.tied_embeddings = True

    config.data.source = "megatron"
    config.data.path = "data/pile/document"
    config.data.tokenizer = "data/pythia_tokenizer.json"

    config.optimizer.learning_rate = learning_rate
    config.optimizer.b1, config.optimizer.b2 = 0.9, 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.no_decay = ("norm_scale", "bias", "ssm_a_log", "ssm_d", "ssm_dt_bias")
    config.optimizer.clip = 1.0
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = 57_220
    config.schedule.final_fraction = 1e-5 / learning_rate

    if model.embed_dim >= 2048:
        config.parallel.strategy = "fsdp"
    return config
