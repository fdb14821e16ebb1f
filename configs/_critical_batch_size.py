"""What the models of the critical-batch-size study share (Zhang et al. 2024, arXiv 2410.21676): cbs*.py.

Source: github.com/hlzhang109/critical-batch-size. The five models, 85M to 1.2B without embeddings
(configs/critical-bs/*.yaml), are OLMo's: LayerNorm without bias, normalised queries and keys, no biases.
The rate is constant after a warm-up, from a tenth of the peak, over a quarter of the Chinchilla tokens;
no weight decay; beta2, and the decay per step of the averaged weights that it evaluates, by batch size as in its
scripts/train.py.

The flag batch_size, configs/cbs151m.py:batch_size=1024, takes beta2, horizon, warm-up and steps along; setting
--config.batch_size alone does not. Steps are one Chinchilla budget; the study let its runs go on until
they reached the loss of batch size 256 there. All sizes share the rate 3.16e-3; at 1.2B the study's
fastest runs had 1e-3 up to batch size 512 and 1e-2 at 4096 and 8192.

The small proxies (configs/small-proxies/*.yaml) have a recipe of their own, t5-base tokens and a cosine.
Theirs was trained with a z-loss and plain fan-in initialisation, which this one does without.

Data: C4, tokenised with Pythia's tokenizer (the study's differs by three reserved tokens) or t5-base's:

    hf download allenai/c4 --repo-type dataset --include 'en/*' --local-dir data/c4
    python tools/tokenize_text.py --input='data/c4/en/c4-train.*.json.gz' \
        --tokenizer=data/pythia_tokenizer.json --output=data/c4-pythia/train
    python tools/tokenize_text.py --input='data/c4/en/c4-validation.*.json.gz' \
        --tokenizer=data/pythia_tokenizer.json --output=data/c4-pythia/validation

(the tokenizers: configs/_pythia.py, and hf download google-t5/t5-base tokenizer.json --local-dir data/t5).
"""

import math

from ml_collections import ConfigDict

from jaxpretrain import config as schema

# layers, width, heads, Chinchilla budget in sequences
MODELS = {
    "85m": (12, 768, 12, 3_400_000),
    "151m": (12, 1024, 16, 6_000_000),
    "302m": (24, 1024, 16, 12_000_000),
    "604m": (12, 2048, 16, 24_000_000),
    "1.2b": (24, 2048, 32, 48_000_000),
}
PROXIES = {"2.4m": (3, 256, 4), "9.4m": (3, 512, 8), "19m": (6, 512, 8), "42m": (6, 768, 12)}
# batch size: beta2, decay of the average per step
DECAYS = {
    64: (0.999, 0.9995),
    128: (0.999, 0.9995),
    256: (0.995, 0.9995),
    512: (0.99, 0.9995),
    1024: (0.99, 0.999),
    2048: (0.95, 0.998),
    4096: (0.95, 0.995),
    8192: (0.95, 0.99),
    16384: (0.95, 0.99),
}


def recipe(size: str, arg: str) -> ConfigDict:
    batch_size = schema.parse_arg(arg, batch_size=256).batch_size
    if batch_size not in DECAYS:
        raise ValueError(f"batch_size={batch_size}: the study's table has {', '.join(map(str, DECAYS))}")
    beta2, decay = DECAYS[batch_size]
    num_layers, embed_dim, num_heads, sequences = MODELS[size]
    config = _shared(num_layers, embed_dim, num_heads, vocab_size=50304, tokens="pythia")
    config.batch_size = batch_size
    config.steps = math.ceil(sequences / batch_size)
    config.data.tokenizer = "data/pythia_tokenizer.json"

    config.optimizer.learning_rate = 3.16e-3
    config.optimizer.b1, config.optimizer.b2 = 0.95, beta2
    config.optimizer.weight_decay = 0.0
    config.schedule.name = "constant"
    config.schedule.warmup_steps = int(0.25 * sequences / batch_size)
    config.average.horizons = (round(-batch_size * config.seq_len / math.log(decay)),)
    if size == "1.2b":
        config.parallel.strategy = "fsdp"
    return config


def proxy(size: str) -> ConfigDict:
    config = _shared(*PROXIES[size], vocab_size=32128, tokens="t5")
    config.batch_size = 256
    config.steps = 100_000
    config.data.tokenizer = "data/t5/tokenizer.json"

    config.optimizer.learning_rate = 1e-3
    config.optimizer.b1, config.optimizer.b2 = 0.9, 0.95
    config.optimizer.weight_decay = 1e-4
    config.optimizer.no_decay = ()
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = 5000
    config.schedule.final_fraction = 0.01
    return config


def _shared(num_layers: int, embed_dim: int, num_heads: int, vocab_size: int, tokens: str) -> ConfigDict:
    config = schema.default()
    config.seq_len = 512
    model = config.model
    model.num_layers, model.embed_dim, model.num_heads, model.vocab_size = num_layers, embed_dim, num_heads, vocab_size
    model.norm_bias = model.attention_bias = model.mlp_bias = False
    model.qk_norm = True
    model.init = "mitchell"

    config.data.source = "megatron"
    config.data.path = f"data/c4-{tokens}/train"
    config.data.validation_path = f"data/c4-{tokens}/validation"
    config.optimizer.eps = 1e-8
    config.optimizer.clip = 1.0
    config.schedule.warmup_from = 0.1
    config.eval.every = 500
    config.eval.max_tokens = 26_214_400  # what the study's evaluation reads with 64 sequences per GPU
    return config
