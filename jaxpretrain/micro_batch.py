"""`micro_batch_size=auto`: the largest micro-batch that fits, guessed by formula and confirmed by the compiler."""

import os
from collections.abc import Callable

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxpretrain import hardware
from jaxpretrain.config import num_masked_tokens
from jaxpretrain.errors import is_out_of_memory
from jaxpretrain.parallel import offload
from jaxpretrain.parallel.mesh import num_data_shards
from jaxpretrain.plan.memory import state_bytes
from jaxpretrain.schema import IMAGE_FAMILIES, TOKEN_FAMILIES
from jaxpretrain.step import TrainStep, make_train_step

_USABLE = 0.9  # of a device's memory; the rest is the runtime's and fragmentation's


def make_fitting_step(config: ConfigDict, mesh: Mesh) -> tuple[TrainStep, Callable]:
    """The train step and its compiled `step`; a micro_batch_size of `auto` is replaced in `config` by what fits.

    Raises ValueError if not even one sequence per device fits.
    """
    if config.micro_batch_size != "auto":
        train_step = make_train_step(config, mesh)
        return train_step, _compile(train_step, config)
    for micro_batch_size in _candidates(config, mesh):
        _set_micro_batch_size(config, micro_batch_size)
        train_step = make_train_step(config, mesh)
        try:
            compiled = _compile(train_step, config)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            continue
        if _fits(compiled, mesh.devices.flat[0]):
            return train_step, compiled
    one = "one image" if config.model.family in IMAGE_FAMILIES else f"one sequence of {config.seq_len} tokens"
    raise ValueError(
        f"{one} per device does not fit into the memory of a "
        f"{mesh.devices.flat[0].device_kind}: set parallel.remat=full, or parallel.strategy=fsdp on more devices"
    )


def guess_micro_batch_size(config: ConfigDict, mesh: Mesh) -> None:
    """Replaces a micro_batch_size of `auto` in `config` by the formula's guess: for evaluation, which needs less."""
    if config.micro_batch_size == "auto":
        _set_micro_batch_size(config, _candidates(config, mesh)[0])


def _candidates(config: ConfigDict, mesh: Mesh) -> list[int]:
    """Divisors of each device's sequences, from the largest that should fit downwards."""
    rows_per_shard = max(1, config.batch_size // num_data_shards(mesh))
    divisors = [d for d in range(rows_per_shard, 0, -1) if rows_per_shard % d == 0]
    limit = device_memory(mesh.devices.flat[0])
    if limit is None:
        return [1]
    free = _USABLE * limit - state_bytes(config, mesh).device
    fitting = [d for d in divisors if d * _activation_bytes_per_sequence(config) < free]
    return fitting or [1]


def device_memory(device: jax.Device) -> int | None:
    """Bytes of memory that programs on this device may use; None if that is not known."""
    if device.platform == "cpu":
        # Half of the machine, over the devices that share it: the host's own work needs the rest.
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total // 2 // jax.local_device_count("cpu")
    stats = device.memory_stats() or {}
    accelerator = hardware.find(device.device_kind)
    return stats.get("bytes_limit") or (accelerator and accelerator.memory_bytes)


def _activation_bytes_per_sequence(config: ConfigDict) -> int:
    """What the backward of one sequence or image needs, roughly: a first guess, the compiler has the last word."""
    width = 4 if config.precision.compute == "float32" else 2
    layers = _layers(config)
    keeps_all = config.parallel.remat == "none"
    kept = sum(count * tokens * (numbers if keeps_all else dim) for count, tokens, numbers, dim in layers)
    # Of one layer: what was kept, its gradient, and float32 between the two.
    in_backward = 3 * max(tokens * numbers for _, tokens, numbers, _ in layers)
    logits = 0
    if config.model.family in TOKEN_FAMILIES:
        num_targets = num_masked_tokens(config) if config.model.family == "encoder" else config.seq_len
        logits = num_targets * min(3 * 4 * config.model.vocab_size, 2**18)
    return width * (kept + in_backward) + logits


def _layers(config: ConfigDict) -> list[tuple[int, int, int, int]]:
    """Kinds of layers: how many, tokens (or pixels) that each sees, numbers that it keeps and that it reads of each."""
    m = config.model
    if m.family == "convnext":
        sides = [m.image.size // 4 // 2**stage for stage in range(4)]
        stages = zip(m.convnext.depths, sides, m.convnext.widths, strict=True)
        return [(depth, side**2, 11 * dim, dim) for depth, side, dim in stages]
    if m.family == "mamba":
        return [(m.num_layers, config.seq_len, m.embed_dim + 6 * m.mamba.expand * m.embed_dim, m.embed_dim)]
    num_tokens = (m.image.size // m.image.patch_size) ** 2 + 1 if m.family == "vit" else config.seq_len
    heads = m.num_heads + (m.num_kv_heads or m.num_heads)
    heads_dim = 2 * heads * (m.head_dim or m.embed_dim // m.num_heads)  # of queries, keys, values and the output
    hidden = (m.mlp_dim or 4 * m.embed_dim) * (2 if m.gated_mlp else 1)
    numbers = (1 if m.parallel_residual else 2) * m.embed_dim + heads_dim + hidden
    return [(m.num_layers, num_tokens, numbers, m.embed_dim)]


def _compile(train_step: TrainStep, config: ConfigDict) -> Callable:
    compiled = train_step.step.lower(train_step.state, train_step.batch).compile()
    offload.check(compiled, train_step.state, config.parallel.remat.startswith("offload"))
    return compiled


def _fits(compiled: jax.stages.Compiled, device: jax.Device) -> bool:
    limit, report = device_memory(device), compiled.memory_analysis()
    if device.platform == "cpu" or limit is None or report is None:
        return True
    peak = report.argument_size_in_bytes + report.output_size_in_bytes - report.alias_size_in_bytes
    return peak + report.temp_size_in_bytes <= _USABLE * limit


def _set_micro_batch_size(config: ConfigDict, size: int) -> None:
    with config.ignore_type():
        config.micro_batch_size = size
