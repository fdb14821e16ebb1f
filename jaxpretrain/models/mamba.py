"""Mamba: a language model of selective state spaces (Gu & Dao 2023, arXiv 2312.00752), as state-spaces/mamba-*-hf are.

Shapes: B batch, T sequence, D embed_dim, C = expand * D inner channels, N state_dim, R dt_rank, W conv_width, L layers.

As in `transformer.py` the model knows arrays and axis names, and computes in the dtype of the parameters it is given;
norms, the convolution's sum, time steps and states are float32.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from ml_collections import ConfigDict

from jaxpretrain.models.layers import RunLayers, scan_layers, stack_layers
from jaxpretrain.models.parameter import parameter
from jaxpretrain.models.transformer import Embedding, Norm, Unembedding, document_positions, embedding_lookup
from jaxpretrain.ops.selective_scan import selective_scan

_DT_FLOOR = 1e-4  # no time step begins smaller


class Mamba(nnx.Module):
    """Parameters are float32; those of the layers are stacked along a leading `layers` axis."""

    def __init__(self, config: ConfigDict, seq_len: int, key: jax.Array):
        """`config` is the `model` section of the config. `seq_len` is of no influence."""
        self.config = c = _resolved(config)
        embed_key, unembed_key, layers_key = jax.random.split(key, 3)
        self.embed = Embedding(c, embed_key, c.vocab_size, "vocab", "embedding")
        self.layers = stack_layers(lambda key, _: MambaBlock(c, key), layers_key, c.num_layers)
        self.final_norm = Norm(c, c.embed_dim)
        if not c.tied_embeddings:
            self.unembed = Unembedding(c, unembed_key)

    def hidden(
        self,
        tokens_BxT: jax.Array,
        segment_ids_BxT: jax.Array | None = None,
        *,
        run_layers: RunLayers = scan_layers,
        attend: object = None,
        keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """The normalised output of the last layer, [B, T, D]; `unembedding()` turns it into logits.

        Args:
          segment_ids_BxT: documents of a row; convolutions and states begin anew where the number changes.
          run_layers: applies a block for each layer of a stack, given its name too; gathers and recomputes, see
            `parallel/remat.py`.
          attend, keys_B: for other models; there is no attention here, and no dropout.
        """
        positions = None
        if segment_ids_BxT is not None:
            positions = document_positions(tokens_BxT.shape[1], segment_ids_BxT)
        graphdef, layers = nnx.split(self.layers)

        def block(layer: dict, x_BxTxD: jax.Array, index: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, layer)(x_BxTxD, positions)

        x_BxTxD = embedding_lookup(self.embed.embedding[...], tokens_BxT)
        return self.final_norm(run_layers(block, nnx.to_pure_dict(layers), x_BxTxD, "layers"))

    def unembedding(self) -> jax.Array:
        """[V, D]: logits are hidden @ unembedding.T."""
        return self.embed.embedding[...] if self.config.tied_embeddings else self.unembed.kernel[...]

    def __call__(self, tokens_BxT: jax.Array, segment_ids_BxT: jax.Array | None = None, **kwargs) -> jax.Array:
        """Logits, float32 [B, T, V]; arguments as `hidden`."""
        hidden_BxTxD = self.hidden(tokens_BxT, segment_ids_BxT, **kwargs)
        return jnp.einsum("btd,vd->btv", hidden_BxTxD, self.unembedding(), preferred_element_type=jnp.float32)


class MambaBlock(nnx.Module):
    def __init__(self, c: ConfigDict, key: jax.Array):
        self.norm = Norm(c, c.embed_dim)
        self.mixer = Mixer(c, key)

    def __call__(self, x_BxTxD: jax.Array, positions_BxT: jax.Array | None) -> jax.Array:
        return x_BxTxD + self.mixer(self.norm(x_BxTxD), positions_BxT)


class Mixer(nnx.Module):
    """Figure 3 of the paper: a gated branch with a convolution and a selective scan, in place of attention and MLP.

    Initial values are those of the authors' code: PyTorch's own for what is not said otherwise; S4D-real for A; D = 1;
    time steps log-uniform in [dt_min, dt_max] (section 3.6); the residual output / sqrt(L).
    """

    def __init__(self, c: ConfigDict, key: jax.Array):
        m, d = c.mamba, c.embed_dim
        channels, n, r = m.expand * d, m.state_dim, m.dt_rank
        keys = jax.random.split(key, 7)
        self.dt_rank, self.state_dim = r, n
        # Two matrices, which Hugging Face stores as one: each can be split over devices by channels.
        self.input = Projection(keys[0], (d, channels), ("embed", "ssm_channels"), "ssm_in_proj")
        self.gate = Projection(keys[1], (d, channels), ("embed", "ssm_channels"), "ssm_in_proj")
        self.conv = CausalConv(keys[2], m.conv_width, channels)
        # Columns: the R numbers that make the time steps, the N of B, the N of C.
        self.x_proj = Projection(keys[3], (channels, r + 2 * n), ("ssm_channels", "dt_b_c"), "ssm_x_proj")
        self.dt_proj = Projection(keys[4], (r, channels), ("dt_rank", "ssm_channels"), "ssm_dt_proj")
        log_min, log_max = math.log(m.dt_min), math.log(m.dt_max)
        dt_C = jnp.maximum(jnp.exp(jax.random.uniform(keys[5], (channels,), minval=log_min, maxval=log_max)), _DT_FLOOR)
        softplus_inverse_C = dt_C + jnp.log(-jnp.expm1(-dt_C))
        self.dt_bias = parameter(softplus_inverse_C, ("ssm_channels",), "ssm_dt_bias")
        a_log_CxN = jnp.tile(jnp.log(jnp.arange(1, n + 1, dtype=jnp.float32)), (channels, 1))
        self.a_log = parameter(a_log_CxN, ("ssm_channels", "ssm_state"), "ssm_a_log")
        self.d = parameter(jnp.ones(channels), ("ssm_channels",), "ssm_d")
        self.out = Projection(
            keys[6], (channels, d), ("ssm_channels", "embed"), "ssm_out_proj", scale=c.num_layers**-0.5
        )

    def __call__(self, x_BxTxD: jax.Array, positions_BxT: jax.Array | None) -> jax.Array:
        u_BxTxC = checkpoint_name(self.input(x_BxTxD), "ssm_in")
        gate_BxTxC = checkpoint_name(self.gate(x_BxTxD), "ssm_gate")
        u_BxTxC = jax.nn.silu(self.conv(u_BxTxC, positions_BxT))
        dt_b_c = checkpoint_name(self.x_proj(u_BxTxC), "ssm_x")
        dt_BxTxR, B_BxTxN, C_BxTxN = jnp.split(dt_b_c, [self.dt_rank, self.dt_rank + self.state_dim], axis=-1)
        dt_BxTxC = checkpoint_name(self.dt_proj(dt_BxTxR), "ssm_dt")
        # In float32: an error of the sum is a relative error of the step.
        dt_BxTxC = _softplus(dt_BxTxC.astype(jnp.float32) + self.dt_bias[...])
        A_CxN = -jnp.exp(self.a_log[...].astype(jnp.float32))
        resets_BxT = None if positions_BxT is None else positions_BxT == 0
        # Names what it keeps for its backward itself.
        y_BxTxC = selective_scan(u_BxTxC, dt_BxTxC, A_CxN, B_BxTxN, C_BxTxN, self.d[...], resets_BxT)
        return checkpoint_name(self.out(y_BxTxC * jax.nn.silu(gate_BxTxC)), "ssm_out")


class Projection(nnx.Module):
    """A matrix multiplication without a bias; initially PyTorch's uniform in 1 / sqrt(fan-in), times `scale`."""

    def __init__(self, key: jax.Array, shape: tuple[int, int], axes: tuple[str, str], role: str, scale: float = 1.0):
        self.kernel = parameter(scale * _uniform(key, shape, shape[0]), axes, role)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        # Two flat dims on both sides, as in the transformer's Linear.
        return (x.reshape(-1, kernel.shape[0]) @ kernel).reshape(*x.shape[:-1], -1)


class CausalConv(nnx.Module):
    """Each channel's weighted sum of its last W values, within the document, and a bias."""

    def __init__(self, key: jax.Array, width: int, channels: int):
        kernel_key, bias_key = jax.random.split(key)
        axes = ("window", "group_channels", "ssm_channels")  # a group is one channel
        self.kernel = parameter(_uniform(kernel_key, (width, 1, channels), width), axes, "conv")
        self.bias = parameter(_uniform(bias_key, (channels,), width), ("ssm_channels",), "bias")

    def __call__(self, x_BxTxC: jax.Array, positions_BxT: jax.Array | None) -> jax.Array:
        """`positions_BxT` of tokens in their documents; None: a row is one document."""
        # Shifted products, which XLA fuses: its own grouped convolutions are slow, in the backward above all.
        kernel_WxC = self.kernel[...][:, 0].astype(jnp.float32)
        width, seq_len = kernel_WxC.shape[0], x_BxTxC.shape[1]
        y_BxTxC = self.bias[...].astype(jnp.float32)
        for shift in range(width):
            shifted_BxTxC = jnp.pad(x_BxTxC, ((0, 0), (shift, 0), (0, 0)))[:, :seq_len].astype(jnp.float32)
            if positions_BxT is not None:
                shifted_BxTxC = jnp.where(positions_BxT[..., None] >= shift, shifted_BxTxC, 0)
            y_BxTxC += kernel_WxC[width - 1 - shift] * shifted_BxTxC
        return y_BxTxC.astype(x_BxTxC.dtype)


def _log_1p_exp(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(jnp.minimum(x, -x)))


# Of jax.nn.softplus a layer would keep for its backward what is inside: masks, and float32 that is cheap to recompute.
_softplus = jax.custom_jvp(_log_1p_exp)
_softplus.defjvp(lambda x, dx: (_log_1p_exp(*x), jax.nn.sigmoid(*x) * dx[0]))


def _uniform(key: jax.Array, shape: tuple[int, ...], num_inputs: int) -> jax.Array:
    bound = num_inputs**-0.5
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def _resolved(config: ConfigDict) -> ConfigDict:
    """The model section with `dt_rank` and what is no choice in Mamba filled in, and immutable."""
    c = config.copy_and_resolve_references()
    c.mamba.dt_rank = c.mamba.dt_rank or -(-c.embed_dim // 16)
    c.norm, c.init = "rmsnorm", "normal"  # the embeddings are the only matrices that `init` says
    c.norm_bias = False
    c.lock()
    return c
