"""What a config is on a number of devices, without any of them: `python -m jaxpretrain.main --mode=describe`."""

import dataclasses
import io
import math
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from jaxpretrain.models import transformer
from jaxpretrain.models.parameter import infos
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.parallel.strategies import make_strategy
from jaxpretrain.plan import memory
from jaxpretrain.step import abstract_state


def describe(config: ConfigDict, count: int) -> dict[str, Any]:
    """Mesh, parameters and bytes per device of a checked config on `count` devices of any kind; nothing is allocated.

    `bytes_per_device` has, in bytes of one device, wherever they are kept: `params` (the float32 masters), `optimizer`,
    `averages`, and what exists during a step beside activations: `compute_copy`, the parameters in compute precision
    as they stay during the step, and `gradients`, accumulated in float32. `host_bytes_per_device` is the part of these
    in the host's memory.
    """
    parallel = config.parallel
    mesh = make_mesh(parallel.strategy, jax.devices("cpu")[:count], tensor=parallel.tensor, replicas=parallel.replicas)
    model_infos = infos(transformer.build(config))
    strategy = make_strategy(parallel.strategy, model_infos, mesh, jnp.dtype(config.precision.compute))
    state, sizes = abstract_state(config, mesh), dataclasses.asdict(memory.state_bytes(config, mesh))
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
        "host_bytes_per_device": sizes.pop("host"),
        "bytes_per_device": sizes,
        "unsharded": strategy.unsharded(state.params),
        "parameters": parameters,
    }


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
        *(f"  {kind:<14}{size / 2**30:10.3f}" for kind, size in d["bytes_per_device"].items()),
        f"  {'sum':<14}{sum(d['bytes_per_device'].values()) / 2**30:10.3f}"
        f", of which {d['host_bytes_per_device'] / 2**30:.3f} in the host's memory",
    ]
    if d["unsharded"]:
        lines.append("held whole by every device, as no dim divides: " + ", ".join(d["unsharded"]))
    return "\n".join(lines)
