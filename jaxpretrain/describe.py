"""What a config is on a number of devices, without any of them: `python -m jaxpretrain.main --mode=describe`."""

import dataclasses
import io
import json
import math
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from jaxpretrain.parallel.mesh import make_mesh, num_data_shards, rows_per_shard
from jaxpretrain.parallel.strategies import make_strategy
from jaxpretrain.plan import memory
from jaxpretrain.step import lay_out, make_train_step


def report(config: ConfigDict, count: int, json_file: str | None) -> None:
    """Prints `describe`, and writes it to a file if one is named. Raises ValueError if that cannot be."""
    description = describe(config, count)
    print(to_text(description))
    if json_file:
        try:
            pathlib.Path(json_file).write_text(json.dumps(description, indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"--json={json_file} cannot be written: {error.strerror}; choose another") from error


def describe(config: ConfigDict, count: int) -> dict[str, Any]:
    """Mesh, parameters and bytes per device of a checked config on `count` devices of any kind; nothing is allocated.

    `bytes_per_device` has, in bytes of one device, wherever they are kept: `params` (the float32 masters), `optimizer`,
    `averages`, and what exists during a step beside activations: `gradients`, accumulated in float32,
    `micro_batch_gradients`, those of one micro-batch before they are added, `compute_copy`, the parameters in compute
    precision as they stay during the step, and `undonated`, the state's second copy where it is not updated in place.
    `host_bytes_per_device` is the part of these in the host's memory. `problem` is why the batch would be refused, or
    None. Raises ValueError for what else a run would refuse, but for an attention kernel, which depends on the device.
    """
    parallel = config.parallel
    mesh = make_mesh(parallel.strategy, jax.devices("cpu")[:count], tensor=parallel.tensor, replicas=parallel.replicas)
    _trace(config, mesh)
    problem = None
    try:
        rows_per_shard(config.batch_size, mesh)
    except ValueError as error:
        problem = str(error)
    shapes = memory.Shapes.of(config)
    model_infos = shapes.infos
    strategy = make_strategy(parallel.strategy, model_infos, mesh, shapes.compute_dtype)
    state = lay_out(shapes.state, strategy, parallel.offload)
    sizes = dataclasses.asdict(shapes.state_bytes(parallel.strategy, mesh, parallel.offload))
    leaves = zip(jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(model_infos), strict=True)
    parameters = [
        {
            "path": jax.tree_util.keystr(path, simple=True, separator="."),
            "shape": list(info.shape),
            "axes": list(info.axes),
            "role": info.role,
            "dtype": str(param.dtype),
            "sharding": list(param.sharding.spec),
            "memory_kind": param.sharding.memory_kind or "device",
            "bytes_per_device": memory.bytes_per_device(param),
        }
        for (path, param), info in leaves
    ]
    return {
        "num_params": sum(math.prod(parameter["shape"]) for parameter in parameters),
        "mesh": dict(mesh.shape),
        "strategy": parallel.strategy,
        "remat": parallel.remat,
        "offload": parallel.offload,
        "problem": problem,
        "host_bytes_per_device": sizes.pop("host"),
        "bytes_per_device": sizes,
        "unsharded": strategy.unsharded(model_infos, state.params),
        "parameters": parameters,
    }


def _trace(config: ConfigDict, mesh: Mesh) -> None:
    """Traces the step, in which `parallel.remat` is checked, with one row for each device and a kernel for CPUs."""
    config = config.copy_and_resolve_references()
    config.kernels.attention = "auto"
    config.batch_size = num_data_shards(mesh)
    with config.ignore_type():
        config.micro_batch_size = 1
    train_step = make_train_step(config, mesh)
    jax.eval_shape(train_step.step, train_step.state, train_step.batch)


def to_text(description: dict[str, Any]) -> str:
    """The same for people."""
    d = description
    mesh = " x ".join(f"{axis} {size}" for axis, size in d["mesh"].items())
    table = Table("parameter", "shape", "role", "dtype", "sharding", "memory", "MiB per device", box=None)
    for p in d["parameters"]:
        axes = ", ".join(f"{axis} / {name}" for axis, name in zip(p["axes"], p["sharding"], strict=True) if name)
        table.add_row(
            p["path"],
            " x ".join(map(str, p["shape"])),
            p["role"],
            p["dtype"],
            axes or "whole",
            p["memory_kind"],
            f"{p['bytes_per_device'] / 2**20:,.2f}",
        )
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table)
    lines = [
        f"{d['num_params']:,} parameters on {math.prod(d['mesh'].values())} devices: {mesh}",
        f"strategy {d['strategy']}, remat {d['remat']}, offload {d['offload']}",
        "",
        console.export_text().rstrip(),
        "",
        "GiB per device, without activations:",
        *(f"  {kind:<22}{size / 2**30:10.3f}" for kind, size in d["bytes_per_device"].items()),
        f"  {'sum':<22}{sum(d['bytes_per_device'].values()) / 2**30:10.3f}"
        f", of which {d['host_bytes_per_device'] / 2**30:.3f} in the host's memory",
    ]
    if d["problem"]:
        lines.append(f"not to be trained so: {d['problem']}")
    if d["unsharded"]:
        lines.append("held by more devices than need be, as their dims do not divide: " + ", ".join(d["unsharded"]))
    return "\n".join(lines)
