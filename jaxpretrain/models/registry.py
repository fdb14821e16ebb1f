"""The model of a config, by `model.family`."""

import jax
from flax import nnx
from ml_collections import ConfigDict

from jaxpretrain.models.convnext import ConvNeXt
from jaxpretrain.models.mamba import Mamba
from jaxpretrain.models.transformer import Transformer
from jaxpretrain.models.vit import ViT

_FAMILIES = {"decoder": Transformer, "encoder": Transformer, "mamba": Mamba, "vit": ViT, "convnext": ConvNeXt}


def make(config: ConfigDict) -> nnx.Module:
    """The model of a whole config, with the initial parameters of its seed."""
    return _FAMILIES[config.model.family](config.model, config.seq_len, jax.random.key(config.seed))


def build(config: ConfigDict) -> nnx.Module:
    """The abstract model of a whole config: shapes, axes and roles of every parameter, nothing allocated."""
    return nnx.eval_shape(lambda: make(config))
