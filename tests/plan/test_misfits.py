"""Runs that the compiler for A100s and H100s says do not fit: `--predict` has to say so, too."""

import csv

import pytest

from jaxpretrain import config as config_lib
from jaxpretrain import hardware
from jaxpretrain.plan import aot, predict
from jaxpretrain.plan.verify import compile_step

pytestmark = pytest.mark.slow

with open("tests/data/published_throughput.csv") as _file:
    _ROWS = {
        (row["model"], row["device"], row["activation_checkpointing"]): row
        for row in csv.DictReader(_file)
        if row["num_devices"] == "8" and row["seq_len"] in ("1024", "2048", "4096") and "fp8" not in row["precision"]
    }


def compiled_bytes(row: dict[str, str]) -> int:
    """Of our step of the same model and micro-batch, under fsdp."""
    config = config_lib.default()
    model = config.model
    for key in ("num_layers", "embed_dim", "num_heads", "vocab_size"):
        model[key] = int(row[key])
    model.positions, model.tied_embeddings = "learned", True
    model.norm_bias = model.attention_bias = model.mlp_bias = False
    config.seq_len, config.micro_batch_size = int(row["seq_len"]), int(row["micro_batch"])
    config.batch_size, config.data.source = int(row["global_batch"]), "synthetic"
    config.parallel.strategy = "fsdp"
    config.parallel.remat = "full" if row["activation_checkpointing"] == "True" else "none"
    config_lib.check(config)
    return compile_step(config, aot.topology(hardware.get(row["device"]).name, 8)).memory.device


def test_runs_that_the_compiler_proves_too_large_are_rejected():
    """At least nine of ten, of at least 20: each row's micro-batch doubled until its program is larger than the device.

    Fails if activations are counted once for all layers.
    """
    found = []
    for row in _ROWS.values():
        row = dict(row, grad_accum="1")
        while True:
            row["micro_batch"] = str(2 * int(row["micro_batch"]))
            row["global_batch"] = str(8 * int(row["micro_batch"]))
            if compiled_bytes(row) > hardware.get(row["device"]).memory_bytes:
                break
        added = predict.predict(row)
        found.append(not added["fits"])
        print(row["model"], row["device"], row["micro_batch"], row["activation_checkpointing"], added)
    assert len(found) >= 20
    assert sum(found) >= 0.9 * len(found)
