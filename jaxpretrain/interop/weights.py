"""Weights from wherever they are: a work directory or a Hugging Face folder."""

from typing import Any

from ml_collections import ConfigDict

from jaxpretrain.checkpoint import restore_params
from jaxpretrain.interop import huggingface, huggingface_config


def load_params(source: str, config: ConfigDict, like: Any) -> Any:
    """The newest weights of `source`, laid out as the abstract parameters `like` of `config`'s model.

    Raises ValueError if they are of another model, naming the keys, or cannot be read.
    """
    if huggingface_config.is_folder(source):
        return huggingface.load_params(source, config, like=like)
    params, saved = restore_params(source, like=like)
    for key in saved.model:
        if key != "init" and saved.model[key] != config.model[key]:
            raise ValueError(
                f"{source} was trained with model.{key}={saved.model[key]!r}, here it is {config.model[key]!r}; "
                "use its model section"
            )
    return params
