"""What is said to be on the host is there: of compiled programs for GPUs and TPUs that are not here."""

import dataclasses
import math
import re
import types

import jax
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.parallel import offload
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.plan import aot
from jaxpretrain.plan.memory import state_bytes
from jaxpretrain.step import make_train_step

SEQ_LEN, EMBED_DIM, NUM_LAYERS = 1024, 512, 4


def compile_step(devices, **parallel):
    config = config_lib.default()
    config.batch_size, config.seq_len, config.micro_batch_size = 2 * len(devices), SEQ_LEN, 1
    config.model.update(dict(vocab_size=4096, num_layers=NUM_LAYERS, embed_dim=EMBED_DIM, num_heads=4))
    config.parallel.update(dict(strategy="fsdp", remat="full") | parallel)
    config_lib.check(config)
    train_step = make_train_step(config, make_mesh("fsdp", devices))
    compiled = aot.compile_for(train_step.step, train_step.state, train_step.batch)
    return config, train_step, compiled


def num_overlapped(text: str) -> tuple[int, int]:
    """Of the copies that begin in the host's memory or end there: how many have other work between start and end."""
    starts, copies, overlapped = {}, 0, 0
    for number, line in enumerate(text.splitlines()):
        if match := re.match(r"\s+%?([\w.\-]+-start[\w.\-]*) = .*S\(5\)", line):
            starts[match[1]] = number
        elif match := re.match(r"\s+%?[\w.\-]+-done[\w.\-]* = .*?\(.*?%?([\w.\-]+-start[\w.\-]*)\)", line):
            if match[1] in starts:
                copies += 1
                overlapped += number > starts[match[1]] + 1
    return copies, overlapped


@pytest.mark.slow
@pytest.mark.parametrize(("target", "count"), [("a100-80gb", 4), ("v4-8", 4)])
def test_state_and_activations_leave_the_device(topology, target, count):
    """The host holds the state and the layers' inputs, once; the device has as much less of the state; copies overlap.

    Fails if the update's loop has the state as `xs` and `ys` of a scan (tried: twice the state on the host), and, on
    GPUs, if JAX drops the memory kinds (tried: `with_memory_kind` in place of `to_host`).
    """
    devices = topology(target, count)
    _, _, plain = compile_step(devices)
    config, train_step, compiled = compile_step(devices, offload="optimizer+params", remat="offload")
    offload.check(compiled, train_step.state, activations=True)
    with pytest.raises(ValueError, match="^parallel.offload: the compiler left [0-9]+ of the step's arguments on the"):
        offload.check(plain, train_step.state, activations=False)
    host = state_bytes(config, train_step.mesh).host
    inputs = NUM_LAYERS * SEQ_LEN * EMBED_DIM * 2
    found, before = aot.memory(compiled), aot.memory(plain)
    assert host + inputs <= found.host < 1.01 * (host + inputs)
    assert found.arguments + found.outputs - found.aliased < 0.05 * host
    # A layer's masters and moments pass through the device, a few at a time.
    assert before.device - found.device > 0.6 * host
    copies, overlapped = num_overlapped(compiled.as_text())
    assert copies > 20 and overlapped > 0.5 * copies


def test_a_program_that_keeps_it_on_the_device_is_refused():
    config = config_lib.default()
    config.batch_size, config.micro_batch_size, config.seq_len = 1, 1, 16
    config.parallel.offload = "optimizer"
    train_step = make_train_step(config, make_mesh("ddp", jax.devices()[:1]))
    on_host = sum(offload.on_host(x.sharding) for x in jax.tree.leaves(train_step.state))
    assert on_host == 2 * sum(
        math.prod(x.shape) > 0 and len(x.shape) - stacked >= 2
        for x, stacked in zip(
            jax.tree.leaves(train_step.state.params), jax.tree.leaves(train_step.strategy.stacked), strict=True
        )
    )

    def program(num_arguments: int, num_results: int):
        arguments, results = (", ".join(["f32[2]{0:S(5)}"] * n) for n in (num_arguments, num_results))
        text = f"HloModule step, entry_computation_layout={{({arguments})->({results})}}, num_partitions=4"
        return types.SimpleNamespace(as_text=lambda: text)

    offload.check(program(on_host, on_host), train_step.state, activations=False)
    for what, numbers in (("arguments", (on_host - 1, on_host)), ("results", (on_host, on_host - 1))):
        with pytest.raises(ValueError, match=f"the compiler left 1 of the step's {what} on the device, of {on_host}"):
            offload.check(program(*numbers), train_step.state, activations=False)
    nothing = dataclasses.replace(train_step.state, opt_state=None)
    offload.check(program(0, 0), nothing, activations=False)
