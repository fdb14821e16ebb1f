"""What the compiler of an accelerator that is not here says of a training step: bytes, and on TPUs its cycles."""

import dataclasses
import re

import jax
from ml_collections import ConfigDict

from jaxpretrain import config as config_lib
from jaxpretrain.errors import is_out_of_memory
from jaxpretrain.parallel import offload
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.plan import aot
from jaxpretrain.plan.search import Candidate
from jaxpretrain.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one compile."""

    memory: aot.Memory | None  # None: refused, as it would not fit
    refusal: str | None  # the compiler's own words
    attention: str | None  # the kernel
    estimated_cycles: int | None  # on TPUs: of what carries an estimate, loops multiplied by their trips


def compile_step(config: ConfigDict, devices: list[jax.Device]) -> Verdict:
    """Compiles the step of a checked config, whose micro_batch_size is a number, for devices from `aot.topology`.

    Raises what is no lack of memory.
    """
    parallel = config.parallel
    mesh = make_mesh(parallel.strategy, devices, tensor=parallel.tensor, replicas=parallel.replicas)
    train_step = make_train_step(config, mesh)
    attention = train_step.attention and train_step.attention.name
    try:
        compiled = aot.compile_for(train_step.step, train_step.state, train_step.batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Verdict(None, " ".join(str(error).split())[:300], attention, None)
    offload.check(compiled, train_step.state, parallel.remat.startswith("offload"))
    is_tpu = devices[0].platform == "tpu"
    return Verdict(aot.memory(compiled), None, attention, estimated_cycles(compiled.as_text()) if is_tpu else None)


def verified(candidates: list[Candidate], number: int) -> dict[Candidate, Verdict]:
    """Verdicts until the fastest `number` are known to fit; what is refused goes on with a smaller micro-batch.

    Args:
      candidates: of one machine, as `plan.search.search` sorts them.

    Raises ValueError if there is no compiler for the machine.
    """
    machine = candidates[0].machine
    if machine.aot_target is None:
        raise ValueError(f"--verify={number}: no compiler here is for {machine.name}; leave it out")
    devices = aot.topology(machine.aot_target, machine.num_devices)
    waiting, verdicts = [c for c in candidates if c.fits], {}
    while pending := [c for c in waiting[:number] if c not in verdicts]:
        candidate = pending[0]
        config = candidate.subject.config.copy_and_resolve_references()
        for key, value in candidate.overrides.items():
            config_lib.override(config, key, value)
        verdict = verdicts[candidate] = compile_step(config, devices[: candidate.layout.num_devices])
        if verdict.memory is None or verdict.memory.device > machine.accelerator.usable_bytes:
            waiting.remove(candidate)
            if smaller := candidate.smaller():
                waiting.append(smaller)
                waiting.sort(key=lambda c: c.step.total)
    return verdicts


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][a-z0-9\-]*)\(")
_ESTIMATE = re.compile(r'"estimated_cycles":"?(\d+)')


def estimated_cycles(text: str) -> int:
    """Sum of the estimates in a program compiled for a TPU, of loops' bodies times their trips.

    Kernels of Pallas and collectives carry no estimate: a second opinion on the rest, and no step time.
    """
    computations, entry = _computations(text)

    def of(name: str) -> int:
        total = 0
        for line in computations.get(name, ()):
            found = _INSTRUCTION.match(line)
            estimate = _ESTIMATE.search(line)
            total += int(estimate[1]) if estimate else 0
            operation = found[2] if found else ""
            if operation == "while":
                condition, body = re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", line).groups()
                total += of(body) * _trips(line, computations.get(condition, []), computations)
            elif operation == "conditional":
                branches = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
                if listed := re.search(r"branch_computations=\{([^}]*)\}", line):
                    branches = listed[1].replace("%", "").split(", ")
                total += max(map(of, branches), default=0)
            elif not estimate and operation in ("call", "async-start"):
                if called := re.search(r"(?:to_apply|calls|called_computation)=%?([\w.\-]+)", line):
                    total += of(called[1])
        return total

    return of(entry)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Name -> instructions, and the name of the entry."""
    computations, current, entry = {}, None, ""
    for line in text.splitlines():
        if header := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{\s*$", line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.rstrip() == "}":
            current = None
        elif current is not None:
            if line.startswith("  ") or not current:
                current.append(line)
            else:  # metadata of kernels goes over several lines
                current[-1] += line
    return computations, entry


def _trips(loop: str, condition: list[str], computations: dict[str, list[str]]) -> int:
    """Of a while loop: what XLA knows, else the constant that its condition compares with; 1 if there is none."""
    if known := re.search(r'known_trip_count":\{"n":"?(\d+)', loop):
        return int(known[1])
    lines = list(condition)
    for line in condition:
        if called := re.search(r"calls=%?([\w.\-]+)", line):
            lines += computations.get(called[1], [])
    constants = [int(found[1]) for line in lines if (found := re.search(r"= [su]32\[\]\S* constant\((\d+)\)", line))]
    return max(constants, default=1)
