"""What each memory-saving method needs on accelerators that are not here, according to their compilers.

    python tools/memory_table.py --workdir=DIR [--minutes=N] [--only=TEXT]

Every cell is one compile, of minutes, in a process of its own, and leaves a file in DIR/cells; a cell that has one is
not compiled again, so the same command goes on where it was stopped. In the end it writes DIR/memory.json and its
tables, DIR/memory.md: docs/benchmarks has both.

Each device gets the same micro-batch whatever the method (MODELS: 4 sequences of 2,048 tokens of Pythia-1B, 1 of
Llama-2-7B, ...); two of them per optimizer step, so that gradients are accumulated.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
MODELS = {  # and the micro-batch
    "pythia1b": 4,
    "llama2_7b": 1,
    "pythia160m": 16,
    "pythia6_9b": 1,
    "roberta_large": 8,
    "mamba130m": 8,
    "vit_large": 32,
}
_FULL = {"parallel.remat": "full"}
_STATE = {"parallel.offload": "optimizer+params"}


def _cells(model: str, target: str, count: int, *methods: tuple[str, dict]) -> list[dict]:
    return [
        {"model": model, "target": target, "count": count, "overrides": {"parallel.strategy": strategy, **more}}
        for strategy, more in methods
    ]


CELLS = [
    *_cells(
        "pythia1b",
        "a100-80gb",
        4,
        ("ddp", {}),
        ("zero1", {}),
        ("zero2", {}),
        ("fsdp", {}),
        ("hsdp", {}),
        ("fsdp", {"parallel.tensor": "2"}),
        ("ddp", _FULL),
        ("fsdp", _FULL),
        ("fsdp", {"parallel.remat": "full:8"}),
        ("fsdp", {"parallel.remat": "dots"}),
        ("fsdp", {"parallel.remat": "offload"}),
        ("fsdp", _FULL | {"parallel.offload": "optimizer"}),
        ("fsdp", _FULL | _STATE),
        ("fsdp", _FULL | {"optimizer.name": "adam_mini"}),
    ),
    *_cells("pythia1b", "rtx-3090", 4, ("ddp", _FULL), ("zero2", _FULL), ("fsdp", _FULL), ("fsdp", _FULL | _STATE)),
    *_cells("llama2_7b", "a100-40gb", 8, ("zero1", _FULL), ("zero2", _FULL), ("fsdp", {}), ("fsdp", _FULL)),
    *_cells("llama2_7b", "h100", 8, ("zero2", _FULL), ("fsdp", {}), ("fsdp", _FULL)),
    *_cells("llama2_7b", "rtx-3090", 8, ("fsdp", _FULL), ("fsdp", _FULL | _STATE)),
    *_cells(
        "pythia1b",
        "v3-8",
        8,
        ("zero2", _FULL),
        ("fsdp", {}),
        ("fsdp", _FULL),
        ("fsdp", _FULL | {"parallel.offload": "optimizer"}),
        ("fsdp", _FULL | _STATE),
    ),
    *_cells(
        "pythia1b",
        "v4-8",
        4,
        ("ddp", {}),
        ("zero1", {}),
        ("zero2", {}),
        ("fsdp", {}),
        ("hsdp", {}),
        ("fsdp", {"parallel.tensor": "2"}),
        ("ddp", _FULL),
        ("fsdp", _FULL),
        ("fsdp", {"parallel.remat": "full:8"}),
        ("fsdp", {"parallel.remat": "dots"}),
        ("fsdp", {"parallel.remat": "offload"}),
        ("fsdp", _FULL | {"parallel.offload": "optimizer"}),
        ("fsdp", _FULL | _STATE),
        ("fsdp", _FULL | {"optimizer.name": "adam_mini"}),
    ),
    *_cells("llama2_7b", "v4-8", 4, ("fsdp", _FULL), ("fsdp", _FULL | _STATE)),
    *_cells("pythia1b", "v5e-8", 8, ("zero2", _FULL), ("fsdp", {}), ("fsdp", _FULL), ("fsdp", _FULL | _STATE)),
    *_cells("llama2_7b", "v5e-8", 8, ("fsdp", _FULL), ("fsdp", _FULL | _STATE)),
    *_cells("llama2_7b", "v5e-16", 16, ("fsdp", _FULL)),
    *_cells("pythia160m", "a100-80gb", 4, ("ddp", {}), ("zero1", {"parallel.remat": "dots"}), ("fsdp", _FULL)),
    *_cells("pythia160m", "h100", 4, ("ddp", {})),
    *_cells("pythia160m", "rtx-3090", 2, ("ddp", {})),
    *_cells("pythia160m", "v4-8", 4, ("fsdp", {})),
    *_cells("pythia6_9b", "a100-80gb", 8, ("fsdp", _FULL), ("fsdp", _FULL | {"parallel.offload": "optimizer"})),
    *_cells("pythia6_9b", "h100", 8, ("fsdp", {})),
    *_cells("pythia6_9b", "v5e-16", 16, ("fsdp", _FULL)),
    *_cells("roberta_large", "a100-80gb", 4, ("ddp", {}), ("fsdp", {})),
    *_cells("roberta_large", "rtx-3090", 4, ("zero2", _FULL)),
    *_cells("roberta_large", "v3-8", 8, ("zero1", _FULL)),
    *_cells("roberta_large", "v4-8", 4, ("fsdp", {})),
    *_cells("mamba130m", "a100-80gb", 4, ("ddp", {}), ("fsdp", _FULL)),
    *_cells("mamba130m", "v4-8", 4, ("ddp", {})),
    *_cells("mamba130m", "v5e-8", 8, ("fsdp", _FULL)),
    *_cells("vit_large", "a100-80gb", 4, ("ddp", {})),
    *_cells("vit_large", "h100", 4, ("fsdp", _FULL)),
    *_cells("vit_large", "rtx-3090", 2, ("zero2", _FULL)),
    *_cells("vit_large", "v4-8", 4, ("zero1", {})),
    *_cells("vit_large", "v3-8", 8, ("fsdp", _FULL)),
    # Activations that fill the device, as plans have them.
    *_cells("pythia160m", "v5e-8", 8, ("zero1", {}), ("fsdp", {}), ("fsdp", {"micro_batch_size": "8"})),
    *_cells("pythia160m", "v4-8", 4, ("zero1", {"micro_batch_size": "32"}), ("ddp", {"parallel.remat": "full:6"})),
    *_cells("pythia1b", "v4-8", 4, ("zero2", {"micro_batch_size": "8"})),
    *_cells("pythia160m", "a100-80gb", 4, ("zero1", {"micro_batch_size": "128"}), ("fsdp", {"micro_batch_size": "64"})),
    *_cells("pythia1b", "a100-80gb", 4, ("zero2", {"micro_batch_size": "32"})),
    *_cells("roberta_large", "v5e-8", 8, ("ddp", {"micro_batch_size": "16"})),
]


def name_of(cell: dict) -> str:
    settings = "-".join(f"{key.split('.')[-1]}={value}" for key, value in cell["overrides"].items())
    return f"{cell['model']}-{cell['target']}x{cell['count']}-{settings}".replace(":", "_")


def compile_cell(cell: dict) -> dict:
    """Bytes per device and seconds of compiling; `error` if the compiler says that the program does not fit."""
    from jaxpretrain import config as config_lib
    from jaxpretrain import hardware
    from jaxpretrain.parallel.mesh import make_mesh, num_data_shards
    from jaxpretrain.plan import aot
    from jaxpretrain.plan.memory import state_bytes
    from jaxpretrain.plan.search import precision_for
    from jaxpretrain.plan.verify import compile_step

    overrides = {"data.source": "synthetic", "micro_batch_size": str(MODELS[cell["model"]])} | cell["overrides"]
    config = config_lib.load(f"{ROOT}/configs/{cell['model']}.py", list(overrides.items()))
    devices = aot.topology(cell["target"], cell["count"])
    accelerator = hardware.find(devices[0].device_kind)
    for key, value in precision_for(config, accelerator).items():  # TPUs have no float16
        config_lib.override(config, key, value)
    mesh = make_mesh(config.parallel.strategy, devices, tensor=config.parallel.tensor)
    config.batch_size = 2 * config.micro_batch_size * num_data_shards(mesh)
    state, started = state_bytes(config, mesh), time.time()
    verdict = compile_step(config, devices)
    result = cell | {
        "attention": verdict.attention,
        "limit": accelerator.memory_bytes,
        "micro_batch_size": config.micro_batch_size,
        "state": state.device,
        "state_host": state.host,
        "seconds": time.time() - started,
    }
    if verdict.memory is None:
        return result | {"error": verdict.refusal}
    return result | {"device": verdict.memory.device, "host": verdict.memory.host}


def report(results: list[dict]) -> str:
    lines = []
    for key in dict.fromkeys((result["model"], result["target"], result["count"]) for result in results):
        rows = [result for result in results if (result["model"], result["target"], result["count"]) == key]
        limit = rows[0]["limit"] / 2**30
        lines += [
            f"\n### {key[0]} on {key[1]}, {key[2]} devices of {limit:.0f} GiB; attention: {rows[0]['attention']}\n",
            "| strategy | remat | offload | other | device, GiB | state by arithmetic | rest | host, GiB | seconds |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            settings = dict(row["overrides"])
            strategy, remat, offload = (
                settings.pop(f"parallel.{name}", "none") for name in ("strategy", "remat", "offload")
            )
            other = ", ".join(f"{name.split('.')[-1]}={value}" for name, value in settings.items())
            if "device" in row:
                device = f"{row['device'] / 2**30:.2f}" + (", does not fit" if row["device"] > row["limit"] else "")
                beside = f"{(row['device'] - row['state']) / 2**30:.2f}"
            else:
                device, beside = f"refused: out of {_space(row['error'])}", ""
            lines.append(
                f"| {strategy} | {remat} | {offload} | {other} | {device} | {row['state'] / 2**30:.2f} | {beside} | "
                f"{row.get('host', row['state_host']) / 2**30:.2f} | {row['seconds']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def _space(error: str) -> str:
    """The memory that a TPU's compiler says is too small: hbm, or one of the small ones of its cores."""
    found = re.search(r"memory space (\w+)|(HBM)", error)
    return (found[1] or found[2]).upper()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", required=True, type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no compile after that")
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # compile this one, here
    args = parser.parse_args()
    folder = args.workdir / "cells"
    if args.cell:
        (cell,) = [cell for cell in CELLS if name_of(cell) == args.cell]
        file = folder / f"{args.cell}.json"
        file.with_suffix(".tmp").write_text(json.dumps(compile_cell(cell)))
        file.with_suffix(".tmp").rename(file)
        return
    folder.mkdir(parents=True, exist_ok=True)
    deadline, results = time.time() + 60 * args.minutes, []
    for cell in CELLS:
        name = name_of(cell)
        file = folder / f"{name}.json"
        if not file.exists() and args.only in name and time.time() < deadline:
            command = [sys.executable, __file__, f"--workdir={args.workdir}", f"--cell={name}"]
            process = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
            print(name, "done" if process.returncode == 0 else process.stderr.splitlines()[-1], flush=True)
        if file.exists():
            results.append(json.loads(file.read_text()))
    (args.workdir / "memory.json").write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")
    text = report(results)
    (args.workdir / "memory.md").write_text(text)
    print(f"{len(results)} of {len(CELLS)} cells\n{text}")


if __name__ == "__main__":
    main()
