"""Bytes of optimizer state on each device, of arrays that exist: the table of docs/benchmarks/optimizers.md."""

import jax
import jax.numpy as jnp
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.models import registry
from jaxpretrain.models.parameter import infos
from jaxpretrain.optim.factory import make_optimizer
from jaxpretrain.optim.schedules import make_schedule
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.step import abstract_state

# (optimizer, first moment, second moment): bytes per parameter of GPT-2 124M under ddp, and on each of 8 under fsdp
BYTES = {
    ("adamw", "float32", "float32"): (8.000, 1.000),
    ("adamw", "bfloat16", "bfloat16"): (4.000, 0.500),
    ("adam_mini", "float32", "float32"): (4.004, 0.501),
    ("adam_mini", "bfloat16", "float32"): (2.004, 0.251),
    ("adam_mini", "int8", "float32"): (1.018, 0.128),
}


@pytest.mark.parametrize("moments", BYTES, ids="-".join)
def test_bytes_per_parameter(moments):
    """Fails if a state leaf takes its parameter's sharding only where the shapes are equal (then fsdp holds whole
    second moments), or if Adam-mini's second moment is kept whole."""
    name, mu_dtype, nu_dtype = moments
    overrides = {"optimizer.name": name, "optimizer.mu_dtype": mu_dtype, "optimizer.nu_dtype": nu_dtype}
    config = config_lib.load("configs/gpt2_small.py:nobias", overrides.items())
    measured = []
    for strategy, num_devices in (("ddp", 1), ("fsdp", 8)):
        state = abstract_state(config, make_mesh(strategy, jax.devices()[:num_devices]))
        optimizer = make_optimizer(config, make_schedule(config), infos(registry.build(config)))
        shardings = jax.tree.map(lambda x: x.sharding, state.opt_state)

        @jax.jit
        def create(params, optimizer=optimizer, shardings=shardings):
            return jax.lax.with_sharding_constraint(optimizer.init(params), shardings)

        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), state.params)
        shards = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(create(params))]
        measured.append(round(sum(shards) / sum(x.size for x in jax.tree.leaves(state.params)), 3))
    assert tuple(measured) == BYTES[moments]
