"""`config.json` of the models of `ARCHITECTURES` in Hugging Face's words <-> the `model` section in ours.

The keys are those of `transformers` 4 and 5, which name the rotary embedding differently: 4 has
`rotary_pct`, `rotary_emb_base`, `rope_theta` and `rope_scaling`, 5 has one `rope_parameters`. Both are read and
both are written.
"""

import json
import os
import pathlib
import sys
from typing import Any

from ml_collections import ConfigDict

from jaxpretrain import config as config_lib
from jaxpretrain.models.transformer import ENCODER_FIRST_POSITION

ARCHITECTURES = {
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "roberta": "RobertaForMaskedLM",
    "mamba": "MambaForCausalLM",
    "vit": "ViTForImageClassification",
    "convnext": "ConvNextForImageClassification",
}

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
_ACTIVATION_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
_ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3"}

# Options that change what the model computes, with the only value that ours computes.
_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "position_embedding_type": "absolute",
    "qkv_bias": True,
    "use_bias": False,
    "use_conv_bias": True,
    "quantization_config": None,
    "per_layer_config": None,
}
_DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "drop_path_rate"),
)


def is_folder(folder: str | os.PathLike) -> bool:
    """Whether this is a model's folder of Hugging Face's kind, supported or not; a work directory is none."""
    file = pathlib.Path(folder) / "config.json"
    return file.is_file() and "model_type" in _Json(file.parent)


def read(folder: pathlib.Path) -> tuple[str, ConfigDict]:
    """The family (a key of ARCHITECTURES) of a folder, and a config whose `model` and `seq_len` are its own, all other
    keys being at their defaults.

    Raises ValueError where there is no `config.json`, or it asks for what the model here does not compute.
    """
    hf = _Json(folder)
    family = hf.get("model_type")
    if family not in ARCHITECTURES:
        raise hf.refused("model_type", family, ARCHITECTURES)
    for key, value in _FIXED.items():
        if hf.get(key, value) != value:
            raise hf.refused(key, hf.get(key), [value])
    dropouts = {key: hf.get(key) for key in _DROPOUTS if hf.get(key)}
    if dropouts:
        print(f"warning: {hf.file}: {dropouts} ignored; see model.dropout and model.drop_path", file=sys.stderr)
    config = config_lib.default()
    _READERS[family](hf, config)
    return family, config


class _Json(dict):
    """A `config.json`; a null reads like a key that is not there."""

    def __init__(self, folder: pathlib.Path):
        self.file = folder / "config.json"
        if not self.file.is_file():
            raise ValueError(
                f"{folder}: holds no config.json, so is no Hugging Face model; download one with "
                "`hf download EleutherAI/pythia-70m --local-dir FOLDER` and give FOLDER"
            )
        try:
            content = json.loads(self.file.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.file}: not valid JSON: {error}") from error
        super().__init__({key: value for key, value in content.items() if value is not None})

    def size(self, key: str) -> int:
        """A number that has no sensible default."""
        if key not in self:
            raise ValueError(f"{self.file}: {key} is missing")
        return self[key]

    def activation(self, key: str, default: str) -> str:
        name = self.get(key, default)
        if name not in _ACTIVATIONS:
            raise self.refused(key, name, _ACTIVATIONS)
        return _ACTIVATIONS[name]

    def refused(self, key: str, value: Any, supported: Any) -> ValueError:
        words = supported if isinstance(supported, str) else ", ".join(map(repr, supported))
        return ValueError(f"{self.file}: {key}={value!r} is not supported, only {words}")


def _from_gpt_neox(hf: _Json, config: ConfigDict) -> None:
    config.model.init = "gpt_neox"
    _sizes(hf, config, "hidden_size", "num_hidden_layers", "num_attention_heads")
    config.seq_len = hf.size("max_position_embeddings")
    config.model.mlp_dim = hf.size("intermediate_size")
    config.model.norm_eps = float(hf.get("layer_norm_eps", 1e-5))
    config.model.activation = hf.activation("hidden_act", "gelu")
    config.model.attention_bias = hf.get("attention_bias", True)
    config.model.parallel_residual = hf.get("use_parallel_residual", True)
    config.model.tied_embeddings = hf.get("tie_word_embeddings", False)
    _rotary(hf, config, theta=hf.get("rotary_emb_base", 10000.0), fraction=hf.get("rotary_pct", 0.25))


def _from_gpt2(hf: _Json, config: ConfigDict) -> None:
    config.model.init = "gpt2"
    _sizes(hf, config, "n_embd", "n_layer", "n_head")
    config.seq_len = hf.size("n_positions")
    config.model.positions = "learned"
    config.model.max_positions = config.seq_len
    config.model.mlp_dim = hf.get("n_inner", 4 * config.model.embed_dim)
    config.model.norm_eps = float(hf.get("layer_norm_epsilon", 1e-5))
    config.model.activation = hf.activation("activation_function", "gelu_new")
    config.model.tied_embeddings = hf.get("tie_word_embeddings", True)


def _from_llama(hf: _Json, config: ConfigDict) -> None:
    config.model.init = "llama"
    _sizes(hf, config, "hidden_size", "num_hidden_layers", "num_attention_heads")
    config.seq_len = hf.size("max_position_embeddings")
    config.model.num_kv_heads = hf.get("num_key_value_heads", config.model.num_heads)
    config.model.head_dim = hf.get("head_dim", config.model.head_dim)
    config.model.mlp_dim = hf.size("intermediate_size")
    config.model.norm = "rmsnorm"
    config.model.norm_bias = False
    config.model.norm_eps = float(hf.get("rms_norm_eps", 1e-6))
    config.model.activation = hf.activation("hidden_act", "silu")
    config.model.gated_mlp = True
    config.model.attention_bias = hf.get("attention_bias", False)
    config.model.mlp_bias = hf.get("mlp_bias", False)
    config.model.tied_embeddings = hf.get("tie_word_embeddings", False)
    _rotary(hf, config, theta=hf.get("rope_theta", 10000.0), fraction=hf.get("partial_rotary_factor", 1.0))
    if config.model.rotary.fraction != 1:
        # Hugging Face's class itself obeys it in some scalings and not in others.
        raise hf.refused("partial_rotary_factor", config.model.rotary.fraction, [1.0])


def _from_roberta(hf: _Json, config: ConfigDict) -> None:
    config.model.family, config.model.init = "encoder", "normal"
    _encoder(hf, config)
    config.model.vocab_size = hf.size("vocab_size")
    config.seq_len = hf.size("max_position_embeddings") - ENCODER_FIRST_POSITION
    config.model.max_positions = config.seq_len
    for key, default, value in (("type_vocab_size", 2, 1), ("pad_token_id", 1, 1), ("tie_word_embeddings", True, True)):
        if hf.get(key, default) != value:
            raise hf.refused(key, hf.get(key, default), [value])


def _from_mamba(hf: _Json, config: ConfigDict) -> None:
    config.model.family = "mamba"
    config.model.vocab_size = hf.size("vocab_size")
    config.model.embed_dim, config.model.num_layers = hf.size("hidden_size"), hf.size("num_hidden_layers")
    config.model.norm_eps = float(hf.get("layer_norm_epsilon", 1e-5))
    config.model.tied_embeddings = hf.get("tie_word_embeddings", True)
    mamba = config.model.mamba
    mamba.state_dim, mamba.conv_width = hf.get("state_size", 16), hf.get("conv_kernel", 4)
    mamba.expand = hf.get("expand", 2)
    rank = hf.get("time_step_rank", "auto")
    mamba.dt_rank = 0 if rank in ("auto", -(-config.model.embed_dim // 16)) else rank
    inner = hf.get("intermediate_size", mamba.expand * config.model.embed_dim)
    if inner != mamba.expand * config.model.embed_dim:
        raise hf.refused("intermediate_size", inner, [mamba.expand * config.model.embed_dim])
    if hf.get("hidden_act", "silu") != "silu":
        raise hf.refused("hidden_act", hf.get("hidden_act"), ["silu"])


def _from_vit(hf: _Json, config: ConfigDict) -> None:
    config.model.family = "vit"
    _encoder(hf, config)
    _image(hf, config)
    image = config.model.image
    image.patch_size = _square(hf, "patch_size", 16)
    if image.size % image.patch_size:
        raise hf.refused("image_size", image.size, f"multiples of patch_size={image.patch_size}")


def _encoder(hf: _Json, config: ConfigDict) -> None:
    model = config.model
    model.embed_dim, model.num_layers = hf.size("hidden_size"), hf.size("num_hidden_layers")
    model.num_heads, model.mlp_dim = hf.size("num_attention_heads"), hf.size("intermediate_size")
    _check_heads(hf, model, "hidden_size", "num_attention_heads")
    model.norm_eps = float(hf.get("layer_norm_eps", 1e-12))
    model.activation = hf.activation("hidden_act", "gelu")


# Of all norms but the last in transformers, whose layer_norm_eps is 1e-12.
_CONVNEXT_EPS = 1e-6


def _from_convnext(hf: _Json, config: ConfigDict) -> None:
    config.model.family = "convnext"
    _image(hf, config)
    convnext = config.model.convnext
    convnext.depths = tuple(hf.get("depths", (3, 3, 9, 3)))
    convnext.widths = tuple(hf.get("hidden_sizes", (96, 192, 384, 768)))
    convnext.layer_scale = float(hf.get("layer_scale_init_value", 1e-6))
    for key, stages in (("depths", convnext.depths), ("hidden_sizes", convnext.widths)):
        if len(stages) != 4:
            raise hf.refused(key, list(stages), "4 stages")
    if config.model.image.size % 32:  # the stem divides it by 4, three stages by 2
        raise hf.refused("image_size", config.model.image.size, "multiples of 32")
    config.model.norm_eps = _CONVNEXT_EPS
    if hf.get("layer_norm_eps", 1e-12) > _CONVNEXT_EPS:
        raise hf.refused("layer_norm_eps", hf.get("layer_norm_eps"), [1e-12, _CONVNEXT_EPS])
    for key, default, value in (("hidden_act", "gelu", "gelu"), ("patch_size", 4, 4)):
        if hf.get(key, default) != value:
            raise hf.refused(key, hf.get(key), [value])


def _square(hf: _Json, key: str, default: int) -> int:
    value = hf.get(key, default)
    if not isinstance(value, int):
        raise hf.refused(key, value, "one number, for squares")
    return value


def _image(hf: _Json, config: ConfigDict) -> None:
    config.seq_len, config.data.source = 1, "images"
    image = config.model.image
    image.size, image.num_channels = _square(hf, "image_size", 224), hf.get("num_channels", 3)
    image.num_classes = len(hf["id2label"]) if "id2label" in hf else hf.get("num_labels", 2)
    if image.num_channels != 3:
        config.data.images.normalize = "half"


_READERS = {
    "gpt_neox": _from_gpt_neox,
    "gpt2": _from_gpt2,
    "llama": _from_llama,
    "roberta": _from_roberta,
    "mamba": _from_mamba,
    "vit": _from_vit,
    "convnext": _from_convnext,
}


def _sizes(hf: _Json, config: ConfigDict, embed_dim: str, num_layers: str, num_heads: str) -> None:
    model = config.model
    model.vocab_size = hf.size("vocab_size")
    model.embed_dim, model.num_layers, model.num_heads = hf.size(embed_dim), hf.size(num_layers), hf.size(num_heads)
    _check_heads(hf, model, embed_dim, num_heads)
    model.num_kv_heads = model.num_heads
    model.head_dim = model.embed_dim // model.num_heads


def _check_heads(hf: _Json, model: ConfigDict, embed_dim: str, num_heads: str) -> None:
    if model.embed_dim % model.num_heads:
        raise ValueError(
            f"{hf.file}: {embed_dim}={model.embed_dim} is not a multiple of {num_heads}={model.num_heads}; "
            "transformers refuses it too"
        )


def _rotary(hf: _Json, config: ConfigDict, theta: float, fraction: float) -> None:
    """`theta` and `fraction` hold where the newer dictionaries, in which transformers 5 keeps them, do not say."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}  # the order of transformers
    name = rope.get("rope_type", rope.get("type", "default"))
    if name not in _ROPE_TYPES:
        raise hf.refused("rope_type", name, _ROPE_TYPES)
    rotary = config.model.rotary
    rotary.theta = float(rope.get("rope_theta", theta))
    rotary.fraction = float(rope.get("partial_rotary_factor", fraction))
    rotary.scaling = _ROPE_TYPES[name]
    if rotary.scaling == "none":
        return
    keys = ("factor",) if rotary.scaling == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    for key in keys:
        if key not in rope:
            raise ValueError(f"{hf.file}: rope_type={name!r} without {key}")
        rotary[key] = float(rope[key])
    if rotary.scaling == "llama3":
        inner = rope.get("original_max_position_embeddings", config.seq_len)
        rotary.original_max_positions = hf.get("original_max_position_embeddings", inner)


def family_of(model: ConfigDict) -> str:
    """The family whose Hugging Face class computes this `model` section (sizes resolved, as `Transformer.config`).

    Raises ValueError naming every key that the nearest class has no option for.
    """
    if model.family != "decoder":
        return {"encoder": "roberta"}.get(model.family, model.family)
    full_heads = dict(num_kv_heads=model.num_heads, head_dim=model.embed_dim // model.num_heads)
    if model.positions == "learned":
        family = "gpt2"
        needs = dict(norm="layernorm", norm_bias=True, attention_bias=True, mlp_bias=True, gated_mlp=False)
        needs |= dict(parallel_residual=False, **full_heads)
    elif model.norm == "rmsnorm":
        family = "llama"
        needs = dict(gated_mlp=True, parallel_residual=False)
    else:
        family = "gpt_neox"
        needs = dict(norm_bias=True, mlp_bias=True, gated_mlp=False, **full_heads)
    needs["qk_norm"] = False
    wrong = [f"model.{key}={model[key]!r} (there {value!r})" for key, value in needs.items() if model[key] != value]
    if family == "llama" and model.rotary.fraction != 1:
        wrong.append(f"model.rotary.fraction={model.rotary.fraction} (there 1.0)")
    if model.embed_dim % model.num_heads:
        wrong.append(f"model.embed_dim={model.embed_dim} (there a multiple of model.num_heads={model.num_heads})")
    if wrong:
        raise ValueError(
            f"no Hugging Face class computes this model; from the nearest, {ARCHITECTURES[family]}, "
            f"it differs in {', '.join(wrong)}"
        )
    return family


def to_json(model: ConfigDict, seq_len: int, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
    """The `config.json` of a resolved `model` section; raises ValueError as `family_of` does."""
    family = family_of(model)
    hf = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "dtype": dtype,
        "torch_dtype": dtype,  # transformers 4
    }
    activation = _ACTIVATION_NAMES[model.activation]
    if family in ("vit", "convnext"):
        return hf | _image_to_json(model, activation)
    hf |= {
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
    }
    if family == "roberta":
        return hf | _roberta_to_json(model, activation)
    if family == "mamba":
        return hf | _mamba_to_json(model)
    if family == "gpt2":
        return hf | {
            "n_embd": model.embed_dim,
            "n_layer": model.num_layers,
            "n_head": model.num_heads,
            "n_positions": model.max_positions,
            "n_inner": model.mlp_dim,
            "activation_function": activation,
            "layer_norm_epsilon": model.norm_eps,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    scaling = _scaling(model.rotary)
    hf |= {
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.mlp_dim,
        "max_position_embeddings": seq_len,
        "hidden_act": activation,
        "attention_bias": model.attention_bias,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default"} | (scaling or {}) | {"rope_theta": model.rotary.theta},
    }
    if family == "llama":
        return hf | {
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "rms_norm_eps": model.norm_eps,
            "mlp_bias": model.mlp_bias,
            "rope_theta": model.rotary.theta,
        }
    hf["rope_parameters"]["partial_rotary_factor"] = model.rotary.fraction
    return hf | {
        "layer_norm_eps": model.norm_eps,
        "use_parallel_residual": model.parallel_residual,
        "rotary_pct": model.rotary.fraction,
        "rotary_emb_base": model.rotary.theta,
    }


def _roberta_to_json(model: ConfigDict, activation: str) -> dict[str, Any]:
    return {
        **_encoder_sizes(model, activation),
        "max_position_embeddings": model.max_positions + ENCODER_FIRST_POSITION,
        "type_vocab_size": 1,
        "pad_token_id": ENCODER_FIRST_POSITION - 1,
    }


def _encoder_sizes(model: ConfigDict, activation: str) -> dict[str, Any]:
    return {
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.mlp_dim,
        "hidden_act": activation,
        "layer_norm_eps": model.norm_eps,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _mamba_to_json(model: ConfigDict) -> dict[str, Any]:
    return {
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "layer_norm_epsilon": model.norm_eps,
        "state_size": model.mamba.state_dim,
        "conv_kernel": model.mamba.conv_width,
        "expand": model.mamba.expand,
        "intermediate_size": model.mamba.expand * model.embed_dim,
        "time_step_rank": model.mamba.dt_rank,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
    }


def _image_to_json(model: ConfigDict, activation: str) -> dict[str, Any]:
    image = model.image
    labels = {str(i): f"LABEL_{i}" for i in range(image.num_classes)}
    hf = {
        "image_size": image.size,
        "num_channels": image.num_channels,
        "id2label": labels,
        "label2id": {label: int(i) for i, label in labels.items()},
    }
    if model.family == "convnext" and model.norm_eps != _CONVNEXT_EPS:
        raise ValueError(f"model.norm_eps={model.norm_eps}: transformers' ConvNeXt has {_CONVNEXT_EPS} only; no export")
    if model.family == "vit":
        return hf | _encoder_sizes(model, activation) | {"patch_size": image.patch_size}
    return hf | {
        "depths": list(model.convnext.depths),
        "hidden_sizes": list(model.convnext.widths),
        # Where it is 0, transformers leaves the scales out, which are trained here.
        "layer_scale_init_value": model.convnext.layer_scale or 1e-6,
        "layer_norm_eps": model.norm_eps,
        "hidden_act": "gelu",
        "patch_size": 4,
    }


def _scaling(rotary: ConfigDict) -> dict[str, Any] | None:
    if rotary.scaling == "none":
        return None
    scaling = {"rope_type": rotary.scaling, "factor": rotary.factor}
    if rotary.scaling == "llama3":
        scaling |= {key: rotary[key] for key in ("low_freq_factor", "high_freq_factor")}
        scaling["original_max_position_embeddings"] = rotary.original_max_positions
    return scaling
