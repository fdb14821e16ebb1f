"""What the forward of one sequence or image consists of, read off the model that trains: nothing is run or compiled.

The objective is traced abstractly with a `run_layers` of its own, which looks at one block of each stack: its products,
its attention, and, per `parallel.remat`, how much of it is kept for the backward. So a new family of models needs
nothing here.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr, JaxprEqn
from ml_collections import ConfigDict

from jaxpretrain.models import registry
from jaxpretrain.models.parameter import infos
from jaxpretrain.objectives import make_objective
from jaxpretrain.ops import attention
from jaxpretrain.ops.dropout import row_keys
from jaxpretrain.parallel.remat import saved_by
from jaxpretrain.parallel.strategies import compute_dtypes


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or a convolution, of one row. `depth` is what each output sums over."""

    flops: int
    depth: int
    width: int  # outputs per position
    numbers: int  # of its activations: operands that are no parameters, and the result


@dataclasses.dataclass(frozen=True)
class Stack:
    """One layer of a stack; all numbers are of one row, in the forward."""

    name: str
    num_layers: int
    products: tuple[Product, ...]
    attention_flops: int  # causal attention counted once
    attention_numbers: int  # of queries, keys, values and output; 0: there is none
    head_dim: int
    loop_numbers: int  # written within loops that are no products (a selective scan)
    input_bytes: int
    kept: dict[str, int]  # `parallel.remat` -> bytes kept for the backward, on the device or the host


@dataclasses.dataclass(frozen=True)
class Work:
    stacks: tuple[Stack, ...]
    outside: tuple[Product, ...]  # embeddings of patches, downsampling, heads
    num_targets: int  # of the loss, per row of the batch
    vocab_size: int  # logits of each target
    num_tokens: int  # what one row of the batch counts as
    num_params: int

    @property
    def forward_flops(self) -> int:
        return sum(p.flops for p in self.outside) + sum(
            stack.num_layers * (stack.attention_flops + sum(p.flops for p in stack.products)) for stack in self.stacks
        )


def trace(config: ConfigDict) -> Work:
    """The work of a checked config, whatever its micro_batch_size and layout, but for `parallel.remat=names:...`."""
    remats = ("none", "full", "dots", *([config.parallel.remat] if config.parallel.remat.startswith("names:") else []))
    config = config.copy_and_resolve_references()
    with config.ignore_type():
        config.micro_batch_size = 1
    compute_dtype = jnp.dtype(config.precision.compute)
    model = registry.build(config)
    objective, stacks, attended = make_objective(config), [], []
    graphdef, _ = nnx.split(model)
    causal = config.model.family == "decoder"

    def attend_marked(q, k, v, segment_ids):
        """Costs nothing, and is seen."""
        num_rows, num_queries, num_heads, head_dim = q.shape
        flops = 4 * num_rows * num_queries * k.shape[1] * num_heads * head_dim
        attended.append((flops // 2 if causal else flops, 2 * q.size + k.size + v.size, head_dim))
        return q

    def run_layers(block: Callable, layers: Any, x: jax.Array, stack: str) -> jax.Array:
        one = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), layers)
        num_layers, index = jax.tree.leaves(layers)[0].shape[0], jax.ShapeDtypeStruct((), jnp.int32)
        attended.clear()
        jaxpr = jax.make_jaxpr(block)(one, x, index).jaxpr
        attention_flops, attention_numbers, head_dim = attended[-1] if attended else (0, 0, 0)
        stacks.append(
            Stack(
                name=stack,
                num_layers=num_layers,
                products=tuple(_products(jaxpr, _sizes(one))),
                attention_flops=attention_flops,
                attention_numbers=attention_numbers,
                head_dim=head_dim,
                loop_numbers=_loop_numbers(jaxpr),
                input_bytes=x.size * x.dtype.itemsize,
                kept={},
            )
        )
        return x

    writes_scores = config.kernels.attention == "xla"
    attend_kept = functools.partial(
        attention.attend, implementation="xla" if writes_scores else "blockwise", causal=causal
    )

    def measure_kept(block: Callable, layers: Any, x: jax.Array, stack: str) -> jax.Array:
        one = jax.tree.map(lambda p: jnp.zeros(p.shape[1:], p.dtype), layers)
        place = next(i for i, s in enumerate(stacks) if s.name == stack)
        kept = {remat: _kept_bytes(block, saved_by(remat), one, x) for remat in remats}
        stacks[place] = dataclasses.replace(stacks[place], kept=kept)
        return x

    def forward(params: Any, batch: Any, attend: Callable, run_layers: Callable) -> Any:
        keys = row_keys(0, 0, jnp.arange(1)) if config.model.dropout or config.model.drop_path else None
        whole = nnx.merge(graphdef, params)
        return objective.sums(whole, batch, True, attend=attend, run_layers=run_layers, keys_B=keys)["loss"]

    described = infos(model)
    params = jax.tree.map(
        lambda info, dtype: jax.ShapeDtypeStruct(info.shape, dtype), described, compute_dtypes(described, compute_dtype)
    )
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), objective.arrays)
    # Attention that writes its scores out is two products like any other.
    attend = attend_kept if writes_scores else attend_marked
    jaxpr = jax.make_jaxpr(functools.partial(forward, attend=attend, run_layers=run_layers))(params, batch).jaxpr
    jax.eval_shape(functools.partial(forward, attend=attend_kept, run_layers=measure_kept), params, batch)
    is_text = "tokens" in objective.arrays
    return Work(
        stacks=tuple(stacks),
        outside=tuple(_products(jaxpr, _sizes(params))),
        num_targets=objective.num_targets,
        vocab_size=config.model.vocab_size if is_text else config.model.image.num_classes,
        num_tokens=config.seq_len if is_text else 1,
        num_params=sum(math.prod(info.shape) for info in jax.tree.leaves(described)),
    )


def _sizes(params: Any) -> frozenset[tuple[int, ...]]:
    """Shapes that are parameters', also as `Linear` flattens them: [in, out] with several dims of either made one."""
    shapes = set()
    for p in jax.tree.leaves(params):
        shapes |= {p.shape, p.shape[::-1]}
        shapes |= {(math.prod(p.shape[:i]), math.prod(p.shape[i:])) for i in range(1, len(p.shape))}
    return frozenset(shapes)


def _equations(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """All of a program's, with how often each is run."""
    for eqn in jaxpr.eqns:
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        bodies = [b for b in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_program) if _is_program(b)]
        yield eqn, times
        for body in bodies:
            yield from _equations(getattr(body, "jaxpr", body), inner)


def _is_program(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def _products(jaxpr: Jaxpr, parameter_shapes: frozenset) -> Iterator[Product]:
    for eqn, times in _equations(jaxpr):
        name = eqn.primitive.name
        if name not in ("dot_general", "conv_general_dilated"):
            continue
        a, b = (operand.aval for operand in eqn.invars[:2])
        out = eqn.outvars[0].aval
        if name == "dot_general":
            (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
            depth = math.prod(a.shape[d] for d in contracted)
            width = out.shape[-1]
        else:  # the kernel's window and input channels, of one group
            depth, width = math.prod(b.shape) // out.shape[-1], out.shape[-1] // eqn.params["feature_group_count"]
        activations = out.size + sum(x.size for x in (a, b) if x.shape not in parameter_shapes)
        yield Product(2 * times * out.size * depth, depth, width, times * activations)


def _loop_numbers(jaxpr: Jaxpr) -> int:
    """Results of what is computed elementwise within loops."""
    inside = 0
    for eqn, times in _equations(jaxpr):
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            inside += times * eqn.params["length"] * sum(out.aval.size for e in body.eqns for out in e.outvars)
    return inside


def _kept_bytes(block: Callable, policy: Callable, layer: Any, x: jax.Array) -> int:
    """Of the residuals of a block, its parameters and what all layers share left out."""
    index = jnp.zeros((), jnp.int32)
    converted, shared = jax.closure_convert(block, layer, x, index)
    run = jax.checkpoint(converted, policy=policy)
    backward = jax.eval_shape(lambda layer, x: jax.vjp(lambda p, x: run(p, x, index, *shared), layer, x)[1], layer, x)
    left_out = Counter((leaf.shape, leaf.dtype) for leaf in [*jax.tree.leaves(layer), *shared, index])
    total = 0
    for leaf in jax.tree.leaves(backward):
        key = leaf.shape, leaf.dtype
        if left_out[key]:
            left_out[key] -= 1
        else:
            total += leaf.size * leaf.dtype.itemsize
    return total
