"""What all Pythias share (Biderman et al. 2023, arXiv 2304.01373): the recipes are pythia14m.py ... pythia12b.py.

Source: models/*.yml of github.com/EleutherAI/pythia, read with what its maintainers corrected since:
weight decay is 0.1 as in the files, not the paper's 0.01 (issue 132); 6.9B started from normal(0.02), residual
outputs / sqrt(2L), not from Table 6's rule (issue 135: its file names none, so GPT-NeoX's default held), and 12B,
whose file names none either, must have too;
all were trained in fp16 but the 1B, in bf16 after a loss spike (README), though its deduped twin in fp16
(issue 171). On TPUs, which have no fp16, and wherever bf16 is fast: --config.precision.compute=bfloat16.

One thing differs from what GPT-NeoX computed: its fused GELU was the tanh approximation; the released
models, and this recipe, say exact GELU (--config.model.activation=gelu_tanh).

Data: the Pile in the published order, 143,000 steps of 1,024 rows of 2,049 tokens, 600 GB:

    hf download EleutherAI/pile-standard-pythia-preshuffled --repo-type dataset \
        --local-dir data/pile-standard-pythia-preshuffled
    curl -o data/pythia_tokenizer.json \
        https://raw.githubusercontent.com/EleutherAI/pythia/main/utils/20B_tokenizer.json

The `deduped` flag, configs/pythia1b.py:deduped, takes pile-deduped-pythia-preshuffled instead. Every row
is training data, so nothing is evaluated unless data.validation_path and eval.every are given.

The 154 published checkpoints are kept: steps 0, 1, 2, 4, ... 512 and every 1,000th, each 12 bytes per
parameter (1B: 12 GB, 1.9 TB in all). --config.checkpoint.keep_every=0 --config.checkpoint.at_steps=
keeps the last two only.
"""

from ml_collections import ConfigDict

from jaxpretrain import config as schema

# layers, width, heads, rows of the embedding (padded to 128 times the model-parallel degree), peak rate.
# The 1B's rate is the paper's, the README's and the model card's; pythia-1b.yml says 2.5e-4.
SIZES = {
    "14m": (6, 128, 4, 50304, 1e-3),
    "31m": (6, 256, 8, 50304, 1e-3),
    "70m": (6, 512, 8, 50304, 1e-3),
    "160m": (12, 768, 12, 50304, 6e-4),
    "410m": (24, 1024, 16, 50304, 3e-4),
    "1b": (16, 2048, 8, 50304, 3e-4),
    "1.4b": (24, 2048, 16, 50304, 2e-4),
    "2.8b": (32, 2560, 32, 50304, 1.6e-4),
    "6.9b": (32, 4096, 32, 50432, 1.2e-4),
    "12b": (36, 5120, 40, 50688, 1.2e-4),
}


def recipe(size: str, arg: str) -> ConfigDict:
    flags = schema.parse_arg(arg, deduped=False)
    config = schema.default()
    config.steps = 143_000
    config.batch_size = 1024
    config.seq_len = 2048

    model = config.model
    model.num_layers, model.embed_dim, model.num_heads, model.vocab_size, learning_rate = SIZES[size]
    model.rotary.fraction = 0.25
    model.parallel_residual = True
    model.init = "gpt2" if size in ("6.9b", "12b") else "gpt_neox"

    corpus = "deduped" if flags.deduped else "standard"
    config.data.source = "megatron"
    config.data.path = f"data/pile-{corpus}-pythia-preshuffled/document"
    config.data.row_len = 2049
    config.data.order = "sequential"
    config.data.tokenizer = "data/pythia_tokenizer.json"
    config.data.validation_fraction = 0.0
    config.eval.every = -1

    config.optimizer.learning_rate = learning_rate
    config.optimizer.b1, config.optimizer.b2, config.optimizer.eps = 0.9, 0.95, 1e-8
    config.optimizer.weight_decay = 0.1
    config.optimizer.no_decay = ("norm_scale", "bias")
    config.optimizer.clip = 1.0
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = 1430
    config.schedule.decay_steps = 1430 + 143_000  # GPT-NeoX's cosine: as many steps as the run, after the warm-up,
    config.schedule.final_fraction = 0.0  # towards zero,
    config.schedule.floor_fraction = 0.1  # held at its min_lr from 80% of the steps on

    if size == "1b" and not flags.deduped:
        config.precision.compute = "bfloat16"
    else:
        config.precision.compute = "float16"
        config.precision.initial_loss_scale = 4096.0
        config.precision.loss_scale_interval = 1000

    if model.embed_dim >= 2048:  # from 1B on
        config.parallel.strategy = "fsdp"
    config.checkpoint.every = config.checkpoint.keep_every = 1000
    config.checkpoint.at_steps = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    return config
