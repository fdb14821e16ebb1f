"""Adam-mini against the authors' own numbers, against Adam, and against what Optax asks of an optimizer."""

import doctest
import functools
import json
import logging
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpretrain import config as config_lib
from jaxpretrain.models import registry
from jaxpretrain.models.parameter import Info, infos
from jaxpretrain.optim import adam_mini as adam_mini_lib
from jaxpretrain.optim.adam_mini import Blocks, adam_mini, scale_by_adam_mini
from jaxpretrain.optim.blocks import adam_mini_blocks

# --- The reference: parameters after each of 5 steps of the authors' code, v1.1.1 and v1.0.4 (see meta.json).

_GOLDEN = np.load(pathlib.Path(__file__).parent.parent / "data_files" / "adam_mini_golden.npz")
_META = json.loads(_GOLDEN["meta.json"].tobytes())
_CASES = [case for case, about in _META["cases"].items() if about["param_dtype"] == "float32"]


def golden(case: str):
    """(meta of the case, p0, [g of each step], [p after each step], v at the end), trees by the reference's names."""
    about = _META["cases"][case]
    inputs = _META["inputs"][about["input"]]
    shapes = [tuple(inputs["shapes"][name]) for name in inputs["order"]]

    def tree(flat, shapes=shapes):
        parts = np.split(flat, np.cumsum([int(np.prod(s)) for s in shapes])[:-1])
        return {name: x.reshape(s) for name, x, s in zip(inputs["order"], parts, shapes, strict=True)}

    counts = [(about["blocks"][name][1],) for name in inputs["order"]]
    gradients = about["grad_scale"] * _GOLDEN[f"in/{about['input']}/g"]
    return (
        about,
        tree(_GOLDEN[f"in/{about['input']}/p0"]),
        [tree(g) for g in gradients],
        [tree(p) for p in _GOLDEN[f"out/{case}/p"]],
        tree(_GOLDEN[f"out/{case}/v"], counts),
    )


def golden_optimizer(about: dict, blocks, decays: dict):
    assert len(set(about["lr"])) == 1
    b1, b2 = about["betas"]
    return adam_mini(
        about["lr"][0], b1, b2, about["eps"], weight_decay=about["weight_decay"], mask=decays, blocks=blocks
    )


def run(optimizer, params, gradients):
    """Parameters after each step, and the final state of Adam-mini."""
    params = jax.tree.map(jnp.asarray, params)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    history = []
    for g in gradients:
        updates, state = update(jax.tree.map(jnp.asarray, g), state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history, state[0]


def test_all_golden_cases_are_there():
    assert len(_CASES) == 8
    assert {blocks[0] for case in _CASES for blocks in _META["cases"][case]["blocks"].values()} == {
        "adam",
        "row",
        "head",
        "whole",
    }


@pytest.mark.parametrize("case", _CASES)
def test_equals_the_reference_on_its_own_partition(case):
    """Fails with the sum over a block in place of its mean, without bias correction of nu, and with b2 for the first
    moment (each tried)."""
    about, p0, gradients, expected, expected_v = golden(case)

    def spec(name):
        kind, count, _ = about["blocks"][name]
        shape = p0[name].shape
        if kind == "head":  # `count` runs of elements in C order
            return Blocks(view=(count, p0[name].size // count), reduce=(1,))
        return {"adam": (), "row": (1,), "whole": tuple(range(len(shape)))}[kind]

    decays = {name: decay > 0 for name, decay in about["weight_decay_per_param"].items()}
    history, state = run(golden_optimizer(about, {name: spec(name) for name in p0}, decays), p0, gradients)
    for step, (ours, theirs) in enumerate(zip(history, expected, strict=True)):
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-6, err_msg=f"{name} step {step + 1}")
    for name in expected_v:
        np.testing.assert_allclose(state.nu[name].ravel(), expected_v[name], rtol=1e-5, err_msg=name)


# --- The same numbers by way of roles and axes, in the layout of our models.


def flax_info(name: str, shape: tuple[int, ...], heads: int, kv_heads: int):
    """What the parameter `name` of `hf_gqa` or `tt_mha` is."""
    d = 8
    last = name.rsplit(".", 2)[-2]
    kinds = {
        ("embed_tokens", "tok_embeddings"): (("vocab", "embed"), "embedding"),
        ("lm_head", "output"): (("vocab", "embed"), "unembedding"),
        ("q_proj", "wq"): (("embed", "heads", "head_dim"), "query"),
        ("k_proj", "wk"): (("embed", "kv_heads", "head_dim"), "key"),
        ("v_proj", "wv"): (("embed", "kv_heads", "head_dim"), "value"),
        ("o_proj", "wo"): (("heads", "head_dim", "embed"), "attn_out"),
        ("gate_proj", "w1"): (("embed", "mlp"), "mlp_gate"),
        ("up_proj", "w3"): (("embed", "mlp"), "mlp_in"),
        ("down_proj", "w2"): (("mlp", "embed"), "mlp_out"),
    }
    axes, role = next((kind for names, kind in kinds.items() if last in names), (("embed",), "norm_scale"))
    if name.endswith("bias"):
        axes, role = axes[1:], "bias"
    sizes = dict(embed=d, heads=heads, kv_heads=kv_heads, head_dim=d // heads, vocab=shape[0])
    sizes["mlp"] = max(shape)
    if role == "norm_scale":
        sizes["embed"] = shape[0]  # q_norm and k_norm have one entry per head_dim
    return Info(tuple(sizes[axis] for axis in axes), jnp.dtype("float32"), axes, role)


def to_flax(info: Info, x: np.ndarray) -> np.ndarray:
    """The reference's [out, in] as our [in, out], heads apart."""
    tables = ("embedding", "unembedding", "norm_scale", "bias")
    return (x if info.role in tables else x.T).reshape(info.shape)


def through_roles(case: str, variant: str):
    about, p0, gradients, expected, expected_v = golden(case)
    inputs = _META["inputs"][about["input"]]
    heads = inputs["n_heads"]
    tree = {name: flax_info(name, p0[name].shape, heads, inputs["n_kv_heads"] or heads) for name in p0}
    decays = {name: decay > 0 for name, decay in about["weight_decay_per_param"].items()}
    p0, *rest = (jax.tree.map(to_flax, tree, x) for x in (p0, *gradients, *expected))
    return about, tree, decays, p0, rest[:5], rest[5:], expected_v


_BY_ROLE = [
    ("hf_gqa/base", "v1_1"),
    ("hf_gqa/wv_whole", "value_whole"),
    ("hf_gqa/v1.0.4", "v1_0"),
    ("tt_mha/base", "v1_1"),
]


@pytest.mark.parametrize("case,variant", _BY_ROLE)
def test_roles_give_the_partition_of_the_reference(case, variant):
    """Fails with query and key averaged over the fan-in only, and with `heads` averaged over (each tried)."""
    about, tree, decays, p0, gradients, expected, expected_v = through_roles(case, variant)
    history, state = run(golden_optimizer(about, adam_mini_blocks(tree, variant), decays), p0, gradients)
    for ours, theirs in zip(history, expected, strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), ours, theirs)
    for name, v in expected_v.items():
        np.testing.assert_allclose(state.nu[name].ravel(), v, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("case,variant", _BY_ROLE)
def test_stacked_layers_are_apart(case, variant):
    """Two layers in one array, the second with other numbers; fails with "layers" not in STACKED_AXES (tried)."""
    about, tree, decays, p0, gradients, expected, _ = through_roles(case, variant)
    is_layer = {name: "layers." in name for name in tree}

    def stack(x, scale):
        return {name: np.stack([x[name], scale * x[name]]) if is_layer[name] else x[name] for name in x}

    stacked = {
        name: Info((2, *info.shape), info.dtype, ("layers", *info.axes), info.role) if is_layer[name] else info
        for name, info in tree.items()
    }
    blocks = adam_mini_blocks(stacked, variant)
    history, _ = run(golden_optimizer(about, blocks, decays), stack(p0, 0.5), [stack(g, 7.0) for g in gradients])
    for ours, theirs in zip(history, expected, strict=True):
        for name in theirs:
            first = ours[name][0] if is_layer[name] else ours[name]
            np.testing.assert_allclose(first, theirs[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("by", ["rows", "columns", "heads"])
def test_sharded_equals_the_reference(by):
    """Fails if each device averages over its own shard, i.e. the update is run under `shard_map` (tried)."""
    about, tree, decays, p0, gradients, expected, _ = through_roles("tt_mha/base", "v1_1")
    num = 2 if by == "heads" else 8
    mesh = jax.make_mesh((num,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num])

    def sharding(info):
        if by == "heads":
            dims = [d for d, axis in enumerate(info.axes) if axis in ("heads", "kv_heads")]
        else:
            dims = [0 if by == "rows" else len(info.shape) - 1]
        return NamedSharding(mesh, P(*["x" if d in dims and s % num == 0 else None for d, s in enumerate(info.shape)]))

    shardings = jax.tree.map(sharding, tree)
    assert sum(not s.is_fully_replicated for s in jax.tree.leaves(shardings)) >= 4
    optimizer = golden_optimizer(about, adam_mini_blocks(tree), decays)
    params, gradients = (jax.device_put(x, s) for x, s in ((p0, shardings), (gradients, [shardings] * 5)))
    history, state = run(optimizer, params, gradients)
    for ours, theirs in zip(history, expected, strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), ours, theirs)


def test_heads_that_do_not_divide_over_the_shards():
    """14 heads of a kernel [8, 14 * 4] over 4 devices (zyushun/Adam-mini issue 25): right, and nothing large moves.

    Fails if the leaf is reshaped before it is averaged over its rows (tried: the gradient is gathered)."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sharded = NamedSharding(mesh, P(None, "x"))
    g = np.random.default_rng(0).normal(size=(8, 56)).astype(np.float32)
    optimizer = scale_by_adam_mini(blocks={"query": Blocks(view=(8, 14, 4), reduce=(0, 2))})
    gradients = {"query": jax.device_put(g, sharded)}
    state = optimizer.init(gradients)
    update = jax.jit(optimizer.update, out_shardings=({"query": sharded}, None)).lower(gradients, state).compile()
    _, state = update(gradients, state)
    np.testing.assert_allclose(
        state.nu["query"].ravel(), 0.001 * np.square(g).reshape(8, 14, 4).mean((0, 2)), rtol=1e-4
    )
    moved = re.findall(r"= f32\[([\d,]+)\]\S* (?:all-gather|all-to-all|collective-permute)\(", update.as_text())
    assert all(np.prod([int(n) for n in shape.split(",")]) <= 56 for shape in moved), moved


# --- Against Adam.

_SPECS = {  # leaf -> (shape, spec, the number of each element's block)
    "elementwise": ((3, 4), (), np.arange(12).reshape(3, 4)),
    "row": ((3, 4), (-1,), np.arange(3)[:, None]),
    "whole": ((3, 4), (0, 1), 0),
    "scalar": ((), (), 0),
    "head": ((2, 3, 4, 5), (1, 3), np.arange(2)[:, None, None, None] * 4 + np.arange(4)[:, None]),
    "view": ((3, 8), Blocks(view=(3, 4, 2), reduce=(0, -1)), np.arange(8)[None] // 2),
    "merging view": ((2, 2, 6), Blocks(view=(4, 2, 3), reduce=(1, 2)), np.arange(4).reshape(2, 2, 1)),
    "straddling view": ((4, 3), Blocks(view=(2, 6), reduce=(1,)), np.arange(4)[:, None] // 2),
    # [D, 3, H, K]: heads of queries, whole keys, neurons of values
    "fused": (
        (5, 3, 2, 2),
        Blocks(reduce=(0,), axis=1, segments=((1, (3,)), (1, (2, 3)), (1, ()))),
        np.array([[[0, 0], [1, 1]], [[2, 2], [2, 2]], [[3, 4], [5, 6]]]),
    ),
    # The same as one matrix of 2 + 2 + 4 columns, the second segment one block.
    "fused columns": (
        (5, 8),
        Blocks(view=(5, 4, 2), reduce=(0,), axis=1, segments=((1, (2,)), (1, (1, 2)), (2, ()))),
        np.array([0, 0, 1, 1, 2, 3, 4, 5]),
    ),
}


def test_second_moment_is_the_block_mean_of_adams():
    """Fails if a segment takes the mean of another one or of the whole axis (each tried)."""
    rng = np.random.default_rng(0)
    params = {name: jnp.zeros(shape) for name, (shape, _, _) in _SPECS.items()}
    mini = scale_by_adam_mini(0.8, 0.9, blocks={name: spec for name, (_, spec, _) in _SPECS.items()})
    adam = optax.scale_by_adam(0.8, 0.9)
    state, adam_state = mini.init(params), adam.init(params)
    update, adam_update = jax.jit(mini.update), jax.jit(adam.update)
    for t in range(1, 5):
        # The second leaf axis decides the size of a gradient, so that wrong neighbours show.
        g = {name: jnp.asarray(rng.lognormal(0, 2, p.shape) * rng.normal(size=p.shape), "float32")
             for name, p in params.items()}  # fmt: skip
        updates, state = update(g, state)
        _, adam_state = adam_update(g, adam_state)
        for name, (shape, _, ids) in _SPECS.items():
            ids = np.broadcast_to(ids, shape).ravel()
            v = np.asarray(adam_state.nu[name], np.float64).ravel()
            mean = (np.bincount(ids, v) / np.bincount(ids))[ids].reshape(shape)
            m = np.asarray(adam_state.mu[name], np.float64)
            expected = m / (1 - 0.8**t) / (np.sqrt(mean / (1 - 0.9**t)) + 1e-8)
            np.testing.assert_allclose(updates[name], expected, rtol=1e-5, err_msg=name)
            if not isinstance(_SPECS[name][1], Blocks):
                np.testing.assert_allclose(np.broadcast_to(state.nu[name], shape), mean, rtol=1e-5, err_msg=name)
    assert {name: nu.shape for name, nu in state.nu.items()} == {
        "elementwise": (3, 4), "row": (3, 1), "whole": (1, 1), "scalar": (), "head": (2, 1, 4, 1),
        "view": (1, 4, 1), "merging view": (4, 1, 1), "straddling view": (2, 1),
        "fused": (1, 3, 2, 2), "fused columns": (1, 4, 2),
    }  # fmt: skip


def test_blocks_of_one_element_are_adamw():
    """With a schedule, decay and its mask. Fails if eps is added before the bias correction (tried)."""
    rng = np.random.default_rng(0)
    params = {"a": jnp.asarray(rng.normal(size=(4, 6)), "float32"), "b": jnp.asarray(rng.normal(size=6), "float32")}
    gradients = [jax.tree.map(lambda p: rng.normal(size=p.shape).astype("float32"), params) for _ in range(8)]
    kwargs = dict(b1=0.8, b2=0.95, eps=1e-2, weight_decay=0.3, mask={"a": True, "b": False})
    schedule = optax.linear_schedule(0.1, 0.01, 6)
    ours, _ = run(adam_mini(schedule, blocks=lambda path, shape: (), **kwargs), params, gradients)
    adamw, _ = run(optax.adamw(schedule, **kwargs), params, gradients)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), ours, adamw)


def test_second_moment_does_not_stop_growing_in_bfloat16():
    """After 2000 steps of |g| = 1 it is 0.865; a bfloat16 average stays at 0.5 (nu_dtype = the gradient's: tried)."""
    params = jnp.ones((8, 4), jnp.bfloat16)
    optimizer = scale_by_adam_mini(b2=0.999)
    _, state = jax.jit(
        lambda: jax.lax.fori_loop(
            0, 2000, lambda _, s: optimizer.update(params, s[1]), (params, optimizer.init(params))
        )
    )()
    assert state.nu.dtype == jnp.float32
    np.testing.assert_allclose(state.nu, 1 - 0.999**2000, rtol=1e-4)


# --- The first moment in fewer bytes.


@pytest.mark.parametrize("mu_dtype,tolerance", [(jnp.bfloat16, 0.004), (jnp.int8, 0.03)])
def test_small_first_moments_follow_the_float32_one(mu_dtype, tolerance):
    """Distance after 200 noisy steps over the distance gone. Fails if the scale is not stored back (tried)."""
    rng = np.random.default_rng(0)
    target, start = rng.normal(size=(2, 16, 64)), np.zeros((16, 64), "float32")
    noise = rng.normal(size=(200, 16, 64)) * rng.lognormal(0, 2, (16, 64))

    def follow(mu_dtype):
        optimizer = adam_mini(0.01, 0.9, 0.95, mu_dtype=mu_dtype, blocks=(1,))

        def step(carry, noise):
            params, state = carry
            updates, state = optimizer.update((params - target[0] + noise).astype("float32"), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), jnp.asarray(noise, "float32"))[0][0])(start)

    exact = follow(None)
    assert np.linalg.norm(follow(mu_dtype) - exact) < tolerance * np.linalg.norm(exact)


def test_int8_keeps_small_entries():
    """Fails with equal steps in place of the square (tried)."""
    sizes = np.array([0, 1e-2, -1e-2, 0.1, -0.5, 1], "float32")
    mu = np.stack([sizes, 1e-20 * sizes, 0 * sizes])
    code, scale = adam_mini_lib._quantize(jnp.asarray(mu))
    assert code.dtype == jnp.int8 and scale.shape == (3, 1)
    np.testing.assert_allclose(adam_mini_lib._dequantize(code, scale), mu, rtol=0.08)


@pytest.mark.parametrize(
    "recipe,num_params,num_biases",
    [
        ("gpt2_small", 124_439_808, 12 * (3 * 768 + 768 + 3072 + 768 + 2 * 768) + 768),  # Hugging Face's
        ("gpt2_small:nobias", 124_373_760, 0),  # nanoGPT's
    ],
)
@pytest.mark.parametrize("mu_dtype,bytes_per_param", [(None, 4), (jnp.bfloat16, 2), (jnp.int8, 1)])
def test_state_bytes_of_gpt2(recipe, num_params, num_biases, mu_dtype, bytes_per_param):
    """4.00, 2.00 and 1.0 bytes a parameter beside 8 of AdamW, of arrays that exist."""
    name, _, flags = recipe.partition(":")
    config = config_lib.load(f"configs/{name}.py{':' if flags else ''}{flags}")
    tree = infos(registry.build(config))
    params = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), tree)
    assert num_params == sum(p.size for p in jax.tree.leaves(params))
    optimizer = scale_by_adam_mini(mu_dtype=mu_dtype, blocks=adam_mini_blocks(tree))
    state = jax.jit(lambda: optimizer.init(params))()
    num_bytes = {name: sum(x.nbytes for x in jax.tree.leaves(x)) for name, x in state._asdict().items()}
    assert num_bytes["count"] == 4 and num_bytes["mu"] == bytes_per_param * num_params
    # Per token and position; per head of queries and keys; per neuron; two norms a layer and the last; every bias.
    per_layer = 2 * 12 + 768 + 768 + 3072 + 768 + 2
    assert num_bytes["nu"] == 4 * (config.model.vocab_size + 1024 + 12 * per_layer + 1 + num_biases)
    total = sum(num_bytes.values()) / num_params
    if mu_dtype == jnp.int8:
        assert total < 1.03
    else:
        assert num_bytes["mu_scale"] == 0
        assert total == pytest.approx(bytes_per_param, abs=0.005 if not num_biases else 0.008)


def test_state_bytes_of_llama2_7b():
    """The paper's 26.96 GB, where AdamW takes 53.91 GB."""
    tree = infos(registry.build(config_lib.load("configs/llama2_7b.py")))
    params = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), tree)

    def gigabytes(optimizer):
        state = jax.eval_shape(optimizer.init, params)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 1e9

    assert round(gigabytes(optax.scale_by_adam()), 2) == 53.91
    assert round(gigabytes(scale_by_adam_mini(blocks=adam_mini_blocks(tree))), 2) == 26.96
    assert round(gigabytes(scale_by_adam_mini(mu_dtype=jnp.bfloat16, blocks=adam_mini_blocks(tree))), 2) == 13.48


# --- Over devices.


def llama_tree():
    d, h, k, f, v = 64, 8, 8, 128, 96
    layer = {
        "query": Info((d, h, k), jnp.dtype("float32"), ("embed", "heads", "head_dim"), "query"),
        "key": Info((d, h, k), jnp.dtype("float32"), ("embed", "kv_heads", "head_dim"), "key"),
        "value": Info((d, h, k), jnp.dtype("float32"), ("embed", "kv_heads", "head_dim"), "value"),
        "out": Info((h, k, d), jnp.dtype("float32"), ("heads", "head_dim", "embed"), "attn_out"),
        "gate": Info((d, f), jnp.dtype("float32"), ("embed", "mlp"), "mlp_gate"),
        "up": Info((d, f), jnp.dtype("float32"), ("embed", "mlp"), "mlp_in"),
        "down": Info((f, d), jnp.dtype("float32"), ("mlp", "embed"), "mlp_out"),
        "attention_norm": Info((d,), jnp.dtype("float32"), ("embed",), "norm_scale"),
        "mlp_norm": Info((d,), jnp.dtype("float32"), ("embed",), "norm_scale"),
    }
    tables = {
        "embed": Info((v, d), jnp.dtype("float32"), ("vocab", "embed"), "embedding"),
        "unembed": Info((v, d), jnp.dtype("float32"), ("vocab", "embed"), "unembedding"),
        "norm": Info((d,), jnp.dtype("float32"), ("embed",), "norm_scale"),
    }
    return {"layer0": layer, "layer1": layer, "layer2": layer, **tables}


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("target", ["cpu", "v4-8", "a100-80gb"])
def test_block_means_are_reduced_together(target, dim, topology):
    """30 tensors, most averaged over a sharded axis: one or two all-reduces of the small means, not one each."""
    tree = llama_tree()
    devices = jax.devices() if target == "cpu" else topology(target, 1 if target == "v4-8" else 4)
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Auto,), devices=devices)

    def param(info):
        spec = [None] * len(info.shape)
        spec[dim] = "x"
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=NamedSharding(mesh, P(*spec)))

    params = jax.tree.map(param, tree)
    assert len(jax.tree.leaves(params)) == 30
    optimizer = scale_by_adam_mini(blocks=adam_mini_blocks(tree))
    state = jax.eval_shape(optimizer.init, params)
    text = jax.jit(optimizer.update).lower(params, state).compile().as_text()
    assert 1 <= len(re.findall(r" all-reduce(?:-start)?\(", text)) <= 2
    assert not re.findall(r" (?:all-gather|all-to-all|reduce-scatter)(?:-start)?\(", text)


@pytest.mark.parametrize("mu_dtype", [None, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize(
    "blocks",
    [
        None,
        (1,),
        (),
        (0, 2),
        Blocks(reduce=(0,), axis=2, segments=((1, (1,)), (3, ()))),
        Blocks(view=(8, 8, 2, 2), reduce=(0, 3)),
    ],
)
@pytest.mark.parametrize("spec", [P(None, "x"), P(("x",), None, None)])
def test_types_of_the_state_stay(mu_dtype, blocks, spec):
    """Shape, dtype and sharding (an Explicit mesh), of float16 parameters, eager and jitted.

    Fails with nu = zeros of the reduced shape, as that is not sharded (tried)."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        params = jnp.zeros((8, 8, 4), jnp.float16, out_sharding=NamedSharding(mesh, spec))
        optimizer = adam_mini(1.0, mu_dtype=mu_dtype, blocks=blocks)
        states = [optimizer.init(params), jax.jit(optimizer.init)(params)]
        states += [update(params, states[0], params)[1] for update in (optimizer.update, jax.jit(optimizer.update))]
        types = [jax.tree.map(jax.typeof, state) for state in states]
    assert types[0] == types[1] == types[2] == types[3]
    if blocks == (1,) and spec == P(("x",), None, None):
        assert types[0][0].nu.sharding.spec[0] == "x"


# --- What Optax asks of an optimizer.


def rosenbrock(params):
    return (1 - params[0]) ** 2 + 100 * (params[1] - params[0] ** 2) ** 2


_TARGETS = {
    "parabola": (lambda p: jnp.sum((p - jnp.array([1.0, -1.0, 1.0])) ** 2), jnp.array([-1.0, 10.0, 1.0]), [1, -1, 1]),
    "rosenbrock": (rosenbrock, jnp.zeros(2), [1, 1]),
    "matrix": (
        lambda p: jnp.sum((p - jnp.array([[3.0, -2.0], [1.0, 4.0]])) ** 2),
        jnp.zeros((2, 2)),
        [[3, -2], [1, 4]],
    ),
}


@pytest.mark.parametrize("target", _TARGETS)
@pytest.mark.parametrize("mu_dtype", [None, jnp.bfloat16, jnp.int8])
def test_converges(target, mu_dtype):
    f, start, end = _TARGETS[target]
    optimizer = adam_mini(1e-2, mu_dtype=mu_dtype)
    num_steps = 10_000 if target == "rosenbrock" else 3000

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(f)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda start: jax.lax.scan(step, (start, optimizer.init(start)), length=num_steps)[0][0])
    np.testing.assert_allclose(run(start), end, rtol=3e-2, atol=3e-2)


def test_extra_arguments_and_one_compilation(caplog):
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    optimizer = adam_mini(0.1)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(params, state, params, an_argument_of_another_transformation=1)
        return optax.apply_updates(params, updates), state

    params, state = step(params, optimizer.init(params))
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        step(params, state)
    assert not [record for record in caplog.records if "ompil" in record.message]
    optax.with_extra_args_support(scale_by_adam_mini()).update(params, state[0], params, an_argument=1)


@pytest.mark.parametrize("mu_dtype", [None, jnp.int8])
def test_hyperparameters_can_be_injected(mu_dtype):
    params = [-jnp.ones((2, 3)), jnp.ones((2, 5, 2))]
    gradients = [jnp.ones((2, 3)), -jnp.ones((2, 5, 2))]
    kwargs = dict(learning_rate=0.1, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.1, mu_dtype=mu_dtype)
    plain, injected = adam_mini(**kwargs), optax.inject_hyperparams(adam_mini)(**kwargs)
    state, injected_state = plain.init(params), jax.jit(injected.init)(params)
    assert {"b1", "b2", "eps", "weight_decay"} <= set(injected_state.hyperparams)
    for _ in range(2):
        updates, state = jax.jit(plain.update)(gradients, state, params)
        injected_updates, injected_state = jax.jit(injected.update)(gradients, injected_state, params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), updates, injected_updates)
    assert [x.dtype for x in jax.tree.leaves(state)] == [x.dtype for x in jax.tree.leaves(injected_state.inner_state)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("mu_dtype", [None, jnp.float32, jnp.bfloat16, jnp.int8])
def test_updates_keep_the_dtype_of_the_gradients(dtype, mu_dtype):
    params = {"w": jnp.ones((2, 3), dtype), "b": jnp.ones(3, dtype)}
    optimizer = adam_mini(0.1, mu_dtype=mu_dtype)
    updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    assert {m.dtype for m in jax.tree.leaves(state[0].mu)} == {jnp.dtype(mu_dtype or dtype)}
    assert {n.dtype for n in jax.tree.leaves(state[0].nu)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("mu_dtype,num_trees", [(None, 2), (jnp.int8, 3)])
def test_map_params(mu_dtype, num_trees):
    """Every tree of the state has the structure of the parameters."""
    params, blocks = {"w": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}, {"w": {"kernel": (0,), "bias": ()}}
    optimizer = adam_mini(0.1, mu_dtype=mu_dtype, blocks=blocks)
    names = {"w": {"kernel": "kernel", "bias": "bias"}}
    state = optax.tree.map_params(
        optimizer, lambda _, name: name, optimizer.init(params), names, transform_non_params=lambda _: "other"
    )
    assert sorted(jax.tree.leaves(state)) == ["bias"] * num_trees + ["kernel"] * num_trees + ["other"]


def test_masked_and_partitioned():
    """A tree of blocks for all parameters serves a transformation that sees some of them."""
    params = {"a": jnp.ones((2, 3)), "b": {"c": jnp.ones(3), "d": jnp.ones((3, 2))}}
    blocks = {"a": (0,), "b": {"c": (0,), "d": (0, 1)}}
    for mask in ({"a": True, "b": False}, {"a": True, "b": {"c": False, "d": True}}):
        masked = optax.masked(scale_by_adam_mini(blocks=blocks), mask)
        updates, state = jax.jit(masked.update)(params, masked.init(params))
        np.testing.assert_allclose(updates["b"]["c"], 1.0)
        assert state.inner_state.nu["a"].shape == (1, 3)
    labels = {"a": "mini", "b": {"c": "sgd", "d": "mini"}}
    optimizer = optax.partition({"mini": adam_mini(0.1, blocks=blocks), "sgd": optax.sgd(1.0)}, labels)
    updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates["a"], -0.1, rtol=1e-5)
    np.testing.assert_allclose(updates["b"]["c"], -1.0)
    optax.tree.map_params(optimizer, lambda x: x, state)


def test_abstract_parameters():
    state = adam_mini(0.1).init(jax.ShapeDtypeStruct((2, 4, 8), jnp.float32))
    assert state[0].nu.shape == (1, 1, 8)


def test_needs_jax_and_optax_only():
    source = pathlib.Path(adam_mini_lib.__file__).read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE))
    assert imported == {"dataclasses", "math", "collections", "typing", "jax", "optax"}


def test_the_docstrings_example():
    assert doctest.testmod(adam_mini_lib) == doctest.TestResults(failed=0, attempted=12)


# --- What is refused.


@pytest.mark.parametrize(
    "spec,message",
    [
        ((2,), "axis 2, which the shape"),
        ((0, -3), "axis -3"),
        ((0, 0), "twice"),
        ((1, -1), "twice"),
        (0, "tuple of axes"),
        (Blocks(view=(2, 2)), "view"),
        (Blocks(view=(2, 3, 4), reduce=(3,)), "axis 3"),
        (Blocks(segments=((1, ()), (2, ())), axis=0), r"\[1, 2\] do not divide up axis 0"),
        (Blocks(segments=((5, ()), (7, (2,))), axis=1), "axis 2"),
        (Blocks(segments=((5, ()), (7, (0,))), axis=1, reduce=(0,)), "twice"),
        (Blocks(segments=((5, ()), (7, ())), axis=1, reduce=(1,)), "do not divide"),
        (Blocks(segments=((12, ()), (0, ())), axis=1), "do not divide"),
    ],
)
def test_blocks_that_do_not_fit(spec, message):
    params = {"layer": {"kernel": jnp.ones((2, 12))}}
    for blocks in ({"layer": {"kernel": spec}}, lambda path, shape: spec):
        with pytest.raises(ValueError, match=r"^layer\.kernel: .*" + message) as error:
            adam_mini(0.1, blocks=blocks).init(params)
        assert "\n" not in str(error.value)


def test_blocks_of_other_parameters():
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones(3)}
    with pytest.raises(ValueError, match="^b: blocks have no entry"):
        scale_by_adam_mini(blocks={"a": (0,)}).init(params)
    with pytest.raises(ValueError, match="^c: blocks have an entry"):
        scale_by_adam_mini(blocks={"a": (0,), "b": (), "c": ()}).init(params)
    state = scale_by_adam_mini().init(params)
    with pytest.raises(ValueError, match="^b: blocks have no entry"):
        scale_by_adam_mini(blocks={"a": (0,)}).update(params, state)


def test_first_moment_in_integers():
    with pytest.raises(ValueError, match="^mu_dtype=int16 cannot hold a first moment: use float32, bfloat16 or int8"):
        adam_mini(0.1, mu_dtype=jnp.int16)
