"""ConvNeXt: a convolutional network in the proportions of a Transformer (Liu et al. 2022, arXiv 2201.03545).

Shapes: B batch, H x W pixels or positions, C channels of the image, D channels of a stage, V classes.

As in `transformer.py` the model knows arrays and axis names, and computes in the dtype of the parameters it is given,
norms and layer scales in float32. Channels are last everywhere.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from ml_collections import ConfigDict

from jaxpretrain.models.layers import RunLayers, scan_layers, stack_layers
from jaxpretrain.models.parameter import parameter
from jaxpretrain.models.transformer import MLP, Norm, initial
from jaxpretrain.models.vit import Head, PatchConv, add
from jaxpretrain.ops.dropout import drop_path

_STEM = 4  # pixels of a side of the stem's patches
_WINDOW = 7  # positions of a side that a depthwise convolution sees


class ConvNeXt(nnx.Module):
    """Parameters are float32; the blocks of each stage are a stack of their own, `stage0` to `stage3`.

    Initial values are those of the authors' code: normal(0.02) for every matrix (their truncation, at 2, is at 100
    standard deviations), biases 0, layer scales `convnext.layer_scale`.
    """

    def __init__(self, config: ConfigDict, seq_len: int, key: jax.Array):
        """`config` is the `model` section of the config. `seq_len` is of no influence."""
        self.config = c = _resolved(config)
        depths, widths = c.convnext.depths, c.convnext.widths
        stem_key, head_key, *keys = jax.random.split(key, 2 + 2 * len(depths))
        stem_shape = (_STEM, _STEM, c.image.num_channels, widths[0])
        self.stem = PatchConv(initial(c, stem_key, stem_shape, "patch_embedding"), "channels", "patch_embedding")
        self.stem_norm = Norm(c, widths[0])
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if stage:
                setattr(self, f"downsample{stage}", Downsample(c, keys[2 * stage], widths[stage - 1], width))
            setattr(self, f"stage{stage}", _blocks(c, keys[2 * stage + 1], depth, width))
        self.final_norm = Norm(c, widths[-1])
        self.head = Head(initial(c, head_key, (c.image.num_classes, widths[-1]), "unembedding"))

    def __call__(
        self,
        images_BxHxWxC: jax.Array,
        *,
        attend: object = None,
        run_layers: RunLayers = scan_layers,
        keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """Logits, float32 [B, V].

        Args:
          images_BxHxWxC: normalised pixels.
          attend: for other models; there is no attention here.
          run_layers: applies a block for each layer of a stack, given its name too; gathers and recomputes, see
            `parallel/remat.py`.
          keys_B: a random key for each image where blocks are dropped (`ops/dropout.py`); None: none is.
        """
        x_BxHxWxD = self.stem_norm(self.stem(images_BxHxWxC))
        for stage in range(len(self.config.convnext.depths)):
            if stage:
                x_BxHxWxD = getattr(self, f"downsample{stage}")(x_BxHxWxD)
            x_BxHxWxD = self._run_stage(stage, x_BxHxWxD, run_layers, keys_B)
        pooled_BxD = x_BxHxWxD.astype(jnp.float32).mean((1, 2))
        return self.head(self.final_norm(pooled_BxD).astype(x_BxHxWxD.dtype))

    def _run_stage(
        self, stage: int, x_BxHxWxD: jax.Array, run_layers: RunLayers, keys_B: jax.Array | None
    ) -> jax.Array:
        num_before = sum(self.config.convnext.depths[:stage])
        graphdef, blocks = nnx.split(getattr(self, f"stage{stage}"))

        def block(layer: dict, x_BxHxWxD: jax.Array, index: jax.Array) -> jax.Array:
            return x_BxHxWxD + self._dropped(nnx.merge(graphdef, layer)(x_BxHxWxD), keys_B, num_before + index)

        return run_layers(block, nnx.to_pure_dict(blocks), x_BxHxWxD, f"stage{stage}")

    def _dropped(self, x_BxHxWxD: jax.Array, keys_B: jax.Array | None, index: jax.Array) -> jax.Array:
        """`index` counts the blocks of all stages; the first is never dropped."""
        if not self.config.drop_path:
            return x_BxHxWxD
        rate = self.config.drop_path * index / max(sum(self.config.convnext.depths) - 1, 1)
        return drop_path(x_BxHxWxD, rate, keys_B, index)


class Block(nnx.Module):
    """What a block adds to its input: a depthwise convolution, a norm, an MLP of 4 times the width, a layer scale."""

    def __init__(self, c: ConfigDict, key: jax.Array):
        """`c` has the width of the stage as `embed_dim`."""
        conv_key, mlp_key = jax.random.split(key)
        self.conv = DepthwiseConv(c, conv_key)
        self.norm = Norm(c, c.embed_dim)
        self.mlp = MLP(c, mlp_key, 0)
        # As a norm's scale it is float32 and, one-dimensional, has no weight decay in the authors' code.
        self.layer_scale = parameter(jnp.full(c.embed_dim, c.convnext.layer_scale), ("embed",), "norm_scale")

    def __call__(self, x_BxHxWxD: jax.Array) -> jax.Array:
        y_BxHxWxD = self.mlp(self.norm(checkpoint_name(self.conv(x_BxHxWxD), "conv")))
        return (self.layer_scale[...] * y_BxHxWxD).astype(x_BxHxWxD.dtype)


class DepthwiseConv(nnx.Module):
    """Each channel's weighted sum over a window around each position, 0 beyond the edges, and a bias."""

    def __init__(self, c: ConfigDict, key: jax.Array):
        axes = ("window_height", "window_width", "group_channels", "embed")  # a group is one channel
        self.kernel = parameter(initial(c, key, (_WINDOW, _WINDOW, 1, c.embed_dim), "conv"), axes, "conv")
        self.bias = parameter(jnp.zeros(c.embed_dim), ("embed",), "bias")

    def __call__(self, x_BxHxWxD: jax.Array) -> jax.Array:
        # 49 shifted products, as in Mamba's convolution, would be 10 times as fast on CPUs, but take TPUs 2.5 times the
        # cycles (v4's compiler, 64 x 56 x 56 x 96, with the backward: 4.2 against 10.5 million). GPUs run cuDNN's.
        y_BxHxWxD = jax.lax.conv_general_dilated(
            x_BxHxWxD,
            self.kernel[...],
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=x_BxHxWxD.shape[-1],
        )
        return add(y_BxHxWxD, self.bias[...])


class Downsample(nnx.Module):
    """Half the positions of each side, before stages 1 to 3: a norm, and a product with each patch of 2 x 2."""

    def __init__(self, c: ConfigDict, key: jax.Array, num_in: int, num_out: int):
        self.norm = Norm(c, num_in)
        self.conv = PatchConv(initial(c, key, (2, 2, num_in, num_out), "conv"), "embed_before", "conv")

    def __call__(self, x_BxHxWxD: jax.Array) -> jax.Array:
        return self.conv(self.norm(x_BxHxWxD))


def _blocks(c: ConfigDict, key: jax.Array, depth: int, width: int) -> nnx.Module:
    """Those of a stage, stacked."""
    c = c.copy_and_resolve_references()
    with c.unlocked():
        c.embed_dim, c.mlp_dim = width, 4 * width
    return stack_layers(lambda key, _: Block(c, key), key, depth)


def _resolved(config: ConfigDict) -> ConfigDict:
    """The model section without a head_dim, which only models with attention have, and immutable."""
    c = config.copy_and_resolve_references()
    del c.head_dim
    c.init = "normal"
    c.lock()
    return c
