"""A byte-level Mamba for any laptop, on the text of configs/tiny.py.

    python -m jaxpretrain.main --config=configs/tiny_mamba.py --workdir=runs/tiny_mamba

Hardware: two CPU cores, a few minutes. The validation loss ends below the entropy of byte bigrams, which is printed
first.
"""

from jaxpretrain import config as schema


def get_config():
    config = schema.default()
    config.steps = 300
    config.batch_size = 8
    config.seq_len = 256

    model = config.model
    model.family = "mamba"
    model.vocab_size = 256
    model.num_layers = 4
    model.embed_dim = 128
    model.tied_embeddings = True

    config.data.source = "stdlib"
    config.data.tokenizer = "bytes"

    config.optimizer.learning_rate = 5e-3
    config.optimizer.no_decay = ("norm_scale", "bias", "ssm_a_log", "ssm_d", "ssm_dt_bias")
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = 30

    config.precision.compute = "float32"  # CPUs have no fast bfloat16

    config.checkpoint.every = 100
    config.eval.every = 0  # at the end
    config.eval.max_tokens = 32_768
    config.eval.ngrams = True
    config.log.every = 10
    return config
