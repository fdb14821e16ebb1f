"""Which parameters share a second moment: by role and axes, through whole models and by hand-written descriptions.

Most cases are failures that users of the authors' code reported, which finds blocks by parts of names and one global
`dim * dim // n_heads`; the numbers of blocks are checked against the authors' own in test_adam_mini.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxpretrain import config as config_lib
from jaxpretrain.models import parameter, registry
from jaxpretrain.models.parameter import Info, infos
from jaxpretrain.optim.adam_mini import Blocks, scale_by_adam_mini
from jaxpretrain.optim.blocks import VARIANTS, adam_mini_blocks, num_second_moments


def info(role: str, **axes: int) -> Info:
    return Info(tuple(axes.values()), jnp.dtype("float32"), tuple(axes), role)


def blocks_of(role: str, variant: str = "v1_1", **axes: int):
    return adam_mini_blocks({"p": info(role, **axes)}, variant)["p"]


def nu_shapes(model_infos: dict, variant: str = "v1_1") -> dict[str, tuple[int, ...]]:
    """Path -> shape of the second moment."""
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), model_infos)
    nu = jax.eval_shape(scale_by_adam_mini(blocks=adam_mini_blocks(model_infos, variant)).init, params).nu
    return {path: x.shape for path, x in traverse_util.flatten_dict(nu, sep=".").items()}


def model_infos(**model) -> dict:
    config = config_lib.default()
    config.seq_len = 24
    config.model.update(dict(vocab_size=61, num_layers=3, embed_dim=32, num_heads=4, mlp_dim=48) | model)
    config_lib.check(config)
    return infos(registry.build(config))


_LLAMA = dict(norm="rmsnorm", norm_bias=False, gated_mlp=True, attention_bias=False, mlp_bias=False)


# --- Whole models.


def test_llama_with_grouped_queries():
    """Fails with kv_heads averaged over as head_dim is (tried)."""
    assert nu_shapes(model_infos(**_LLAMA, num_kv_heads=2)) == {
        "embed.embedding": (61, 1),
        "layers.attention.query.kernel": (3, 1, 4, 1),
        "layers.attention.key.kernel": (3, 1, 2, 1),
        "layers.attention.value.kernel": (3, 1, 2, 8),
        "layers.attention.out.kernel": (3, 1, 1, 32),
        "layers.attention_norm.scale": (3, 1),
        "layers.mlp.up.kernel": (3, 1, 48),
        "layers.mlp.gate.kernel": (3, 1, 48),
        "layers.mlp.down.kernel": (3, 1, 32),
        "layers.mlp_norm.scale": (3, 1),
        "final_norm.scale": (1,),
        "unembed.kernel": (61, 1),
    }


@pytest.mark.parametrize(
    "variant,changed",
    [
        ("value_whole", {"attention.value.kernel": (3, 1, 1, 1)}),
        ("fan_out", {
            "attention.value.kernel": (3, 32, 1, 1), "attention.out.kernel": (3, 4, 8, 1),
            "mlp.up.kernel": (3, 32, 1), "mlp.gate.kernel": (3, 32, 1), "mlp.down.kernel": (3, 48, 1),
        }),
        ("slim", {
            "attention.query.kernel": (3, 1, 4, 8), "attention.key.kernel": (3, 1, 2, 8),
            "attention.value.kernel": (3, 32, 1, 1), "attention.out.kernel": (3, 4, 8, 1),
            "mlp.up.kernel": (3, 32, 1), "mlp.gate.kernel": (3, 32, 1), "mlp.down.kernel": (3, 48, 1),
            "attention_norm.scale": (3, 32), "mlp_norm.scale": (3, 32), "final_norm.scale": (32,),
        }),
        ("v1_0", {
            "embed.embedding": (61, 32), "unembed.kernel": (61, 32),
            "attention.value.kernel": (3, 1, 1, 1), "attention.out.kernel": (3, 1, 1, 1),
            "mlp.up.kernel": (3, 1, 1), "mlp.gate.kernel": (3, 1, 1), "mlp.down.kernel": (3, 1, 1),
        }),
    ],
)  # fmt: skip
def test_variants_differ_as_they_say(variant, changed):
    tree = model_infos(**_LLAMA, num_kv_heads=2)
    changed = {path if path in nu_shapes(tree) else f"layers.{path}": shape for path, shape in changed.items()}
    assert nu_shapes(tree, variant) == nu_shapes(tree) | changed


def test_per_tensor():
    tree = model_infos()
    assert num_second_moments(tree, adam_mini_blocks(tree, "per_tensor")) == sum(
        3 if i.axes[0] == "layers" else 1 for i in jax.tree.leaves(tree)
    )


def test_gpt2_with_biases_and_tied_embeddings():
    """One leaf for both embeddings, one number per token; position by position; biases as in Adam."""
    shapes = nu_shapes(model_infos(positions="learned", tied_embeddings=True))
    assert "unembed.kernel" not in shapes
    assert shapes["embed.embedding"] == (61, 1)
    assert shapes["position_embed.embedding"] == (24, 1)
    assert shapes["layers.attention.query.bias"] == (3, 4, 8)
    assert shapes["layers.mlp.up.bias"] == (3, 48)
    assert shapes["layers.mlp_norm.bias"] == (3, 32)
    whole = nu_shapes(model_infos(positions="learned", tied_embeddings=True), "v1_0")
    assert whole["layers.attention.query.bias"] == (3, 1, 1) and whole["position_embed.embedding"] == (24, 32)


@pytest.mark.parametrize("recipe", ["pythia1b", "llama2_102m", "gpt2_small", "cbs151m", "tiny"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_recipe_has_blocks(recipe, variant):
    """GPT-NeoX's norms (`final_layer_norm`) and norms beside an MLP crash the authors' code: one block here."""
    tree = infos(registry.build(config_lib.load(f"configs/{recipe}.py")))
    shapes = nu_shapes(tree, variant)
    for path, i in traverse_util.flatten_dict(tree, sep=".").items():
        layers = i.shape[0] if i.axes[0] == "layers" else 1
        assert layers == 1 or shapes[path][0] == layers, path
        if i.role == "norm_scale":
            assert np.prod(shapes[path]) == (np.prod(i.shape) if variant == "slim" else layers), path


def test_query_and_key_norms():
    shapes = nu_shapes(model_infos(qk_norm=True))
    assert shapes["layers.attention.query_norm.scale"] == shapes["layers.attention.key_norm.scale"] == (3, 1)


@pytest.mark.parametrize("embed_dim,num_heads,head_dim", [(48, 4, 16), (32, 4, 16), (56, 14, 4)])
def test_heads_are_what_the_axis_says(embed_dim, num_heads, head_dim):
    """In small: Gemma's 16 heads of 256 at a width of 3072, Qwen3's head_dim of twice width / heads, 14 heads."""
    shapes = nu_shapes(model_infos(**_LLAMA, embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim))
    assert shapes["layers.attention.query.kernel"] == (3, 1, num_heads, 1)
    assert shapes["layers.attention.out.kernel"] == (3, 1, 1, embed_dim)


# --- Parameters of other models, as they would describe themselves.


@pytest.mark.parametrize(
    "what,role,axes,expected",
    [
        ("Gemma-7B", "query", dict(embed=3072, heads=16, head_dim=256), (0, 2)),
        ("Qwen3-0.6B", "query", dict(embed=1024, heads=16, head_dim=128), (0, 2)),
        ("Qwen2-0.5B", "query", dict(layers=24, embed=896, heads=14, head_dim=64), (1, 3)),
        ("HF GPT-2 Conv1D, [in, out]", "mlp_in", dict(embed=768, mlp=3072), (0,)),
        ("HF GPT-2 Conv1D, [in, out]", "mlp_out", dict(mlp=3072, embed=768), (0,)),
        ("BERT embeddings.LayerNorm", "norm_scale", dict(embed=768), (0,)),
        ("BERT token types", "embedding", dict(token_type=2, embed=768), (1,)),
        ("BERT attention.output.LayerNorm", "norm_scale", dict(layers=12, embed=768), (1,)),
        ("norm inside an MLP", "norm_scale", dict(layers=12, mlp=3072), (1,)),
        ("ViT patch_embed.proj", "patch_embedding", dict(height=16, width=16, channels=3, embed=768), (0, 1, 2)),
        ("ViT pos_embed", "position_embedding", dict(batch=1, position=197, embed=768), (2,)),
        ("convolution", "conv", dict(height=3, width=3, channels=64, features=128), (0, 1, 2)),
        ("depthwise convolution", "conv", dict(height=7, width=7, group=1, features=96), (0, 1, 2)),
        ("MoE experts", "mlp_in", dict(experts=8, embed=64, mlp=128), (1,)),
        ("MoE experts in layers", "mlp_out", dict(layers=2, experts=8, mlp=128, embed=64), (2,)),
        ("MoE router", "router", dict(layers=2, embed=64, experts=8), (1,)),
        ("MoE biases", "bias", dict(layers=2, experts=8, mlp=128), ()),
        ("LoRA A", "lora_a", dict(embed=4096, rank=16), (0,)),
        ("LoRA A of attn_out", "lora_a", dict(heads=32, head_dim=128, rank=16), (0, 1)),
        ("LoRA B of a query", "lora_b", dict(rank=16, heads=32, head_dim=128), (0,)),
        ("Mamba in_proj, x and z fused", "ssm_in_proj", dict(layers=4, embed=64, inner=256), (1,)),
        ("Mamba x_proj, dt, B and C fused", "ssm_x_proj", dict(inner=128, selection=36), (0,)),
        ("Mamba dt_proj", "ssm_dt_proj", dict(rank=4, inner=128), (0,)),
        ("Mamba out_proj", "ssm_out_proj", dict(inner=128, embed=64), (0,)),
        ("Mamba conv1d", "conv", dict(layers=4, window=4, group=1, inner=128), (1, 2)),
        ("Mamba A_log", "ssm_a_log", dict(layers=4, inner=128, state=16), (2,)),
        ("Mamba-2 A_log", "ssm_a_log", dict(layers=4, heads=24), ()),
        ("Mamba D", "ssm_d", dict(layers=4, inner=128), ()),
    ],
)  # fmt: skip
def test_other_models(what, role, axes, expected):
    """Fails with experts averaged over, and with the fan-in dims not shifted past the layers (each tried)."""
    assert blocks_of(role, **axes) == expected, what


def test_every_role_has_a_rule():
    """Of any variant, on a parameter with enough axes."""
    for role in parameter.ROLES:
        for variant in VARIANTS:
            axes = dict(layers=2, embed=8, heads=4, head_dim=2)
            if role == "query_key_value":
                axes["qkv"] = 3
            tree = {"p": info(role, **axes)}
            assert num_second_moments(tree, adam_mini_blocks(tree, variant)) % 2 == 0


@pytest.mark.parametrize(
    "axes",
    [
        dict(embed=6, qkv=3, heads=4, head_dim=2),
        dict(embed=6, heads=4, qkv=3, head_dim=2),  # GPT-NeoX
        dict(embed=6, kv_heads=2, qkv=4, head_dim=2),  # two query heads for each of two key heads
        dict(layers=2, embed=6, qkv=3, heads=4, head_dim=2),
        dict(layers=2, embed=6, kv_heads=2, qkv=5, head_dim=2),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_projections_equal_separate_ones(axes, variant):
    """A step on fused queries, keys and values against one on the three apart.

    Fails with the value's segment given the blocks of a key, and with qkv averaged over (each tried)."""
    if variant == "per_tensor":
        assert blocks_of("query_key_value", variant, **axes) == parameter.own_dims(tuple(axes))
        return
    qkv, size = list(axes).index("qkv"), axes["qkv"]
    shape = tuple(axes.values())
    rng = np.random.default_rng(0)
    g = (rng.lognormal(0, 2, shape) * rng.normal(size=shape)).astype("float32")
    # Apart, the query heads of a group are simply heads of their own.
    apart = {
        role: {str(i): info(role, **{a: n for a, n in axes.items() if a != "qkv"}) for i in indices}
        for role, indices in dict(query=range(size - 2), key=[size - 2], value=[size - 1]).items()
    }

    def update(tree, gradients):
        optimizer = scale_by_adam_mini(blocks=adam_mini_blocks(tree, variant))
        return jax.jit(optimizer.update)(gradients, optimizer.init(gradients))[0]

    fused = update({"p": info("query_key_value", **axes)}, {"p": g})["p"]
    fused = np.asarray(fused)
    parts = update(apart, {role: {i: g.take(int(i), qkv) for i in tree} for role, tree in apart.items()})
    for tree in parts.values():
        for i, expected in tree.items():
            np.testing.assert_allclose(fused.take(int(i), qkv), expected, rtol=1e-5)


def test_fused_stores_no_more_than_it_must():
    tree = {"p": info("query_key_value", layers=2, embed=6, qkv=3, heads=4, head_dim=2)}
    assert adam_mini_blocks(tree)["p"] == Blocks(reduce=(1,), axis=2, segments=((1, (4,)), (1, (4,)), (1, ())))
    assert num_second_moments(tree, adam_mini_blocks(tree)) == 2 * 3 * 4 * 2


# --- What is refused.


@pytest.mark.parametrize(
    "role,axes,message",
    [
        ("query", dict(embed=8, query=8), "need an axis heads or kv_heads"),
        ("query_key_value", dict(embed=8, qkv_heads_head_dim=24), "need an axis qkv"),
        ("query_key_value", dict(embed=8, qkv=3, out=8), "need an axis heads or kv_heads"),
        ("query_key_value", dict(embed=8, qkv=2, heads=2, head_dim=4), "size 2, and needs 3 or more"),
        ("in_proj_weight", dict(out=24, embed=8), "the role 'in_proj_weight' has no Adam-mini blocks; the roles are"),
        ("mlp_in", dict(layers=2, mlp=8), "needs axes of inputs and of outputs"),
        ("embedding", dict(embed=8), "needs axes of inputs and of outputs"),
    ],
)
def test_parameter_without_a_rule(role, axes, message):
    with pytest.raises(ValueError, match=r"^parameter layers\.x\.kernel with axes \(.*" + message) as error:
        adam_mini_blocks({"layers": {"x": {"kernel": info(role, **axes)}}})
    assert "\n" not in str(error.value)


def test_variant_that_does_not_exist():
    with pytest.raises(ValueError, match="'v2': choose one of v1_1, value_whole, v1_0, fan_out, slim, per_tensor$"):
        adam_mini_blocks({}, "v2")
