"""The layouts of a run on a machine, each with what it needs and how long it takes, by arithmetic alone."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from ml_collections import ConfigDict

from jaxpretrain import config as config_lib
from jaxpretrain.hardware import Accelerator, Machine
from jaxpretrain.plan import flops
from jaxpretrain.plan.layout import Layout
from jaxpretrain.plan.memory import PeakBytes, Shapes, StateBytes, peak_bytes
from jaxpretrain.plan.time import StepTime, step_time
from jaxpretrain.plan.work import Work, trace
from jaxpretrain.sweep import space as spaces

SPACES = ("paper22", "default", "full")
_STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
# Their compilers refuse programs that stream the state: out of synchronisation flags (docs/benchmarks/memory.md).
_NO_OFFLOAD = ("v2", "v3")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout on a machine, and what is predicted of it."""

    subject: "Subject"
    method: str  # what it is called, for people
    machine: Machine
    layout: Layout
    memory: PeakBytes
    step: StepTime
    tokens_per_second: float  # of all devices; images for vision
    mfu: float

    @property
    def fits(self) -> bool:
        return self.memory.device <= self.machine.accelerator.usable_bytes

    @property
    def overrides(self) -> dict[str, str]:
        return self.layout.overrides | self.subject.extra

    def smaller(self) -> "Candidate | None":
        """With the next smaller micro-batch; None: it has one row."""
        rows = self.subject.config.batch_size // self.layout.num_data_shards
        size = next((d for d in range(self.layout.micro_batch_size - 1, 0, -1) if rows % d == 0), None)
        if size is None:
            return None
        layout = dataclasses.replace(self.layout, micro_batch_size=size)
        return self.subject.evaluate(self.method, self.machine, layout)


class Subject:
    """A config that is planned: what does not depend on the layout is found out once."""

    def __init__(self, config: ConfigDict, extra: dict[str, str] | None = None):
        """Of a checked config, with overrides that no layout has: the user's, of the precision, of the naive method."""
        self.extra = dict(extra or {})
        config = config.copy_and_resolve_references()
        with config.ignore_type():
            config.micro_batch_size = 1
        for key, value in self.extra.items():
            config_lib.override(config, key, value)
        self.config = config

    @functools.cached_property
    def work(self) -> Work:
        return trace(self.config)

    @functools.cached_property
    def shapes(self) -> Shapes:
        return Shapes.of(self.config)

    @functools.cached_property
    def flops_per_token(self) -> int:
        return flops.train_flops_per_token(self.config)

    def can_run_on(self, machine: Machine) -> bool:
        """Whether its devices have matrix units for a precision that the model may use."""
        return precision_for(self.config, machine.accelerator) is not None

    @functools.cache  # noqa: B019 a process has few subjects
    def state(self, strategy: str, num_devices: int, num_nodes: int, tensor: int, offload: str) -> StateBytes:
        layout = Layout(num_devices=num_devices, num_nodes=num_nodes, strategy=strategy, tensor=tensor)
        return self.shapes.state_bytes(strategy, layout.mesh, offload)

    @functools.cache  # noqa: B019
    def variant(self, *overrides: tuple[str, str]) -> "Subject":
        return Subject(self.config, self.extra | dict(overrides)) if overrides else self

    def evaluate(self, method: str, machine: Machine, layout: Layout) -> Candidate:
        config = self.config
        state = self.state(layout.strategy, layout.num_devices, layout.num_nodes, layout.tensor, layout.offload)
        step = step_time(
            self.work,
            state,
            layout,
            machine,
            batch_size=config.batch_size,
            compute=config.precision.compute,
            matmul=config.precision.matmul,
        )
        tokens_per_second = config.batch_size * self.work.num_tokens / step.total
        peak = machine.accelerator.peak_flops(config.precision.compute, config.precision.matmul)
        return Candidate(
            subject=self,
            method=method,
            machine=machine,
            layout=layout,
            memory=self.memory(layout, machine.accelerator),
            step=step,
            tokens_per_second=tokens_per_second,
            mfu=tokens_per_second * self.flops_per_token / (layout.num_devices * peak),
        )

    def memory(self, layout: Layout, accelerator: Accelerator) -> PeakBytes:
        state = self.state(layout.strategy, layout.num_devices, layout.num_nodes, layout.tensor, layout.offload)
        return peak_bytes(self.shapes, self.work, state, layout, accelerator.is_tpu)


def search(subject: Subject, machine: Machine, space: str = "default") -> list[Candidate]:
    """Every method of a space with the micro-batch that is fastest for it; those that fit first, the fastest first.

    The global batch is the recipe's: of devices over which it does not divide, fewer are used. A method that does not
    fit by any micro-batch is there with micro-batches of one row.

    Args:
      space: `paper22`, the academic benchmark's methods and its naive one; `default`; `full`: every number of
        recomputed layers.

    Raises ValueError where the device has matrix units for no precision that the model may use.
    """
    precision = precision_for(subject.config, machine.accelerator)
    if precision is None:
        compute = subject.config.precision.compute
        raise ValueError(f"precision.compute={compute}: {machine.name} has no matrix units for it; name another device")
    subject = subject.variant(*precision.items())
    num_devices = _usable_devices(subject.config.batch_size, machine)
    methods = _paper22(subject, num_devices) if space == "paper22" else _methods(subject, machine, num_devices, space)
    candidates = [
        best for method, variant, layout in methods for best in [_best(method, variant, machine, layout)] if best
    ]
    return sorted(candidates, key=lambda c: (not c.fits, c.step.total if c.fits else c.memory.device))


def precision_for(config: ConfigDict, accelerator: Accelerator) -> dict[str, str] | None:
    """What has to be set for the device: it may have no units for the recipe's 16-bit type. None: nothing helps."""
    wanted = config.precision.compute
    for compute in (wanted, *(("bfloat16", "float16", "float32") if wanted != "float32" else ())):
        if accelerator.peak_flops(compute):
            return {} if compute == wanted else {"precision.compute": compute}
    return None


def _usable_devices(batch_size: int, machine: Machine) -> int:
    """As many as there are, less those that would leave the global batch undivided."""
    total = machine.num_devices
    if machine.nodes > 1:
        return total
    return next(n for n in range(total, 0, -1) if any(batch_size % (n // t) == 0 for t in (1, 2, 4, 8) if n % t == 0))


def _paper22(subject: Subject, num_devices: int) -> Iterator[tuple[str, Subject, dict[str, str]]]:
    naive = spaces.naive(subject.config.precision.compute)
    for method in [naive, *spaces.paper22(num_devices)]:
        layout = {key.split(".")[1]: value for key, value in method.overrides.items() if key in _LAYOUT_KEYS}
        extra = {key: value for key, value in method.overrides.items() if key not in _LAYOUT_KEYS}
        name = "free lunch" if method.name == "none" else method.name
        yield name, subject.variant(*extra.items()), {"num_devices": num_devices, **layout}


_LAYOUT_KEYS = ("parallel.strategy", "parallel.remat", "parallel.offload")


def _methods(subject: Subject, machine: Machine, num_devices: int, space: str) -> Iterator[tuple[str, Subject, dict]]:
    num_layers = min(stack.num_layers for stack in subject.work.stacks)
    some = range(1, num_layers) if space == "full" else sorted({num_layers * n // 4 for n in (1, 2, 3)} - {0})
    remats = ("none", "dots", *(f"full:{k}" for k in some), "full", "offload")
    offloads = _offloads(subject.config, machine.accelerator)
    degrees = _tensor_degrees(subject.config, machine, num_devices)
    for strategy, tensor, remat, offload in itertools.product(_STRATEGIES, degrees, remats, offloads):
        layout = dict(num_devices=num_devices, strategy=strategy, tensor=tensor)
        if not _is_of_its_own(Layout(num_nodes=machine.nodes, **layout)):
            continue
        parts = {"tensor": tensor if tensor > 1 else "none", "remat": remat, "offload": offload}
        name = ", ".join([strategy, *(f"{key} {value}" for key, value in parts.items() if value != "none")])
        yield name, subject, layout | {"remat": remat, "offload": offload}


def _is_of_its_own(layout: Layout) -> bool:
    """Whether its strategy is not the same program as a simpler one."""
    if layout.strategy == "hsdp":
        return layout.mesh.shape["replica"] > 1 and layout.mesh.shape["fsdp"] > 1
    return layout.strategy == "ddp" or layout.num_data_shards > 1


def _tensor_degrees(config: ConfigDict, machine: Machine, num_devices: int) -> list[int]:
    """Within a node, and such that heads divide."""
    degrees = [t for t in (1, 2, 4, 8) if num_devices % t == 0 and machine.count % t == 0]
    return [t for t in degrees if config.model.num_heads % t == 0]


def _offloads(config: ConfigDict, accelerator: Accelerator) -> list[str]:
    if accelerator.name in _NO_OFFLOAD:
        return ["none"]
    averages = "+averages" if config.average.horizons else ""
    return ["none", *(["averages"] if averages else []), f"optimizer{averages}", f"optimizer+params{averages}"]


def _best(method: str, subject: Subject, machine: Machine, fields: dict) -> Candidate | None:
    """With the fastest micro-batch that fits; one row if none does; None where the batch does not divide."""
    layout = Layout(num_nodes=machine.nodes, **fields)
    rows, left = divmod(subject.config.batch_size, layout.num_data_shards)
    if left:
        return None
    usable = machine.accelerator.usable_bytes
    divisors = [d for d in range(rows, 0, -1) if rows % d == 0]
    fitting = []
    for size in divisors:
        layout = dataclasses.replace(layout, micro_batch_size=size)
        if subject.memory(layout, machine.accelerator).device <= usable:
            fitting.append(subject.evaluate(method, machine, layout))
            if len(fitting) == 2:  # smaller ones only take longer
                break
    if not fitting:
        return subject.evaluate(method, machine, layout)
    return min(fitting, key=lambda candidate: candidate.step.total)
