"""A byte-level RoBERTa for any laptop, on the text of configs/tiny.py: masked bytes, rows of whole lines.

    python -m jaxpretrain.main --config=configs/tiny_roberta.py --workdir=runs/tiny_roberta

Hardware: two CPU cores, a few minutes. The validation loss ends below the entropy of bytes without context, which is
printed first.
"""

from jaxpretrain import config as schema


def get_config():
    config = schema.default()
    config.steps = 300
    config.batch_size = 32
    config.seq_len = 128

    model = config.model
    model.family = "encoder"
    model.vocab_size = 259  # bytes, and three that begin rows, pad them and mask
    model.num_layers = 4
    model.embed_dim = 128
    model.num_heads = 4
    model.init = "normal"

    config.data.source = "stdlib"
    config.data.tokenizer = "bytes"

    config.optimizer.learning_rate = 2e-3
    config.optimizer.b2 = 0.98
    config.schedule.name = "linear"
    config.schedule.warmup_steps = 30
    config.schedule.final_fraction = 0.0

    config.precision.compute = "float32"  # CPUs have no fast bfloat16

    config.checkpoint.every = 100
    config.eval.every = 0  # at the end
    config.eval.max_tokens = 65_536
    config.eval.ngrams = True
    config.log.every = 10
    return config
