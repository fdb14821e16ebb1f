"""Pythia-1B's whole training step, compiled for accelerators that are not here.

Those of the real size are slow: a compile takes up to four minutes on two cores.
"""

import re

import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.plan import aot
from jaxpretrain.step import make_train_step

SEQ_LEN = 4608  # a number that no width or shard of the model is


def compile_step(devices, attention: str = "auto", **more: str):
    overrides = [
        ("kernels.attention", attention),
        ("seq_len", str(SEQ_LEN)),
        ("batch_size", "8"),
        ("micro_batch_size", "1"),
        ("parallel.strategy", "fsdp"),
        ("parallel.remat", "full"),
        ("data.source", "synthetic"),
        *more.items(),
    ]
    config = config_lib.load("configs/pythia1b.py", overrides)
    train_step = make_train_step(config, make_mesh("fsdp", devices))
    compiled = aot.compile_for(train_step.step, train_step.state, train_step.batch)
    print(f"{train_step.attention.why}; {aot.memory(compiled)}")
    return train_step, compiled


def square_buffers(compiled) -> list[str]:
    """Shapes in the program that hold a score for each pair of positions."""
    return re.findall(rf"\w+\[(?:\d+,)*{SEQ_LEN},{SEQ_LEN}\]", compiled.as_text())


def test_accumulation_compiles_for_a_tpu(topology):
    """Two layers of an eighth of the width. Fails without the barrier in step.py's `accumulate`: libtpu's pass that
    moves reductions out of loops stops on the embeddings' reduce-scatters."""
    small = {"model.num_layers": "2", "model.embed_dim": "256", "model.num_heads": "1", "model.vocab_size": "1024"}
    train_step, compiled = compile_step(topology("v4-8"), **small)
    assert train_step.num_micro_batches == 2
    assert "reduce-scatter" in compiled.as_text()


@pytest.mark.slow
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


@pytest.mark.slow
def test_plain_attention_is_quadratic(topology):
    """The control of the test above."""
    _, compiled = compile_step(topology("a100-80gb", 4), "xla")
    assert square_buffers(compiled)
