"""Dropout whose masks are the same on any layout: each row of a batch draws by a key of its own.

B rows. `site` tells the uses within a model apart; it may be traced (a layer's number times a constant).
"""

import jax
import jax.numpy as jnp


def row_keys(seed: int, step: jax.Array, rows_B: jax.Array) -> jax.Array:
    """A key for each row, from the numbers of the step and of the row in the global batch: keys [B]."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None, site: jax.Array | int) -> jax.Array:
    """x [B, ...] with each number zeroed with probability `rate`, the others divided by 1 - rate. No keys: x."""
    if keys_B is None or rate == 0:
        return x
    kept = _kept(1 - rate, keys_B, site, x.shape[1:])
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def drop_path(x: jax.Array, rate: jax.Array | float, keys_B: jax.Array | None, site: jax.Array | int) -> jax.Array:
    """x [B, ...] with each row zeroed with probability `rate`, which may be traced (Huang et al. 2016, section 3)."""
    if keys_B is None:
        return x
    kept = _kept(1 - rate, keys_B, site, (1,) * (x.ndim - 1))
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def _kept(probability: jax.Array | float, keys_B: jax.Array, site: jax.Array | int, shape: tuple) -> jax.Array:
    return jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), probability, shape))(keys_B)
