"""The compiler's word on a plan, and the cycles that it estimates."""

import dataclasses

import jax
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain import hardware
from jaxpretrain.plan import aot, verify
from jaxpretrain.plan.search import Subject, search

# As libtpu writes it: a loop whose trips XLA knows, one whose condition tells, a branch, and a kernel's metadata that
# goes over several lines.
PROGRAM = """
HloModule jit_step

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %fusion.1 = f32[8]{0} fusion(%p), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"100"}
}

%condition (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%p, %limit), direction=LT
}

%cheap (p: f32[8]) -> f32[8] {
  ROOT %copy = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"3"}
}

%dear (p: f32[8]) -> f32[8] {
  ROOT %copy = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"40"}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %kernel = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={kernel="{
}, {}"}
  %w1 = f32[8]{0} while(%a), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %w2 = f32[8]{0} while(%w1), condition=%condition, body=%body
  %b = f32[8]{0} conditional(%i, %a, %a), branch_computations={%cheap, %dear}
  ROOT %add = f32[8]{0} add(%w2, %b), backend_config={"estimated_cycles":"11"}
}
"""


def test_cycles_of_loops_count_for_every_trip():
    """Fails if a loop's body is counted once, or if both branches are."""
    assert verify.estimated_cycles(PROGRAM) == 7 * 100 + 5 * 100 + 40 + 11


@pytest.fixture
def candidates():
    config = config_lib.load("configs/pythia160m.py", [("data.source", "synthetic")])
    return search(Subject(config), hardware.parse_machine("a100-80gb", 4))


def test_what_the_compiler_refuses_goes_on_smaller(monkeypatch, candidates):
    """A compiler that lets micro-batches of 32 through: the fastest two that fit are verified, all refusals kept.

    Fails if a refused layout is dropped, or if the next in line is not compiled in its place.
    """

    def compile_step(config, devices):
        if config.micro_batch_size > 32:
            return verify.Verdict(None, "RESOURCE_EXHAUSTED: ...", None, None)
        return verify.Verdict(aot.Memory(2**30, 0, 0, 0, 0), None, None, None)

    monkeypatch.setattr(verify, "compile_step", compile_step)
    monkeypatch.setattr(aot, "topology", lambda target, count: [None] * count)
    verdicts = verify.verified(candidates, 2)
    fitting = sorted(
        (candidate for candidate, verdict in verdicts.items() if verdict.memory), key=lambda c: c.step.total
    )
    refused = [candidate for candidate, verdict in verdicts.items() if not verdict.memory]
    assert len(fitting) == 2 and {c.layout.micro_batch_size for c in fitting} <= {16, 32}
    assert candidates[0] in refused
    assert dataclasses.replace(candidates[0].layout, micro_batch_size=32) in [c.layout for c in verdicts]
    assert not any(c.layout.micro_batch_size > 32 for c in fitting)


def test_a_machine_without_a_compiler_says_so(candidates):
    machine = hardware.parse_machine("mi300x", 4)
    others = search(candidates[0].subject, machine)
    with pytest.raises(ValueError, match=r"^--verify=1: no compiler here is for 4 x mi300x; leave it out$"):
        verify.verified(others, 1)


@pytest.mark.slow
def test_two_compilers_agree_with_the_closed_form(candidates):
    """Of an A100, and of a v5e, which refuses the first micro-batches of pythia160m (docs/plan.md)."""
    (best,) = [c for c, v in verify.verified(candidates, 1).items() if v.memory]
    devices = aot.topology("a100-80gb", 4)
    assert best.memory.device == pytest.approx(_compiled(best, devices).memory.device, rel=0.12)

    found = search(candidates[0].subject, hardware.parse_machine("v5e-8"))
    verdicts = verify.verified(found, 1)
    candidate, verdict = next((c, v) for c, v in verdicts.items() if v.memory)
    assert candidate.memory.device == pytest.approx(verdict.memory.device, rel=0.12)
    assert verdict.estimated_cycles > 1e8
    assert all(v.refusal for v in verdicts.values() if v.memory is None)


def _compiled(candidate, devices: list[jax.Device]) -> verify.Verdict:
    config = config_lib.load("configs/pythia160m.py", [("data.source", "synthetic"), *candidate.overrides.items()])
    return verify.compile_step(config, devices)
