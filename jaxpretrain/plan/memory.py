"""Bytes that a training step holds on each device, by arithmetic: nothing is allocated or compiled.

The state is exact. What a step needs beside it is what the forward keeps for the backward, which follows from the model
(plan/work.py), and the compiler's working set: a few multiples, fitted to what the compilers themselves report
(docs/benchmarks/memory.md, `tools/calibrate.py memory`).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxpretrain.losses import CHUNK_BYTES
from jaxpretrain.models import registry
from jaxpretrain.models.parameter import Info, infos
from jaxpretrain.parallel.offload import on_host
from jaxpretrain.parallel.strategies import Strategy, make_strategy
from jaxpretrain.plan.layout import Layout
from jaxpretrain.plan.work import Stack, Work
from jaxpretrain.step import TrainState, lay_out, shapes_of_state


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes per device, wherever they are kept, of all that is as large as the parameters."""

    params: int  # the float32 masters
    optimizer: int
    averages: int
    gradients: int  # float32, accumulated over micro-batches
    micro_batch_gradients: int  # of one of them, in compute precision, before they are accumulated
    compute_copy: int  # the parameters in compute precision, as they stay during a step
    undonated: int  # the first three again, where `parallel.donate` is False
    host: int  # of the first three, in the host's memory

    @property
    def device(self) -> int:
        return sum(dataclasses.astuple(self)) - 2 * self.host


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Parameters and state of a config, not laid out yet."""

    infos: dict[str, Any]
    state: TrainState  # of jax.ShapeDtypeStruct
    compute_dtype: jnp.dtype
    donate: bool
    whole_logits: bool  # `kernels.cross_entropy=whole`

    @classmethod
    def of(cls, config: ConfigDict) -> "Shapes":
        """Of a checked config; its `parallel.strategy`, `tensor` and `offload` do not matter."""
        model_infos = infos(registry.build(config))
        return cls(
            infos=model_infos,
            state=shapes_of_state(config, model_infos),
            compute_dtype=jnp.dtype(config.precision.compute),
            donate=config.parallel.donate,
            whole_logits=config.kernels.cross_entropy == "whole",
        )

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Numbers of parameters, by their outermost key: stacks and what is not stacked."""
        leaves = {name: jax.tree.leaves(subtree) for name, subtree in self.infos.items()}
        return {name: sum(math.prod(info.shape) for info in infos) for name, infos in leaves.items()}

    def state_bytes(self, strategy_name: str, mesh: Mesh | AbstractMesh, offload: str) -> StateBytes:
        """Of `parallel.strategy` on a mesh made for it, with `parallel.offload`."""
        strategy = make_strategy(strategy_name, self.infos, mesh, self.compute_dtype)
        state = lay_out(self.state, strategy, offload)
        parts = {"params": state.params, "optimizer": state.opt_state, "averages": state.averages}
        sizes = {name: _total(part) for name, part in parts.items()}
        host = _total([leaf for leaf in jax.tree.leaves(state) if on_host(leaf.sharding)])
        # What a copy is gathered as, its gradient comes as: whole, or sharded where layers are gathered one by one.
        compute_copy = _total(_during_step(self, strategy, strategy.copy_specs, strategy.dtypes))
        float32 = jax.tree.map(lambda _: jnp.dtype(jnp.float32), self.infos)
        return StateBytes(
            **sizes,
            gradients=_total(_during_step(self, strategy, strategy.gradient_specs, float32)),
            micro_batch_gradients=compute_copy,
            compute_copy=compute_copy,
            undonated=0 if self.donate else sum(sizes.values()) - host,
            host=host,
        )


def state_bytes(config: ConfigDict, mesh: Mesh) -> StateBytes:
    """Of a checked config on a mesh from `make_mesh`."""
    return Shapes.of(config).state_bytes(config.parallel.strategy, mesh, config.parallel.offload)


def _during_step(shapes: Shapes, strategy: Strategy, specs: Any, dtypes: Any) -> Any:
    def leaf(info: Info, spec: PartitionSpec, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(info.shape, dtype, sharding=NamedSharding(strategy.mesh, spec))

    return jax.tree.map(leaf, shapes.infos, specs, dtypes)


@dataclasses.dataclass(frozen=True)
class PeakBytes:
    """What a device holds at once during a step, but for what the runtime itself takes."""

    state: StateBytes
    kept: int  # results of the forward, for the backward of one micro-batch
    working: int  # the compiler's temporaries

    @property
    def device(self) -> int:
        return self.state.device + self.kept + self.working


# Multiples of the sizes that `working_sizes` names, fitted to the compilers' reports. A TPU's compiler holds more
# float32 at once, and gathers ahead.
GPU = dict(layer_kept=1.76, logits=0.58, gathered=3.96, recomputed=0.22, loop=0.03, streamed=0.62, split_stack=2.49)
TPU = dict(
    layer_kept=4.94,
    gathered=2.00,
    gathered_outside=1.73,
    recomputed=1.56,
    loop=0.02,
    streamed=3.39,
    compute_copy=0.52,
    padded_heads=0.99,
    whole_gradients=0.70,
)


def peak_bytes(shapes: Shapes, work: Work, state: StateBytes, layout: Layout, is_tpu: bool) -> PeakBytes:
    """Of the training step of a config, on a TPU or a GPU. `state` is of the same layout."""
    multiples = TPU if is_tpu else GPU
    sizes = working_sizes(shapes, work, state, layout)
    kept = sum(_kept_bytes(stack, layout.remat) for stack in work.stacks) * layout.micro_batch_size // layout.tensor
    return PeakBytes(
        state=state,
        kept=kept,
        working=round(sum(multiple * sizes[name] for name, multiple in multiples.items())),
    )


def working_sizes(shapes: Shapes, work: Work, state: StateBytes, layout: Layout) -> dict[str, int]:
    """Bytes that temporaries are multiples of."""
    remat = layout.remat.partition(":")[0]
    rows = layout.micro_batch_size
    largest = max(stack.kept["none"] for stack in work.stacks) * rows // layout.tensor
    is_gathered = layout.strategy in ("fsdp", "hsdp") and layout.mesh.shape["fsdp"] > 1
    stacks = {stack.name: stack.num_layers for stack in work.stacks}
    copy = {name: shapes.compute_dtype.itemsize * size // layout.tensor for name, size in shapes.sizes.items()}
    layer = max(copy[name] // num_layers for name, num_layers in stacks.items())
    outside = sum(size for name, size in copy.items() if name not in stacks)
    logits = 4 * rows * work.num_targets * work.vocab_size // layout.tensor
    gradients = 4 * sum(shapes.sizes.values()) // layout.tensor
    width = shapes.compute_dtype.itemsize

    def padded(stack: Stack) -> int:
        return _kept_layers(stack, layout.remat) * _head_padding(stack)

    return {
        "layer_kept": largest,  # what one layer makes, in its backward
        "logits": logits if shapes.whole_logits else min(logits, CHUNK_BYTES),
        "gathered": is_gathered * layer,
        "gathered_outside": is_gathered * outside,  # embeddings and the like, in compute precision
        "recomputed": (remat in ("full", "offload")) * largest,
        "loop": (remat == "full") * 4 * rows * max(stack.loop_numbers for stack in work.stacks),
        "streamed": (layout.offload != "none") * layer,  # state on its way from and to the host
        "split_stack": (remat == "full" and ":" in layout.remat) * layer,
        "compute_copy": state.compute_copy,
        "padded_heads": width * rows * sum(map(padded, work.stacks)) // layout.tensor,
        "whole_gradients": (layout.strategy in ("ddp", "zero1")) * gradients,
    }


def _kept_bytes(stack: Stack, remat: str) -> int:
    """Of one row, on the device: all layers' results that stay for the backward, by `parallel.remat`."""
    kind = remat.partition(":")[0]
    if kind == "offload":
        return 0
    if kind == "full":
        whole = _kept_layers(stack, remat)
        return whole * stack.kept["none"] + (stack.num_layers - whole) * stack.kept["full"]
    return stack.num_layers * stack.kept[remat]


def _kept_layers(stack: Stack, remat: str) -> int:
    """Layers of which the results of attention stay: with none and dots all, with `full:K` all but K."""
    kind, _, argument = remat.partition(":")
    if kind == "full":
        return max(0, stack.num_layers - int(argument)) if argument else 0
    return stack.num_layers if kind in ("none", "dots") else 0


def _head_padding(stack: Stack) -> int:
    """Numbers per row that TPUs add to queries, keys, values and output of heads narrower than their 128 lanes."""
    if not stack.attention_numbers:
        return 0
    return stack.attention_numbers * (-stack.head_dim % 128) // stack.head_dim


def bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Of an array with a sharding."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _total(tree: Any) -> int:
    return sum(map(bytes_per_device, jax.tree.leaves(tree)))
