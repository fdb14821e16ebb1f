"""Compiling without the accelerator: names of targets, and the account of memory of a program whose sizes are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpretrain.plan import aot


@pytest.mark.parametrize(
    "target, device_kind, num_devices",
    [
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", 4),
        ("A100_80GB", "NVIDIA A100-SXM4-80GB", 4),
        ("rtx-3090", "NVIDIA GeForce RTX 3090", 4),
        ("v2-8", "TPU v2", 8),  # 4 chips of 2 cores, each a device
        ("v3-32", "TPU v3", 32),
        ("v4-8", "TPU v4", 4),  # 4 chips of 2 cores, each chip a device
        ("v4-64", "TPU v4", 32),
        ("v5p-8", "TPU v5", 4),
        ("v5e-1", "TPU v5 lite", 1),
        ("v5e-8", "TPU v5 lite", 8),
        ("v6e-8", "TPU v6 lite", 8),
    ],
)
def test_devices(topology, target, device_kind, num_devices):
    devices = topology(target, 4)
    assert (devices[0].device_kind, len(devices)) == (device_kind, num_devices)


@pytest.mark.parametrize(
    "target, message",
    [
        ("a1000", "cannot compile for 'a1000'.*a100-80gb"),
        ("v4", "cannot compile"),
        ("v5e-7", "v5e comes as v5e-1, v5e-4"),
    ],
)
def test_unknown_targets(target, message):
    with pytest.raises(ValueError, match=message):
        aot.topology(target)


def test_memory_of_a_sharded_program_with_donation(topology):
    """w is donated, so its new value costs nothing; the gathered w and the activations are temporary.

    Seen to fail with `aliased` left out of `Memory.device`.
    """
    mesh = jax.sharding.Mesh(np.array(topology("a100-80gb", 4)), ("x",))
    w = jax.ShapeDtypeStruct((4096, 1024), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, jax.P("x")))
    x = jax.ShapeDtypeStruct((512, 4096), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, jax.P()))

    def step(w, x):
        gathered = jax.lax.with_sharding_constraint(w, jax.sharding.NamedSharding(mesh, jax.P()))
        return w - 1, jnp.tanh(x @ gathered)

    compiled = aot.compile_for(jax.jit(step, donate_argnums=0), w, x)
    memory = aot.memory(compiled)
    assert "all-gather" in compiled.as_text()
    assert memory.arguments == 1024 * 1024 * 4 + 512 * 4096 * 4
    assert memory.aliased == 1024 * 1024 * 4
    assert memory.temporaries >= 4096 * 1024 * 4
    new = 512 * 1024 * 4  # bytes of the second output; a tuple of outputs also has its pointers
    assert 0 <= memory.device - memory.arguments - memory.temporaries - new < 64
    assert memory.host == 0


def test_cudnn_is_asked_about_the_target_not_this_machine(topology):
    """Seen to fail without `_cudnn_of`: "cuDNN not found" here, and the limit of the local GPU elsewhere."""

    def compile_for(target):
        sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(topology(target)), ("x",)), jax.P())
        q = jax.ShapeDtypeStruct((1, 256, 2, 256), jnp.bfloat16, sharding=sharding)

        def attend(q):
            return jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn")

        return aot.compile_for(jax.jit(attend), q).as_text()

    with pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        compile_for("a100-80gb")
    assert "cudnn" in compile_for("h100")


def test_arguments_say_where():
    with pytest.raises(ValueError, match="shardings"):
        aot.compile_for(jax.jit(jnp.sin), jax.ShapeDtypeStruct((3,), jnp.float32))
