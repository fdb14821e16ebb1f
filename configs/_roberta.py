"""RoBERTa as published: the encoder, trained to predict masked tokens of rows packed with whole sentences.

Liu et al. 2019 (arXiv 1907.11692), table 9 and section 4: 500,000 steps of 8,192 rows of 512 tokens, Adam with eps 1e-6
and betas 0.9 and 0.98, linear warm-up and decay, no clipping, dropout of 0.1, in float16. Not here: dropout of the
attention's probabilities (0.1 there), which no flash attention has with masks that are the same on any layout.

The data, 160 GB of five corpora, is not published as one. Text is packed by its lines (blank lines left out), Megatron
files by their sequences: one a sentence where the set was written so. The tokenizer is Hugging Face's:

    hf download FacebookAI/roberta-large tokenizer.json --local-dir data/roberta
"""

from ml_collections import ConfigDict

from jaxpretrain import config as schema

# layers, width, heads, peak rate, warm-up steps
SIZES = {"base": (12, 768, 12, 6e-4, 24_000), "large": (24, 1024, 16, 4e-4, 30_000)}


def recipe(size: str) -> ConfigDict:
    config = schema.default()
    config.steps = 500_000
    config.batch_size = 8192
    config.seq_len = 512

    model = config.model
    model.family = "encoder"
    model.vocab_size = 50265
    model.num_layers, model.embed_dim, model.num_heads, learning_rate, warmup_steps = SIZES[size]
    model.init = "normal"
    model.dropout = 0.1

    config.data.source = "text"
    config.data.path = "data/roberta/text"
    config.data.tokenizer = "data/roberta/tokenizer.json"

    config.optimizer.learning_rate = learning_rate
    config.optimizer.b1, config.optimizer.b2, config.optimizer.eps = 0.9, 0.98, 1e-6
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip = 0.0
    config.schedule.name = "linear"
    config.schedule.warmup_steps = warmup_steps
    config.schedule.final_fraction = 0.0

    config.precision.compute = "float16"
    return config
