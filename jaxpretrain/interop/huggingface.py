"""Hugging Face folders (safetensors and config.json) of the models in families.py, read and written.

Neither torch nor transformers is needed. Both directions hold one stacked parameter in host memory beside
what the caller keeps: reading fills and places them one after the other, writing fetches a layer at a time.

Shapes: H query heads, K head_dim.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict
from safetensors import SafetensorError, safe_open

from jaxpretrain.config import flatten
from jaxpretrain.data.tokenizer import check_vocabulary, load_tokenizer
from jaxpretrain.interop import huggingface_config
from jaxpretrain.interop.families import FAMILIES, Family
from jaxpretrain.models import registry
from jaxpretrain.models.parameter import Info, fan_in, infos

_DTYPES = {"float32": ("F32", np.float32), "bfloat16": ("BF16", ml_dtypes.bfloat16), "float16": ("F16", np.float16)}
_SHARD_BYTES = 5 * 10**9
_TO_SAFETENSORS = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{0}').save_pretrained('{0}-safetensors')\""
)
_VECTORS = ("bias", "norm_scale", "ssm_d", "ssm_dt_bias")  # roles of parameters that have one dim there
_TABLES = ("embedding", "position_embedding", "unembedding", "ssm_a_log")  # that are never transposed
_CONVOLUTIONS = ("conv", "patch_embedding")  # [out, in, *window] there, [*window, in, out] here


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of theirs, or the same one of every layer, and the parameters of ours that it holds."""

    name: str  # with {} for the layer
    paths: tuple[str, ...]
    info: Info  # of the first of `paths`; the others have the same shape
    family: Family
    extra_dims: int = 0  # of size 1, in front

    @property
    def num_layers(self) -> int:
        """0 where it belongs to no layer."""
        return self.info.shape[0] if self.info.axes[0] == "layers" else 0

    @property
    def _inner(self) -> tuple[int, ...]:
        """Shape of one layer's parameters, stacked where they are fused."""
        shape = list(self.info.shape[bool(self.num_layers) :])
        if len(self.paths) > 1:
            shape.insert(len(shape) + 1 + self.family.fused_dim, len(self.paths))
        return tuple(shape)

    @property
    def _matrix(self) -> tuple[int, ...]:
        """`_inner` with its input dims as one and its output dims as one."""
        if self.info.role in _VECTORS:
            return (math.prod(self._inner),)
        if self.info.role in _TABLES:
            return self._inner
        num_inputs = fan_in(self.info.shape[bool(self.num_layers) :], self.info.role)
        return num_inputs, math.prod(self._inner) // num_inputs

    @property
    def _is_transposed(self) -> bool:
        return self.family.transposed and self.info.role not in _VECTORS + _TABLES

    @property
    def shape(self) -> tuple[int, ...]:
        if self.info.role in _CONVOLUTIONS:
            *window, num_in, num_out = self._inner
            return num_out, num_in, *window
        return (1,) * self.extra_dims + (self._matrix[::-1] if self._is_transposed else self._matrix)

    def split(self, theirs: np.ndarray) -> list[np.ndarray]:
        """Views of one layer's tensor of theirs, in our shapes, one for each of `paths`."""
        if self.info.role in _CONVOLUTIONS:
            return [np.moveaxis(theirs, (1, 0), (-2, -1))]
        inner = (theirs.T if self._is_transposed else theirs).reshape(self._inner)
        return list(np.moveaxis(inner, self.family.fused_dim, 0)) if len(self.paths) > 1 else [inner]

    def join(self, ours: list[np.ndarray]) -> np.ndarray:
        """The inverse of `split`."""
        if self.info.role in _CONVOLUTIONS:
            return np.moveaxis(ours[0], (-2, -1), (1, 0))
        inner = np.stack(ours, self.family.fused_dim) if len(ours) > 1 else ours[0]
        matrix = inner.reshape(self._matrix)
        return (matrix.T if self._is_transposed else matrix).reshape(self.shape)

    def layer_names(self) -> list[str]:
        return [self.name.format(i) for i in range(self.num_layers)] or [self.name]


def _tensors(family: Family, parameters: Mapping[str, Info]) -> list[_Tensor]:
    """All tensors of a model, in the order in which they are written."""
    modules = {family.prefix + theirs: ours for theirs, ours in family.modules.items()}
    modules |= family.outside or {family.unembed[0].removesuffix(".weight"): ("unembed",)}
    tensors, covered = [], set(family.tensors.values())
    for theirs, path in family.tensors.items():
        info = parameters[path]
        extra_dims = family.extra_dims if len(info.shape) == 2 else 0
        tensors.append(_Tensor(family.prefix + theirs, (path,), info, family, extra_dims))
    for theirs, ours in modules.items():
        for path, info in parameters.items():
            module, _, leaf = path.rpartition(".")
            if module == ours[0] and path not in family.tensors.values():
                paths = tuple(f"{other}.{leaf}" for other in ours)
                name = f"{theirs}.{'bias' if leaf == 'bias' else 'weight'}"
                tensors.append(_Tensor(name, paths, info, family))
                covered.update(paths)
    assert covered == set(parameters), covered ^ set(parameters)
    return tensors


# --- Reading


def model_config(folder: str | os.PathLike) -> ConfigDict:
    """A config whose `model` and `seq_len` are those of `folder`; all other keys are at their defaults.

    Raises ValueError, naming key and value, for what is not supported.
    """
    return huggingface_config.read(pathlib.Path(folder))[1]


def check_same_model(folder: str | os.PathLike, config: ConfigDict) -> None:
    """Raises ValueError naming the keys in which the model of `config` is another one than that of `folder`."""
    check_same_architecture(folder, model_config(folder), config)


def check_same_architecture(source: str | os.PathLike, saved: ConfigDict, config: ConfigDict) -> None:
    """Raises ValueError naming the keys in which the models of two configs differ, `saved` being that of `source`.

    What only initialises or regularises does not count, nor does `seq_len` unless it sizes a position table.
    """
    there, here = (flatten(registry.build(c).config) for c in (saved, config))
    if there["family"] != here["family"]:
        raise ValueError(
            f"{source} holds a model of the family {there['family']!r}, the config one of {here['family']!r}"
        )
    unread = {*_NOT_ARCHITECTURE, *(["max_positions"] if here["positions"] == "rotary" else [])}
    keys = [key for key in here if here[key] != there[key] and key not in unread]
    if keys:
        wrong = [f"model.{key}={here[key]!r} (there {there[key]!r})" for key in keys]
        raise ValueError(f"{source} holds another model than the config: {_first(wrong)}; set these keys as there")


_NOT_ARCHITECTURE = ("init", "dropout", "drop_path", "convnext.layer_scale", "mamba.dt_min", "mamba.dt_max")


def load_params(folder: str | os.PathLike, config: ConfigDict, like: Mapping | None = None) -> dict:
    """The parameters of `folder` for the model of `config`: a nested dict, float32.

    Args:
      like: abstract parameters with shardings, which say where they go; without it they are NumPy arrays.

    Raises ValueError as `check_same_model` does; where tensors are missing, unknown or of the wrong shape, naming
    them; and for files that are not safetensors.
    """
    check_same_model(folder, config)
    folder = pathlib.Path(folder)
    family = FAMILIES[huggingface_config.read(folder)[0]]
    parameters = _flat_infos(config)
    tensors = _tensors(family, parameters)
    with contextlib.ExitStack() as stack:
        files = _open(folder, family, stack)
        _check_names_and_shapes(folder, files, tensors)
        if registry.build(config).config.tied_embeddings:
            _check_tied(folder, files, tensors, family)
        shardings = like and traverse_util.flatten_dict(like, sep=".")
        flat = {}
        for tensor in tensors:
            for i, path in enumerate(tensor.paths):
                # One of fused parameters at a time: their file is read three times, memory holds one of three.
                value = np.empty(parameters[path].shape, np.float32)
                for layer, name in enumerate(tensor.layer_names()):
                    part = tensor.split(files[name].read())[i]
                    value[layer if tensor.num_layers else ...] = part
                flat[path] = _placed(value, shardings[path]) if shardings else value
                del value
    return traverse_util.unflatten_dict(flat, sep=".")


def _flat_infos(config: ConfigDict) -> dict[str, Info]:
    return traverse_util.flatten_dict(infos(registry.build(config)), sep=".")


def _placed(value: np.ndarray, like: Any) -> jax.Array:
    """On the devices of `like`, complete: the host's array can go."""
    array = jax.make_array_from_callback(value.shape, like.sharding, lambda index: value[index])
    return jax.block_until_ready(array)


@dataclasses.dataclass(frozen=True)
class _StoredTensor:
    file: Any  # safe_open
    name: str  # as stored

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        """In the words of safetensors."""
        return self.file.get_slice(self.name).get_dtype()

    def read(self) -> np.ndarray:
        """The tensor in its own precision."""
        return self.file.get_tensor(self.name)


def _open(folder: pathlib.Path, family: Family, stack: contextlib.ExitStack) -> dict[str, _StoredTensor]:
    """Every parameter of the folder, by the name that we write it with; nothing is read yet."""
    stored = {}
    for path in _weight_files(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="np"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error}); download it again") from error
        for name in file.keys():
            stored[name] = _StoredTensor(file, name)
    named = {}
    for name, tensor in stored.items():
        if name in family.unembed:
            named[family.unembed[0]] = tensor
        elif name.rpartition(".")[0] in family.outside:
            named[name] = tensor
        elif not re.fullmatch(family.buffers, name.removeprefix(family.prefix)):
            named[family.prefix + name.removeprefix(family.prefix)] = tensor
    return named


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        paths = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ValueError(f"{folder}: {_first(missing)} listed in {index.name} but not there; download again")
        return paths
    if list(folder.glob("pytorch_model*.bin*")):
        raise ValueError(
            f"{folder}: holds pytorch_model.bin, not safetensors; convert it, where torch is installed, with "
            + _TO_SAFETENSORS.format(str(folder).rstrip("/"))
        )
    raise ValueError(f"{folder}: holds no weights (model.safetensors or model.safetensors.index.json)")


def _check_names_and_shapes(folder: pathlib.Path, files: Mapping[str, _StoredTensor], tensors: list[_Tensor]) -> None:
    expected = {name: tensor.shape for tensor in tensors for name in tensor.layer_names()}
    tied_copy = tensors[0].family.unembed[0]  # a tied model may store it too, see _check_tied
    problems = {
        "missing": [name for name in expected if name not in files],
        "unknown": [files[name].name for name in files if name not in expected and name != tied_copy],
        "wrong shape": [
            f"{files[name].name} {list(files[name].shape)}, not {list(shape)}"
            for name, shape in expected.items()
            if name in files and files[name].shape != shape
        ],
        "no floating-point numbers": [
            f"{stored.name} {stored.dtype}"
            for stored in files.values()
            if stored.dtype not in ("F64", *(code for code, _ in _DTYPES.values()))
        ],
    }
    if any(problems.values()):
        text = "; ".join(f"{what}: {_first(names)}" for what, names in problems.items() if names)
        raise ValueError(f"{folder}: tensors do not fit its config.json: {text}")


def _check_tied(
    folder: pathlib.Path, files: Mapping[str, _StoredTensor], tensors: list[_Tensor], family: Family
) -> None:
    copy = files.get(family.unembed[0])
    embedding = next(files[tensor.name] for tensor in tensors if tensor.paths == ("embed.embedding",))
    if copy is not None and not np.array_equal(copy.read(), embedding.read()):
        raise ValueError(
            f"{folder}: config.json says tie_word_embeddings, but {copy.name} differs from {embedding.name}; "
            "set tie_word_embeddings to false there"
        )


def _first(names: list[str], count: int = 4) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


# --- Writing


def export(
    params: Mapping,
    config: ConfigDict,
    folder: str | os.PathLike,
    *,
    dtype: str = "float32",
    tokenizer: str | os.PathLike | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes `folder` for the `transformers` class that computes the model of `config`.

    Args:
      params: nested dict of NumPy or fully addressable JAX arrays, on one device or many.
      dtype: of the written weights: float32, bfloat16 or float16.
      tokenizer: a `tokenizer.json` to copy along; its end-of-document token becomes the `eos_token`.
      shard_bytes: size from which the weights are split into several files.

    The folder appears when it is whole. Raises ValueError where it exists, and where no Hugging Face class
    computes this model, naming the keys.
    """
    folder = pathlib.Path(folder)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: it is one of {', '.join(_DTYPES)}")
    if folder.exists():
        raise ValueError(f"{folder} exists; choose another folder or remove it")
    parameters = _flat_infos(config)
    flat = traverse_util.flatten_dict(params, sep=".")
    wrong = [path for path in parameters.keys() | flat.keys() if path not in flat or path not in parameters]
    wrong += [path for path in parameters.keys() & flat.keys() if flat[path].shape != parameters[path].shape]
    if wrong:
        raise ValueError(f"params are not those of config.model: {_first(sorted(wrong))}")
    model = registry.build(config).config
    eos_token, eos_token_id = _end_of_document(tokenizer, model.vocab_size)
    hf_config = huggingface_config.to_json(model, config.seq_len, dtype, eos_token_id)
    tensors = _tensors(FAMILIES[hf_config["model_type"]], parameters)
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        (unfinished / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, unfinished / "tokenizer.json")
            tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
            (unfinished / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
        _write_weights(unfinished, flat, tensors, dtype, shard_bytes)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _end_of_document(tokenizer: str | os.PathLike | None, vocab_size: int) -> tuple[str | None, int | None]:
    if tokenizer is None:
        return None, None
    loaded = load_tokenizer(str(tokenizer))
    check_vocabulary(loaded, vocab_size)
    return (None if loaded.eod is None else loaded.decode([loaded.eod])), loaded.eod


def _write_weights(
    folder: pathlib.Path, flat: Mapping[str, Any], tensors: list[_Tensor], dtype: str, shard_bytes: int
) -> None:
    """Fills the files one after the other. The format has its header first, which shapes alone decide, so that
    unlike safetensors' own writer this needs no two tensors at a time."""
    code, numpy_dtype = _DTYPES[dtype]
    item_bytes = np.dtype(numpy_dtype).itemsize
    shapes = {name: tensor.shape for tensor in tensors for name in tensor.layer_names()}
    shards: list[dict[str, dict]] = [{}]
    offset = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * item_bytes
        if shards[-1] and offset + num_bytes > shard_bytes:
            shards.append({})
            offset = 0
        shards[-1][name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        total = sum(math.prod(shape) for shape in shapes.values()) * item_bytes
        weight_map = {name: file for shard, file in zip(shards, files, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    values = _values(flat, tensors)
    for shard, file in zip(shards, files, strict=True):
        with open(folder / file, "wb") as out:
            header = json.dumps({"__metadata__": {"format": "pt"}, **shard}).encode()
            header += b" " * (-len(header) % 8)
            out.write(len(header).to_bytes(8, "little") + header)
            for name, (written, value) in zip(shard, itertools.islice(values, len(shard)), strict=True):
                assert name == written and value.shape == shapes[name], (name, written, value.shape)
                out.write(np.ascontiguousarray(value, numpy_dtype).reshape(-1).view(np.uint8))


def _values(flat: Mapping[str, Any], tensors: list[_Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Name and value of every tensor. Slices of JAX arrays are new ones: fetching the whole would keep its host
    copy for as long as it lives."""
    for tensor in tensors:
        ours = [flat[path] for path in tensor.paths]
        for layer, name in enumerate(tensor.layer_names()):
            yield name, tensor.join([np.asarray(x[layer] if tensor.num_layers else x) for x in ours])
