"""`micro_batch_size=auto`: the largest micro-batch that fits, planned by arithmetic and confirmed by the compiler."""

import dataclasses
import os
from collections.abc import Callable

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxpretrain import hardware
from jaxpretrain.errors import is_out_of_memory
from jaxpretrain.parallel import offload
from jaxpretrain.parallel.mesh import num_data_shards
from jaxpretrain.plan.layout import Layout
from jaxpretrain.plan.memory import Shapes, peak_bytes
from jaxpretrain.plan.work import trace
from jaxpretrain.schema import IMAGE_FAMILIES
from jaxpretrain.step import TrainStep, make_train_step

USABLE = 0.97  # of the memory that the runtime hands out; the rest is fragmentation's


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
    shapes, work, parallel = Shapes.of(config), trace(config), config.parallel
    state = shapes.state_bytes(parallel.strategy, mesh, parallel.offload)
    layout = Layout(
        num_devices=mesh.size,
        strategy=parallel.strategy,
        tensor=parallel.tensor,
        remat=parallel.remat,
        offload=parallel.offload,
    )
    is_tpu = mesh.devices.flat[0].platform == "tpu"

    def needed(size: int) -> int:
        return peak_bytes(shapes, work, state, dataclasses.replace(layout, micro_batch_size=size), is_tpu).device

    return [d for d in divisors if needed(d) <= USABLE * limit] or [1]


def device_memory(device: jax.Device) -> int | None:
    """Bytes of memory that programs on this device may use; None if that is not known."""
    if device.platform == "cpu":
        # Half of the machine, over the devices that share it: the host's own work needs the rest.
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total // 2 // jax.local_device_count("cpu")
    stats = device.memory_stats() or {}
    accelerator = hardware.find(device.device_kind)
    return stats.get("bytes_limit") or (accelerator and accelerator.memory_bytes)


def _compile(train_step: TrainStep, config: ConfigDict) -> Callable:
    compiled = train_step.step.lower(train_step.state, train_step.batch).compile()
    offload.check(compiled, train_step.state, config.parallel.remat.startswith("offload"))
    return compiled


def _fits(compiled: jax.stages.Compiled, device: jax.Device) -> bool:
    limit, report = device_memory(device), compiled.memory_analysis()
    if device.platform == "cpu" or limit is None or report is None:
        return True
    peak = report.argument_size_in_bytes + report.output_size_in_bytes - report.alias_size_in_bytes
    return peak + report.temp_size_in_bytes <= USABLE * limit


def _set_micro_batch_size(config: ConfigDict, size: int) -> None:
    with config.ignore_type():
        config.micro_batch_size = size
