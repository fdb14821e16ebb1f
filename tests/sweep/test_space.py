"""The academic benchmark's combinations, and what they are here."""

import collections

import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.sweep.space import naive, paper22


def test_the_papers_22():
    """As its code enumerates them, 11 without and with activation checkpointing. Fails if offload needs no sharding."""
    names = [method.name for method in paper22(8)]
    eleven = [
        "none",
        "zero_1",
        "zero_1+offload",
        "zero_2",
        "zero_2+offload",
        "zero_3",
        "zero_3+offload",
        "fsdp_shard_grad_op",
        "fsdp_shard_grad_op+offload",
        "fsdp_full_shard",
        "fsdp_full_shard+offload",
    ]
    assert names == [*eleven, *(f"{name}+remat" for name in eleven)]


def test_the_papers_12_on_one_device():
    names = [method.name for method in paper22(1)]
    assert len(names) == 12
    assert all(name in ("none", "none+remat") or "offload" in name for name in names)


def test_what_is_one_program_here():
    """ZeRO-2 and FSDP's grad-op, ZeRO-3 and FSDP's full shard; but FSDP offloads parameters where ZeRO-2 does not."""
    same = collections.defaultdict(list)
    for method in paper22(4):
        same[tuple(method.overrides.values())].append(method.name)
    assert [names for names in same.values() if len(names) > 1] == [
        ["zero_2", "fsdp_shard_grad_op"],
        ["zero_3", "fsdp_full_shard"],
        ["zero_3+offload", "fsdp_full_shard+offload"],
        ["zero_2+remat", "fsdp_shard_grad_op+remat"],
        ["zero_3+remat", "fsdp_full_shard+remat"],
        ["zero_3+offload+remat", "fsdp_full_shard+offload+remat"],
    ]
    assert len(same) == 16


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_every_method_is_a_valid_config(compute):
    for method in (*paper22(8), *paper22(1), naive(compute)):
        config = config_lib.default()
        config.precision.compute = compute
        for key, value in method.overrides.items():
            config_lib.override(config, key, value)
        config_lib.check(config)
