"""ViT: an image as a sequence of patches (Dosovitskiy et al. 2020, arXiv 2010.11929), as `google/vit-*` are.

Shapes: B batch, H x W pixels, C channels, P patch_size, T = HW / P^2 + 1 tokens, D embed_dim, V classes, L layers.

As in `transformer.py` the model knows arrays and axis names, and computes in the dtype of the parameters it is given,
norms in float32.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from jaxpretrain.models.layers import RunLayers, scan_layers, stack_layers
from jaxpretrain.models.parameter import parameter
from jaxpretrain.models.transformer import Attend, Embedding, Norm, TransformerBlock
from jaxpretrain.ops.dropout import dropout


class ViT(nnx.Module):
    """Parameters are float32; those of the layers are stacked along a leading `layers` axis.

    The class is read off the last state of a token of no patch (section 3.1), by one matrix: without the hidden layer
    that the authors' pre-trained heads also have. Initial values are those of their code (google-research/
    vision_transformer): Xavier uniform for the blocks' matrices, whose MLPs' biases are of 1e-6 and other biases 0;
    LeCun normal for the patches; normal(0.02) for positions; 0 for the class token and the head.
    """

    def __init__(self, config: ConfigDict, seq_len: int, key: jax.Array):
        """`config` is the `model` section of the config. `seq_len` is of no influence: the image says it."""
        self.config = c = _resolved(config)
        patch_key, position_key, layers_key = jax.random.split(key, 3)
        patch_shape = (c.image.patch_size, c.image.patch_size, c.image.num_channels, c.embed_dim)
        patch_kernel = jax.nn.initializers.lecun_normal()(patch_key, patch_shape)
        self.patch_embed = PatchConv(patch_kernel, "channels", "patch_embedding")
        self.class_token = parameter(jnp.zeros((1, c.embed_dim)), ("class_token", "embed"), "position_embedding")
        self.position_embed = Embedding(c, position_key, c.max_positions, "position", "position_embedding")
        self.layers = stack_layers(lambda key, i: _block(c, key, i), layers_key, c.num_layers)
        self.final_norm = Norm(c, c.embed_dim)
        self.head = Head(jnp.zeros((c.image.num_classes, c.embed_dim)))

    def __call__(
        self,
        images_BxHxWxC: jax.Array,
        *,
        attend: Attend,
        run_layers: RunLayers = scan_layers,
        keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """Logits, float32 [B, V].

        Args:
          images_BxHxWxC: normalised pixels.
          attend: attention of q_BxTxHxK, k_BxTxGxK, v_BxTxGxK and None, both ways.
          run_layers: applies a block for each layer of a stack, given its name too; gathers and recomputes, see
            `parallel/remat.py`.
          keys_B: a random key for each image where there is dropout (`ops/dropout.py`); None: there is none.
        """
        batch, d = len(images_BxHxWxC), self.config.embed_dim
        patches_BxNxD = self.patch_embed(images_BxHxWxC).reshape(batch, -1, d)
        class_Bx1xD = jnp.broadcast_to(self.class_token[...].astype(jnp.float32), (batch, 1, d))
        x_BxTxD = jnp.concatenate([class_Bx1xD, patches_BxNxD.astype(jnp.float32)], axis=1)
        x_BxTxD = add(x_BxTxD, self.position_embed.embedding[...]).astype(patches_BxNxD.dtype)
        x_BxTxD = dropout(x_BxTxD, self.config.dropout, keys_B, site=0)
        graphdef, layers = nnx.split(self.layers)

        def block(layer: dict, x_BxTxD: jax.Array, index: jax.Array) -> jax.Array:
            def attend_to_all(q, k, v):
                return attend(q, k, v, None)

            return nnx.merge(graphdef, layer)(x_BxTxD, attend_to_all, keys_B=keys_B, index=index)

        x_BxTxD = run_layers(block, nnx.to_pure_dict(layers), x_BxTxD, "layers")
        return self.head(self.final_norm(x_BxTxD[:, 0]))


class PatchConv(nnx.Module):
    """A convolution whose stride is its window: the product of a matrix with each patch. With a bias, initially 0."""

    def __init__(self, kernel_PxPxCxD: jax.Array, in_axis: str, role: str):
        self.kernel = parameter(kernel_PxPxCxD, ("window_height", "window_width", in_axis, "embed"), role)
        self.bias = parameter(jnp.zeros(kernel_PxPxCxD.shape[-1]), ("embed",), "bias")

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        """[B, H / P, W / P, D], in the dtype of the kernel."""
        kernel_PxPxCxD = self.kernel[...]
        size, _, _, num_out = kernel_PxPxCxD.shape
        batch, height, width, channels = x_BxHxWxC.shape
        rows, columns = height // size, width // size
        x = x_BxHxWxC.astype(kernel_PxPxCxD.dtype).reshape(batch, rows, size, columns, size, channels)
        patches = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch * rows * columns, size * size * channels)
        y = add(patches @ kernel_PxPxCxD.reshape(-1, num_out), self.bias[...])
        return y.reshape(batch, rows, columns, num_out)


class Head(nnx.Module):
    """The matrix and the bias, initially 0, that give the logits of the classes."""

    def __init__(self, kernel_VxD: jax.Array):
        self.kernel = parameter(kernel_VxD, ("vocab", "embed"), "unembedding")
        self.bias = parameter(jnp.zeros(len(kernel_VxD)), ("vocab",), "bias")

    def __call__(self, x_BxD: jax.Array) -> jax.Array:
        logits = jnp.einsum("bd,vd->bv", x_BxD, self.kernel[...], preferred_element_type=jnp.float32)
        return logits + self.bias[...]


def add(x: jax.Array, parameter: jax.Array) -> jax.Array:
    """x + parameter, in x's dtype; the parameter's gradient is a sum in float32: on CPUs 16-bit sums stop growing."""
    return (x.astype(jnp.float32) + parameter.astype(jnp.float32)).astype(x.dtype)


def _block(c: ConfigDict, key: jax.Array, layer: jax.Array) -> TransformerBlock:
    block_key, *keys = jax.random.split(key, 3)
    block = TransformerBlock(c, block_key, layer)
    for linear, key in zip((block.mlp.up, block.mlp.down), keys, strict=True):
        linear.bias[...] = 1e-6 * jax.random.normal(key, linear.bias.shape)
    return block


def _resolved(config: ConfigDict) -> ConfigDict:
    """The model section with what TransformerBlock reads filled in, and immutable."""
    c = config.copy_and_resolve_references()
    c.num_kv_heads, c.head_dim = c.num_heads, c.embed_dim // c.num_heads
    c.mlp_dim = c.mlp_dim or 4 * c.embed_dim
    c.max_positions = (c.image.size // c.image.patch_size) ** 2 + 1
    c.init = "vit"
    c.lock()
    return c
