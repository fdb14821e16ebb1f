"""Layout is not an experiment: every strategy, with every way to recompute, offload and split, trains the same model.

In float32 the losses are compared. Adam divides by the size of a gradient, and where that is zero but for rounding (the
bias of a key) float32 parameters may go anywhere: parameters are compared in float64. For that, this file is run as a
program that puts float64 in the place of every float32.
"""

import functools
import itertools
import json
import os
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.parallel.mesh import make_mesh, num_data_shards
from jaxpretrain.step import make_train_step

NUM_STEPS, BATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 20, 24, 16, 61  # a prime number of rows, which nothing divides
_MODELS = {
    "pythia": dict(parallel_residual=True, init="gpt_neox"),
    "llama": dict(
        norm="rmsnorm",
        norm_bias=False,
        activation="silu",
        gated_mlp=True,
        attention_bias=False,
        mlp_bias=False,
        num_kv_heads=2,
        tied_embeddings=True,
        init="mitchell",
    ),
}
_FACTORS = {
    "model": ("pythia", "llama"),
    "optimizer": ("adamw", "adam_mini"),
    "devices": (1, 2, 3, 4, 6, 8),
    "tensor": (1, 2, 4),
    "strategy": ("ddp", "zero1", "zero2", "fsdp", "hsdp"),
    "remat": ("none", "full", "full:1", "dots", "names:attention+mlp_up", "offload", "offload:query+mlp_up"),
    "offload": ("none", "optimizer", "optimizer+params", "averages", "optimizer+params+averages"),
    "micro_batches": (1, 2, 3),
}


def is_possible(layout: dict) -> bool:
    """Devices divide, and each has a sequence for every micro-batch."""
    num_data, rest = divmod(layout["devices"], layout["tensor"])
    return rest == 0 and num_data > 0 and BATCH_SIZE % (num_data * layout["micro_batches"]) == 0


def pairwise_covering(seed: int = 0) -> list[dict]:
    """Layouts, drawn greedily, among which each two values of different factors that can meet do meet."""
    rng = random.Random(seed)
    every = [dict(zip(_FACTORS, values, strict=True)) for values in itertools.product(*_FACTORS.values())]
    every = [layout for layout in every if is_possible(layout)]

    def pairs(layout: dict) -> set:
        return set(itertools.combinations(layout.items(), 2))

    missing, chosen = set().union(*map(pairs, rng.sample(every, 5000))), []
    while missing:
        best = max(rng.sample(every, 300), key=lambda layout: len(pairs(layout) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def one_device(model: str, optimizer: str) -> dict:
    first = {factor: values[0] for factor, values in _FACTORS.items()}
    return first | {"model": model, "optimizer": optimizer}


def run(layout: dict, compute: str) -> tuple[list[float], list[np.ndarray]]:
    """The losses, and the last parameters and averages."""
    config = config_lib.default()
    config.steps, config.batch_size, config.seq_len = NUM_STEPS, BATCH_SIZE, SEQ_LEN
    config.model.update(dict(vocab_size=VOCAB_SIZE, num_layers=2, embed_dim=32, num_heads=4))
    config.model.update(_MODELS[layout["model"]])
    config.data.isolate_documents = True
    config.optimizer.name, config.optimizer.learning_rate = layout["optimizer"], 3e-3
    config.average.horizons = (200, 2000)
    config.precision.compute = compute
    for key in ("strategy", "tensor", "remat", "offload"):
        config.parallel[key] = layout[key]
    mesh = make_mesh(layout["strategy"], jax.devices()[: layout["devices"]], tensor=layout["tensor"])
    config.micro_batch_size = BATCH_SIZE // num_data_shards(mesh) // layout["micro_batches"]
    config_lib.check(config)
    train_step = make_train_step(config, mesh)
    state, losses = train_step.init(), []
    for i in range(NUM_STEPS):
        state, metrics = train_step.step(state, make_batch(train_step, i))
        losses.append(float(metrics["loss"]))
    assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(train_step.state)]
    return losses, [np.asarray(x) for x in jax.tree.leaves((state.params, state.averages.averages))]


def make_batch(train_step, i: int) -> dict:
    """Rows of two documents, and of uneven lengths."""
    rng = np.random.default_rng(i)
    tokens, index = rng.integers(0, VOCAB_SIZE, (BATCH_SIZE, SEQ_LEN + 1)), np.arange(SEQ_LEN + 1)
    segment_ids = 1 + (index >= rng.integers(1, SEQ_LEN, (BATCH_SIZE, 1)))
    segment_ids = np.where(index < rng.integers(1, SEQ_LEN + 2, (BATCH_SIZE, 1)), segment_ids, 0)
    batch = dict(tokens=tokens, segment_ids=segment_ids)
    return {name: jax.device_put(x.astype(np.int32), train_step.batch[name].sharding) for name, x in batch.items()}


@functools.cache
def expected_losses(model: str, optimizer: str) -> list[float]:
    losses, _ = run(one_device(model, optimizer), "float32")
    assert losses[-1] < losses[0]
    return losses


_LAYOUTS = pairwise_covering()
_SAMPLE = random.Random(1).sample(_LAYOUTS, 5)


def assert_losses_of_one_device(layout: dict) -> None:
    losses, _ = run(layout, "float32")
    np.testing.assert_allclose(losses, expected_losses(layout["model"], layout["optimizer"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", _SAMPLE, ids=lambda layout: "-".join(map(str, layout.values())))
def test_losses_of_some_layouts(layout):
    """Fails if `reduce` forgets the replicas, or if the offloaded update takes every layer's state from the first (each
    tried)."""
    assert_losses_of_one_device(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", _LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_losses_of_every_pair_of_settings(layout):
    assert_losses_of_one_device(layout)


def largest_difference(layouts: list[dict]) -> float:
    """In float64, of any parameter or average from what one device has, over the largest in its array."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, json.dumps(layouts)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3000)
    assert result.returncode == 0, result.stderr
    return float(result.stdout.split()[-1])


def test_parameters_of_some_layouts():
    assert largest_difference(_SAMPLE[:2]) < 1e-8


@pytest.mark.slow
def test_parameters_of_every_pair_of_settings():
    assert largest_difference(_LAYOUTS) < 1e-8


def main() -> None:
    from jaxpretrain import schema

    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64
    schema.CHOICES["precision.compute"] += ("float64",)
    expected, largest = {}, 0.0
    for layout in json.loads(sys.argv[1]):
        key = layout["model"], layout["optimizer"]
        if key not in expected:
            expected[key] = run(one_device(*key), "float64")[1]
        for a, b in zip(run(layout, "float64")[1], expected[key], strict=True):
            assert a.dtype == np.float64
            largest = max(largest, float(np.max(np.abs(a - b))))
    print(largest)


if __name__ == "__main__":
    main()
