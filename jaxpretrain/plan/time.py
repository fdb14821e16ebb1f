"""Seconds of an optimizer step, by a roofline per class of operation: nothing is compiled or run.

A micro-batch costs the products of its matrices, its attention, the memory traffic of activations and weights, and what
each layer takes whatever its size; what is gathered and reduced meanwhile hides behind these, in part. A step is its
micro-batches, the collectives that wait for the last of them, the update, and what happens once.

Ten numbers are fitted (`Calibration`), to published throughputs of PyTorch on A100s and H100s: `tools/calibrate.py
time`, docs/benchmarks/prediction.md.
"""

import dataclasses
import math

from jaxpretrain.hardware import Machine
from jaxpretrain.parallel.mesh import AXES
from jaxpretrain.plan.layout import Layout
from jaxpretrain.plan.memory import StateBytes
from jaxpretrain.plan.work import Stack, Work

_BACKWARD = 2  # of what the forward costs: two products for each one
# Of flash attention: five products for two, as the scores are computed again (Dao 2023, arXiv 2307.08691, section 3.1).
_ATTENTION_BACKWARD = 2.5
_POWER_BOUND = ("hopper", "blackwell")  # generations whose clocks drop under large products


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The fitted numbers."""

    matmul: float  # efficiency: part of the peak that large products reach
    matmul_power_bound: float  # the same on Hopper and Blackwell
    attention: float  # efficiency, of causal attention counted once
    attention_power_bound: float
    passes: float  # how often the forward reads or writes what goes into products and comes out, with all between them
    layer_seconds: float  # of a layer's forward, whatever its size: launches
    link: float  # efficiency of links, within a node and between nodes
    overlap: float  # part of the shorter of computing and communicating that hides behind the longer
    hop_seconds: float  # of a collective, per doubling of the devices
    step_seconds: float  # once per step


BOUNDS = {  # within which each makes sense
    "matmul": (0.3, 1.0),
    "matmul_power_bound": (0.3, 1.0),
    "attention": (0.1, 1.0),
    "attention_power_bound": (0.1, 1.0),
    "passes": (1.0, 8.0),
    "layer_seconds": (0.0, 3e-4),  # the fit would take more: PyTorch's FSDP launches slowly
    "link": (0.6, 0.9),  # NCCL reaches 230 GB/s of 300 between A100s
    "overlap": (0.0, 1.0),
    "hop_seconds": (0.0, 2e-4),
    "step_seconds": (0.0, 0.1),
}
FITTED = Calibration(  # `tools/calibrate.py time` prints them
    matmul=0.781,
    matmul_power_bound=0.697,
    attention=0.332,
    attention_power_bound=0.171,
    passes=2.33,
    layer_seconds=3e-4,
    link=0.601,
    overlap=0.248,
    hop_seconds=5.93e-5,
    step_seconds=0.0552,
)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on each device, by what takes them."""

    matmul: float
    attention: float
    memory: float  # traffic of activations and weights
    recomputation: float  # of these three in the backward, by `parallel.remat`
    communication: float  # that is not hidden
    offload: float  # transfers from and to the host that are not hidden
    optimizer: float
    launches: float  # and what happens once per step

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    @property
    def limit(self) -> str:
        """What takes most of the time."""
        groups = {
            "compute": self.matmul + self.attention + self.recomputation,
            "bandwidth": self.memory + self.optimizer,
            "links": self.communication,
            "host link": self.offload,
            "launches": self.launches,
        }
        return max(groups, key=groups.get)


def step_time(
    work: Work,
    state: StateBytes,
    layout: Layout,
    machine: Machine,
    *,
    batch_size: int,
    compute: str,
    matmul: str = "default",
    fitted: Calibration = FITTED,
) -> StepTime:
    """Of a step of `batch_size` rows, which the layout divides.

    Args:
      work, state: of the model, and of its state in this layout.
      compute, matmul: as in `precision`; compute may also be `float8`, of the layers' products alone.

    Raises ValueError for a precision that the device has no matrix units for.
    """
    forward = _Forward(work, layout, machine, compute, matmul, fitted)
    links = _Links(work, layout, machine, compute, fitted)
    num_micro_batches = batch_size // (layout.num_data_shards * layout.micro_batch_size)
    device = machine.accelerator
    # Weights are read by three products; their gradients are written and added to the float32 sums.
    weights = (3 * state.compute_copy + state.micro_batch_gradients + 2 * state.gradients) / device.memory_bandwidth
    recomputation = forward.recomputation(layout.remat)
    launches = (1 + _BACKWARD) * forward.launches
    products = (1 + _BACKWARD) * forward.matmul
    attention = (1 + _ATTENTION_BACKWARD) * forward.attention
    memory = (1 + _BACKWARD) * forward.memory + weights
    computing = products + attention + memory + recomputation + launches
    # Twice: out in the forward, back in the backward.
    offloaded = 2 * _offloaded_bytes(work, layout) / (device.host_link * fitted.link)
    update = 2 * (state.params + state.optimizer + state.averages) + state.gradients  # bytes read and written
    return StepTime(
        matmul=num_micro_batches * products,
        attention=num_micro_batches * attention,
        memory=num_micro_batches * memory,
        recomputation=num_micro_batches * recomputation,
        communication=num_micro_batches * (_exposed(links.per_micro_batch(state), computing, fitted) + links.tensor())
        + links.per_step(state),
        offload=num_micro_batches * _exposed(offloaded, computing, fitted)
        + 2 * state.host / (device.host_link * fitted.link),
        optimizer=update / device.memory_bandwidth,
        launches=num_micro_batches * launches + fitted.step_seconds,
    )


def _width(compute: str) -> int:
    """Bytes of a number of the compute copy and of activations."""
    return 4 if compute == "float32" else 2


def _exposed(transfer: float, computing: float, fitted: Calibration) -> float:
    """What a transfer adds to computing beside which it runs."""
    return max(transfer, computing) + (1 - fitted.overlap) * min(transfer, computing) - computing


class _Forward:
    """Seconds of the forward of one micro-batch on one device."""

    def __init__(self, work: Work, layout: Layout, machine: Machine, compute: str, matmul: str, fitted: Calibration):
        device = machine.accelerator
        power_bound = device.generation in _POWER_BOUND
        outside = "bfloat16" if compute == "float8" else compute
        peaks = {precision: device.peak_flops(precision, matmul) for precision in (compute, outside)}
        for precision, peak in peaks.items():
            if peak is None:
                raise ValueError(
                    f"precision.compute={precision}: {device.name} has no matrix units for it; set another"
                )
        efficiency = fitted.matmul_power_bound if power_bound else fitted.matmul
        self._flops = efficiency * peaks[compute]
        self._attention_flops = peaks[outside] * (fitted.attention_power_bound if power_bound else fitted.attention)
        self._seconds_per_number = fitted.passes * _width(compute) / device.memory_bandwidth
        self._rows = layout.micro_batch_size / layout.tensor
        self._layer_seconds = fitted.layer_seconds
        self._stacks = work.stacks
        # The head works on float32, twice as wide.
        numbers, flops = (sum(getattr(p, name) for p in work.outside) for name in ("numbers", "flops"))
        self.matmul = self._sum(self._matmul) + self._rows * flops / (efficiency * peaks[outside])
        self.attention = self._sum(self._attention)
        self.memory = self._sum(self._memory) + 2 * self._rows * numbers * self._seconds_per_number
        self.launches = self._layer_seconds * sum(stack.num_layers for stack in work.stacks)

    def _sum(self, seconds) -> float:
        return sum(stack.num_layers * seconds(stack) for stack in self._stacks)

    def _matmul(self, stack: Stack) -> float:
        return self._rows * sum(p.flops for p in stack.products) / self._flops

    def _attention(self, stack: Stack) -> float:
        return self._rows * stack.attention_flops / self._attention_flops

    def _memory(self, stack: Stack) -> float:
        return self._rows * (sum(p.numbers for p in stack.products) + stack.loop_numbers) * self._seconds_per_number

    def recomputation(self, remat: str) -> float:
        """Of the layers, in the backward: all of their forward, or what is no product of matrices."""
        kind, _, argument = remat.partition(":")
        if kind in ("none", "names"):
            return 0.0

        def of_layer(stack: Stack) -> float:
            again = self._attention(stack) + self._memory(stack)
            return again if kind == "dots" else again + self._matmul(stack) + self._layer_seconds

        most = int(argument) if kind == "full" and argument else math.inf
        return sum(min(most, stack.num_layers) * of_layer(stack) for stack in self._stacks)


class _Links:
    """Seconds of what devices send each other. Rings: each byte enters every device once."""

    def __init__(self, work: Work, layout: Layout, machine: Machine, compute: str, fitted: Calibration):
        self._work, self._layout, self._machine, self._fitted = work, layout, machine, fitted
        self._copy_bytes = _width(compute) * work.num_params / layout.tensor  # of the parameters, whole
        self._num_layers = sum(stack.num_layers for stack in work.stacks)
        self._shape = layout.mesh.shape

    def _seconds(self, num_bytes: float, axis: str, num_collectives: int) -> float:
        """Of gathering, or reducing and scattering, so many bytes in all over an axis of the mesh."""
        size = self._shape[axis]
        if size == 1:
            return 0.0
        # Devices in a node follow each other along the last axis, then along the one before.
        stride = math.prod(self._shape[inner] for inner in AXES[AXES.index(axis) + 1 :])
        within = max(1, min(size, self._machine.count // stride))
        device = self._machine.accelerator
        seconds = num_bytes * (1 - 1 / size) / device.link_bandwidth if within > 1 else 0.0
        if within < size:  # then the slower is the network, which those devices of a node drive together
            seconds = max(seconds, num_bytes * (1 - within / size) / (device.network * within))
        return seconds / self._fitted.link + num_collectives * self._fitted.hop_seconds * math.log2(size)

    def per_micro_batch(self, state: StateBytes) -> float:
        """Parameters gathered and gradients scattered while the layers compute."""
        if self._layout.strategy == "zero2":
            return self._seconds(state.micro_batch_gradients, "fsdp", self._num_layers)
        if self._layout.strategy not in ("fsdp", "hsdp"):
            return 0.0
        # Parameters whose dims do not divide are whole already.
        gathered = min(state.compute_copy * self._shape["fsdp"], self._copy_bytes)
        return self._seconds(3 * gathered, "fsdp", 3 * self._num_layers)

    def per_step(self, state: StateBytes) -> float:
        """What is reduced after the last micro-batch, and gathered before the first."""
        match self._layout.strategy:
            case "zero1":
                return self._seconds(state.gradients + state.compute_copy, "fsdp", 2)
            case "zero2":
                return self._seconds(state.compute_copy, "fsdp", 1)
            case _:  # where there are replicas, an all-reduce: scattered and gathered
                return self._seconds(2 * state.gradients, "replica", 2)

    def tensor(self) -> float:
        """Of a micro-batch: two gathers and two scatters of the sequence per layer in each pass (arXiv 2205.05198)."""
        passes = 2 + (self._layout.remat.startswith(("full", "offload")))
        stacks = self._work.stacks
        num_bytes = self._layout.micro_batch_size * sum(stack.num_layers * stack.input_bytes for stack in stacks)
        return self._seconds(4 * passes * num_bytes, "tensor", 4 * passes * self._num_layers)


def _offloaded_bytes(work: Work, layout: Layout) -> float:
    """Of a micro-batch's activations, that `parallel.remat=offload` sends to the host."""
    if not layout.remat.startswith("offload"):
        return 0.0
    per_row = sum(stack.num_layers * stack.input_bytes for stack in work.stacks)
    return layout.micro_batch_size * per_row / layout.tensor
