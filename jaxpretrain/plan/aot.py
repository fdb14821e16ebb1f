"""Compiling for accelerators that are not here: the compilers of TPUs and NVIDIA GPUs run on any Linux machine.

    devices = topology("v4-8")
    compiled = compile_for(train_step, state, batch)  # ShapeDtypeStructs whose shardings are on these devices
    memory(compiled).device  # bytes

A process that does this should have JAX_PLATFORMS=cpu, and not use a real TPU: libtpu is told that there is none.

What the compilers do not know without the device:
- whether the program fits on a GPU. Compare `memory` with the budget; for a TPU, XLA raises RESOURCE_EXHAUSTED.
- the scratch memory of cuDNN's calls.
"""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """What XLA must know of a GPU to compile for it (GpuTargetConfigProto), from NVIDIA's white papers and guides."""

    device_kind: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    fp32_units: int  # per multiprocessor
    threads: int  # resident, per multiprocessor
    shared_memory_kib: int  # per multiprocessor; one block may use all but 1 KiB
    l2_mib: int
    memory_bytes: int
    memory_bandwidth: float  # bytes/s
    clock_ghz: float


_GPUS = {
    "a100-80gb": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 164, 40, 80 * 2**30, 2.039e12, 1.41),
    "a100-40gb": _Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 2048, 164, 40, 40 * 2**30, 1.555e12, 1.41),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 228, 50, 80 * 2**30, 3.35e12, 1.98),
    "rtx-3090": _Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 128, 1536, 100, 6, 24 * 2**30, 9.36e11, 1.695),
}

# Chips -> layout, as Google offers them. v2 to v4 and v5p slices are named by cores, two a chip.
_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_3D = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8"}
# libtpu reads these when it is loaded: this machine is no TPU host, do not ask Google Cloud's metadata server
# about it, and do not insist on being the only process with libtpu.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_CUDNN = (9, 10)  # the version that programs for GPUs are compiled for
_TPUS = {  # generation -> (cores per chip in the slice's name, layouts, options)
    "v2": (2, _2D, {}),
    "v3": (2, _2D, {}),
    "v4": (2, _3D, {"chip_config_name": "megacore"}),  # else each chip shows as two devices
    "v5p": (2, _3D, {}),
    "v5e": (1, _2D, {}),
    "v6e": (1, _2D, {}),
}


def topology(target: str, count: int = 1) -> list[jax.Device]:
    """Devices to compile for: of a TPU slice ("v4-8"), or `count` of a GPU ("a100-80gb"). Nothing can run on them.

    Raises ValueError for a name it does not know and for a missing compiler, naming the extra that has it.
    """
    target = target.lower().replace("_", "-")
    if target in _GPUS:
        return _cuda_devices(_GPUS[target], count)
    generation, _, cores = target.rpartition("-")
    if generation not in _TPUS or not cores.isdigit():
        raise ValueError(f"cannot compile for {target!r}: known are {', '.join(_GPUS)} and TPU slices such as v4-8")
    cores_per_chip, layouts, options = _TPUS[generation]
    chips = {num * cores_per_chip: layout for num, layout in layouts.items()}
    if int(cores) not in chips:
        sizes = ", ".join(f"{generation}-{num}" for num in chips)
        raise ValueError(f"there is no TPU slice {target!r}: {generation} comes as {sizes}")
    _require("libtpu", "aot-tpu", f"TPU {generation}")
    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)
    layout = chips[int(cores)]
    if layout == "1x1":
        options = {"chips_per_host_bounds": (1, 1, 1), **options}  # else a host has four chips
    return list(topologies.get_topology_desc(f"{generation}:{layout}", platform="tpu", **options).devices)


def compile_for(function: Any, *args: Any) -> jax.stages.Compiled:
    """Compiles a `jax.jit`ted function for the devices of its arguments, ShapeDtypeStructs with shardings.

    Raises what the function raises when it is traced, and JaxRuntimeError where the compiler gives up.
    """
    with _cudnn_of(_device_of(args)):
        lowered = function.lower(*args)
    return lowered.compile()


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device of a compiled program; all but `host` are in device memory."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int  # outputs that reuse arguments (donated)
    host: int

    @property
    def device(self) -> int:
        """What the device holds at once. Not XLA's own peak figure: that one includes host memory."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def memory(compiled: jax.stages.Compiled) -> Memory:
    """The compiler's account of a program."""
    stats = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
    )


def _cuda_devices(gpu: _Gpu, count: int) -> list[jax.Device]:
    _require("jax_plugins.xla_cuda12", "aot-cuda", gpu.device_kind)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # compiling needs none of CUDA's libraries
    shared = gpu.shared_memory_kib * 1024
    config = f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {gpu.compute_capability[0]} minor: {gpu.compute_capability[1]} }}
          core_count: {gpu.multiprocessors}
          fpus_per_core: {gpu.fp32_units}
          clock_rate_ghz: {gpu.clock_ghz}
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: {gpu.threads}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          shared_memory_per_core: {shared}
          shared_memory_per_block_optin: {shared - 1024}
          shared_memory_per_block: 49152
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          l2_cache_size: {gpu.l2_mib * 2**20}
          device_memory_size: {gpu.memory_bytes}
          memory_bandwidth: {int(gpu.memory_bandwidth)}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}
        device_description_str: "{gpu.device_kind}"
    """
    description = topologies.get_topology_desc(
        gpu.device_kind, platform="cuda", target_config=config, topology=f"1x1x{count}"
    )
    return list(description.devices)


def _require(module: str, extra: str, what: str) -> None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ValueError(f"compiling for {what} needs its compiler: pip install 'jaxpretrain[{extra}]'")


def _device_of(args: Any) -> jax.Device:
    for leaf in jax.tree.leaves(args):
        if getattr(leaf, "sharding", None) is not None:
            return next(iter(leaf.sharding.device_set))
    raise ValueError("compile_for needs arguments with shardings: they say which devices to compile for")


@contextlib.contextmanager
def _cudnn_of(device: jax.Device) -> Iterator[None]:
    """JAX asks the *local* GPU and cuDNN which attention they support: answers for `device` instead."""
    if device.platform != "gpu":
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    capability = tuple(int(part) for part in device.compute_capability.split("."))

    def as_tuple(text):
        return tuple(int(part) for part in text.split("."))

    answers = {
        "check_cudnn_version": lambda: _CUDNN[0] * 10000 + _CUDNN[1] * 100,
        "check_compute_capability": lambda least: capability >= as_tuple(least),
        "is_cuda_compute_capability_equal": lambda exact: capability == as_tuple(exact),
    }
    saved = {name: getattr(cudnn, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(cudnn, name, answer)
        yield
    finally:
        for name, function in saved.items():
            setattr(cudnn, name, function)
