"""Answers to "can I, how, how long, at what cost": rows of a table, which rank layouts, machines or models."""

import dataclasses
import json
import pathlib
import shlex
import statistics
from collections.abc import Iterable
from typing import Any

from jaxpretrain.hardware import Machine
from jaxpretrain.plan.cost import cost
from jaxpretrain.plan.search import Candidate, Subject, search
from jaxpretrain.plan.verify import Verdict, verified

# 90th percentiles of the absolute errors in docs/benchmarks/prediction.md.
CALIBRATED, NOT_VALIDATED, MEASURED = "calibrated on another stack", "not validated", "measured here"
_CALIBRATED_ON = ("a100-40gb", "a100-80gb", "h100")
_BANDS = {CALIBRATED: 0.20, NOT_VALIDATED: 0.40}


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Step times that `tools/sweep.py step_time` left in a work directory, of one device and config."""

    seconds: dict[frozenset, float]  # overrides -> median of a step

    @staticmethod
    def exist(workdir: str) -> bool:
        return (pathlib.Path(workdir) / "trials.jsonl").exists()

    @classmethod
    def read(cls, workdir: str) -> "Measurements":
        """Of DIR/trials.jsonl. Raises ValueError if there is none, or none that ended well."""
        file = pathlib.Path(workdir) / "trials.jsonl"
        try:
            trials = [json.loads(line) for line in file.read_text().splitlines()]
        except OSError as error:
            raise ValueError(f"--workdir={workdir}: {file.name} cannot be read: {error.strerror}") from error
        done = {frozenset(t["overrides"].items()): t["step_time"] for t in trials if t["status"] == "ok"}
        return cls(done)


def correction(measured: Measurements, candidates: Iterable[Candidate]) -> tuple[float, float] | None:
    """Median of measured over predicted times, and the largest distance from it; None: nothing was measured."""
    ratios = [
        measured.seconds[key] / candidate.step.total
        for candidate in candidates
        if (key := frozenset(candidate.overrides.items())) in measured.seconds
    ]
    if not ratios:
        return None
    factor = statistics.median(ratios)
    return factor, max(0.02, max(abs(ratio / factor - 1) for ratio in ratios))


def row(candidate: Candidate, recipe: str, job_hours: float | None = None, **corrected) -> dict[str, Any]:
    """What is written for a candidate.

    Args:
      recipe: what `--config` is.
      corrected: `factor` and `band` of measurements on this machine, and `seconds` where it was measured itself.
    """
    subject, machine = candidate.subject, candidate.machine
    config = subject.config
    seconds = corrected.get("seconds") or candidate.step.total * corrected.get("factor", 1.0)
    speed = candidate.step.total / seconds
    costs = cost(config, machine, candidate.memory.state, seconds, job_hours)
    label = _label(machine, corrected)
    return {
        "model": name_of(recipe),
        "machine": machine.name,
        "method": candidate.method,
        "fits": candidate.fits,
        "days": costs.days,
        "tokens_per_second": candidate.tokens_per_second * speed,
        "mfu": candidate.mfu * speed,
        "peak_bytes": candidate.memory.device,
        "usable_bytes": machine.accelerator.usable_bytes,
        "host_bytes": candidate.memory.state.host * machine.count,
        "cost_usd": costs.usd,
        "limit": candidate.step.limit if candidate.fits else "memory",
        "label": label,
        "band": corrected.get("band", _BANDS.get(label)),
        "step_time": seconds,
        "step": dataclasses.asdict(candidate.step),
        "memory": memory_parts(candidate),
        "cost": dataclasses.asdict(costs),
        "machine_usd": machine.price_usd,
        "flops": float(config.steps * config.batch_size * subject.work.num_tokens * subject.flops_per_token),
        "devices_used": candidate.layout.num_devices,
        "micro_batch_size": candidate.layout.micro_batch_size,
        "overrides": candidate.overrides,
        "command": command(recipe, candidate),
        "measure": shlex.join(["python", "tools/sweep.py", "step_time", f"--config={recipe}", "--workdir=DIR"]),
    }


def _label(machine: Machine, corrected: dict) -> str:
    if corrected:
        return MEASURED
    return CALIBRATED if machine.accelerator.name in _CALIBRATED_ON else NOT_VALIDATED


def memory_parts(candidate: Candidate) -> dict[str, int]:
    """Bytes of a device, which add up to `peak_bytes`."""
    state = candidate.memory.state
    return {
        "masters, moments, averages": state.params + state.optimizer + state.averages + state.undonated - state.host,
        "gradients": state.gradients + state.micro_batch_gradients,
        "compute copy": state.compute_copy,
        "activations": candidate.memory.kept,
        "temporaries": candidate.memory.working,
    }


def command(recipe: str, candidate: Candidate) -> str:
    """To train so, complete. The first devices of a node are used where not all are."""
    layout, machine = candidate.layout, candidate.machine
    flags = [f"--config.{key}={value}" for key, value in candidate.overrides.items()]
    words = ["python", "-m", "jaxpretrain.main", f"--config={recipe}", f"--workdir=runs/{name_of(recipe)}", *flags]
    unused = machine.num_devices - layout.num_devices
    prefix = f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(layout.num_devices)))} " if unused else ""
    return prefix + shlex.join(words)


def name_of(recipe: str) -> str:
    """`pythia1b` of `configs/pythia1b.py:deduped`."""
    return pathlib.Path(recipe.partition(":")[0]).stem


def machine_rows(
    subject: Subject,
    machine: Machine,
    recipe: str,
    space: str,
    measured: Measurements | None = None,
    job_hours: float | None = None,
    verify: int = 0,
) -> list[dict[str, Any]]:
    """All methods of a space on one machine, the best first; the best `verify` with the compiler's bytes."""
    candidates = search(subject, machine, space)
    found = correction(measured, candidates) if measured else None
    factor = {"factor": found[0], "band": found[1]} if found else {}
    verdicts = verified(candidates, verify) if verify else {}
    rows = []
    for candidate in dict.fromkeys([*candidates, *verdicts]):
        seconds = measured and measured.seconds.get(frozenset(candidate.overrides.items()))
        corrected = factor | ({"seconds": seconds, "band": 0.02} if seconds else {})
        verdict = verdicts.get(candidate)
        rows.append(
            row(candidate, recipe, job_hours, **corrected) | (_by_compiler(candidate, verdict) if verdict else {})
        )
    return sorted(rows, key=lambda r: (not r["fits"], r["days"] if r["fits"] else r["peak_bytes"]))


def _by_compiler(candidate: Candidate, verdict: Verdict) -> dict[str, Any]:
    """What replaces the prediction."""
    predicted = candidate.memory.device
    said = {"verified": True, "predicted_peak_bytes": predicted, "estimated_cycles": verdict.estimated_cycles}
    if verdict.memory is None:
        return said | {"fits": False, "limit": "memory", "refusal": verdict.refusal}
    fits = verdict.memory.device <= candidate.machine.accelerator.usable_bytes
    return said | {"peak_bytes": verdict.memory.device, "fits": fits} | ({} if fits else {"limit": "memory"})


def pareto(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that no other beats in both days and dollars, from the fastest to the cheapest."""
    front, least = [], float("inf")
    for r in sorted((r for r in rows if r["cost_usd"] is not None), key=lambda r: (r["days"], r["cost_usd"])):
        if r["cost_usd"] < least:
            front.append(r)
            least = r["cost_usd"]
    return front
