"""A byte-level model small enough for any laptop, on text that every Python machine has: the standard library's own.

    python -m jaxpretrain.main --config=configs/tiny.py --workdir=runs/tiny

Hardware: two CPU cores, a bit over a minute, nothing to download. The validation loss ends below the
entropy of byte bigrams (both are printed), so the model has learnt more than pairs.
"""

from jaxpretrain import config as schema


def get_config():
    config = schema.default()
    config.steps = 300
    config.batch_size = 8
    config.seq_len = 256

    model = config.model
    model.vocab_size = 256
    model.num_layers = 4
    model.embed_dim = 160
    model.num_heads = 5
    model.mlp_dim = 640
    model.norm = "rmsnorm"
    model.norm_bias = False
    model.attention_bias = False
    model.mlp_bias = False
    model.tied_embeddings = True

    config.data.source = "stdlib"
    config.data.tokenizer = "bytes"

    config.optimizer.learning_rate = 3e-3
    config.optimizer.b2 = 0.98
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = 20

    config.precision.compute = "float32"  # CPUs have no fast bfloat16

    config.checkpoint.every = 100
    config.eval.every = 0  # at the end
    config.eval.max_tokens = 32_768
    config.eval.ngrams = True
    config.log.every = 1
    return config
