"""Pythia-1B's whole training step, compiled for accelerators that are not here.

All are slow: a compile takes one to four minutes on two cores.
"""

import re

import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.plan import aot
from jaxpretrain.step import make_train_step

pytestmark = pytest.mark.slow

SEQ_LEN = 4608  # a number that no width or shard of the model is


def compile_step(devices, attention: str = "auto"):
    overrides = [
        ("kernels.attention", attention),
        ("seq_len", str(SEQ_LEN)),
        ("batch_size", "8"),
        ("micro_batch_size", "1"),
        ("parallel.strategy", "fsdp"),
        ("parallel.remat", "full"),
        ("data.source", "synthetic"),
    ]
    config = config_lib.load("configs/pythia1b.py", overrides)
    train_step = make_train_step(config, make_mesh("fsdp", devices))
    compiled = aot.compile_for(train_step.step, train_step.state, train_step.batch)
    print(f"{train_step.attention.why}; {aot.memory(compiled)}")
    return train_step, compiled


def square_buffers(compiled) -> list[str]:
    """Shapes in the program that hold a score for each pair of positions."""
    return re.findall(rf"\w+\[(?:\d+,)*{SEQ_LEN},{SEQ_LEN}\]", compiled.as_text())


@pytest.mark.parametrize(
    ("target", "count", "attention"),
    [
        ("a100-80gb", 4, "pallas"),  # cuDNN takes no head_dim 256 on Ampere
        ("h100", 4, "cudnn"),
        ("v3-8", 1, "blockwise"),  # no kernel for bfloat16
        ("v4-8", 1, "splash"),
        ("v5e-8", 1, "splash"),
    ],
)
def test_pythia1b_compiles_without_quadratic_memory(topology, target, count, attention):
    """Fails if `select` falls back to `xla` for one of these, which the control below shows would be seen."""
    train_step, compiled = compile_step(topology(target, count))
    assert train_step.attention.name == attention
    assert square_buffers(compiled) == []
    memory = aot.memory(compiled)
    # Masters and moments of a billion parameters over the shards, and less than plain scores would take.
    num_devices = train_step.mesh.size
    assert memory.arguments == pytest.approx(12 * 1.0118e9 / num_devices, rel=0.01)
    assert memory.temporaries < 8 * 2**30


def test_plain_attention_is_quadratic(topology):
    """The control of the test above."""
    _, compiled = compile_step(topology("a100-80gb", 4), "xla")
    assert square_buffers(compiled)
