"""Parts of the training state in the host's memory, and the update that streams them through the device.

`parallel.offload` names the parts, joined by `+`: `optimizer` (what it keeps of the parameters), `averages` of the
weights, and `params`, the float32 masters. They live in pinned host memory, sharded as they would be on the device. The
step brings one layer at a time to the device, updates it, and writes it back in place; the copies are asynchronous, and
the host needs no second copy of anything. Of masters on the host the device holds the copy in compute precision, made
in the same way.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxpretrain.models.parameter import owner

HOST = "pinned_host"


def fields(offload: str) -> frozenset[str]:
    """The fields of the TrainState that `parallel.offload` moves to the host."""
    names = {"optimizer": "opt_state", "params": "params", "averages": "averages"}
    return frozenset(names[part] for part in offload.split("+") if part != "none")


def hosted(state: Any, stacked: Any, offload: str) -> Any:
    """Whether each leaf of an abstract TrainState belongs on the host: matrices of the named parts do.

    Vectors are small, and a TPU cannot fetch one layer's of a stack. `stacked`, with the structure of the parameters,
    says which of them stack layers.
    """
    names, of_parameter = fields(offload), dict(jax.tree_util.tree_leaves_with_path(stacked))

    def leaf(path: tuple, x: jax.ShapeDtypeStruct) -> bool:
        parameter = owner(path, of_parameter)
        if path[0].name not in names or parameter is None:
            return False
        return len(x.shape) - of_parameter[parameter] >= 2

    return jax.tree_util.tree_map_with_path(leaf, state)


class _HostOfAbsentGpu(NamedSharding):
    """In the host's memory of GPUs that are not here: for those JAX (0.10) drops the memory kind of a NamedSharding."""

    @property
    def memory_kind(self) -> str:
        return HOST

    def __eq__(self, other: object) -> bool:
        return type(other) is _HostOfAbsentGpu and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((HOST, super().__hash__()))


def to_host(sharding: NamedSharding) -> NamedSharding:
    """The same sharding, in the host's memory."""
    moved = sharding.with_memory_kind(HOST)
    return moved if on_host(moved) else _HostOfAbsentGpu(sharding.mesh, sharding.spec)


def of_result(sharding: NamedSharding) -> NamedSharding:
    """A sharding as `out_shardings` take it: of GPUs that are not here the result's type alone says where it is."""
    return NamedSharding(sharding.mesh, sharding.spec) if type(sharding) is _HostOfAbsentGpu else sharding


def on_host(sharding: jax.sharding.Sharding) -> bool:
    return sharding.memory_kind == HOST


def to_device(tree: Any) -> Any:
    """Arrays, each in the device's memory with the sharding it has; outside of jit."""

    def move(x: jax.Array) -> jax.Array:
        is_there = jax.typeof(x).memory_space == jax.memory.Space.Device
        return x if is_there else jax.device_put(x, x.sharding.with_memory_kind("device"))

    return jax.tree.map(move, tree)


def map_by_layer(function: Callable[[str, Any], Any], params: dict, stacks: Sequence[str]) -> dict:
    """`function(name, subtree)` of parameters on the host, brought to the device a layer at a time. Within jit.

    Args:
      stacks: keys of `params` whose leaves stack layers; of these `function` sees one layer.
    """

    def one(name: str, subtree: Any) -> Any:
        return function(name, jax.tree.map(_to_device, subtree))

    return {
        name: jax.lax.map(functools.partial(one, name), subtree) if name in stacks else one(name, subtree)
        for name, subtree in params.items()
    }


def update_by_layer(update: Callable, parts: dict[str, tuple], state: Any, gradients: dict, hosted: Any) -> Any:
    """The update of a state, part of the model by part of the model, each on the device only while it is updated.

    Within jit. A part is the state of a model that has some of the parameters: its leaves have the paths that they have
    in the whole state, without the leading dim of layers if the part is a stack.

    Args:
      update: of an optimizer, a part's state and its gradients; returns its new state.
      parts: name of the stack, or "" for all that is not stacked -> optimizer and abstract state.
      state, gradients, hosted: of the whole model; whether each leaf of the state is on the host.
    """
    leaves = _by_path(state)
    hosted = {path for path, is_hosted in _by_path(hosted).items() if is_hosted}

    def fetch(path: str, leaf: jax.Array) -> jax.Array:
        return _to_device(leaf) if path in hosted else leaf

    def store(path: str, leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, jax.memory.Space.Host) if path in hosted else leaf

    def update_rest(optimizer: Any, abstract: Any) -> dict[str, jax.Array]:
        part = _map_by_path(lambda path, _: fetch(path, leaves[path]), abstract)
        rest = {name: subtree for name, subtree in gradients.items() if name not in parts}
        return {path: store(path, leaf) for path, leaf in _by_path(update(optimizer, part, rest)).items()}

    def update_stack(name: str, optimizer: Any, abstract: Any) -> dict[str, jax.Array]:
        num_layers = jax.tree.leaves(gradients[name])[0].shape[0]
        # The rest, step counts and the like, is the same for all layers, and updated with what is not stacked.
        stacked = {
            path: leaves[path]
            for path, leaf in _by_path(abstract).items()
            if leaves[path].shape == (num_layers, *leaf.shape)
        }

        def update_layer(i: jax.Array, stacked: dict[str, jax.Array]) -> dict[str, jax.Array]:
            def pick(path: str, _: Any) -> jax.Array:
                return fetch(path, _layer(stacked[path], i) if path in stacked else leaves[path])

            layer = {name: jax.tree.map(lambda g: _layer(g, i), gradients[name])}
            updated = _by_path(update(optimizer, _map_by_path(pick, abstract), layer))
            return {
                path: jax.lax.dynamic_update_index_in_dim(leaf, store(path, updated[path]), i, 0)
                for path, leaf in stacked.items()
            }

        return jax.lax.fori_loop(0, num_layers, update_layer, stacked)

    new = dict(leaves)
    for name, part in parts.items():
        new |= update_stack(name, *part) if name else update_rest(*part)
    return _map_by_path(lambda path, _: new[path], state)


def check(compiled: jax.stages.Compiled, state: Any, activations: bool) -> None:
    """Raises ValueError if a compiled step keeps on the device what should be in the host's memory.

    The compiler may do that silently (openxla/xla#17541), so its own text is read: S(5) is the host's memory there.

    Args:
      state: the step's first argument, of jax.ShapeDtypeStruct with shardings.
      activations: whether `parallel.remat` offloads some.
    """
    hosted = [leaf for leaf in jax.tree.leaves(state) if on_host(leaf.sharding)]
    if not hosted and not activations:
        return
    text = compiled.as_text()
    layout = re.search(r"entry_computation_layout=\{(.*)\}", text)[1]
    for what, part in zip(("arguments", "results"), layout.split("->"), strict=True):
        if missing := len(hosted) - part.count("S(5)"):
            raise ValueError(
                f"parallel.offload: the compiler left {missing} of the step's {what} on the device, of {len(hosted)} "
                "that belong in the host's memory; set parallel.offload=none"
            )
    if jax.tree.leaves(state)[0].sharding.mesh.devices.flat[0].platform == "cpu":
        return  # a CPU's two memories are one, and its program does not tell them apart
    of_state = {str(leaf.sharding.shard_shape(leaf.shape)) for leaf in hosted}
    shapes = {str(tuple(map(int, dims.split(",")))) for dims in re.findall(r"\w+\[([\d,]+)\]\{[^{}]*S\(5\)\}", text)}
    if activations and not shapes - of_state:
        raise ValueError("parallel.remat=offload: the compiler left the activations on the device; set another")


def _to_device(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Device)


def _layer(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _map_by_path(function: Callable[[str, Any], Any], tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(jax.tree_util.keystr(path), leaf), tree)
