"""Hugging Face folders without torch: configurations, names, layouts and what is refused.

That the layouts are the right ones is shown against `transformers` in test_huggingface_parity.py.
"""

import json
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxpretrain import config as config_lib
from jaxpretrain.interop import huggingface, huggingface_config
from jaxpretrain.models import registry
from jaxpretrain.models.parameter import infos

PYTHIA_70M = dict(
    architectures=["GPTNeoXForCausalLM"],
    model_type="gpt_neox",
    vocab_size=50304,
    hidden_size=512,
    num_hidden_layers=6,
    num_attention_heads=8,
    intermediate_size=2048,
    max_position_embeddings=2048,
    hidden_act="gelu",
    layer_norm_eps=1e-5,
    rotary_pct=0.25,
    rotary_emb_base=10000,
    use_parallel_residual=True,
    tie_word_embeddings=False,
)
GPT2 = dict(
    architectures=["GPT2LMHeadModel"],
    model_type="gpt2",
    vocab_size=50257,
    n_embd=768,
    n_layer=12,
    n_head=12,
    n_positions=1024,
    n_ctx=1024,
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    attn_pdrop=0.1,
)
VIT_B = dict(
    architectures=["ViTForImageClassification"],
    model_type="vit",
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    hidden_act="gelu",
    layer_norm_eps=1e-12,
    image_size=224,
    patch_size=16,
)
CONVNEXT_T = dict(
    architectures=["ConvNextForImageClassification"],
    model_type="convnext",
    depths=[3, 3, 9, 3],
    hidden_sizes=[96, 192, 384, 768],
    layer_norm_eps=1e-12,
    image_size=224,
)
LLAMA_31_8B = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    max_position_embeddings=131072,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=dict(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3"
    ),
    attention_bias=False,
    mlp_bias=False,
    pretraining_tp=1,
    quantization_config=None,
)


def write_config(folder, hf: dict):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def model_section(folder, hf: dict) -> dict:
    config = huggingface.model_config(write_config(folder, hf))
    config_lib.check(config)
    return config.model.to_dict() | {"seq_len": config.seq_len}


def test_published_configurations(tmp_path):
    pythia = model_section(tmp_path / "a", PYTHIA_70M)
    assert pythia["rotary"]["fraction"] == 0.25 and pythia["parallel_residual"] and pythia["activation"] == "gelu"
    assert (pythia["seq_len"], pythia["head_dim"], pythia["mlp_dim"], pythia["init"]) == (2048, 64, 2048, "gpt_neox")
    assert not pythia["tied_embeddings"] and pythia["attention_bias"] and pythia["mlp_bias"] and pythia["norm_bias"]
    gpt2 = model_section(tmp_path / "b", GPT2)
    assert (gpt2["positions"], gpt2["max_positions"], gpt2["activation"]) == ("learned", 1024, "gelu_tanh")
    assert gpt2["tied_embeddings"] and gpt2["mlp_dim"] == 3072 and gpt2["num_kv_heads"] == 12
    llama = model_section(tmp_path / "c", LLAMA_31_8B)
    assert (llama["norm"], llama["norm_bias"], llama["activation"], llama["gated_mlp"]) == ("rmsnorm", 0, "silu", True)
    assert (llama["num_kv_heads"], llama["head_dim"], llama["seq_len"]) == (8, 128, 131072)
    assert not llama["attention_bias"] and not llama["mlp_bias"] and not llama["tied_embeddings"]
    rotary = dict(fraction=1.0, theta=500000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0)
    assert llama["rotary"] == rotary | dict(high_freq_factor=4.0, original_max_positions=8192)


def test_rotary_in_the_words_of_transformers_5(tmp_path):
    old, new = dict(LLAMA_31_8B), dict(LLAMA_31_8B)
    new["rope_parameters"] = new.pop("rope_scaling") | {"rope_theta": new.pop("rope_theta")}
    assert model_section(tmp_path / "a", new) == model_section(tmp_path / "b", old)
    old, new = dict(PYTHIA_70M), dict(PYTHIA_70M)
    new["rope_parameters"] = dict(
        rope_type="default", rope_theta=new.pop("rotary_emb_base"), partial_rotary_factor=new.pop("rotary_pct")
    )
    assert model_section(tmp_path / "a", new) == model_section(tmp_path / "b", old)
    oldest = dict(LLAMA_31_8B, rope_scaling={"type": "linear", "factor": 2})
    rotary = model_section(tmp_path / "a", oldest)["rotary"]
    assert (rotary["scaling"], rotary["factor"], rotary["theta"]) == ("linear", 2.0, 500000.0)


@pytest.mark.parametrize("family, scaling", [("gpt_neox", "none"), ("gpt_neox", "linear"), ("llama", "llama3")])
def test_both_words_for_rotary_are_written(tmp_path, family, scaling):
    """Either alone says the same. Mutation seen to fail: `rope_parameters` without `rope_theta`."""
    config = small_config(family)
    config.model.rotary.update(dict(theta=500.0, scaling=scaling))
    huggingface.export(random_params(config), config, tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    new = ("rope_parameters",)
    old = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_emb_base")
    for left_out in (old, new):
        hf = {key: value for key, value in written.items() if key not in left_out}
        rotary = huggingface.model_config(write_config(tmp_path / "read", hf)).model.rotary
        assert rotary == config.model.rotary


@pytest.mark.parametrize(
    "base, change, words",
    [
        (PYTHIA_70M, dict(model_type="mamba2"), "model_type='mamba2'"),
        (PYTHIA_70M, dict(hidden_act="relu"), "hidden_act='relu'"),
        (PYTHIA_70M, dict(hidden_size=510), "hidden_size=510"),
        (PYTHIA_70M, dict(intermediate_size=None), "intermediate_size is missing"),
        (GPT2, dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        (GPT2, dict(scale_attn_weights=False), "scale_attn_weights=False"),
        (GPT2, dict(add_cross_attention=True), "add_cross_attention=True"),
        (LLAMA_31_8B, dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_type='yarn'"),
        (LLAMA_31_8B, dict(rope_scaling=dict(rope_type="llama3", factor=4.0)), "without low_freq_factor"),
        (LLAMA_31_8B, dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (LLAMA_31_8B, dict(quantization_config={"bits": 4}), "quantization_config="),
        (VIT_B, dict(image_size=[224, 112]), "image_size=[224, 112] is not supported, only one number, for squares"),
        (VIT_B, dict(image_size=220), "image_size=220 is not supported, only multiples of patch_size=16"),
        (VIT_B, dict(hidden_size=770), "hidden_size=770 is not a multiple of num_attention_heads=12"),
        (CONVNEXT_T, dict(depths=[3, 3, 9]), "depths=[3, 3, 9] is not supported, only 4 stages"),
        (CONVNEXT_T, dict(hidden_sizes=[96, 192]), "hidden_sizes=[96, 192] is not supported, only 4 stages"),
        (CONVNEXT_T, dict(image_size=230), "image_size=230 is not supported, only multiples of 32"),
    ],
)
def test_unsupported_configurations_are_refused_by_name_and_value(tmp_path, base, change, words):
    """Of images, seen to fail: they came as far as the checks of our own keys, which name no folder."""
    with pytest.raises(ValueError, match="config.json") as error:
        huggingface.model_config(write_config(tmp_path, base | change))
    assert words in str(error.value) and "\n" not in str(error.value)


def small_config(family: str, **changes):
    config = config_lib.default()
    config.seq_len = 16
    config.model.update(dict(vocab_size=61, embed_dim=24, num_heads=6, num_layers=3, mlp_dim=40))
    if family == "gpt2":
        config.model.update(dict(positions="learned", activation="gelu_tanh", tied_embeddings=True))
    elif family == "gpt_neox":
        config.model.update(dict(parallel_residual=True))
        config.model.rotary.fraction = 0.5
    else:
        config.model.update(dict(norm="rmsnorm", norm_bias=False, activation="silu", gated_mlp=True))
        config.model.update(dict(attention_bias=False, mlp_bias=False, num_kv_heads=2, head_dim=10))
    config.model.update(changes)
    config_lib.check(config)
    return config


def random_params(config) -> dict:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda info: rng.standard_normal(info.shape, np.float32),
        infos(registry.build(config)),
        is_leaf=lambda x: hasattr(x, "axes"),
    )


def rewrite(folder, change) -> None:
    """Replaces the tensors of a folder with one file by what `change` leaves in the dict."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(params=["gpt_neox", "gpt2", "llama"])
def exported(request, tmp_path):
    """Config, parameters, folder."""
    config = small_config(request.param)
    params = random_params(config)
    huggingface.export(params, config, tmp_path / "hf")
    return config, params, tmp_path / "hf"


def assert_equal_trees(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_export_then_load_is_exact(exported):
    """Mutation seen to fail: `join` stacking along -2 whatever the family."""
    config, params, folder = exported
    assert huggingface_config.is_folder(folder)
    assert_equal_trees(huggingface.load_params(folder, config), params)
    reread = huggingface.model_config(folder)
    assert reread.seq_len == config.seq_len
    huggingface.check_same_model(folder, config)
    assert_equal_trees(huggingface.load_params(folder, reread), params)


def test_shards_and_half_precision(exported, tmp_path):
    config, params, _ = exported
    huggingface.export(params, config, tmp_path / "bf16", dtype="bfloat16", shard_bytes=5000)
    index = json.loads((tmp_path / "bf16" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "bf16").glob("*.safetensors")}
    assert len(files) > 3
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(x.nbytes for file in files.values() for x in file.values())
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params)
    assert_equal_trees(huggingface.load_params(tmp_path / "bf16", config), rounded)


def test_parameters_spread_over_devices(exported, tmp_path):
    config, params, folder = exported
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharding(x):
        dim = next((i for i, size in enumerate(x.shape) if size % mesh.size == 0), None)
        axes = [None] * x.ndim
        if dim is not None:
            axes[dim] = "fsdp"
        return NamedSharding(mesh, PartitionSpec(*axes))

    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), params)
    placed = huggingface.load_params(folder, config, like)
    assert_equal_trees(placed, params)
    assert jax.tree.map(lambda x: x.sharding, placed) == jax.tree.map(lambda x: x.sharding, like)
    huggingface.export(placed, config, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_names_of_older_files_are_read(exported):
    """Without the prefix, with the buffers of old classes, and GPT-NeoX's unembedding by its newer name.

    Mutation seen to fail: buffers not told from parameters.
    """
    config, params, folder = exported
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    prefix = {"gpt_neox": "gpt_neox.", "gpt2": "transformer.", "llama": "model."}[model_type]
    buffers = {
        "gpt_neox": [
            "layers.0.attention.bias",
            "layers.0.attention.masked_bias",
            "layers.2.attention.rotary_emb.inv_freq",
        ],
        "gpt2": ["h.0.attn.bias", "h.1.attn.masked_bias"],
        "llama": ["layers.0.self_attn.rotary_emb.inv_freq"],
    }[model_type]

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix(prefix).replace("embed_out", "lm_head")] = tensors.pop(name)
        tensors.update({name: np.zeros((1, 1), bool) for name in buffers})

    rewrite(folder, change)
    assert_equal_trees(huggingface.load_params(folder, config), params)


def test_misfitting_tensors_are_named(exported):
    config, _, folder = exported

    def change(tensors):
        names = sorted(tensors)
        del tensors[names[0]]
        tensors[names[1]] = tensors[names[1]][..., :-1]
        tensors["score.weight"] = np.zeros((2, 2), np.float32)
        change.names = names[:2]

    rewrite(folder, change)
    with pytest.raises(ValueError) as error:
        huggingface.load_params(folder, config)
    assert f"missing: {change.names[0]};" in str(error.value)
    assert "unknown: score.weight;" in str(error.value)
    assert f"wrong shape: {change.names[1]} [" in str(error.value)
    assert "\n" not in str(error.value)


def test_many_misfitting_tensors_are_counted(exported):
    config, _, folder = exported
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:9]])
    with pytest.raises(ValueError, match="and 5 more"):
        huggingface.load_params(folder, config)


def test_tied_models_may_store_the_unembedding(tmp_path):
    config = small_config("llama", tied_embeddings=True)
    params = random_params(config)
    huggingface.export(params, config, tmp_path / "hf")
    name = "model.embed_tokens.weight"
    rewrite(tmp_path / "hf", lambda tensors: tensors.update({"lm_head.weight": tensors[name].copy()}))
    assert_equal_trees(huggingface.load_params(tmp_path / "hf", config), params)
    rewrite(tmp_path / "hf", lambda tensors: tensors.update({"lm_head.weight": tensors[name] + 1}))
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        huggingface.load_params(tmp_path / "hf", config)


def test_unusable_files_are_refused(tmp_path):
    config = small_config("llama")
    folder = tmp_path / "hf"
    with pytest.raises(ValueError, match="holds no config.json.*hf download"):
        huggingface.load_params(folder, config)
    huggingface.export(random_params(config), config, folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(ValueError, match="model.safetensors: not a whole safetensors file"):
        huggingface.load_params(folder, config)
    (folder / "model.safetensors").write_bytes(weights)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": np.zeros((61, 24), np.int8)}))
    with pytest.raises(ValueError, match="no floating-point numbers: lm_head.weight I8"):
        huggingface.load_params(folder, config)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        huggingface.load_params(folder, config)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors listed in .* but not there"):
        huggingface.load_params(folder, config)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="pytorch_model.bin.*save_pretrained"):
        huggingface.load_params(folder, config)


def test_another_model_is_refused_by_key(tmp_path):
    """Of the same shapes, but not the same function. Mutation seen to fail: no `check_same_model` in `load_params`."""
    config = small_config("gpt_neox")
    huggingface.export(random_params(config), config, tmp_path / "hf")
    other = small_config("gpt_neox", parallel_residual=False, norm_eps=1e-6, init="mitchell")
    with pytest.raises(ValueError) as error:
        huggingface.load_params(tmp_path / "hf", other)
    assert "model.parallel_residual=False (there True)" in str(error.value)
    assert "model.norm_eps=1e-06 (there 1e-05)" in str(error.value) and "init" not in str(error.value)
    longer = small_config("gpt_neox")
    longer.seq_len = 64
    huggingface.check_same_model(tmp_path / "hf", longer)


def test_what_only_initialises_or_regularises_is_no_other_model(tmp_path):
    """A run's weights are as free in that as a Hugging Face folder's. Seen to fail: dropout was compared, and an
    mlp_dim of 0 with its own value."""
    saved = small_config("gpt_neox", mlp_dim=0)
    other = small_config("gpt_neox", mlp_dim=4 * 24, init="mitchell")
    huggingface.check_same_architecture("run", saved, other)
    vision = config_lib.load("configs/tiny_vit.py", [("model.drop_path", "0.0"), ("model.dropout", "0.0")])
    regular = config_lib.load("configs/tiny_vit.py", [("model.drop_path", "0.1"), ("model.dropout", "0.1")])
    huggingface.check_same_architecture("run", vision, regular)
    convnext = config_lib.load("configs/tiny_convnext.py", [])
    with pytest.raises(ValueError, match="run holds a model of the family 'convnext', the config one of 'vit'"):
        huggingface.check_same_architecture("run", convnext, vision)


@pytest.mark.parametrize(
    "family, changes, words",
    [
        ("gpt_neox", dict(qk_norm=True, norm_bias=False), ("model.norm_bias=False", "model.qk_norm=True")),
        ("gpt_neox", dict(num_kv_heads=2), ("model.num_kv_heads=2",)),
        ("gpt_neox", dict(head_dim=8), ("model.head_dim=8",)),
        ("gpt_neox", dict(gated_mlp=True), ("model.gated_mlp=True",)),
        ("gpt2", dict(parallel_residual=True), ("model.parallel_residual=True",)),
        ("gpt2", dict(mlp_bias=False), ("model.mlp_bias=False",)),
        ("llama", dict(gated_mlp=False), ("model.gated_mlp=False",)),
        ("llama", dict(embed_dim=25), ("model.embed_dim=25",)),
        ("llama", dict(rotary=dict(fraction=0.4)), ("model.rotary.fraction=0.4",)),
    ],
)
def test_models_without_a_hugging_face_class_are_refused_by_key(tmp_path, family, changes, words):
    config = small_config(family, **changes)
    with pytest.raises(ValueError, match="no Hugging Face class") as error:
        huggingface.export(random_params(config), config, tmp_path / "hf")
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_export_refuses_other_parameters_and_dtypes(tmp_path):
    config = small_config("llama")
    params = random_params(config)
    with pytest.raises(ValueError, match="dtype='float8'"):
        huggingface.export(params, config, tmp_path / "hf", dtype="float8")
    params["embed"]["embedding"] = params["embed"]["embedding"][:-1]
    with pytest.raises(ValueError, match="embed.embedding"):
        huggingface.export(params, config, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_an_export_is_whole_or_absent(tmp_path):
    config = small_config("llama")
    params = random_params(config)
    (tmp_path / "kept").mkdir()
    with pytest.raises(ValueError, match="kept exists"):
        huggingface.export(params, config, tmp_path / "kept")

    class Fails:
        shape = params["final_norm"]["scale"].shape

        def __array__(self, *_, **__):
            raise RuntimeError("interrupted")

    params["final_norm"]["scale"] = Fails()
    with pytest.raises(RuntimeError, match="interrupted"):
        huggingface.export(params, config, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_no_second_copy_in_memory(tmp_path):
    """Mutations seen to fail: `values` made a list before the first is written; `np.empty` in float64."""
    config = small_config("gpt_neox", num_layers=32, embed_dim=96, mlp_dim=256)
    params = random_params(config)
    flat = traverse_util.flatten_dict(params, sep=".")
    total, largest = sum(x.nbytes for x in flat.values()), max(x.nbytes for x in flat.values())
    assert total > 3 * largest
    tracemalloc.start()
    huggingface.export(params, config, tmp_path / "hf")
    _, peak = tracemalloc.get_traced_memory()
    assert peak < largest
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    loaded = huggingface.load_params(tmp_path / "hf", config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - before < total + largest / 2
    assert_equal_trees(loaded, params)


def test_the_tokenizer_comes_along(tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {"a": 0, "b": 1, "<|endoftext|>": 2}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    config = small_config("gpt2")
    huggingface.export(random_params(config), config, tmp_path / "hf", tokenizer=tmp_path / "tokenizer.json")
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 2
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    small = small_config("gpt2", vocab_size=2)
    with pytest.raises(ValueError, match="model.vocab_size=2"):
        huggingface.export(random_params(small), small, tmp_path / "small", tokenizer=tmp_path / "tokenizer.json")
