"""Named spaces of memory-saving methods, each a set of config overrides."""

import dataclasses
import itertools

# What the academic benchmark (arXiv 2410.23261) calls sharding, and ours. FSDP's "shard grad op" is ZeRO-2, its "full
# shard" ZeRO-3. DeepSpeed's offload moves the optimizer's state, and in stage 3 the parameters too; FSDP's moves both.
_SHARDING = {
    "": ("ddp", None),
    "zero_1": ("zero1", "optimizer"),
    "zero_2": ("zero2", "optimizer"),
    "zero_3": ("fsdp", "optimizer+params"),
    "fsdp_shard_grad_op": ("zero2", "optimizer+params"),
    "fsdp_full_shard": ("fsdp", "optimizer+params"),
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train with less memory: a name, and what it sets."""

    name: str
    overrides: dict[str, str]


def paper22(num_devices: int) -> list[Method]:
    """The benchmark's "all": activation checkpointing x sharding x offload, which needs sharding.

    22 on several devices. On one, where sharding without offload would do nothing, 12. Methods with equal overrides are
    one program here.
    """
    methods = []
    for checkpointing, sharding, offloading in itertools.product((False, True), _SHARDING, (False, True)):
        strategy, offload = _SHARDING[sharding]
        if (offloading and not sharding) or (num_devices == 1 and sharding and not offloading):
            continue
        parts = [sharding or "none", *(["offload"] if offloading else []), *(["remat"] if checkpointing else [])]
        overrides = {
            "parallel.strategy": strategy,
            "parallel.remat": "full" if checkpointing else "none",
            "parallel.offload": offload if offloading else "none",
        }
        methods.append(Method("+".join(parts), overrides))
    return methods


def naive(compute: str) -> Method:
    """What a speed-up is over: the recipe's mixed precision, and none of what costs nothing.

    float32 products in full float32 (the benchmark turns TF32 off), attention and cross-entropy that write out all
    scores and all logits, a state that is not updated in place, and XLA's options as they come.

    Args:
      compute: the recipe's `precision.compute`; 16-bit products have one precision only.
    """
    overrides = {
        "parallel.strategy": "ddp",
        "parallel.remat": "none",
        "parallel.offload": "none",
        "parallel.donate": "False",
        "parallel.xla_options": "default",
        "kernels.attention": "xla",
        "kernels.cross_entropy": "whole",
    }
    if compute == "float32":
        overrides["precision.matmul"] = "highest"
    return Method("naive", overrides)
