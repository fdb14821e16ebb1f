"""Every family of models trains the same under every strategy: losses of 1 to 8 devices, dropout and all.

`test_equality.py` does the same for decoders, with everything that can be combined.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.data.masking import Masking
from jaxpretrain.data.tokenizer import ByteTokenizer
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.step import make_train_step, weights

NUM_STEPS, BATCH_SIZE = 5, 16
MODELS = {
    "encoder": dict(vocab_size=263, num_layers=3, embed_dim=16, num_heads=2, init="normal", dropout=0.1),
    "mamba": dict(vocab_size=61, num_layers=3, embed_dim=16, tied_embeddings=True),
    "vit": dict(num_layers=3, embed_dim=16, num_heads=2, dropout=0.1, drop_path=0.2),
    "convnext": dict(drop_path=0.2),
}
SECTIONS = {
    "mamba": {"mamba": dict(state_dim=4)},
    "vit": {"image": dict(size=16, num_classes=7, patch_size=4)},
    "convnext": {
        "image": dict(size=32, num_classes=7),
        "convnext": dict(depths=(1, 2, 1, 1), widths=(4, 8, 8, 16), layer_scale=0.1),
    },
}
# strategy, devices, tensor, micro-batch, remat, offload
LAYOUTS = [
    ("ddp", 8, 1, 2, "none", "none"),
    ("zero1", 4, 1, 2, "full", "none"),
    ("zero2", 4, 2, 4, "none", "optimizer"),
    ("fsdp", 8, 1, 1, "full", "none"),
    ("fsdp", 4, 2, 2, "none", "optimizer+params+averages"),
    ("hsdp", 8, 1, 2, "offload", "none"),
]


def make_config(family: str, strategy: str, tensor: int, micro_batch: int, remat: str, offload: str):
    config = config_lib.default()
    config.batch_size, config.micro_batch_size, config.steps = BATCH_SIZE, micro_batch, NUM_STEPS
    config.seq_len = 1 if family in ("vit", "convnext") else 24
    config.data.source = "synthetic"
    config.model.family = family
    config.model.update(MODELS[family])
    for section, values in SECTIONS.get(family, {}).items():
        config.model[section].update(values)
    config.precision.compute = "float32"
    config.optimizer.learning_rate = 3e-3
    config.average.horizons = (100,)
    config.parallel.update(dict(strategy=strategy, tensor=tensor, remat=remat, offload=offload))
    config_lib.check(config)
    return config


def batch_of(config, step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    if config.model.family in ("vit", "convnext"):
        size = config.model.image.size
        return {
            "images": random.integers(0, 256, (BATCH_SIZE, size, size, 3)).astype(np.uint8),
            "labels": random.integers(0, 7, (BATCH_SIZE, 2)).astype(np.int32),
            "weights": random.uniform(size=BATCH_SIZE).astype(np.float32),
        }
    if config.model.family == "mamba":
        return {"tokens": random.integers(0, 61, (BATCH_SIZE, 25)).astype(np.int32)}
    tokens = random.integers(0, 256, (BATCH_SIZE, 24)).astype(np.int32)
    real = np.arange(24) < random.integers(2, 25, (BATCH_SIZE, 1))
    masking = Masking(ByteTokenizer.masking_tokens, 263, 0.15, config_lib.num_masked_tokens(config))
    batch = {"tokens": np.where(real, tokens, 257), "segment_ids": real.astype(np.int32)}
    return masking(batch, np.arange(BATCH_SIZE), step)


@functools.cache
def losses(family: str, strategy: str, num_devices: int, *layout) -> list[float]:
    config = make_config(family, strategy, *layout)
    mesh = make_mesh(strategy, jax.devices()[:num_devices], tensor=config.parallel.tensor)
    train_step = make_train_step(config, mesh)
    state, found = train_step.init(), []
    for step in range(NUM_STEPS):
        batch = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), batch_of(config, step), train_step.batch)
        state, metrics = train_step.step(state, batch)
        found.append(float(metrics["loss"]))
    sums = train_step.evaluate(weights(state), batch)
    return [*found, float(sums["loss"] / sums["targets"])]


def cases():
    """Quick: one layout for each family."""
    quick = {"encoder": 3, "mamba": 2, "vit": 4, "convnext": 5}
    for family, (i, layout) in itertools.product(MODELS, enumerate(LAYOUTS)):
        name = f"{family}-{'-'.join(map(str, layout))}"
        yield pytest.param(family, layout, id=name, marks=() if quick[family] == i else pytest.mark.slow)


@pytest.mark.parametrize(("family", "layout"), list(cases()))
def test_losses_equal_those_of_one_device(family, layout):
    """Seen to fail with the number of the row in the shard, in place of the batch, as what dropout draws by."""
    expected = losses(family, "ddp", 1, 1, 4, "none", "none")
    np.testing.assert_allclose(losses(family, *layout), expected, rtol=2e-5)
