"""`micro_batch_size=auto`, with a compiler and a device that say what they are told to."""

import types

import jax
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain import micro_batch
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.plan.layout import Layout
from jaxpretrain.plan.memory import Shapes, peak_bytes, state_bytes
from jaxpretrain.plan.work import trace

_OUT_OF_MEMORY = [
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes.",
    "RESOURCE_EXHAUSTED: TPU backend error: Ran out of memory in memory space hbm. Used 17.1G of 15.75G hbm. "
    "Exceeded hbm capacity by 1.4G.",
    "INTERNAL: Failed to allocate 12345 bytes for new constant",
    "XLA:TPU compile permanent error. Program size exceeds available HBM (15.75G)",
]


@pytest.fixture
def config():
    config = config_lib.default()
    config.batch_size = 96  # 12 sequences for each of 8 devices
    config.seq_len = 16
    config.model.update(num_layers=1, embed_dim=16, num_heads=2)
    config_lib.check(config)
    return config


@pytest.fixture
def compiler(monkeypatch):
    """compiler(largest, message): micro-batches up to `largest` compile; returns the list of those tried."""

    def compiler(largest, message=_OUT_OF_MEMORY[0], memory=2**40):
        tried = []

        def compile(train_step, _):
            size = 12 // train_step.num_micro_batches
            tried.append(size)
            if size > largest:
                raise jax.errors.JaxRuntimeError(message)
            return f"program of {size}"

        monkeypatch.setattr(micro_batch, "_compile", compile)
        monkeypatch.setattr(micro_batch, "device_memory", lambda device: memory)
        monkeypatch.setattr(micro_batch, "_fits", lambda compiled, device: True)
        return tried

    return compiler


def test_largest_divisor_and_frozen(config, compiler):
    tried = compiler(largest=12)
    train_step, compiled = micro_batch.make_fitting_step(config, make_mesh("ddp"))
    assert (config.micro_batch_size, train_step.num_micro_batches, compiled) == (12, 1, "program of 12")
    assert tried == [12]
    config_lib.check(config)
    assert config_lib.from_json(config_lib.to_json(config)).micro_batch_size == 12

    config.micro_batch_size = 3  # what is frozen is not chosen again
    _, compiled = micro_batch.make_fitting_step(config, make_mesh("ddp"))
    assert (config.micro_batch_size, compiled, tried) == (3, "program of 3", [12, 3])


@pytest.mark.parametrize("message", _OUT_OF_MEMORY)
def test_steps_down_when_the_compiler_runs_out_of_memory(config, compiler, message):
    """Fails if one of the wordings is not recognised."""
    tried = compiler(largest=5, message=message)
    train_step, _ = micro_batch.make_fitting_step(config, make_mesh("ddp"))
    assert (config.micro_batch_size, train_step.num_micro_batches, tried) == (4, 3, [12, 6, 4])


def test_other_compiler_errors_are_not_swallowed(config, compiler):
    compiler(largest=5, message="INTERNAL: ptxas died")
    with pytest.raises(jax.errors.JaxRuntimeError, match="ptxas"):
        micro_batch.make_fitting_step(config, make_mesh("ddp"))


def test_nothing_fits(config, compiler):
    tried = compiler(largest=0)
    with pytest.raises(ValueError, match=r"^one sequence of 16 tokens .*set parallel\.remat=full.*fsdp[^\n]*$"):
        micro_batch.make_fitting_step(config, make_mesh("ddp"))
    assert tried == [12, 6, 4, 3, 2, 1]


def test_arithmetic_starts_where_memory_allows(config, compiler):
    """Fails if `_candidates` offers all divisors."""
    shapes, state = Shapes.of(config), state_bytes(config, make_mesh("ddp"))
    needed = {
        size: peak_bytes(shapes, trace(config), state, Layout(num_devices=8, micro_batch_size=size), False).device
        for size in (3, 4)
    }
    tried = compiler(largest=12, memory=(needed[3] + needed[4]) / 2 / micro_batch.USABLE)
    micro_batch.make_fitting_step(config, make_mesh("ddp"))
    assert tried == [3]
    compiler(largest=12, memory=1)  # nothing should fit by arithmetic: the compiler decides about one sequence
    with config.ignore_type():
        config.micro_batch_size = "auto"
    micro_batch.guess_micro_batch_size(config, make_mesh("ddp"))
    assert config.micro_batch_size == 1


def test_compiled_memory_is_compared_with_the_device(monkeypatch):
    """Arguments, outputs that are not donated arguments, and temporaries."""
    monkeypatch.setattr(micro_batch, "device_memory", lambda device: 1000)
    device = types.SimpleNamespace(platform="gpu")

    def fits(arguments, outputs, alias, temporaries):
        report = types.SimpleNamespace(
            argument_size_in_bytes=arguments,
            output_size_in_bytes=outputs,
            alias_size_in_bytes=alias,
            temp_size_in_bytes=temporaries,
        )
        return micro_batch._fits(types.SimpleNamespace(memory_analysis=lambda: report), device)

    assert fits(500, 500, 500, 470)
    assert not fits(500, 500, 500, 471)
    assert not fits(500, 500, 0, 0)


def test_device_memory_of_a_fake_cpu_device():
    assert 0 < micro_batch.device_memory(jax.devices()[0]) < 2**43
