"""Keys that contradict each other: each may be good by itself."""

from ml_collections import ConfigDict

from jaxpretrain.optim import scaling
from jaxpretrain.schema import IMAGE_FAMILIES, IMAGE_SOURCES


def check_combinations(config: ConfigDict) -> None:
    """Raises ValueError for keys of a config, each good by itself, that contradict each other."""
    if config.model.family in IMAGE_FAMILIES:
        _check_images(config)
    else:
        _check_tokens(config)
    if config.seed >= 1 << 32:
        raise ValueError(f"seed={config.seed}: must be below 2**32, as JAX drops the bits above; take a smaller one")
    horizons = config.average.horizons
    if any(horizon <= 0 for horizon in horizons) or len(set(horizons)) < len(horizons):
        raise ValueError(f"average.horizons={horizons}: must be distinct and above 0; they are in tokens")
    if config.checkpoint.resume_from and config.checkpoint.init_from:
        raise ValueError(
            "checkpoint.resume_from and checkpoint.init_from are both set: the first brings the weights too"
        )
    _check_optimizer(config)
    _check_schedule(config)
    _check_offload(config)
    if config.micro_batch_size != "auto" and config.micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={config.micro_batch_size}: must be 'auto' or at least 1")
    _check_data(config)


def _check_tokens(config: ConfigDict) -> None:
    model = config.model
    if config.data.source in set(IMAGE_SOURCES) - {"huggingface"}:
        raise ValueError(
            f"data.source={config.data.source!r} has images, and model.family={model.family!r} reads tokens; change one"
        )
    if config.eval.ngrams and model.vocab_size > 4096:
        raise ValueError(
            f"eval.ngrams=True with model.vocab_size={model.vocab_size}: the table of pairs would be too large, the "
            "most is 4096; set eval.ngrams=False"
        )
    if model.family == "mamba":
        if model.mamba.dt_min <= 0 or model.mamba.dt_max < model.mamba.dt_min:
            raise ValueError(
                f"model.mamba.dt_min={model.mamba.dt_min} and model.mamba.dt_max={model.mamba.dt_max}: "
                "both must be above 0, and in order"
            )
        return
    _check_heads(config)
    if not 0 <= model.dropout < 1:
        raise ValueError(f"model.dropout={model.dropout}: must be at least 0 and below 1")
    has_table = model.family == "encoder" or model.positions == "learned"
    if has_table and model.max_positions and model.max_positions < config.seq_len:
        raise ValueError(
            f"seq_len={config.seq_len} is longer than model.max_positions={model.max_positions}, "
            "the learned position table; shorten seq_len or grow the table"
        )
    if model.family == "encoder":
        fraction = config.objective.mask_fraction
        if not 0 < fraction < 1:
            raise ValueError(f"objective.mask_fraction={fraction}: must be above 0 and below 1")
        if config.seq_len < 2:
            raise ValueError(
                f"seq_len={config.seq_len}: an encoder's rows begin with a token of their own; set 2 or more"
            )
        return
    if model.num_kv_heads and model.num_heads % model.num_kv_heads:
        raise ValueError(f"model.num_kv_heads={model.num_kv_heads} does not divide model.num_heads={model.num_heads}")
    if model.norm == "rmsnorm" and model.norm_bias:
        raise ValueError("model.norm_bias=True has no effect with model.norm='rmsnorm'; set model.norm_bias=False")
    head_dim = model.head_dim or model.embed_dim // model.num_heads
    if not 0 < model.rotary.fraction <= 1:
        raise ValueError(f"model.rotary.fraction={model.rotary.fraction}: must be above 0 and at most 1")
    if model.positions == "rotary" and (
        int(model.rotary.fraction * head_dim) % 2 or model.rotary.fraction * head_dim < 2
    ):
        raise ValueError(
            f"model.rotary.fraction={model.rotary.fraction} of a head of {head_dim} dims: rotary turns them in pairs; "
            "change it, model.num_heads or model.head_dim until that is even"
        )


def _check_heads(config: ConfigDict) -> None:
    model = config.model
    if model.head_dim == 0 and model.embed_dim % model.num_heads:
        fix = "set model.head_dim" if model.family == "decoder" else "change one of the two"
        raise ValueError(
            f"model.embed_dim={model.embed_dim} is not divisible by model.num_heads={model.num_heads}; {fix}"
        )


def _check_images(config: ConfigDict) -> None:
    model, data = config.model, config.data
    if config.seq_len != 1:
        raise ValueError(f"seq_len={config.seq_len} with model.family={model.family!r}: an image counts as one; set 1")
    if data.source not in (*IMAGE_SOURCES, "synthetic"):
        raise ValueError(
            f"data.source={data.source!r} has no images, which model.family={model.family!r} reads: it is one of "
            f"{', '.join(IMAGE_SOURCES)}, synthetic"
        )
    for key, value in (("model.drop_path", model.drop_path), ("model.dropout", model.dropout)):
        if not 0 <= value < 1:
            raise ValueError(f"{key}={value}: must be at least 0 and below 1")
    magnitude = data.images.randaugment_magnitude
    if magnitude > 10:
        raise ValueError(f"data.images.randaugment_magnitude={magnitude}: must be at most 10")
    smoothing = config.objective.label_smoothing
    if not 0 <= smoothing < 1:
        raise ValueError(f"objective.label_smoothing={smoothing}: must be at least 0 and below 1")
    if data.images.normalize == "imagenet" and model.image.num_channels != 3:
        raise ValueError(
            f"data.images.normalize='imagenet' with model.image.num_channels={model.image.num_channels}: its means are "
            "of 3 channels; set 'half'"
        )
    for key in ("min_crop", "eval_crop"):
        if not 0 < data.images[key] <= 1:
            raise ValueError(f"data.images.{key}={data.images[key]}: must be above 0 and at most 1")
    if data.images.erase > 1:
        raise ValueError(f"data.images.erase={data.images.erase}: must be a probability, 0 to 1")
    if model.family == "vit":
        _check_heads(config)
        if model.image.size % model.image.patch_size:
            raise ValueError(
                f"model.image.patch_size={model.image.patch_size} does not divide model.image.size={model.image.size}"
            )
        return
    depths, widths = model.convnext.depths, model.convnext.widths
    if len(depths) != 4 or len(widths) != 4 or min(*depths, *widths) < 1:
        raise ValueError(f"model.convnext.depths={depths} and widths={widths}: each is 4 numbers of at least 1")
    if model.image.size % 32:
        raise ValueError(f"model.image.size={model.image.size}: ConvNeXt halves it five times; set a multiple of 32")


def _check_data(config: ConfigDict) -> None:
    data = config.data
    if not 0 <= data.validation_fraction < 1:
        raise ValueError(f"data.validation_fraction={data.validation_fraction}: must be at least 0 and below 1")
    if data.source == "mixture" and not data.mixture:
        raise ValueError("data.source='mixture' needs data.mixture: {name: {weight, source, path}, ...}")
    for name, entry in data.mixture.items():
        if entry.get("weight", 1.0) <= 0:
            raise ValueError(f"data.mixture.{name}.weight={entry.weight}: must be above 0")
        if entry.get("source") in set(IMAGE_SOURCES) - {"huggingface"}:
            raise ValueError(f"data.mixture.{name}.source={entry.source!r} has images: mixtures are of text; change it")
        if entry.get("source") == "mixture":
            raise ValueError(f"data.mixture.{name}.source='mixture': mixtures do not nest; list its sources here")


def _check_offload(config: ConfigDict) -> None:
    offload, optimizer = config.parallel.offload, config.optimizer
    parts = offload.split("+")
    if len(set(parts)) < len(parts):
        raise ValueError(f"parallel.offload={offload!r}: names a part twice; once is enough")
    if "averages" in parts and not config.average.horizons:
        raise ValueError(
            f"parallel.offload={offload!r}: there are no averages; set average.horizons, or remove averages"
        )
    if "optimizer" in parts and optimizer.name == "sgd" and optimizer.momentum == 0:
        raise ValueError(
            f"parallel.offload={offload!r}: sgd with optimizer.momentum=0.0 keeps nothing; remove optimizer"
        )


def _check_optimizer(config: ConfigDict) -> None:
    optimizer, base = config.optimizer, config.scaling.base_batch_size
    for key in ("b1", "b2", "momentum"):
        if optimizer[key] >= 1:
            raise ValueError(f"optimizer.{key}={optimizer[key]}: must be below 1")
    if optimizer.mu_dtype == "int8" and optimizer.name != "adam_mini":
        raise ValueError(
            f"optimizer.mu_dtype='int8' with optimizer.name={optimizer.name!r}: only adam_mini has it; use 'bfloat16'"
        )
    for name, key in (("adafactor", "b1"), ("sgd", "momentum")):
        if optimizer.name == name and optimizer[key] == 0 and optimizer.mu_dtype != "float32":
            raise ValueError(
                f"optimizer.mu_dtype={optimizer.mu_dtype!r} has no effect: {name} with optimizer.{key}=0 keeps no "
                "first moment; remove one of the two"
            )
    if base and config.scaling.learning_rate == "none" and config.scaling.b2 == "none":
        raise ValueError(
            f"scaling.base_batch_size={base} has no effect without a rule: set scaling.learning_rate or scaling.b2"
        )
    if optimizer.nu_dtype == "bfloat16" and scaling.b2(config) >= 0.995:
        raise ValueError(
            f"optimizer.nu_dtype='bfloat16' with b2={scaling.b2(config):.4g}: below 0.995 only, as its 8 bits lose "
            "updates of (1 - b2) and the second moment stands still; use 'float32' or a lower optimizer.b2"
        )
    if optimizer.name == "schedule_free_adamw":
        if optimizer.b1 == 0:
            raise ValueError("optimizer.b1=0.0 with schedule_free_adamw: must be above 0, e.g. 0.9 or 0.95")
        if config.schedule.name != "constant":
            raise ValueError(
                f"schedule.name={config.schedule.name!r} with optimizer.name='schedule_free_adamw': its averaging "
                "takes the place of a decay; set schedule.name='constant', with a warm-up"
            )


def _check_schedule(config: ConfigDict) -> None:
    schedule = config.schedule
    if schedule.warmup_steps and schedule.warmup_tokens:
        raise ValueError(
            f"schedule.warmup_steps={schedule.warmup_steps} and schedule.warmup_tokens={schedule.warmup_tokens} are "
            "both set; set one of them to 0"
        )
    num_warmup = scaling.warmup_steps(config)
    warmup = f"schedule.warmup_steps={num_warmup}"
    if schedule.warmup_tokens:
        warmup = f"schedule.warmup_tokens={schedule.warmup_tokens} ({num_warmup} steps)"
    if schedule.decay_steps and schedule.decay_steps < num_warmup:
        raise ValueError(f"schedule.decay_steps={schedule.decay_steps} ends before {warmup}; both count from step 0")
    if schedule.name == "inverse_sqrt" and num_warmup == 0:
        raise ValueError(
            "schedule.name='inverse_sqrt' needs a warm-up, whose length sets the pace of the decay; "
            "set schedule.warmup_steps or schedule.warmup_tokens"
        )
    if schedule.name != "wsd":
        return
    if not 0 < schedule.decay_fraction <= 1:
        raise ValueError(f"schedule.decay_fraction={schedule.decay_fraction}: must be above 0 and at most 1")
    if schedule.decay_shape == "exponential" and schedule.final_fraction == 0:
        raise ValueError(
            "schedule.final_fraction=0.0 with schedule.decay_shape='exponential' would fall to 0 at once; set a "
            "fraction above 0, e.g. 0.01, or another decay_shape"
        )
    start, end = scaling.decay_span(config)
    if start < num_warmup < end:
        key = "decay_length" if schedule.decay_length else "decay_fraction"
        raise ValueError(
            f"schedule.{key}={schedule[key]}: the decay to step {end} begins at step {start}, before the end of "
            f"{warmup}; shorten one of the two"
        )
