"""The selective scan compiled for accelerators that are not here, in the shape of mamba-130m: memory of its gradient.

Without the compilers (extras aot-cuda and aot-tpu) these skip, or fail where JAXPRETRAIN_REQUIRE_AOT=1.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpretrain.ops.selective_scan import selective_scan
from jaxpretrain.plan import aot

C, N = 1536, 16


def all_states(u_BxTxC, dt_BxTxC, A_CxN, B_BxTxN, C_BxTxN, D_C):
    """The same by a parallel scan over all states at once, and autodiff."""
    decay_BxTxCxN = jnp.exp(dt_BxTxC[..., None] * A_CxN)
    added_BxTxCxN = (dt_BxTxC * u_BxTxC)[..., None] * B_BxTxN[:, :, None]

    def after(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    h_BxTxCxN = jax.lax.associative_scan(after, (decay_BxTxCxN, added_BxTxCxN), axis=1)[1]
    return (jnp.einsum("btcn,btn->btc", h_BxTxCxN, C_BxTxN) + D_C * u_BxTxC).astype(u_BxTxC.dtype)


def temporaries(device, scan, T):
    """Bytes of temporary memory of the forward and backward of one sequence, bfloat16."""
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array([device]), ("x",)), jax.P())

    def struct(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    channels, states = struct(1, T, C, dtype=jnp.bfloat16), struct(1, T, N, dtype=jnp.bfloat16)
    x = channels, struct(1, T, C), struct(C, N), states, states, struct(C)
    gradients = jax.jit(lambda dy, *x: jax.vjp(lambda *x: scan(*x), *x)[1](dy))
    return aot.memory(aot.compile_for(gradients, channels, *x)).temporaries


@pytest.mark.parametrize(
    "target, on_chip", [("a100-80gb", 0), pytest.param("v4-8", 128 * 2**20, marks=pytest.mark.slow)]
)
def test_memory_is_linear_and_small(topology, target, on_chip):
    """Seen to fail with `all_states` in place of the scan, and with the scan's segments as long as its chunks.

    A TPU v4 keeps what it can in its 128 MiB of common memory and counts none of that.
    """
    device = topology(target)[0]
    at = {T: temporaries(device, selective_scan, T) for T in (4096, 8192)}
    naive = temporaries(device, all_states, 4096)
    print(f"{target}: {at[4096] / 2**20:.1f} and {at[8192] / 2**20:.1f} MiB, all states {naive / 2**20:.1f} MiB")
    assert at[8192] <= 2.1 * at[4096] + on_chip
    assert at[4096] <= naive / 5
