"""One configuration, measured in a process of its own: `python -m jaxpretrain.sweep.trial REQUEST.json RESULT.json`.

Whole optimizer steps with the run's own data, accumulation and optimizer, each waited for until all of the new state is
there. The result is written whatever happens, but where the process is killed; then its parent says so.
"""

import ctypes
import json
import math
import os
import pathlib
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpretrain import config as config_lib
from jaxpretrain import hardware
from jaxpretrain.data.dataset import make_dataset
from jaxpretrain.data.loader import Loader
from jaxpretrain.errors import explain, is_out_of_memory
from jaxpretrain.evaluation import own_rows, place
from jaxpretrain.micro_batch import make_fitting_step
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.plan import flops
from jaxpretrain.schema import IMAGE_FAMILIES

MAX_WARM_UP, MIN_STEPS, MAX_STEPS = 12, 10, 40
_STEADY = 0.05  # warm-up ends when three steps in a row lie within this of each other
_TIGHT = 0.02  # and timing when the median is known to this, at 95 %
FLAGGED_MFU, IMPOSSIBLE_MFU = 0.8, 1.0
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def measure(config: ConfigDict, on_compiled: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Status `ok` and the numbers of a checked config on all devices here; raises what goes wrong."""
    mesh = make_mesh(config.parallel.strategy, tensor=config.parallel.tensor, replicas=config.parallel.replicas)
    device, started = mesh.devices.flat[0], time.perf_counter()
    train_step, compiled = make_fitting_step(config, mesh)
    on_compiled()
    compile_seconds = time.perf_counter() - started
    dataset, state = make_dataset(config, "train"), train_step.init()
    warm_up, timed, losses = [], [], []
    num_steps = MAX_WARM_UP + MAX_STEPS
    with Loader(dataset, lambda batch: place(batch, train_step), 0, num_steps, own_rows(config.batch_size)) as loader:
        while not enough(timed):
            batch = jax.block_until_ready(next(loader))
            start = time.perf_counter()
            state, metrics = jax.block_until_ready(compiled(state, batch))
            seconds = time.perf_counter() - start
            losses.append(float(metrics["loss"]))
            if metrics["bad_steps"] or not math.isfinite(losses[-1]):  # overflows of float16 are no bad steps
                what = f"step {len(losses)} is not finite, in its loss ({losses[-1]}) or its gradients"
                return {"status": "non-finite", "error": what}
            (timed if is_steady(warm_up) else warm_up).append(seconds)
        waited = loader.seconds_waited
    step_time = statistics.median(timed)
    num_tokens = config.batch_size * (1 if config.model.family in IMAGE_FAMILIES else config.seq_len)
    mfu = _mfu(config, device.device_kind, num_tokens / step_time / mesh.size)
    stats, report = device.memory_stats() or {}, compiled.memory_analysis()
    result = {
        "status": "ok",
        "step_time": step_time,
        "step_times": timed,
        "warm_up_times": warm_up,
        "spread": half_interval(timed),
        "tokens_per_second": num_tokens / step_time,
        "mfu": mfu,
        "compile_seconds": compile_seconds,
        "input_wait": waited / (len(timed) + len(warm_up)),
        "peak_bytes": stats.get("peak_bytes_in_use") or (report and _peak(report)),
        "peak_host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "losses": losses[:MIN_STEPS],
        "micro_batch_size": config.micro_batch_size,
        "device_kind": device.device_kind,
        "num_devices": mesh.size,
    }
    if mfu is not None and mfu > IMPOSSIBLE_MFU:
        return result | {"status": "implausible", "error": f"an MFU of {mfu:.2f} is above the peak: the timer is wrong"}
    return result | ({"warning": f"an MFU of {mfu:.2f} is hardly possible"} if mfu and mfu > FLAGGED_MFU else {})


def is_steady(times: list[float]) -> bool:
    """Whether the warm-up is over: the last three steps agree, or it has lasted long enough. The first never counts."""
    last = times[1:][-3:]
    return len(times) >= MAX_WARM_UP or (len(last) == 3 and max(last) <= (1 + _STEADY) * min(last))


def enough(times: list[float]) -> bool:
    if len(times) < MIN_STEPS:
        return False
    return len(times) >= MAX_STEPS or half_interval(times) <= _TIGHT * statistics.median(times)


def half_interval(times: list[float]) -> float:
    """Half of the 95 % interval of the median: between order statistics, which assumes no distribution."""
    n, ordered = len(times), sorted(times)
    reach = math.ceil(0.98 * math.sqrt(n))
    low, high = max(0, n // 2 - reach), min(n - 1, n // 2 + reach)
    return (ordered[high] - ordered[low]) / 2


def _mfu(config: ConfigDict, device_kind: str, tokens_per_second: float) -> float | None:
    accelerator = hardware.find(device_kind)
    peak = accelerator and accelerator.peak_flops(config.precision.compute, config.precision.matmul)
    return None if peak is None else tokens_per_second * flops.train_flops_per_token(config) / peak


def _peak(report: Any) -> int:
    peak = report.argument_size_in_bytes + report.output_size_in_bytes - report.alias_size_in_bytes
    return peak + report.temp_size_in_bytes


def failure(error: BaseException, compiling: bool) -> dict[str, str]:
    """`device memory`, `host memory`, `compile` or `other`."""
    text = str(error)
    if isinstance(error, MemoryError) or "bad_alloc" in text:
        kind = "host memory"
    elif is_out_of_memory(error) or "does not fit into the memory" in text:  # micro_batch.py's words
        kind = "device memory"
    else:
        kind = "compile" if compiling else "other"
    return {"status": kind, "error": explain(error)}


def probe() -> dict[str, Any]:
    """The devices that trials will see, and what a measurement depends on beside the config."""
    devices = jax.devices()
    return {
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "platform": devices[0].platform,
        "platform_version": devices[0].client.platform_version,
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
    }


def end_with_parent() -> None:
    """A sweep that is killed leaves no trial behind that would hold the device. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(request_file: str, result_file: str) -> None:
    end_with_parent()
    request = json.loads(pathlib.Path(request_file).read_text())
    stage = ["compile"]
    try:
        if request.get("probe"):
            result = probe()
        else:
            config = config_lib.load(request["recipe"], list(request["overrides"].items()))
            result = measure(config, on_compiled=stage.clear)
    except BaseException as error:  # whatever it is, it is this trial's result
        result = failure(error, compiling=bool(stage))
    aside = f"{result_file}.{os.getpid()}"
    pathlib.Path(aside).write_text(json.dumps(result))
    os.replace(aside, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
