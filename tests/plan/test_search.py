"""What the search finds, refuses and prunes."""

import dataclasses

import pytest

from jaxpretrain import config as config_lib
from jaxpretrain import hardware
from jaxpretrain.plan.search import Subject, search


def subject(recipe="pythia1b", **overrides):
    settings = [("data.source", "synthetic"), *((key.replace("__", "."), str(v)) for key, v in overrides.items())]
    return Subject(config_lib.load(f"configs/{recipe}.py", settings))


@pytest.fixture(scope="module")
def pythia1b():
    return subject()


def test_what_fits_comes_first_and_the_fastest_of_it():
    found = search(subject("pythia1_4b"), hardware.parse_machine("rtx-3090", 2))
    fits = [candidate.fits for candidate in found]
    assert fits == sorted(fits, reverse=True) and any(fits) and not all(fits)
    times = [candidate.step.total for candidate in found if candidate.fits]
    assert times == sorted(times)
    for candidate in found:
        assert candidate.fits == (candidate.memory.device <= candidate.machine.accelerator.usable_bytes)
        assert candidate.mfu < 0.8  # physically possible


def test_the_papers_space_has_its_22_methods_and_the_naive_one(pythia1b):
    """12 on one device. Fails if methods that do not fit are left out."""
    names = [c.method for c in search(pythia1b, hardware.parse_machine("rtx-3090", 2), "paper22")]
    assert len(names) == len(set(names)) == 23
    assert {"naive", "free lunch"} <= set(names)
    assert len(search(pythia1b, hardware.parse_machine("rtx-3090", 1), "paper22")) == 13


def test_the_naive_method_is_slower_and_larger(pythia1b):
    found = {c.method: c for c in search(pythia1b, hardware.parse_machine("h100", 4), "paper22")}
    naive, free = found["naive"], found["free lunch"]
    assert naive.step.total > 1.1 * free.step.total
    same_size = dataclasses.replace(free.layout, micro_batch_size=naive.layout.micro_batch_size)
    assert naive.memory.device > pythia1b.memory(same_size, free.machine.accelerator).device
    assert naive.overrides["kernels.attention"] == "xla"
    assert naive.overrides["parallel.donate"] == "False"


@pytest.mark.parametrize("count", [1, 3, 5, 6, 7])
def test_any_number_of_devices(pythia1b, count):
    """The global batch of 1,024 divides over 1, 2 and 4: of six devices 4 are used, or 2 groups... of none of 3."""
    for candidate in search(pythia1b, hardware.parse_machine("a100-80gb", count)):
        layout = candidate.layout
        assert layout.num_devices <= count
        assert 1024 % (layout.num_data_shards * layout.micro_batch_size) == 0


def test_every_divisor_is_tried_not_powers_of_two():
    found = search(subject(batch_size=96 * 9), hardware.parse_machine("a100-80gb", 8))
    assert any(candidate.layout.micro_batch_size % 3 == 0 for candidate in found if candidate.fits)


def test_several_nodes(pythia1b):
    found = search(pythia1b, hardware.parse_machine("a100-80gb", 8, 2))
    assert found[0].layout.num_devices == 16
    one = search(pythia1b, hardware.parse_machine("a100-80gb", 8))
    assert 1 < one[0].step.total / found[0].step.total < 2


def test_a_tpu_that_cannot_stream_the_state_is_not_told_to(pythia1b):
    """docs/benchmarks/memory.md: v3's compiler refused both such programs."""
    layouts = [c.layout for c in search(pythia1b, hardware.parse_machine("v3-8"))]
    assert {layout.offload for layout in layouts} == {"none"}
    layouts = [c.layout for c in search(pythia1b, hardware.parse_machine("v4-8"))]
    assert {layout.offload for layout in layouts} == {"none", "optimizer", "optimizer+params"}


def test_the_precision_is_one_that_the_device_has(pythia1b):
    """V100s have no bfloat16; TPUs no float16, which the other Pythias were trained in."""
    v100 = search(pythia1b, hardware.parse_machine("v100-32gb", 4))[0]
    assert v100.overrides["precision.compute"] == "float16"
    assert "precision.compute" not in search(pythia1b, hardware.parse_machine("a100-80gb", 4))[0].overrides
    v4 = search(subject("pythia160m"), hardware.parse_machine("v4-8"))[0]
    assert v4.overrides["precision.compute"] == "bfloat16"


def test_averages_move_to_the_host_with_the_rest():
    found = search(subject(average__horizons=(1_000_000,)), hardware.parse_machine("a100-80gb", 2))
    assert "averages" in {candidate.layout.offload for candidate in found}


@pytest.mark.parametrize("recipe", ["roberta_large", "mamba130m", "vit_large", "convnext_xlarge"])
def test_every_family(recipe):
    best = search(subject(recipe), hardware.parse_machine("a100-80gb", 4))[0]
    assert best.fits and 0.02 < best.mfu < 0.8


def test_overrides_train(pythia1b):
    """Each is a key of the config that checks accept, together."""
    for candidate in search(pythia1b, hardware.parse_machine("a100-80gb", 4), "paper22"):
        if "donate" not in str(candidate.overrides):
            config = config_lib.load("configs/pythia1b.py", list(candidate.overrides.items()))
            assert config.batch_size == 1024
