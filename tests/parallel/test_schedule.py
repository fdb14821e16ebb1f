"""What the compiled step communicates, when, and what it keeps: the program's text and the compiler's account.

CPU text by default; the same of the program for A100s (slow), as only that shows what a GPU would run.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpretrain import config as config_lib
from jaxpretrain import step as step_lib
from jaxpretrain.models import registry, transformer
from jaxpretrain.models.parameter import infos
from jaxpretrain.ops import attention
from jaxpretrain.parallel import remat
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.parallel.strategies import make_strategy
from jaxpretrain.plan import aot

_COLLECTIVES = "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"


def make_config(strategy: str, num_layers: int, accumulate: int, num_devices: int = 8, **overrides):
    config = config_lib.default()
    config.batch_size, config.seq_len, config.micro_batch_size = num_devices * accumulate, 8, 1
    config.model.update(dict(vocab_size=32, num_layers=num_layers, embed_dim=128, num_heads=4, parallel_residual=True))
    config.model.attention_bias = False  # its output's has the same gradient as the MLP's: XLA computes it once
    config.parallel.strategy, config.precision.compute = strategy, "float32"
    for key, value in overrides.items():
        config_lib.override(config, key.replace("__", "."), str(value))
    config_lib.check(config)
    return config


@functools.cache
def compile_step(*args, **overrides):
    config = make_config(*args, **overrides)
    mesh = make_mesh(config.parallel.strategy, jax.devices(), tensor=config.parallel.tensor)
    train_step = step_lib.make_train_step(config, mesh)
    return train_step, train_step.step.lower(train_step.state, train_step.batch).compile()


class Program:
    """`loops[name]`: collectives and their elements in that loop and what it calls; "" is what runs once a step."""

    def __init__(self, text: str):
        calls, self.own, name, entry = {}, {}, None, None
        for line in text.splitlines():
            header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
            if header:
                name = header[2]
                calls[name], self.own[name] = [], []
                entry = name if header[1] else entry
                continue
            line = re.sub(r"/\*.*?\*/", "", line.split(", metadata=")[0])
            instruction = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", line)
            if not instruction or name is None:
                continue
            shape, operation, rest = instruction.groups()
            called = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", rest)
            calls[name] += [(operation == "while", c) for c in called]
            operation = operation.removesuffix("-start")
            if operation in _COLLECTIVES:
                self.own[name].append((operation, _num_elements(shape)))
        self.loops = {"": self._inside(entry, calls)}
        for inner in calls.values():
            for is_loop, callee in inner:
                if is_loop:
                    self.loops[callee] = self._inside(callee, calls)

    def _inside(self, name, calls):
        """Collectives of a computation and those it calls, but not of loops within."""
        found = list(self.own[name])
        for is_loop, callee in calls[name]:
            if not is_loop:
                found += self._inside(callee, calls)
        return found

    def elements(self, loop: str, operation: str) -> int:
        return sum(count for name, count in self.loops[loop] if name == operation)

    def loops_with(self, operation: str) -> list[str]:
        return [loop for loop in self.loops if loop and self.elements(loop, operation)]


def _num_elements(shape: str) -> int:
    """Of all arrays in `f32[2,3]{1,0}`, or a tuple of such; of `(inputs, outputs)`, what "start" gives, the outputs."""
    shape = re.split(r"\), ?\(", shape)[-1]
    return sum(math.prod(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\w+\[([\d,]*)\]", shape))


def num_parameters(train_step) -> int:
    return sum(math.prod(p.shape) for p in jax.tree.leaves(train_step.state.params))


def num_layer_parameters(train_step) -> int:
    return sum(math.prod(p.shape[1:]) for p in jax.tree.leaves(train_step.state.params["layers"]))


# --- ddp


@pytest.mark.parametrize("accumulate", [1, 4])
def test_ddp_reduces_gradients_once_per_optimizer_step(accumulate):
    """Each gradient is in exactly one all-reduce, outside every loop, however many micro-batches there are.

    Fails if `reduce` moves into the accumulation (tried: psum of each micro-batch's gradients).
    """
    train_step, compiled = compile_step("ddp", 2, accumulate)
    program = Program(compiled.as_text())
    assert train_step.num_micro_batches == accumulate
    assert len(program.loops) >= 3  # forward and backward over layers, and what runs once
    # And the sums of losses, targets and tokens, of which the last two are the same here.
    assert program.elements("", "all-reduce") - num_parameters(train_step) in (2, 3)
    assert [loop for operation in _COLLECTIVES for loop in program.loops_with(operation)] == []
    assert program.elements("", "all-gather") == 0


# --- fsdp


def test_fsdp_gathers_one_layer_at_a_time_forward_and_backward():
    """Fails if the layers are gathered before the loop (tried: `strategy.gather` over all parameters)."""
    train_step, compiled = compile_step("fsdp", 4, 1)
    program = Program(compiled.as_text())
    layer = num_layer_parameters(train_step)
    kernels = 12 * 128 * 128
    gathering = program.loops_with("all-gather")
    forward = [loop for loop in gathering if not program.elements(loop, "reduce-scatter")]
    by_layer = [loop for loop in gathering if program.elements(loop, "all-gather") in range(kernels // 2, layer + 1)]
    assert len(by_layer) == 2 and set(forward) & set(by_layer)
    (backward,) = set(by_layer) - set(forward)
    assert program.elements(backward, "reduce-scatter") == layer // 8
    rest = num_parameters(train_step) - 4 * layer  # embedding, unembedding and the last norm
    assert program.elements("", "all-gather") == rest
    assert program.elements("", "reduce-scatter") == rest // 8
    # Nothing is reduced twice: what is left is the loss, the number of tokens, and the norm of the gradients.
    assert program.elements("", "all-reduce") < 50


def test_fsdp_keeps_no_gathered_weights():
    """Fails if gathered weights are kept for the backward (tried: `all_gather` or `reshape` out of `_RECOMPUTED`)."""
    temporaries = [compile_step("fsdp", n, 1)[1].memory_analysis().temp_size_in_bytes for n in (4, 8)]
    whole_layer = 4 * 12 * 128 * 128
    # A layer's accumulated gradient and its new one are an eighth each; its activations are of 8 tokens.
    assert (temporaries[1] - temporaries[0]) / 4 < 0.3 * whole_layer


# --- zero1 and zero2: of the parameters a copy is gathered once a step, in no loop.


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_zero_gathers_once_per_optimizer_step(strategy):
    """Fails if the copy is gathered for every micro-batch (tried: `gather_for_step` within the accumulation)."""
    train_step, compiled = compile_step(strategy, 2, 4)
    program = Program(compiled.as_text())
    assert program.elements("", "all-gather") == num_parameters(train_step)
    assert program.loops_with("all-gather") == []


def test_zero1_reduces_gradients_once_per_optimizer_step():
    """Fails if zero1 reduces each micro-batch's, as zero2 does (tried)."""
    train_step, compiled = compile_step("zero1", 2, 4)
    program = Program(compiled.as_text())
    assert program.elements("", "reduce-scatter") == num_parameters(train_step) // 8
    assert [loop for operation in _COLLECTIVES for loop in program.loops_with(operation)] == []
    assert program.elements("", "all-reduce") < 50  # of the loss, the number of tokens, and the gradients' norm


def test_zero2_reduces_each_micro_batch():
    """Fails if zero2 reduces once, as zero1 does (tried)."""
    train_step, compiled = compile_step("zero2", 2, 4)
    program = Program(compiled.as_text())
    (accumulation,) = program.loops_with("reduce-scatter")
    assert program.elements(accumulation, "reduce-scatter") == num_parameters(train_step) // 8
    assert program.elements("", "reduce-scatter") == 0


def test_hsdp_reduces_over_replicas_once_per_optimizer_step():
    """Within a replica it is fsdp; what each device has of the gradients goes over the replicas once.

    Fails if gradients are summed over the replicas in the backward (tried: `psum` in `reduce_micro_batch`).
    """
    train_step, compiled = compile_step("hsdp", 4, 2)
    program = Program(compiled.as_text())
    assert dict(train_step.mesh.shape) == {"replica": 2, "fsdp": 4, "tensor": 1}
    shards = sum(math.prod(p.sharding.shard_shape(p.shape)) for p in jax.tree.leaves(train_step.state.params))
    assert shards == num_parameters(train_step) // 4
    assert shards <= program.elements("", "all-reduce") < shards + 50
    assert program.loops_with("all-reduce") == []
    assert len(program.loops_with("reduce-scatter")) >= 2  # the layers', and the embeddings' of each micro-batch


# --- tensor


def test_tensor_splits_products_and_keeps_a_part_of_the_sequence():
    """Two devices share each layer: what a layer keeps for the backward halves, and no weights are gathered.

    Fails if the sequence is not split between blocks (tried: `split_sequence` returns x).
    """
    options = dict(seq_len=1024)
    whole, split = (
        [
            compile_step("ddp", n, 1, parallel__tensor=tensor, **options)[1].memory_analysis().temp_size_in_bytes
            for n in (2, 6)
        ]
        for tensor in (1, 2)
    )
    assert split[1] - split[0] < 0.6 * (whole[1] - whole[0])


# --- What a layer keeps


def grad_jaxpr(remat_name: str | None, compute_dtype=jnp.bfloat16) -> str:
    """Gradient of one block of a tiny model, whole on one device."""
    config = make_config("ddp", 1, 1)
    mesh = make_mesh("ddp", jax.devices()[:1])
    strategy = make_strategy("ddp", infos(registry.build(config)), mesh, compute_dtype)
    run_layers = remat.layer_runner(strategy, remat_name, True) if remat_name else transformer.scan_layers
    model = transformer.Transformer(config.model, 8, jax.random.key(0))
    graphdef, params = nnx.split(model)
    params = strategy.compute_copy(nnx.to_pure_dict(params))
    attend = functools.partial(attention.attend, implementation="blockwise")

    def loss(params):
        hidden = nnx.merge(graphdef, params).hidden(jnp.zeros((1, 8), jnp.int32), attend=attend, run_layers=run_layers)
        return hidden.astype(jnp.float32).sum()

    return str(jax.make_jaxpr(jax.grad(loss))(params))


def test_remat_none_computes_no_product_twice():
    """As many matrix products as without `jax.checkpoint`; `full` has those of the forward again.

    Fails if dot_general is in `_RECOMPUTED` (tried).
    """
    plain, none, full = (grad_jaxpr(name).count(" = dot_general[") for name in (None, "none", "full"))
    assert none == plain < full


@pytest.mark.parametrize(
    ("name", "repeated"),
    [("full:1", 1.0), ("dots", 0.4), ("names:query+key+value+attention+mlp_up", 0.0), ("offload:mlp_up", 0.9)],
)
def test_graded_remat_computes_less_again_than_full(name, repeated):
    """The share of full's repeated products, of the one layer here. dots repeats those of attention only; what is named
    spares all but the last of MLP and attention, whose results nothing in the backward reads."""
    plain, full, graded = (grad_jaxpr(remat).count(" = dot_general[") for remat in (None, "full", name))
    assert 0 <= (graded - plain) / (full - plain) <= repeated


def test_offloaded_activations_are_on_the_host():
    """Fails if the policy saves on the device (tried: save_only_these_names)."""
    assert "<host>" in grad_jaxpr("offload") and "<host>" in grad_jaxpr("offload:mlp_up")
    assert "<host>" not in grad_jaxpr("names:mlp_up")


def test_remat_none_keeps_little():
    """Per token and layer: input, queries, keys, values, attention's output and the MLP before its activation.

    Fails if a norm's or gelu's pieces are kept, or the scores of blockwise attention (tried: `mul`, or no `name`).
    """
    options = dict(seq_len=1024, precision__compute="float32")
    temporaries = [compile_step("ddp", n, 1, **options)[1].memory_analysis().temp_size_in_bytes for n in (2, 6)]
    gradients = 2 * 4 * 12 * 128 * 128  # of the layer: new and accumulated
    activations = 1024 * 4 * (5 * 128 + 512)
    assert (temporaries[1] - temporaries[0]) / 4 < gradients + 1.1 * activations


# --- A real accelerator's program


@pytest.mark.slow
def test_schedules_compiled_for_gpus(topology):
    """The same on 4 A100s, in bfloat16 with cuDNN's attention: XLA for GPUs has passes of its own."""
    devices = topology("a100-80gb", 4)
    options = dict(seq_len=1024, model__embed_dim=512, precision__compute="bfloat16")

    def compiled(strategy, num_layers, accumulate):
        config = make_config(strategy, num_layers, accumulate, 4, **options)
        train_step = step_lib.make_train_step(config, make_mesh(strategy, devices))
        assert train_step.attention.name == "cudnn"
        return train_step, aot.compile_for(train_step.step, train_step.state, train_step.batch)

    train_step, program = compiled("ddp", 2, 4)
    program = Program(program.as_text())
    assert program.elements("", "all-reduce") - num_parameters(train_step) in (2, 3)
    assert [loop for operation in _COLLECTIVES for loop in program.loops_with(operation)] == []

    train_step, four = compiled("fsdp", 4, 2)
    program = Program(four.as_text())
    kernels = 12 * 512 * 512
    # XLA may fetch the first layer ahead of its loop, never more than one.
    layer = num_layer_parameters(train_step)
    gathered = {loop: program.elements(loop, "all-gather") for loop in program.loops}
    assert len([n for n in gathered.values() if n >= kernels]) >= 2
    assert max(gathered.values()) <= layer + num_parameters(train_step) - 4 * layer
    assert sum(program.elements(loop, "reduce-scatter") for loop in program.loops) >= kernels // 4
    _, eight = compiled("fsdp", 8, 2)
    growth = (aot.memory(eight).temporaries - aot.memory(four).temporaries) / 4
    # Input, queries, keys, values, attention's output and four widths of MLP; then of each shard the compute copy, a
    # micro-batch's gradient and the accumulated one. Gathered weights would be 2 bytes times all kernels more.
    activations = 1024 * 2 * 512 * 9
    assert growth < 1.2 * activations + (2 + 2 + 4) * kernels / 4


@pytest.mark.slow
def test_zero_compiled_for_tpus(topology):
    """The compiler for TPUs moves reductions out of loops where it can; zero2's must stay."""
    devices = topology("v4-8")
    programs = {}
    for strategy in ("zero1", "zero2"):
        config = make_config(
            strategy, 4, 2, 4, seq_len=1024, model__embed_dim=512, model__vocab_size=4096, precision__compute="bfloat16"
        )
        train_step = step_lib.make_train_step(config, make_mesh(strategy, devices))
        programs[strategy] = Program(aot.compile_for(train_step.step, train_step.state, train_step.batch).as_text())
        assert programs[strategy].elements("", "all-gather") >= num_parameters(train_step) - 10_000
        assert programs[strategy].loops_with("all-gather") == []
    reducing = ("reduce-scatter", "all-reduce")  # libtpu turns some of the first, small ones, into the second
    assert [loop for operation in reducing for loop in programs["zero1"].loops_with(operation)] == []
    (accumulation,) = programs["zero2"].loops_with("reduce-scatter")
    kernels = 4 * 12 * 512 * 512
    assert 4 * programs["zero2"].elements(accumulation, "reduce-scatter") > kernels
    assert programs["zero2"].elements("", "reduce-scatter") == 0
