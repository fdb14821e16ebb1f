"""Evaluates and samples from the weights of a work directory or of a Hugging Face folder."""

import pathlib
from collections.abc import Iterator

import numpy as np
from ml_collections import ConfigDict

from jaxpretrain import config as config_lib
from jaxpretrain import evaluation
from jaxpretrain.data.dataset import make_dataset
from jaxpretrain.data.tokenizer import load_tokenizer
from jaxpretrain.interop import huggingface, huggingface_config
from jaxpretrain.interop.weights import load_weights
from jaxpretrain.micro_batch import guess_micro_batch_size
from jaxpretrain.parallel.mesh import make_mesh, num_data_shards
from jaxpretrain.step import TrainStep, make_train_step

NUM_SAMPLED_TOKENS = 200
TEMPERATURE = 0.8

# Keys, by their beginnings, that a mode does not read. The model is that of the weights.
_UNREAD_ALWAYS = (
    *("model.", "steps", "optimizer.", "schedule.", "scaling.", "average.", "checkpoint.", "log."),
    *("run.name", "run.max_bad_steps", "parallel.offload", "parallel.remat", "parallel.donate"),
    "parallel.xla_options",
)
# How training images are changed; evaluation crops and normalises only.
_TRAINING_IMAGES = tuple(
    f"data.images.{key}" for key in ("min_crop", "flip", "randaugment", "erase", "mixup", "cutmix")
)
_UNREAD = {
    "eval": (*_UNREAD_ALWAYS, "eval.every", "eval.ngrams", "objective.label_smoothing", *_TRAINING_IMAGES),
    "sample": (*_UNREAD_ALWAYS, "eval.", "batch_size", "micro_batch_size", "kernels."),
}


def load_config(source: str, config: ConfigDict | None, overrides: list[tuple[str, str]], mode: str) -> ConfigDict:
    """The config to run the weights of `source` with.

    `config`, of `--config` with its overrides, has its way, but for a Hugging Face folder's model, which is the
    folder's; without it, a work directory's own config or the defaults, with `overrides`.
    Raises ValueError if `source` is neither, if `config` has another model than the work directory, or, where there is
    no `config`, for an override that `mode`, eval or sample, does not read.
    """
    path = pathlib.Path(source)
    is_hugging_face = huggingface_config.is_folder(source)
    if not is_hugging_face and not (path / "config.json").is_file():
        raise ValueError(f"--workdir={source} is neither a run's work directory nor a Hugging Face folder")
    saved = huggingface.model_config(source) if is_hugging_face else config_lib.from_json(_read(path / "config.json"))
    if config is None:
        config = saved
        for key, text in overrides:
            if key.startswith(_UNREAD[mode]):
                raise ValueError(f"--config.{key} has no effect with --mode={mode}; remove it")
            config_lib.override(config, key, text)
    elif is_hugging_face:
        config.model = saved.model
    elif config.model != saved.model:
        raise ValueError(f"--config has another model than the run in {source}; without --config its own is taken")
    typed = [key for key, _ in overrides]
    config_lib.reset_unread(config, typed)
    if is_hugging_face and (path / "tokenizer.json").is_file() and "data.tokenizer" not in typed:
        config.data.tokenizer = str(path / "tokenizer.json")
    config_lib.check(config)
    return config


def evaluate(config: ConfigDict, source: str) -> str:
    """Loss on the validation split of `config`, in words."""
    validation = make_dataset(config, "valid")
    train_step = _step(config)
    params = load_weights(source, config, train_step.state.params)
    result = evaluation.evaluate(train_step, params, validation, config.eval.max_tokens)
    unit = {"encoder": "masked token", "vit": "image", "convnext": "image"}.get(config.model.family, "token")
    accuracy = "" if result.accuracy is None else f", accuracy {result.accuracy:.2%}"
    return f"valid loss {result.loss:.4f} nats per {unit}{accuracy} over {result.eval_tokens:,} {unit}s of {source}"


def sample(config: ConfigDict, source: str, prompt: str) -> Iterator[str]:
    """Yields the prompt, then text continuing it, until the end of the document or NUM_SAMPLED_TOKENS."""
    if config.model.family not in ("decoder", "mamba"):
        raise ValueError(f"--mode=sample: model.family={config.model.family!r} does not continue text; use --mode=eval")
    tokenizer = load_tokenizer(config.data.tokenizer)
    tokens = list(tokenizer.encode(prompt)) or [tokenizer.eod if tokenizer.eod is not None else ord("\n")]
    if len(tokens) >= config.seq_len:
        raise ValueError(f"--prompt has {len(tokens)} tokens; the model sees {config.seq_len}: shorten it")
    train_step = _step(config)
    params = load_weights(source, config, train_step.state.params)
    random = np.random.default_rng(config.seed)
    shown = ""
    for _ in range(NUM_SAMPLED_TOKENS + 1):
        text = tokenizer.decode(tokens).rstrip("\ufffd")  # the rest of a character may still come
        yield text[len(shown) :]
        shown = text
        token = _next_token(train_step, params, tokens[-config.seq_len :], random)
        if token == tokenizer.eod:
            return
        tokens.append(token)


def _next_token(train_step: TrainStep, params: dict, tokens: list[int], random: np.random.Generator) -> int:
    """Draws at TEMPERATURE. The whole prefix is computed again, padded to a power of two to compile seldom."""
    length = min(train_step.seq_len, max(64, 1 << (len(tokens) - 1).bit_length()))
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(tokens)] = tokens
    logits_V = np.asarray(train_step.logits(params, padded)[0, len(tokens) - 1]).astype(np.float64) / TEMPERATURE
    gumbel_V = random.gumbel(size=logits_V.shape)
    return int(np.argmax(logits_V + gumbel_V))


def _step(config: ConfigDict) -> TrainStep:
    mesh = make_mesh(config.parallel.strategy, tensor=config.parallel.tensor, replicas=config.parallel.replicas)
    guess_micro_batch_size(config, mesh)
    config.parallel.offload = config.parallel.remat = "none"  # there is no optimizer state, and no backward
    # Not the run's own batch, which need not divide over the devices that are here.
    config.batch_size = config.micro_batch_size * num_data_shards(mesh)
    return make_train_step(config, mesh)


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
