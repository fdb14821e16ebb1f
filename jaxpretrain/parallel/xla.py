"""XLA's options for the training step: the one table of what is set, why, and who says so."""

from jax.sharding import Mesh

# Platform -> options that a step over several devices is compiled with; `parallel.xla_options=default` sets none.
_OPTIONS = {
    "gpu": {
        # Moves collectives away from where their results are needed, so that they run beside matrix products: fsdp's
        # gathers of the next layer. Off by default; on in NVIDIA's own JAX images, and in JAX's GPU performance tips
        # (docs.nvidia.com/jax-toolbox/environment-variables, docs.jax.dev/en/latest/gpu_performance_tips.html).
        "xla_gpu_enable_latency_hiding_scheduler": True,
    },
    "tpu": {},  # libtpu schedules so by itself
    "cpu": {},
}


def compiler_options(mesh: Mesh, xla_options: str) -> dict[str, bool]:
    """What `jax.jit` should be given for a step on this mesh."""
    return _OPTIONS[mesh.devices.flat[0].platform] if xla_options == "tuned" and mesh.size > 1 else {}
