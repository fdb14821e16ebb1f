"""Weights from wherever they are: a work directory or a Hugging Face folder."""

from typing import Any

from ml_collections import ConfigDict

from jaxpretrain.checkpoint import read_config, restore_weights
from jaxpretrain.interop import huggingface, huggingface_config


def check_same_model(source: str, config: ConfigDict) -> None:
    """Raises ValueError if `source` holds no weights, or those of another model than `config`'s, naming the keys."""
    if huggingface_config.is_folder(source):
        huggingface.check_same_model(source, config)
        return
    huggingface.check_same_architecture(source, read_config(source), config)


def load_weights(source: str, config: ConfigDict, like: Any) -> Any:
    """The newest weights of `source`, laid out as the abstract parameters `like` of `config`'s model.

    A run's are those of `step.weights`. Raises ValueError as `check_same_model`, and if they cannot be read.
    """
    if huggingface_config.is_folder(source):
        return huggingface.load_params(source, config, like=like)
    check_same_model(source, config)
    return restore_weights(source, like=like)[0]
