"""Every key of the configuration: its default, its meaning, what it may be and when something reads it."""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict, FieldReference


def default() -> ConfigDict:
    """The schema: a config with every key at its default."""
    config = ConfigDict()
    config.seed = 0  # of the initial parameters and of the order of the data
    config.steps = 1000  # optimizer steps
    config.batch_size = 8  # sequences per optimizer step, over all devices and accumulation steps
    # sequences per device and accumulation step; "auto" is resolved once
    config.micro_batch_size = FieldReference("auto", field_type=object)  # object: a recipe may assign an int
    config.seq_len = 256  # tokens that the model sees of a row; images count as one: 1

    config.model = model = ConfigDict()
    # decoder and mamba predict the next token, encoder masked tokens, vit and convnext the class of an image
    model.family = "decoder"
    model.vocab_size = 256  # rows of the embedding
    model.num_layers = 4
    model.embed_dim = 128
    model.num_heads = 4
    model.num_kv_heads = 0  # 0: as many as num_heads
    model.head_dim = 0  # 0: embed_dim / num_heads
    model.mlp_dim = 0  # 0: 4 * embed_dim
    model.positions = "rotary"  # rotary | learned
    model.max_positions = 0  # rows of the learned position table; 0: seq_len
    model.rotary = rotary = ConfigDict()
    rotary.fraction = 1.0  # of head_dim that is rotated (Pythia: 0.25)
    rotary.theta = 10000.0
    rotary.scaling = "none"  # none | linear | llama3
    rotary.factor = 8.0  # linear, llama3: how much longer the context is than the original
    rotary.low_freq_factor = 1.0  # llama3
    rotary.high_freq_factor = 4.0  # llama3
    rotary.original_max_positions = 8192  # llama3
    model.norm = "layernorm"  # layernorm | rmsnorm
    model.norm_eps = 1e-5
    model.norm_bias = True  # layernorm only
    model.qk_norm = False  # normalise queries and keys over all heads together, before rotary (OLMo)
    model.activation = "gelu"  # gelu (exact) | gelu_tanh | silu
    model.gated_mlp = False  # True with silu: SwiGLU
    model.attention_bias = True
    model.mlp_bias = True
    model.parallel_residual = False  # attention and MLP both read the block's input (GPT-NeoX)
    model.tied_embeddings = False
    model.init = "gpt2"  # gpt_neox | gpt2 | llama | mitchell | normal
    model.dropout = 0.0  # encoder, vit: of the embeddings and of what each attention and each MLP adds
    model.drop_path = 0.0  # vit, convnext: chance that an image skips the last block; the first block's is 0
    model.mamba = mamba = ConfigDict()
    mamba.state_dim = 16  # numbers that each channel remembers
    mamba.conv_width = 4  # tokens that the causal convolution sees
    mamba.expand = 2  # channels of the inner layer, in embed_dim
    mamba.dt_rank = 0  # of the projection that gives the time steps; 0: embed_dim / 16, rounded up
    mamba.dt_min = 0.001  # time steps begin log-uniformly between dt_min and dt_max
    mamba.dt_max = 0.1
    model.image = image = ConfigDict()
    image.size = 224  # pixels of a side
    image.num_channels = 3
    image.num_classes = 1000
    image.patch_size = 16  # pixels of a side of vit's patches
    model.convnext = convnext = ConfigDict()
    convnext.depths = (3, 3, 9, 3)  # blocks of each stage
    convnext.widths = (96, 192, 384, 768)  # channels of each stage
    convnext.layer_scale = 1e-6  # of what each block adds, at the beginning

    config.data = data = ConfigDict()
    data.update(data_source_defaults())
    data.mixture = ConfigDict()  # name -> {weight, source, path, ...}; with data.source = "mixture"
    data.tokenizer = "bytes"  # bytes, or the path of a Hugging Face tokenizer.json
    data.order = "shuffled"  # shuffled: a new permutation every epoch | sequential: as stored, from step 0
    data.isolate_documents = False  # attention and loss do not cross document boundaries
    data.validation_fraction = 0.01  # of the documents, where validation_path is empty
    data.validation_path = ""  # a source of the same kind that holds the validation data
    data.cache_dir = ""  # tokenised text; "": jaxpretrain/ in the user's cache directory

    data.workers = 0  # processes that decode images; 0: as many as the cores of the host
    data.images = images = ConfigDict()  # how training images are changed: docs/images.md
    images.min_crop = 0.08  # random crops take at least this part of the area; 1: all of the image
    images.flip = True  # half of the images are mirrored
    images.randaugment_ops = 0  # RandAugment's operations on each image
    images.randaugment_magnitude = 9.0  # their strength, 0 to 10
    images.erase = 0.0  # chance that a rectangle is replaced by noise
    images.mixup = 0.0  # alpha of mixup; 0: none
    images.cutmix = 0.0  # alpha of CutMix; 0: none. With both, half of the pairs get each
    images.eval_crop = 0.875  # evaluation sees the middle of the image: this part of its shorter side
    images.normalize = "imagenet"  # imagenet: its mean and deviation | half: 0.5 and 0.5

    config.objective = objective = ConfigDict()
    objective.mask_fraction = 0.15  # encoder: of the tokens, that are to be predicted
    objective.label_smoothing = 0.0  # vit, convnext: of the label's probability, spread over all classes

    config.optimizer = optimizer = ConfigDict()
    # adamw | adam_mini | adafactor | lion | lamb | sm3 | sgd | muon | schedule_free_adamw: docs/optimizers.md
    optimizer.name = "adamw"
    optimizer.learning_rate = 1e-3  # the peak
    optimizer.b1 = 0.9  # adafactor: of its momentum, 0: none. schedule_free_adamw: weight of the average in gradients
    optimizer.b2 = 0.95
    optimizer.eps = 1e-8
    optimizer.momentum = 0.95  # sgd (0: none) and muon's matrices
    optimizer.weight_decay = 0.1  # decoupled, times the learning rate
    optimizer.no_decay = ("norm_scale", "bias")  # roles of parameters (models/parameter.py) without weight decay
    optimizer.lr_multipliers = ConfigDict()  # role -> what its whole update, weight decay too, is multiplied by
    optimizer.clip = 1.0  # global gradient norm; 0: none
    optimizer.mu_dtype = "float32"  # first moment: float32 | bfloat16 | int8 (adam_mini only)
    optimizer.nu_dtype = "float32"  # adamw's second moment: float32 | bfloat16
    optimizer.blocks = "v1_1"  # adam_mini: v1_1 | value_whole | v1_0 | fan_out | slim | per_tensor

    config.schedule = schedule = ConfigDict()
    schedule.name = "cosine"  # constant | cosine | linear | inverse_sqrt | wsd (warm-up, stable, decay)
    schedule.warmup_steps = 0
    schedule.warmup_tokens = 0  # the same in tokens, whatever the batch size; one of the two
    schedule.warmup_from = 0.0  # fraction of the peak at which the warm-up starts
    schedule.final_fraction = 0.1  # of the peak, at the end of the decay
    schedule.floor_fraction = 0.0  # of the peak, below which the decay does not go
    schedule.decay_steps = 0  # where the decay ends, counted from step 0; 0: steps
    schedule.decay_shape = "linear"  # wsd: linear | exponential | one_minus_sqrt
    schedule.decay_fraction = 0.1  # wsd: the last part of the steps up to its end, which decays
    schedule.decay_length = 0  # wsd: the same in steps; 0: by decay_fraction

    config.scaling = scaling = ConfigDict()  # rules that turn settings found at one batch size into those of another
    scaling.base_batch_size = 0  # sequences; where optimizer.learning_rate and optimizer.b2 were found; 0: no rule
    scaling.learning_rate = "none"  # none | sqrt | linear: times (batch_size / base_batch_size) or its root
    scaling.b2 = "none"  # none | tokens: b2 ** (batch_size / base_batch_size), so the same half-life in tokens

    config.average = average = ConfigDict()
    average.horizons = ()  # tokens, each of an exponential average of the weights that is kept and evaluated

    config.parallel = parallel = ConfigDict()
    parallel.strategy = "ddp"  # ddp | zero1 | zero2 | fsdp | hsdp: docs/memory.md
    parallel.replicas = 0  # hsdp: groups of devices that each hold the whole model; 0: one per host, or on one host 2
    parallel.tensor = 1  # devices that share the matrices of each layer
    # none: no matmul or attention is computed twice | full: only layer inputs are kept | full:K | dots | names:a+b |
    # offload | offload:a+b: docs/memory.md
    parallel.remat = "none"
    parallel.offload = "none"  # to the host's memory: optimizer, params, averages, and sums such as optimizer+params
    parallel.xla_options = "tuned"  # tuned: parallel/xla.py | default: as XLA comes (the naive method)
    parallel.donate = True  # False: the state is not updated in place, and is held twice (the naive method)
    parallel.scan_layers = True  # False: unrolled; compiles longer, often faster on GPUs

    config.precision = precision = ConfigDict()
    precision.compute = "bfloat16"  # bfloat16 | float32 | float16 (dynamic loss scale)
    precision.matmul = "default"  # default | highest: of float32 matrix multiplications
    precision.initial_loss_scale = 65536.0  # float16 only
    precision.loss_scale_interval = 1000  # float16 only: finite steps before the scale doubles

    config.kernels = kernels = ConfigDict()
    kernels.attention = "auto"  # auto | xla | blockwise | cudnn | pallas | splash
    kernels.cross_entropy = "auto"  # auto | plain | chunked | whole (all logits at once: the naive method)

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every = 1000  # steps; 0: off. The last step is always saved
    checkpoint.every_minutes = 0.0  # 0: off
    checkpoint.at_steps = ()  # also at these steps, kept for ever
    checkpoint.keep_last = 2
    checkpoint.keep_every = 0  # keep those at multiples of this for ever; 0: none
    checkpoint.resume_from = ""  # another run's workdir: its whole state, if this workdir has no checkpoint
    checkpoint.init_from = ""  # a workdir or a Hugging Face folder: its weights only, from step 0

    config.eval = evaluation = ConfigDict()
    evaluation.every = 1000  # steps; 0: at the end only; -1: never
    evaluation.max_tokens = 0  # of the validation split; 0: all of it
    evaluation.ngrams = False  # also print the split's unigram and bigram entropies (vocabularies up to 4096)

    config.log = log = ConfigDict()
    log.every = 10  # steps
    log.tensorboard = False
    log.wandb = False
    log.wandb_project = "jaxpretrain"

    config.run = run = ConfigDict()
    run.name = ""  # the run's name at Weights & Biases; "": the name of the workdir
    run.max_bad_steps = 10  # steps in a row with non-finite gradients before the run stops; 0: never
    run.compilation_cache = "auto"  # a directory; auto: in the user's cache directory; "": none
    return config


def data_source_defaults() -> dict[str, Any]:
    """The keys that describe one source of data, for `data` itself and for each entry of `data.mixture`."""
    return dict(
        # text: stdlib | text | megatron | tokens | olmo | huggingface | synthetic | mixture
        # images: images | arrayrecord | parquet | huggingface | digits | synthetic
        source="stdlib",
        path="",  # file, prefix, folder or glob; several with commas; local or gs://
        dtype="uint16",  # of tokens and olmo files: uint16 | uint32
        text_key="text",  # text, huggingface: the field that holds the text
        tokens_key="",  # huggingface: the field that holds token ids; "": tokenise text_key
        image_key="image",  # huggingface, parquet, arrayrecord: the field that holds the image
        label_key="label",  # and the one that holds the number of its class
        row_len=0,  # megatron preshuffled rows of this many tokens (Pythia: 2049); 0: a stream of documents
    )


MIXTURE_ENTRY = {"weight": 1.0, **data_source_defaults()}

TOKEN_FAMILIES, IMAGE_FAMILIES = ("decoder", "encoder", "mamba"), ("vit", "convnext")
ATTENTION_FAMILIES = ("decoder", "encoder", "vit")
IMAGE_SOURCES = ("images", "arrayrecord", "parquet", "huggingface", "digits")  # huggingface has text, too

# Keys that may differ from the saved config.json when a run is resumed (DESIGN section 9).
FREE_ON_RESUME = (
    *("parallel.", "kernels.", "micro_batch_size.", "data.workers.", "checkpoint.", "eval.", "log.", "run."),
)

CHOICES = {
    "model.family": (*TOKEN_FAMILIES, *IMAGE_FAMILIES),
    "model.positions": ("rotary", "learned"),
    "model.rotary.scaling": ("none", "linear", "llama3"),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.activation": ("gelu", "gelu_tanh", "silu"),
    "model.init": ("gpt_neox", "gpt2", "llama", "mitchell", "normal"),
    "data.images.normalize": ("imagenet", "half"),
    "data.source": (
        *("stdlib", "text", "megatron", "tokens", "olmo", "huggingface", "synthetic", "mixture"),
        *("images", "arrayrecord", "parquet", "digits"),
    ),
    "data.dtype": ("uint16", "uint32"),
    "data.order": ("shuffled", "sequential"),
    "optimizer.name": (
        *("adamw", "adam_mini", "adafactor", "lion", "lamb", "sm3", "sgd", "muon", "schedule_free_adamw"),
    ),
    "optimizer.mu_dtype": ("float32", "bfloat16", "int8"),
    "optimizer.nu_dtype": ("float32", "bfloat16"),
    "optimizer.blocks": ("v1_1", "value_whole", "v1_0", "fan_out", "slim", "per_tensor"),
    "schedule.name": ("constant", "cosine", "linear", "inverse_sqrt", "wsd"),
    "schedule.decay_shape": ("linear", "exponential", "one_minus_sqrt"),
    "scaling.learning_rate": ("none", "sqrt", "linear"),
    "scaling.b2": ("none", "tokens"),
    "parallel.strategy": ("ddp", "zero1", "zero2", "fsdp", "hsdp"),
    "parallel.xla_options": ("tuned", "default"),
    "precision.compute": ("bfloat16", "float32", "float16"),
    "precision.matmul": ("default", "highest"),
    "kernels.attention": ("auto", "xla", "blockwise", "cudnn", "pallas", "splash"),
    "kernels.cross_entropy": ("auto", "plain", "chunked", "whole"),
}

# What other systems call a choice of ours whose name is not like it.
SYNONYMS = {"zero3": "fsdp", "zero_3": "fsdp", "roberta": "encoder", "bert": "encoder", "transformer": "decoder"}

# key -> (regular expression of what it may be, the same in words)
FORMS = {
    "parallel.remat": (
        r"none|full(:[1-9][0-9]*)?|dots|names:\w+(\+\w+)*|offload(:\w+(\+\w+)*)?",
        "none, full, full:LAYERS, dots, names:A+B, offload or offload:A+B",
    ),
    "parallel.offload": (
        r"none|(optimizer|params|averages)(\+(optimizer|params|averages))*",
        "none, or optimizer, params and averages joined by +",
    ),
}

AT_LEAST = {
    "seed": 0,
    "steps": 1,
    "batch_size": 1,
    "seq_len": 1,
    "model.vocab_size": 2,
    "model.num_layers": 1,
    "model.embed_dim": 1,
    "model.num_heads": 1,
    "model.num_kv_heads": 0,
    "model.head_dim": 0,
    "model.mlp_dim": 0,
    "model.max_positions": 0,
    "model.dropout": 0,
    "model.drop_path": 0,
    **{f"model.mamba.{key}": 1 for key in ("state_dim", "conv_width", "expand")},
    "model.mamba.dt_rank": 0,
    "model.mamba.dt_min": 0,
    "model.mamba.dt_max": 0,
    **{f"model.image.{key}": 1 for key in ("size", "num_channels", "num_classes", "patch_size")},
    "model.convnext.layer_scale": 0,
    "data.row_len": 0,
    "data.workers": 0,
    **{f"data.images.{key}": 0 for key in ("min_crop", "randaugment_ops", "randaugment_magnitude", "erase")},
    **{f"data.images.{key}": 0 for key in ("mixup", "cutmix", "eval_crop")},
    "objective.mask_fraction": 0,
    "objective.label_smoothing": 0,
    "optimizer.learning_rate": 0,
    "optimizer.b1": 0,
    "optimizer.b2": 0,
    "optimizer.eps": 0,
    "optimizer.momentum": 0,
    "optimizer.weight_decay": 0,
    "optimizer.lr_multipliers": 0,
    "optimizer.clip": 0,
    "schedule.warmup_steps": 0,
    "schedule.warmup_tokens": 0,
    "schedule.warmup_from": 0,
    "schedule.final_fraction": 0,
    "schedule.floor_fraction": 0,
    "schedule.decay_steps": 0,
    "schedule.decay_fraction": 0,
    "schedule.decay_length": 0,
    "scaling.base_batch_size": 0,
    "parallel.replicas": 0,
    "parallel.tensor": 1,
    "precision.initial_loss_scale": 1,
    "precision.loss_scale_interval": 1,
    "checkpoint.every": 0,
    "checkpoint.every_minutes": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 0,
    "eval.every": -1,
    "eval.max_tokens": 0,
    "log.every": 1,
    "run.max_bad_steps": 0,
}


# Which sources read a key that describes one, in `data` itself and in an entry of `data.mixture`.
SOURCES_THAT_READ = {
    "path": ("text", "megatron", "tokens", "olmo", "huggingface", "images", "arrayrecord", "parquet"),
    "dtype": ("tokens", "olmo"),
    "text_key": ("text", "huggingface"),
    "tokens_key": ("huggingface",),
    "image_key": ("huggingface", "arrayrecord", "parquet"),
    "label_key": ("huggingface", "arrayrecord", "parquet"),
    "row_len": ("megatron",),
}

# Of huggingface, which has text and images.
FAMILIES_OF_SOURCE_KEYS = {
    **dict.fromkeys(("text_key", "tokens_key"), TOKEN_FAMILIES),
    **dict.fromkeys(("image_key", "label_key"), IMAGE_FAMILIES),
}

# Which optimizers read a key of `optimizer`; all of them read the others.
OPTIMIZERS_THAT_READ = {
    "b1": ("adamw", "adam_mini", "adafactor", "lion", "lamb", "sm3", "muon", "schedule_free_adamw"),
    "b2": ("adamw", "adam_mini", "lion", "lamb", "muon", "schedule_free_adamw"),
    "eps": ("adamw", "adam_mini", "lamb", "sm3", "muon", "schedule_free_adamw"),
    "momentum": ("sgd", "muon"),
    "mu_dtype": ("adamw", "adam_mini", "adafactor", "lion", "lamb", "sgd", "muon"),
    "nu_dtype": ("adamw",),
    "blocks": ("adam_mini",),
}

# Which families of models read a key of `model`; all of them read the others.
_WITH_LAYERS = (*TOKEN_FAMILIES, "vit")
FAMILIES_THAT_READ = {
    "vocab_size": TOKEN_FAMILIES,
    "num_layers": _WITH_LAYERS,
    "embed_dim": _WITH_LAYERS,
    "num_heads": ATTENTION_FAMILIES,
    "num_kv_heads": ("decoder",),
    "head_dim": ("decoder",),
    "mlp_dim": ATTENTION_FAMILIES,
    "positions": ("decoder",),
    "norm": ("decoder",),
    "norm_bias": ("decoder",),
    "qk_norm": ("decoder",),
    "activation": ATTENTION_FAMILIES,
    "gated_mlp": ("decoder",),
    "attention_bias": ("decoder",),
    "mlp_bias": ("decoder",),
    "parallel_residual": ("decoder",),
    "tied_embeddings": ("decoder", "mamba"),
    "init": ("decoder", "encoder"),
    "dropout": ATTENTION_FAMILIES,
    "drop_path": IMAGE_FAMILIES,
    **{f"mamba.{key}": ("mamba",) for key in ("state_dim", "conv_width", "expand", "dt_rank", "dt_min", "dt_max")},
    **{f"image.{key}": IMAGE_FAMILIES for key in ("size", "num_channels", "num_classes")},
    "image.patch_size": ("vit",),
    **{f"convnext.{key}": ("convnext",) for key in ("depths", "widths", "layer_scale")},
}

_WHEN_ROTARY = (
    lambda c: c.model.family == "decoder" and c.model.positions == "rotary",
    "model.family is 'decoder' and model.positions is 'rotary'",
)
_WHEN_LLAMA3 = (lambda c: c.model.rotary.scaling == "llama3", "model.rotary.scaling is 'llama3'")
_WHEN_DECAYING = (lambda c: c.schedule.name != "constant", "schedule.name is not 'constant'")
_WHEN_DECAY_ENDS = (
    lambda c: c.schedule.name not in ("constant", "inverse_sqrt"),
    "schedule.name is 'cosine', 'linear' or 'wsd'",
)
_WHEN_WSD = (lambda c: c.schedule.name == "wsd", "schedule.name is 'wsd'")
_WHEN_RESCALING = (lambda c: c.scaling.base_batch_size > 0, "scaling.base_batch_size is above 0")


def _is_synthetic_images(c: ConfigDict) -> bool:
    return c.model.family in IMAGE_FAMILIES and c.data.source == "synthetic"


_WHEN_IMAGES = (lambda c: c.model.family in IMAGE_FAMILIES, "model.family is 'vit' or 'convnext'")
_WHEN_IMAGE_FILES = (
    lambda c: c.model.family in IMAGE_FAMILIES and not _is_synthetic_images(c),
    "model.family is 'vit' or 'convnext' and data.source has images",
)
_WHEN_TEXT = (
    lambda c: c.model.family in TOKEN_FAMILIES and (c.data.source != "synthetic" or c.model.family == "encoder"),
    "data.source holds text",
)
_WHEN_FLOAT16 = (lambda c: c.precision.compute == "float16", "precision.compute is 'float16'")
_WHEN_EVALUATING = (lambda c: c.eval.every >= 0, "eval.every is not -1")

# key -> (when something reads it, the same in words). A changed key that nothing reads is refused.
READ_WHEN: dict[str, tuple[Callable[[ConfigDict], bool], str]] = {
    "model.max_positions": (
        lambda c: c.model.family == "encoder" or (c.model.family == "decoder" and c.model.positions == "learned"),
        "model.family is 'encoder', or 'decoder' with model.positions='learned'",
    ),
    "model.rotary.fraction": _WHEN_ROTARY,
    "model.rotary.theta": _WHEN_ROTARY,
    "model.rotary.scaling": _WHEN_ROTARY,
    "model.rotary.factor": (lambda c: c.model.rotary.scaling != "none", "model.rotary.scaling is 'linear' or 'llama3'"),
    "model.rotary.low_freq_factor": _WHEN_LLAMA3,
    "model.rotary.high_freq_factor": _WHEN_LLAMA3,
    "model.rotary.original_max_positions": _WHEN_LLAMA3,
    "data.mixture": (lambda c: c.data.source == "mixture", "data.source is 'mixture'"),
    "data.cache_dir": (
        lambda c: c.data.source in ("stdlib", "text", "huggingface", "mixture") and c.model.family in TOKEN_FAMILIES,
        "data.source is tokenised into a cache",
    ),
    "data.validation_path": (
        lambda c: c.data.source in SOURCES_THAT_READ["path"] and c.eval.every >= 0,
        "data.source reads files and eval.every is not -1",
    ),
    "data.validation_fraction": (
        lambda c: not c.data.validation_path and not _is_synthetic_images(c),
        "data.validation_path is empty and images are not synthetic",
    ),
    "data.order": (lambda c: not _is_synthetic_images(c), "images are not synthetic"),
    "data.tokenizer": _WHEN_TEXT,
    "data.isolate_documents": (
        lambda c: c.model.family in ("decoder", "mamba"),
        "model.family predicts the next token",
    ),
    "data.workers": _WHEN_IMAGE_FILES,
    **{f"data.images.{key}": _WHEN_IMAGE_FILES for key in ("min_crop", "flip", "randaugment_ops", "erase", "mixup")},
    **{f"data.images.{key}": _WHEN_IMAGE_FILES for key in ("cutmix", "eval_crop")},
    "data.images.normalize": _WHEN_IMAGES,
    "data.images.randaugment_magnitude": (
        lambda c: c.model.family in IMAGE_FAMILIES and c.data.images.randaugment_ops > 0,
        "data.images.randaugment_ops is above 0",
    ),
    "objective.mask_fraction": (lambda c: c.model.family == "encoder", "model.family is 'encoder'"),
    "objective.label_smoothing": _WHEN_IMAGES,
    "kernels.attention": (lambda c: c.model.family in ATTENTION_FAMILIES, "model.family has attention"),
    "kernels.cross_entropy": (lambda c: c.model.family in TOKEN_FAMILIES, "model.family predicts tokens"),
    "eval.ngrams": (
        lambda c: c.eval.every >= 0 and c.model.family in TOKEN_FAMILIES,
        "eval.every is not -1 and model.family predicts tokens",
    ),
    "optimizer.no_decay": (lambda c: c.optimizer.weight_decay > 0, "optimizer.weight_decay is above 0"),
    "schedule.final_fraction": _WHEN_DECAY_ENDS,
    "schedule.floor_fraction": _WHEN_DECAYING,
    "schedule.decay_steps": _WHEN_DECAY_ENDS,
    "schedule.decay_shape": _WHEN_WSD,
    "schedule.decay_length": _WHEN_WSD,
    "schedule.decay_fraction": (
        lambda c: c.schedule.name == "wsd" and c.schedule.decay_length == 0,
        "schedule.name is 'wsd' and schedule.decay_length is 0",
    ),
    "schedule.warmup_from": (
        lambda c: c.schedule.warmup_steps > 0 or c.schedule.warmup_tokens > 0,
        "schedule.warmup_steps or schedule.warmup_tokens is above 0",
    ),
    "scaling.learning_rate": _WHEN_RESCALING,
    "scaling.b2": (
        lambda c: c.scaling.base_batch_size > 0 and c.optimizer.name in OPTIMIZERS_THAT_READ["b2"],
        "scaling.base_batch_size is above 0 and the optimizer has a b2",
    ),
    "parallel.replicas": (lambda c: c.parallel.strategy == "hsdp", "parallel.strategy is 'hsdp'"),
    "precision.matmul": (lambda c: c.precision.compute == "float32", "precision.compute is 'float32'"),
    "precision.initial_loss_scale": _WHEN_FLOAT16,
    "precision.loss_scale_interval": _WHEN_FLOAT16,
    "eval.max_tokens": _WHEN_EVALUATING,
    "log.wandb_project": (lambda c: c.log.wandb, "log.wandb is True"),
    "run.name": (lambda c: c.log.wandb, "log.wandb is True"),
}
for _key, _families in FAMILIES_THAT_READ.items():
    READ_WHEN[f"model.{_key}"] = (
        lambda c, families=_families: c.model.family in families,
        f"model.family is {' or '.join(map(repr, _families))}",
    )
for _key, _sources in SOURCES_THAT_READ.items():
    _families = FAMILIES_OF_SOURCE_KEYS.get(_key, CHOICES["model.family"])
    _words = f", and model.family of {', '.join(_families)}" if _key in FAMILIES_OF_SOURCE_KEYS else ""
    READ_WHEN[f"data.{_key}"] = (
        lambda c, s=_sources, f=_families: c.data.source in s and c.model.family in f,
        f"data.source is one of {', '.join(_sources)}{_words}",
    )
for _key, _names in OPTIMIZERS_THAT_READ.items():
    READ_WHEN[f"optimizer.{_key}"] = (
        lambda c, names=_names: c.optimizer.name in names,
        f"optimizer.name is one of {', '.join(_names)}",
    )
