"""Fits the numbers of plan/memory.py and plan/time.py, and writes down how well they predict what was not fitted.

    python tools/calibrate.py memory --cells=docs/benchmarks/memory.json
    python tools/calibrate.py time --table=tests/data/published_throughput.csv --output=docs/benchmarks/prediction.md

`memory` fits to what compilers said (tools/memory_table.py), `time` to published throughputs. Both print the fitted
numbers, to be copied into those files.
"""

import argparse
import csv
import dataclasses
import functools
import json
import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from scipy.optimize import least_squares, nnls

from jaxpretrain import config as config_lib
from jaxpretrain import hardware
from jaxpretrain.plan import flops, memory, predict, work
from jaxpretrain.plan import time as plan_time
from jaxpretrain.plan.layout import Layout

ROOT = pathlib.Path(__file__).parents[1]


def predicted_cell(cell: dict) -> tuple[memory.PeakBytes, dict[str, int]]:
    """Of a cell of tools/memory_table.py: the closed form, and the sizes that its working set is made of."""
    overrides = dict(cell["overrides"])
    overrides.pop("micro_batch_size", None)
    layout = Layout(
        num_devices=cell["count"],
        strategy=overrides.pop("parallel.strategy"),
        tensor=int(overrides.pop("parallel.tensor", 1)),
        remat=overrides.pop("parallel.remat", "none"),
        offload=overrides.pop("parallel.offload", "none"),
        micro_batch_size=cell["micro_batch_size"],
    )
    shapes, model_work = _traced(cell["model"], *overrides.items())
    state = shapes.state_bytes(layout.strategy, layout.mesh, layout.offload)
    peak = memory.peak_bytes(shapes, model_work, state, layout, is_tpu(cell))
    return peak, memory.working_sizes(shapes, model_work, state, layout)


@functools.cache
def _traced(model: str, *overrides: tuple[str, str]) -> tuple[memory.Shapes, work.Work]:
    settings = [("data.source", "synthetic"), ("micro_batch_size", "1"), *overrides]
    config = config_lib.load(f"{ROOT}/configs/{model}.py", settings)
    return memory.Shapes.of(config), work.trace(config)


def is_tpu(cell: dict) -> bool:
    return cell["target"].startswith(("v", "tpu"))


def fit_memory(cells: str) -> None:
    results = [cell for cell in json.loads(pathlib.Path(cells).read_text()) if "device" in cell]
    errors = []
    for kind, multiples in (("GPU", memory.GPU), ("TPU", memory.TPU)):
        rows = [(cell, *predicted_cell(cell)) for cell in results if is_tpu(cell) == (kind == "TPU")]
        actual = np.array([cell["device"] for cell, *_ in rows])
        known = np.array([peak.state.device + peak.kept for _, peak, _ in rows])
        sizes = np.array([[sizes[name] for name in multiples] for *_, sizes in rows])
        fitted = fit_multiples(sizes / actual[:, None], 1 - known / actual)
        print(kind, ", ".join(f"{name}={value:.2f}" for name, value in zip(multiples, fitted, strict=True)))
        error = (known + sizes @ np.round(fitted, 2)) / actual - 1
        print(f"{kind}, fitted now: {_summary(error)}")
        error = np.array([peak.device for _, peak, _ in rows]) / actual - 1
        print(f"{kind}, as in plan/memory.py: {_summary(error)}")
        errors.append(error)
    print(f"all: {_summary(np.concatenate(errors))}")


def fit_multiples(sizes: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Least cubes, none negative: a plan is wrong by its worst error, not by the mean one."""
    weights = np.ones(len(left))
    for _ in range(100):
        fitted = nnls(sizes * weights[:, None], left * weights)[0]
        new = np.abs(sizes @ fitted - left) + 0.01
        weights = 0.8 * weights + 0.2 * new / new.mean()
    return fitted


def _summary(error: np.ndarray) -> str:
    error = np.abs(error)
    return (
        f"{len(error)}, median {np.median(error):.1%}, 90th percentile {np.quantile(error, 0.9):.1%}, "
        f"maximum {error.max():.1%}"
    )


def fit_time(table: str, output: str | None) -> None:
    with open(table) as file:
        rows = list(csv.DictReader(file))
    actual = np.array([float(row["tokens_per_second_per_device"]) for row in rows])
    everything = np.arange(len(rows))
    fitting, held_out = everything[::2], everything[1::2]
    fitted = fit(rows, actual, fitting)
    print("FITTED =", fitted)
    speeds = predicted_speeds(rows, fitted, everything)
    errors = speeds / actual - 1
    lines = [f"fitted half: {_summary(errors[fitting])}", f"other half: {_summary(errors[held_out])}"]
    for column in ("model", "device"):
        for value in dict.fromkeys(row[column] for row in rows):
            left_out = np.array([i for i in everything if rows[i][column] == value])
            others = np.setdiff1d(everything, left_out)
            fitted = fit(rows, actual, others)
            if not any(row["device"].startswith("h100") for row in (rows[i] for i in others)):  # then as all devices
                fitted = dataclasses.replace(
                    fitted, matmul_power_bound=fitted.matmul, attention_power_bound=fitted.attention
                )
            error = predicted_speeds(rows, fitted, left_out) / actual[left_out] - 1
            lines.append(f"without {column} {value}: {_summary(error)}, median signed {np.median(error):+.1%}")
    print("\n".join(lines))
    others = [(run, run.predict(plan_time.FITTED)) for run in OTHERS]
    for run, value in others:
        error = value / run.published - 1
        print(f"{run.system} {run.what}: {run.quantity} {run.published:g}, predicted {value:.4g} ({error:+.1%})")
    print("other systems:", _summary(np.array([value / run.published - 1 for run, value in others])))
    if output:
        write_page(pathlib.Path(output), rows, speeds, errors, lines, others)


def fit(rows: list[dict], actual: np.ndarray, which: np.ndarray) -> plan_time.Calibration:
    """To the logarithms of throughputs; large errors, which are the table's own, count less."""
    low, high = np.array(list(plan_time.BOUNDS.values())).T

    def residuals(unit: np.ndarray) -> np.ndarray:
        return np.log(predicted_speeds(rows, of(unit), which) / actual[which])

    def of(unit: np.ndarray) -> plan_time.Calibration:
        return plan_time.Calibration(*(float(f"{value:.3g}") for value in low + (high - low) * unit))

    start = (np.array(dataclasses.astuple(plan_time.FITTED)) - low) / (high - low)
    found = least_squares(
        residuals, np.clip(start, 0.01, 0.99), bounds=(0, 1), loss="soft_l1", f_scale=0.05, diff_step=0.01
    )
    return of(found.x)


def predicted_speeds(rows: list[dict], fitted: plan_time.Calibration, which: np.ndarray) -> np.ndarray:
    return np.array([predict.predict(rows[i], fitted)["predicted_tokens_per_second_per_device"] for i in which])


@dataclasses.dataclass(frozen=True)
class Run:
    """A throughput that another system published, and that nothing was fitted to."""

    system: str
    what: str
    source: str
    config: dict  # overrides of the default config
    hardware: tuple  # arguments of hardware.parse_machine
    layout: dict
    batch_size: int
    quantity: str  # tokens/s, seconds, or MFU: by 6 N + 12 L d T, or with half of the attention
    published: float
    compute: str = "bfloat16"

    def predict(self, fitted: plan_time.Calibration) -> float:
        config = config_lib.default()
        for key, value in self.config.items():
            config_lib.override(config, key, str(value))
        config.micro_batch_size, config.data.source = 1, "synthetic"
        config_lib.check(config)
        machine = hardware.parse_machine(*self.hardware)
        layout = Layout(num_devices=machine.num_devices, num_nodes=machine.nodes, **self.layout)
        shapes, model_work = memory.Shapes.of(config), work.trace(config)
        state = shapes.state_bytes(layout.strategy, layout.mesh, "none")
        seconds = plan_time.step_time(
            model_work, state, layout, machine, batch_size=self.batch_size, compute=self.compute, fitted=fitted
        ).total
        if self.quantity == "seconds":
            return seconds
        speed = self.batch_size * config.seq_len / machine.num_devices / seconds
        if self.quantity == "tokens/s":
            return speed
        per_token = {
            "MFU": flops.palm_flops_per_token(config),
            "MFU, causal": flops.train_flops_per_token(config),
        }[self.quantity]
        return 100 * speed * per_token / machine.accelerator.peak_flops("bfloat16")


def _gpt(layers: int, dim: int, heads: int, seq_len: int, **more) -> dict:
    sizes = {"model.num_layers": layers, "model.embed_dim": dim, "model.num_heads": heads, "seq_len": seq_len}
    return {"model.vocab_size": 50304, "model.tied_embeddings": True, "model.positions": "learned"} | sizes | more


def _llama(layers: int, dim: int, heads: int, mlp: int, seq_len: int, vocab: int = 32000, **more) -> dict:
    sizes = {"model.num_layers": layers, "model.embed_dim": dim, "model.num_heads": heads, "model.mlp_dim": mlp}
    fixed = {"model.norm": "rmsnorm", "model.activation": "silu", "model.gated_mlp": True}
    biases = {f"model.{name}_bias": False for name in ("attention", "mlp", "norm")}
    return sizes | fixed | biases | {"seq_len": seq_len, "model.vocab_size": vocab} | more


_LLAMA2_7B = dict(layers=32, dim=4096, heads=32, mlp=11008)
_LLAMA3_8B = _llama(32, 4096, 32, 14336, 8192, 128256, **{"model.num_kv_heads": 8})
_MAXTEXT, _TITAN, _AXLEARN = ("MaxText", "torchtitan", "axlearn")
OTHERS = [
    Run(_MAXTEXT, "Llama2-7B", "configs/a3/llama_2_7b/1vm.sh, README of the H100 configs",
        _llama(**_LLAMA2_7B, seq_len=4096), ("h100", 8), {"strategy": "fsdp", "remat": "none", "micro_batch_size": 4},
        32, "MFU, causal", 49.7),
    Run(_MAXTEXT, "16B", "configs/v5e/16b.sh, README",
        _llama(32, 4096, 64, 28672, 2048, **{"model.head_dim": 128}), ("v5e-256",),
        {"strategy": "fsdp", "remat": "full", "micro_batch_size": 6}, 6 * 256, "MFU", 61.1),
    Run(_MAXTEXT, "22B", "configs/v4/22b.sh, README",
        _gpt(48, 6144, 24, 2048, **{"model.vocab_size": 32000, "model.mlp_dim": 24576}), ("v4-128",),
        {"strategy": "fsdp", "remat": "full", "micro_batch_size": 13}, 13 * 64, "MFU", 56.7),
    Run(_MAXTEXT, "64B", "configs/v5p/64b.sh, README",
        _llama(64, 8192, 64, 28672, 2048), ("v5p-128",),
        {"strategy": "fsdp", "tensor": 4, "remat": "none", "micro_batch_size": 12}, 12 * 16, "MFU", 70.3),
    Run(_TITAN, "Llama3.1-8B", "benchmarks/llama3_h100_202412_torchtitan.md",
        _LLAMA3_8B, ("h100", 8), {"strategy": "fsdp", "remat": "dots", "micro_batch_size": 2}, 16, "tokens/s", 6667),
    Run(_TITAN, "Llama3.1-8B, float8", "the same",
        _LLAMA3_8B, ("h100", 8), {"strategy": "fsdp", "remat": "dots", "micro_batch_size": 2}, 16, "tokens/s", 8532,
        compute="float8"),
    Run(_TITAN, "Llama3.1-8B, float8", "benchmarks of 32 H200",
        _LLAMA3_8B, ("h200", 8, 4), {"strategy": "fsdp", "remat": "dots", "micro_batch_size": 2}, 64, "tokens/s", 10938,
        compute="float8"),
    Run("Levanter", "345M", "docs/Levanter-1.0-Release.md",
        _gpt(24, 1024, 16, 1024, **{"kernels.attention": "xla"}), ("v3-256",),
        {"strategy": "fsdp", "remat": "full", "micro_batch_size": 2}, 512, "MFU", 35.1),
    Run("Levanter", "1.4B", "the same",
        _gpt(48, 1536, 24, 1024, **{"kernels.attention": "xla"}), ("v3-256",),
        {"strategy": "fsdp", "remat": "full", "micro_batch_size": 2}, 512, "MFU", 41.7),
    Run(_AXLEARN, "7B", "experiments/text/gpt/fuji.py",
        _llama(**_LLAMA2_7B, seq_len=4096), ("v5e-256", None, 4),
        {"strategy": "hsdp", "remat": "dots", "micro_batch_size": 1}, 1024, "seconds", 2.21),
    Run(_AXLEARN, "70B, activations offloaded", "the same",
        _llama(80, 8192, 64, 28672, 4096, **{"model.num_kv_heads": 8}), ("v5e-256", None, 4),
        {"strategy": "hsdp", "remat": "dots", "micro_batch_size": 1}, 1024, "seconds", 14.37),
    Run("KempnerForge", "7B", "Kempner benchmark page",
        _llama(**_LLAMA2_7B, seq_len=4096), ("h200", 1), {"remat": "full", "micro_batch_size": 4},
        16, "tokens/s", 10471),
]  # fmt: skip


def write_page(output: pathlib.Path, rows: list[dict], speeds: np.ndarray, errors: np.ndarray, lines: list[str],
               others: list[tuple[Run, float]]) -> None:  # fmt: skip
    """Replaces what follows `## Numbers` in the page, and the plot beside it."""
    text = output.read_text() if output.exists() else "# Prediction\n\n"
    text = text.partition("## Numbers")[0] + "## Numbers\n\n"
    text += "\n".join(f"- {line}" for line in lines) + "\n\n"
    text += f"![predicted against published]({output.stem}.svg)\n\n### Other systems\n\n"
    text += "| system | run | what | published | predicted | error | source |\n|---|---|---|---|---|---|---|\n"
    for run, value in others:
        error = value / run.published - 1
        machine = " x ".join(str(part) for part in run.hardware if part)
        text += f"| {run.system} | {run.what}, {machine} | {run.quantity} | {run.published:g} | {value:.4g} | "
        text += f"{error:+.1%} | {run.source} |\n"
    text += f"\n{_summary(np.array([value / run.published - 1 for run, value in others]))}\n\n### llm-foundry\n\n"
    text += "`half` is 1 for the rows that were fitted. Tokens per second and device.\n\n"
    text += "| half | model | seq_len | devices | micro-batch | accumulated | precision | checkpointing | published | "
    text += "predicted | error | GiB predicted | of |\n|" + "---|" * 13 + "\n"
    for i, row in enumerate(rows):
        added = predict.predict(row)
        usable = hardware.get(row["device"]).usable_bytes
        text += (
            f"| {1 + i % 2} | {row['model']} | {row['seq_len']} | {row['num_devices']} x {row['device']} | "
            f"{row['micro_batch']} | {row['grad_accum']} | {row['precision']} | {row['activation_checkpointing']} | "
            f"{float(row['tokens_per_second_per_device']):,.0f} | {speeds[i]:,.0f} | {errors[i]:+.1%} | "
            f"{added['predicted_peak_bytes'] / 2**30:.1f} | {usable / 2**30:.1f} |\n"
        )
    output.write_text(text)
    plot(output.with_suffix(".svg"), rows, speeds)


def plot(file: pathlib.Path, rows: list[dict], speeds: np.ndarray) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxpretrain"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.subplots()
    actual = np.array([float(row["tokens_per_second_per_device"]) for row in rows])
    devices = list(dict.fromkeys(row["device"] for row in rows))
    for device, colour in zip(devices, ("#3b6ea5", "#6fa8a0", "#c8553d"), strict=True):
        for half, marker in ((0, "o"), (1, "s")):
            which = [i for i, row in enumerate(rows) if row["device"] == device and i % 2 == half]
            label = f"{device.replace('_', '-')}, {('fitted', 'held out')[half]}"
            face = "none" if half == 0 else colour
            axes.scatter(
                actual[which], speeds[which], s=22, marker=marker, edgecolor=colour, facecolor=face, label=label
            )
    ends = np.array([actual.min() / 1.3, actual.max() * 1.3])
    axes.plot(ends, ends, color="#22303c", linewidth=0.8)
    axes.fill_between(ends, ends / 1.2, ends * 1.2, color="#d8dee4", alpha=0.6, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="published, tokens/s/device", ylabel="predicted; the band is 20 %")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("memory").add_argument("--cells", required=True)
    time = commands.add_parser("time")
    time.add_argument("--table", required=True)
    time.add_argument("--output", help="a page for docs/benchmarks, with a plot beside it")
    args = parser.parse_args()
    fit_memory(args.cells) if args.command == "memory" else fit_time(args.table, args.output)


if __name__ == "__main__":
    main()
