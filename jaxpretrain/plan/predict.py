"""Predictions for tables of decoders that others trained, one row a run: `tools/plan.py --predict=FILE.csv`."""

import csv
import functools
import io
import math
import pathlib

from jaxpretrain import config as config_lib
from jaxpretrain import hardware
from jaxpretrain.plan.layout import Layout
from jaxpretrain.plan.memory import Shapes, StateBytes, peak_bytes
from jaxpretrain.plan.time import FITTED, Calibration, step_time
from jaxpretrain.plan.work import Work, trace

DEVICES_PER_NODE = 8
_COLUMNS = (
    *("num_layers", "embed_dim", "num_heads", "mlp_ratio", "vocab_size", "tied", "seq_len", "num_devices", "device"),
    *("micro_batch", "global_batch", "precision", "sharding", "activation_checkpointing"),
)
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32", "fp8": "float8"}
_SHARDINGS = {"FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "zero2", "HYBRID_SHARD": "hsdp", "NO_SHARD": "ddp"}
ADDED = ("predicted_tokens_per_second_per_device", "predicted_step_time", "predicted_peak_bytes", "fits")


def predict_file(path: str, output: str) -> int:
    """Copies a table and adds the predictions; returns how many rows it has. Raises ValueError for what it lacks."""
    try:
        rows = list(csv.DictReader(io.StringIO(pathlib.Path(path).read_text())))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--predict={path}: cannot be read: {error}") from error
    if not rows:
        raise ValueError(f"--predict={path}: has no rows; give a table with the columns {', '.join(_COLUMNS)}")
    if missing := [column for column in _COLUMNS if column not in rows[0]]:
        raise ValueError(f"--predict={path}: lacks the columns {', '.join(missing)}")
    for number, row in enumerate(rows, start=2):
        try:
            row |= predict(row)
        except (ValueError, TypeError) as error:
            raise ValueError(f"--predict={path}, line {number}: {error}") from error
    try:
        with open(output, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ValueError(f"--output={output} cannot be written: {error.strerror}; choose another") from error
    return len(rows)


def predict(row: dict[str, str], fitted: Calibration = FITTED) -> dict[str, float | int | bool]:
    """What ADDED names, of a row that was trained with PyTorch's FSDP.

    The step is timed as ours with the same sharding. Memory is FSDP's: float32 parameters, gradients and moments, and
    no copy in compute precision that outlasts a layer; with our activations and working set.
    """
    for column in ("num_layers", "embed_dim", "num_heads", "vocab_size", "seq_len"):
        _count(row, column)
    ratio = _number(row, "mlp_ratio")
    if not 0 < ratio < 1000:
        raise ValueError(f"mlp_ratio={row['mlp_ratio']}: write a number above 0")
    work, shapes = _model(*(row.get(key, "") for key in _MODEL_COLUMNS))
    num_devices, global_batch = _count(row, "num_devices"), _count(row, "global_batch")
    checkpointing = _boolean(row, "activation_checkpointing")
    layout = Layout(
        num_devices=num_devices,
        num_nodes=-(-num_devices // DEVICES_PER_NODE),
        strategy=_choice(row, "sharding", _SHARDINGS),
        remat="full" if checkpointing else "none",
        micro_batch_size=_count(row, "micro_batch"),
    )
    if global_batch % (num_devices * layout.micro_batch_size):
        raise ValueError(f"global_batch={global_batch}: not a multiple of num_devices x micro_batch")
    compute = _choice(row, "precision", _PRECISIONS, row["precision"].removeprefix("amp_"))
    device = hardware.get(row["device"])
    machine = hardware.Machine(device, count=min(num_devices, DEVICES_PER_NODE), nodes=layout.num_nodes)
    state = shapes.state_bytes(layout.strategy, layout.mesh, "none")
    seconds = step_time(work, state, layout, machine, batch_size=global_batch, compute=compute, fitted=fitted).total
    needed = peak_bytes(shapes, work, state, layout, is_tpu=False)
    peak = _fsdp_bytes(state, layout) + needed.kept + needed.working
    return {
        "predicted_tokens_per_second_per_device": global_batch * work.num_tokens / num_devices / seconds,
        "predicted_step_time": seconds,
        "predicted_peak_bytes": peak,
        "fits": peak <= device.usable_bytes,
    }


_MODEL_COLUMNS = (
    *("num_layers", "embed_dim", "num_heads", "mlp_ratio", "vocab_size", "tied", "seq_len"),
    *("num_kv_heads", "gated_mlp"),  # may be absent
)


@functools.cache
def _model(
    num_layers: str,
    embed_dim: str,
    num_heads: str,
    mlp_ratio: str,
    vocab_size: str,
    tied: str,
    seq_len: str,
    num_kv_heads: str,
    gated_mlp: str,
) -> tuple[Work, Shapes]:
    config = config_lib.default()
    model = config.model
    sizes = (num_layers, embed_dim, num_heads)
    model.num_layers, model.embed_dim, model.num_heads = (int(float(size)) for size in sizes)
    model.mlp_dim = round(float(mlp_ratio) * model.embed_dim)
    model.vocab_size, model.tied_embeddings = int(float(vocab_size)), tied.lower() in ("1", "true")
    model.num_kv_heads, model.gated_mlp = int(num_kv_heads or 0), gated_mlp.lower() in ("1", "true")
    model.positions = "rotary" if model.gated_mlp else "learned"
    model.norm_bias = model.attention_bias = model.mlp_bias = False
    config.seq_len, config.micro_batch_size = int(float(seq_len)), 1
    config.data.source = "synthetic"
    config_lib.check(config)
    return trace(config), Shapes.of(config)


def _fsdp_bytes(state: StateBytes, layout: Layout) -> int:
    copy = state.compute_copy if layout.strategy == "zero2" else 0
    return state.params + state.optimizer + state.params + copy


def _number(row: dict[str, str], column: str) -> float:
    try:
        return float(row[column])
    except ValueError:
        return math.nan


def _count(row: dict[str, str], column: str) -> int:
    value = _number(row, column)
    if not (value > 0 and value == round(value)):
        raise ValueError(f"{column}={row[column]}: write a whole number above 0")
    return int(value)


def _choice(row: dict[str, str], column: str, choices: dict[str, str], value: str | None = None) -> str:
    value = row[column] if value is None else value
    if value not in choices:
        raise ValueError(f"{column}={row[column]}: unknown; known are {', '.join(choices)}")
    return choices[value]


def _boolean(row: dict[str, str], column: str) -> bool:
    value = row[column].lower()
    if value not in ("true", "false", "1", "0"):
        raise ValueError(f"{column}={row[column]}: write True or False")
    return value in ("true", "1")
