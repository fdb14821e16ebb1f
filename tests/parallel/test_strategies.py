"""The layout of what optimizers keep of the parameters."""

import math

import jax
import jax.numpy as jnp
import optax

from jaxpretrain.models.parameter import Info
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.parallel.strategies import make_strategy


def info(shape, axes, role):
    return Info(shape, jnp.dtype(jnp.float32), axes, role)


_INFOS = {
    "embed": {"embedding": info((61, 32), ("vocab", "embed"), "embedding")},
    "layers": {
        "up": {"kernel": info((2, 32, 64), ("layers", "embed", "mlp"), "mlp_in")},
        "norm": {"scale": info((2, 32), ("layers", "embed"), "norm_scale")},
    },
    "norm": {"scale": info((32,), ("embed",), "norm_scale")},
}


def layout(state, strategy="fsdp"):
    """Path -> (spec, elements per device) of a state of the model's parameters on eight devices."""
    params = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), _INFOS)
    strategy = make_strategy(strategy, _INFOS, make_mesh(strategy), jnp.float32)
    state = jax.eval_shape(state, params)
    shardings = jax.tree.leaves(strategy.state_shardings(state, params))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            tuple(sharding.spec),
            math.prod(sharding.shard_shape(leaf.shape)),
        )
        for (path, leaf), sharding in zip(jax.tree_util.tree_leaves_with_path(state), shardings, strict=True)
    }


def test_parameters_and_moments():
    """Fails if beginnings of a leaf's path are looked up in the place of its ends (tried)."""
    found = layout(lambda params: {"params": params, "opt_state": optax.adam(1e-3).init(params)})
    assert found["opt_state.0.count"] == ((), 1)
    for tree in ("params", "opt_state.0.mu", "opt_state.0.nu"):
        assert found[f"{tree}.layers.up.kernel"] == ((None, None, "fsdp"), 2 * 32 * 8)
        assert found[f"{tree}.layers.norm.scale"] == ((None, "fsdp"), 2 * 4)
        assert found[f"{tree}.embed.embedding"] == ((None, "fsdp"), 61 * 4)
        assert found[f"{tree}.norm.scale"] == (("fsdp",), 4)
    replicated = layout(optax.adam(1e-3).init, "ddp")
    assert not any(axis for spec, _ in replicated.values() for axis in spec)


def test_dims_of_another_size_are_whole():
    """Adam-mini's second moment, with size 1 in the dims that it averages over; placeholders of shape (1,).

    Fails if the parameter's spec is taken as it is: JAX refuses to split size 1 (tried).
    """

    def init(params):
        one_a_row = jax.tree.map(lambda x: jnp.zeros((*x.shape[:-1], 1)), params)
        one_a_column = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:])), params)
        return {"row": one_a_row, "column": one_a_column, "none": jax.tree.map(lambda x: jnp.zeros(1), params)}

    found = layout(init)
    assert found["row.layers.up.kernel"] == ((None, None, None), 2 * 32)
    assert found["column.layers.up.kernel"] == ((None, None, "fsdp"), 32 * 8)
    assert found["row.norm.scale"] == ((None,), 1)
    assert found["column.embed.embedding"] == ((None, "fsdp"), 4)
    assert all(found[f"none.{path}"][1] == 1 for path in ("layers.up.kernel", "norm.scale", "embed.embedding"))


def test_other_ranks_are_replicated():
    """Adafactor's rows and columns. Fails without the comparison of ranks (tried)."""
    found = layout(optax.scale_by_factored_rms(min_dim_size_to_factor=8).init)
    assert found["v_row.layers.up.kernel"][0] == found["v_col.layers.up.kernel"][0] == ()
    assert found["v.norm.scale"] == (("fsdp",), 4)


def test_parts_of_the_parameters():
    """Masked and partitioned optimizers keep some parameters only."""
    labels = {"embed": "a", "layers": "b", "norm": "a"}
    found = layout(optax.partition({"a": optax.trace(0.9), "b": optax.sgd(0.1)}, labels).init)
    assert set(found.values()) == {((None, "fsdp"), 61 * 4), (("fsdp",), 4)}
