"""What the GPT-2 recipes share: GPT-2's architecture with the Adam-mini study's hyper-parameters (arXiv 2406.16793).

Sources: the model, Radford et al. 2019 and the released weights; batch, rates, steps, decay and clipping,
examples/gpt2/config/train_gpt2_*.py of github.com/zyushun/Adam-mini, which derive from nanoGPT's. Its
AdamW decays all matrices and embeddings, as nanoGPT's does. Its published curves end after 20B tokens.
Its medium file sets eps to 1e-6, but the script never passes it on: torch's 1e-8 was used.

The flag `nobias`, configs/gpt2_small.py:nobias, is the model that the study and nanoGPT really trained:
no biases and 50,304 rows of embedding; Hugging Face's GPT-2 has no such variant.

nanoGPT's own run, train_gpt2.py, to a validation loss of about 2.85:

    --config=configs/gpt2_small.py:nobias,steps=600000,schedule.decay_steps=600000
    --config.optimizer.weight_decay=0.1 --config.schedule.final_fraction=0.1

Data: OpenWebText as uint16 GPT-2 tokens, 18 GB, prepared by data/openwebtext/prepare.py of
github.com/karpathy/nanoGPT: put its train.bin and val.bin into data/openwebtext/. The tokenizer, for
sampling: hf download openai-community/gpt2 tokenizer.json --local-dir data/gpt2
"""

from ml_collections import ConfigDict

from jaxpretrain import config as schema

# layers, width, heads, peak rate, last rate, weight decay, steps (of a cosine over 100,000)
SIZES = {
    "small": (12, 768, 12, 6e-4, 3e-5, 0.0, 100_000),
    "medium": (24, 1024, 16, 3e-4, 6e-5, 0.1, 50_000),
    "xl": (48, 1600, 25, 1e-4, 1e-5, 0.1, 50_000),
}


def recipe(size: str, arg: str) -> ConfigDict:
    flags = schema.parse_arg(arg, nobias=False)
    num_layers, embed_dim, num_heads, peak, last, weight_decay, steps = SIZES[size]
    config = schema.default()
    config.steps = steps
    config.batch_size = 480  # 491,520 tokens
    config.seq_len = 1024

    model = config.model
    model.num_layers, model.embed_dim, model.num_heads = num_layers, embed_dim, num_heads
    model.vocab_size = 50304 if flags.nobias else 50257
    model.positions = "learned"
    model.max_positions = 1024
    model.activation = "gelu_tanh"
    model.tied_embeddings = True
    model.norm_bias = model.attention_bias = model.mlp_bias = not flags.nobias
    model.init = "gpt2"

    config.data.source = "tokens"
    config.data.dtype = "uint16"
    config.data.path = "data/openwebtext/train.bin"
    config.data.validation_path = "data/openwebtext/val.bin"
    config.data.tokenizer = "data/gpt2/tokenizer.json"

    config.optimizer.learning_rate = peak
    config.optimizer.b1, config.optimizer.b2, config.optimizer.eps = 0.9, 0.95, 1e-8
    config.optimizer.weight_decay = weight_decay
    config.optimizer.no_decay = ("norm_scale", "bias")
    config.optimizer.clip = 1.0
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = 2000
    config.schedule.decay_steps = 100_000
    config.schedule.final_fraction = last / peak

    if size == "xl":
        config.parallel.strategy = "fsdp"
    config.eval.every = 1000
    config.eval.max_tokens = 200 * 30 * 1024  # the study's 200 batches of 30
    return config
