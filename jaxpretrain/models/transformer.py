"""A transformer: decoders that by configuration are GPT-NeoX, GPT-2, Llama 2/3 or OLMo, and RoBERTa's encoder.

Shapes: B batch, T sequence, D embed_dim, H query heads, G key/value heads, K head_dim, F mlp_dim,
V vocabulary, L layers, P positions, N tokens of whatever rows.

The model knows arrays and axis names. It computes in the dtype of the parameters it is given (norms,
rotary and softmax in float32); which mesh they live on and what is recomputed is decided by `parallel/`
through `run_layers`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from ml_collections import ConfigDict

from jaxpretrain.models.layers import RunLayers, scan_layers, stack_layers
from jaxpretrain.models.parameter import fan_in, parameter
from jaxpretrain.ops.dropout import drop_path, dropout

ENCODER_FIRST_POSITION = 2  # of RoBERTa's table, whose rows 0 and 1 are of no token (fairseq's padding index is 1)

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


class Transformer(nnx.Module):
    """Parameters are float32; those of the layers are stacked along a leading `layers` axis.

    An encoder differs in four things: attention goes both ways, norms come after the residual sums and not before the
    branches, so that the embeddings have one and the last layer needs none, a learned vector is added to all
    embeddings (BERT's type of the only segment), and masked tokens are predicted through one more layer (`transform`).
    """

    def __init__(self, config: ConfigDict, seq_len: int, key: jax.Array):
        """`config` is the `model` section of the config; `seq_len` sizes a learned position table left at 0."""
        self.config = c = _resolved(config, seq_len)
        embed_key, position_key, unembed_key, layers_key = jax.random.split(key, 4)
        self.embed = Embedding(c, embed_key, c.vocab_size, "vocab", "embedding")
        if c.positions == "learned":
            num_rows = c.max_positions + (ENCODER_FIRST_POSITION if c.family == "encoder" else 0)
            self.position_embed = Embedding(c, position_key, num_rows, "position", "position_embedding")
        self.layers = stack_layers(lambda key, i: TransformerBlock(c, key, i), layers_key, c.num_layers)
        if c.family == "encoder":
            self.type_embed = Embedding(c, jax.random.fold_in(position_key, 0), 1, "type", "position_embedding")
            self.embed_norm = Norm(c, c.embed_dim)
            self.transform = Transform(c, unembed_key)
        else:
            self.final_norm = Norm(c, c.embed_dim)
        if c.family == "encoder" or not c.tied_embeddings:
            self.unembed = Unembedding(c, unembed_key)

    def hidden(
        self,
        tokens_BxT: jax.Array,
        segment_ids_BxT: jax.Array | None = None,
        *,
        attend: Attend,
        run_layers: RunLayers = scan_layers,
        keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """The normalised output of the last layer, [B, T, D]; `unembedding()` turns it into logits.

        Args:
          segment_ids_BxT: documents of a row, numbered from 1; attention and positions stay within each. 0 is padding.
          attend: attention of q_BxTxHxK, k_BxTxGxK, v_BxTxGxK and segment_ids, causal in a decoder.
          run_layers: applies a block for each layer of a stack, given its name too; gathers and recomputes, see
            `parallel/remat.py`.
          keys_B: a random key for each row where there is dropout (`ops/dropout.py`); None: there is none.
        """
        c = self.config
        positions = document_positions(tokens_BxT.shape[1], segment_ids_BxT)
        x_BxTxD = embedding_lookup(self.embed.embedding[...], tokens_BxT)
        rotary = None
        if c.family == "encoder":
            positions += ENCODER_FIRST_POSITION
            x_BxTxD += self.type_embed.embedding[...]
        if c.positions == "learned":
            x_BxTxD += embedding_lookup(self.position_embed.embedding[...], positions)
        else:
            rotary = rotary_tables(c, positions)
        if c.family == "encoder":
            x_BxTxD = self.embed_norm(x_BxTxD)
        x_BxTxD = dropout(x_BxTxD, c.dropout, keys_B, site=0)
        graphdef, layers = nnx.split(self.layers)

        def block(layer: dict, x_BxTxD: jax.Array, index: jax.Array) -> jax.Array:
            def attend_within(q, k, v):
                return attend(q, k, v, segment_ids_BxT)

            return nnx.merge(graphdef, layer)(x_BxTxD, attend_within, rotary=rotary, keys_B=keys_B, index=index)

        x_BxTxD = run_layers(block, nnx.to_pure_dict(layers), x_BxTxD, "layers")
        return x_BxTxD if c.family == "encoder" else self.final_norm(x_BxTxD)

    def unembedding(self) -> jax.Array:
        """[V, D]: logits are hidden @ unembedding.T, of an encoder transform(hidden) @ unembedding.T + unembed.bias."""
        return self.embed.embedding[...] if self.config.tied_embeddings else self.unembed.kernel[...]

    def __call__(self, tokens_BxT: jax.Array, segment_ids_BxT: jax.Array | None = None, **kwargs) -> jax.Array:
        """Logits, float32 [B, T, V]; arguments as `hidden`."""
        hidden_BxTxD = self.hidden(tokens_BxT, segment_ids_BxT, **kwargs)
        if self.config.family == "encoder":
            hidden_BxTxD = self.transform(hidden_BxTxD)
        logits = jnp.einsum("btd,vd->btv", hidden_BxTxD, self.unembedding(), preferred_element_type=jnp.float32)
        return logits + self.unembed.bias[...] if self.config.family == "encoder" else logits


class TransformerBlock(nnx.Module):
    """Attention and MLP; norms before both (of decoders and ViT) or after each sum (of encoders)."""

    def __init__(self, c: ConfigDict, key: jax.Array, layer: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.config = c
        self.attention_norm = Norm(c, c.embed_dim)
        self.attention = Attention(c, attention_key, layer)
        self.mlp_norm = Norm(c, c.embed_dim)
        self.mlp = MLP(c, mlp_key, layer)

    def __call__(
        self,
        x_BxTxD: jax.Array,
        attend: Callable,
        *,
        rotary: tuple | None = None,
        keys_B: jax.Array | None = None,
        index: jax.Array | int = 0,
    ) -> jax.Array:
        """`attend` of queries, keys and values; `keys_B` and the layer's `index` are for dropout only."""
        c = self.config

        def attention_branch(x_BxTxD):
            return self._dropped(self.attention(x_BxTxD, rotary, attend), keys_B, index, 0)

        def mlp_branch(x_BxTxD):
            return self._dropped(self.mlp(x_BxTxD), keys_B, index, 1)

        if c.family == "encoder":
            x_BxTxD = self.attention_norm(x_BxTxD + attention_branch(x_BxTxD))
            return self.mlp_norm(x_BxTxD + mlp_branch(x_BxTxD))
        if c.parallel_residual:
            return x_BxTxD + attention_branch(self.attention_norm(x_BxTxD)) + mlp_branch(self.mlp_norm(x_BxTxD))
        x_BxTxD += attention_branch(self.attention_norm(x_BxTxD))
        return x_BxTxD + mlp_branch(self.mlp_norm(x_BxTxD))

    def _dropped(self, x_BxTxD: jax.Array, keys_B: jax.Array | None, index: jax.Array | int, branch: int) -> jax.Array:
        c, site = self.config, 1 + 4 * index + 2 * branch  # and the next one; 0 is the embeddings'
        x_BxTxD = dropout(x_BxTxD, c.dropout, keys_B, site)
        if not c.drop_path:
            return x_BxTxD
        rate = c.drop_path * index / max(c.num_layers - 1, 1)
        return drop_path(x_BxTxD, rate, keys_B, site + 1)


class Transform(nnx.Module):
    """What an encoder does to the hidden state of a masked token before it meets the embeddings (BERT, section A.1)."""

    def __init__(self, c: ConfigDict, key: jax.Array):
        d = c.embed_dim
        self.dense = Linear(c, key, 0, (d,), (d,), ("embed",), ("mlp",), "mlp_in", bias=True)
        self.norm = Norm(c, d)
        self.activation = _ACTIVATIONS[c.activation]

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return self.norm(self.activation(self.dense(hidden)))


class Attention(nnx.Module):
    def __init__(self, c: ConfigDict, key: jax.Array, layer: jax.Array):
        d, h, g, k = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim
        keys = jax.random.split(key, 4)
        bias = c.attention_bias
        self.query = Linear(c, keys[0], layer, (d,), (h, k), ("embed",), ("heads", "head_dim"), "query", bias)
        self.key = Linear(c, keys[1], layer, (d,), (g, k), ("embed",), ("kv_heads", "head_dim"), "key", bias)
        self.value = Linear(c, keys[2], layer, (d,), (g, k), ("embed",), ("kv_heads", "head_dim"), "value", bias)
        self.out = Linear(c, keys[3], layer, (h, k), (d,), ("heads", "head_dim"), ("embed",), "attn_out", bias)
        if c.qk_norm:
            self.query_norm = Norm(c, h * k, "heads_head_dim", bias=False)
            self.key_norm = Norm(c, g * k, "kv_heads_head_dim", bias=False)

    def __call__(self, x_BxTxD: jax.Array, rotary: tuple | None, attend: Callable) -> jax.Array:
        q_BxTxHxK, k_BxTxGxK, v_BxTxGxK = self.query(x_BxTxD), self.key(x_BxTxD), self.value(x_BxTxD)
        if hasattr(self, "query_norm"):
            q_BxTxHxK = self.query_norm(q_BxTxHxK, num_dims=2)
            k_BxTxGxK = self.key_norm(k_BxTxGxK, num_dims=2)
        if rotary is not None:
            q_BxTxHxK, k_BxTxGxK = rotate(q_BxTxHxK, *rotary), rotate(k_BxTxGxK, *rotary)
        q_BxTxHxK = checkpoint_name(q_BxTxHxK, "query")
        k_BxTxGxK = checkpoint_name(k_BxTxGxK, "key")
        v_BxTxGxK = checkpoint_name(v_BxTxGxK, "value")
        out_BxTxHxK = attend(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK)  # names what it keeps for its backward itself
        return checkpoint_name(self.out(out_BxTxHxK), "attention_projected")


class MLP(nnx.Module):
    def __init__(self, c: ConfigDict, key: jax.Array, layer: jax.Array):
        d, f = c.embed_dim, c.mlp_dim
        keys = jax.random.split(key, 3)
        self.activation = _ACTIVATIONS[c.activation]
        self.up = Linear(c, keys[0], layer, (d,), (f,), ("embed",), ("mlp",), "mlp_in", c.mlp_bias)
        if c.gated_mlp:
            self.gate = Linear(c, keys[1], layer, (d,), (f,), ("embed",), ("mlp",), "mlp_gate", c.mlp_bias)
        self.down = Linear(c, keys[2], layer, (f,), (d,), ("mlp",), ("embed",), "mlp_out", c.mlp_bias)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        up_BxTxF = checkpoint_name(self.up(x_BxTxD), "mlp_up")
        if hasattr(self, "gate"):
            up_BxTxF *= self.activation(checkpoint_name(self.gate(x_BxTxD), "mlp_gate"))
        else:
            up_BxTxF = self.activation(up_BxTxF)
        return checkpoint_name(self.down(up_BxTxF), "mlp_projected")


class Linear(nnx.Module):
    """A matrix multiplication from the trailing `in_dims` to `out_dims`."""

    def __init__(self, c, key, layer, in_dims, out_dims, in_axes, out_axes, role, bias):
        shape = (*in_dims, *out_dims)
        self.num_in = len(in_dims)
        self.kernel = parameter(initial(c, key, shape, role, layer), (*in_axes, *out_axes), role)
        if bias:
            self.bias = parameter(jnp.zeros(out_dims), out_axes, "bias")

    def __call__(self, x: jax.Array) -> jax.Array:
        # Two flat dims on both sides: on CPUs a 4-D contraction is a third slower (docs/benchmarks/cpu.md).
        kernel = self.kernel[...]
        batch, in_dims, out_dims = x.shape[: -self.num_in], x.shape[-self.num_in :], kernel.shape[self.num_in :]
        x = x.reshape(-1, math.prod(in_dims)) @ kernel.reshape(math.prod(in_dims), -1)
        if hasattr(self, "bias"):
            x += self.bias[...].reshape(-1)
        return x.reshape(*batch, *out_dims)


class Norm(nnx.Module):
    """LayerNorm or RMSNorm, in float32 whatever the dtype of the input."""

    def __init__(self, c: ConfigDict, size: int, axis: str = "embed", bias: bool = True):
        self.rms, self.eps = c.norm == "rmsnorm", c.norm_eps
        self.scale = parameter(jnp.ones(size), (axis,), "norm_scale")
        if bias and c.norm_bias:
            self.bias = parameter(jnp.zeros(size), (axis,), "bias")

    def __call__(self, x: jax.Array, num_dims: int = 1) -> jax.Array:
        """Normalises over the last `num_dims` dims together."""
        y = x.reshape(*x.shape[: x.ndim - num_dims], -1).astype(jnp.float32)
        if not self.rms:
            y -= y.mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y *= self.scale[...]
        if hasattr(self, "bias"):
            y += self.bias[...]
        return y.astype(x.dtype).reshape(x.shape)


class Embedding(nnx.Module):
    def __init__(self, c: ConfigDict, key: jax.Array, num_rows: int, axis: str, role: str):
        self.embedding = parameter(initial(c, key, (num_rows, c.embed_dim), role), (axis, "embed"), role)


class Unembedding(nnx.Module):
    """The matrix that gives logits, unless the embeddings are it; an encoder's has a bias."""

    def __init__(self, c: ConfigDict, key: jax.Array):
        role = "unembedding"
        if not c.tied_embeddings:
            self.kernel = parameter(initial(c, key, (c.vocab_size, c.embed_dim), role), ("vocab", "embed"), role)
        if c.family == "encoder":
            self.bias = parameter(jnp.zeros(c.vocab_size), ("vocab",), "bias")


def _gelu(x: jax.Array) -> jax.Array:
    """By erf: jax.nn.gelu's erfc costs a CPU several times as much. In float32, as 1 + erf cancels in 16 bits."""
    x_f32 = x.astype(jnp.float32)
    return (0.5 * x_f32 * (1 + jax.lax.erf(x_f32 * 0.5**0.5))).astype(x.dtype)


_ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}


def _resolved(config: ConfigDict, seq_len: int) -> ConfigDict:
    """The model section with every size that is left at 0 filled in, and immutable."""
    c = config.copy_and_resolve_references()
    c.num_kv_heads = c.num_kv_heads or c.num_heads
    c.head_dim = c.head_dim or c.embed_dim // c.num_heads
    c.mlp_dim = c.mlp_dim or 4 * c.embed_dim
    c.max_positions = c.max_positions or seq_len
    if c.family == "encoder":  # no choice: it is RoBERTa
        c.positions, c.tied_embeddings = "learned", True
    c.lock()
    return c


def initial(c: ConfigDict, key: jax.Array, shape: tuple[int, ...], role: str, layer: jax.Array | int = 0) -> jax.Array:
    """The initial value of a matrix, by the family's own rule.

    gpt_neox: normal, sqrt(2 / 5D) ("small init", Nguyen & Salazar 2019), residual outputs 2 / (L sqrt(D))
      ("wang init", GPT-J), as in Pythia's configurations.
    gpt2: normal, 0.02, residual outputs / sqrt(2L) (Radford et al. 2019, section 2.3).
    llama: torchtitan's: 0.02 truncated; the gated product's `up`, and residual outputs, 0.02 / sqrt(2(layer+1));
      embedding normal(1), unembedding 1/sqrt(D) truncated at 3 standard deviations.
    normal: 0.02 for every matrix (BERT, RoBERTa).
    vit: ViT's own: 0.02 for positions, Xavier uniform for the matrices of blocks.
    mitchell: OLMo's: truncated at 3 standard deviations of 1/sqrt(fan-in), residual outputs also
      / sqrt(2(layer+1)); embeddings 1/sqrt(D).
    """
    d, residual_output = c.embed_dim, role in ("attn_out", "mlp_out")
    depth = jnp.sqrt(2.0 * (layer + 1))
    if c.init == "gpt_neox":
        std = 2 / (c.num_layers * math.sqrt(d)) if residual_output else math.sqrt(2 / (5 * d))
        return std * jax.random.normal(key, shape)
    if c.init == "normal":
        return 0.02 * jax.random.normal(key, shape)
    if c.init == "vit":
        if role == "position_embedding":
            return 0.02 * jax.random.normal(key, shape)
        num_in = fan_in(shape, role)
        return jax.nn.initializers.xavier_uniform()(key, (num_in, math.prod(shape) // num_in)).reshape(shape)
    if c.init == "gpt2":
        return 0.02 / (math.sqrt(2 * c.num_layers) if residual_output else 1) * jax.random.normal(key, shape)
    if c.init == "llama":
        if role in ("embedding", "position_embedding"):
            return jax.random.normal(key, shape)
        if role == "unembedding":
            return d**-0.5 * jax.random.truncated_normal(key, -3, 3, shape)
        up_of_gated = role == "mlp_in" and c.gated_mlp
        std = 0.02 / (depth if residual_output or up_of_gated else 1)
        return std * jax.random.truncated_normal(key, -2 / 0.02, 2 / 0.02, shape)
    assert c.init == "mitchell", c.init
    std = fan_in(shape, role) ** -0.5 / (depth if residual_output else 1)
    return std * jax.random.truncated_normal(key, -3, 3, shape)


def document_positions(seq_len: int, segment_ids_BxT: jax.Array | None) -> jax.Array:
    """Position of each token in its document: [1, T], or [B, T] where rows hold several documents."""
    index_1xT = jnp.arange(seq_len)[None]
    if segment_ids_BxT is None:
        return index_1xT
    starts = jnp.diff(segment_ids_BxT, axis=1, prepend=-1) != 0
    return index_1xT - jax.lax.cummax(jnp.where(starts, index_1xT, 0), axis=1)


def rotary_tables(c: ConfigDict, positions_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [B, T, 1, R/2] for the R = rotary.fraction * head_dim dims that rotate.

    Su et al. 2021; the scaling of Llama 3.1 keeps wavelengths that are short against the original context,
    divides long ones by `factor` and interpolates between the two.
    """
    num_rotated = int(c.rotary.fraction * c.head_dim)
    frequencies = c.rotary.theta ** (-jnp.arange(0, num_rotated, 2, dtype=jnp.float32) / num_rotated)
    if c.rotary.scaling == "linear":
        frequencies /= c.rotary.factor
    elif c.rotary.scaling == "llama3":
        low, high = c.rotary.low_freq_factor, c.rotary.high_freq_factor
        turns = c.rotary.original_max_positions * frequencies / (2 * jnp.pi)  # within the original context
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        frequencies *= kept + (1 - kept) / c.rotary.factor
    angles_BxTx1xR = positions_BxT[..., None, None] * frequencies
    return jnp.cos(angles_BxTx1xR), jnp.sin(angles_BxTx1xR)


def rotate(x_BxTxHxK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first dims of each head in pairs (i, i + R/2), as Hugging Face does; the rest passes through."""
    half = cos.shape[-1]
    x = x_BxTxHxK.astype(jnp.float32)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x_BxTxHxK[..., 2 * half :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x_BxTxHxK.dtype), rest], axis=-1)


@jax.custom_vjp
def embedding_lookup(table_VxD: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]` whose gradient is summed in float32: a frequent token's bfloat16 sum would stop growing."""
    return table_VxD[ids]


def _lookup_forward(table_VxD, ids):
    return table_VxD[ids], (table_VxD, ids)


def _lookup_backward(residuals, gradient):
    table_VxD, ids = residuals
    summed = jnp.zeros(table_VxD.shape, jnp.float32).at[ids].add(gradient.astype(jnp.float32))
    return summed.astype(table_VxD.dtype), None


embedding_lookup.defvjp(_lookup_forward, _lookup_backward)
