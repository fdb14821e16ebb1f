"""Which layout is the fastest on the machine at hand: trials in processes of their own, in the order of the plan."""

import collections
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from jaxpretrain import config as config_lib
from jaxpretrain import hardware
from jaxpretrain.hardware import Machine
from jaxpretrain.plan.search import Subject, search
from jaxpretrain.sweep import space as spaces
from jaxpretrain.sweep.cache import Trials

TRIAL = [sys.executable, "-m", "jaxpretrain.sweep.trial"]  # takes a request and leaves a result


@dataclasses.dataclass(frozen=True)
class Row:
    """A method, and the trial that measures it: methods with the same overrides share one."""

    method: str
    overrides: tuple[tuple[str, str], ...]
    predicted: float | None = None  # seconds of a step by the plan; None: the device is in no catalogue


def rows(config: ConfigDict, machine: dict[str, Any], space: str, methods: str) -> list[Row]:
    """What to measure, what the plan thinks the fastest first.

    Args:
      machine: of `probe`.
      space: of `tools/plan.py`; of a device that is in no catalogue only `paper22` is known.
      methods: of `paper22`: `all` (the naive one is extra), `naive`, `free_lunch` (no memory is saved), or several with
        commas.

    Raises ValueError for others.
    """
    accelerator = hardware.find(machine["device_kind"])
    if space != "paper22":
        if accelerator is None:
            raise ValueError(f"--space={space}: no plan is made for {machine['device_kind']!r}; set --space=paper22")
        if methods != "all":
            raise ValueError(f"--methods={methods} has no effect with --space={space}; leave it out")
    chosen = _paper22(config, machine["num_devices"], methods)
    if accelerator is None:
        return [Row(name, tuple(overrides.items())) for name, overrides in chosen.items()]
    found = search(Subject(config), Machine(accelerator, machine["num_devices"]), space)
    wanted = [c for c in found if c.fits and (space != "paper22" or c.method in chosen)]
    return [Row(c.method, tuple(c.overrides.items()), c.step.total) for c in wanted]


def _paper22(config: ConfigDict, num_devices: int, methods: str) -> dict[str, dict[str, str]]:
    """Name, as plan/search.py has it, -> overrides."""
    naive, free_lunch, *others = [spaces.naive(config.precision.compute), *spaces.paper22(num_devices)]
    free_lunch = dataclasses.replace(free_lunch, name="free lunch")
    groups = {"naive": [naive], "free_lunch": [free_lunch], "all": [free_lunch, *others]}
    chosen = {}
    for name in methods.split(","):
        if name not in groups:
            raise ValueError(f"--methods={methods}: {name!r} is none of {', '.join(groups)}")
        chosen |= {method.name: method.overrides for method in groups[name]}
    return chosen


def probe(seconds: float) -> dict[str, Any]:
    """What trials will see. Raises ValueError if JAX finds no device."""
    result = run_process({"probe": True}, seconds)
    if "device_kind" not in result:
        raise ValueError(f"no device answers: {result['error']}")
    return result


def sweep(
    recipe: str,
    config: ConfigDict,
    chosen: list[Row],
    trials: Trials,
    overrides: dict[str, str],
    *,
    trial_seconds: float,
    max_trials: int | None = None,
    max_seconds: float | None = None,
    retry_failed: bool = False,
    stop_early: bool = False,
    report: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measures what has not been, and returns the trials of all rows that have a result.

    Interrupted anywhere, the same call goes on: a trial that ended is not run again, unless it failed and
    `retry_failed`. What does not fit is tried again with the next smaller micro-batch. `stop_early` ends the sweep when
    what is left cannot win: predicted times, corrected by those measured, are all above the best.
    """
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    waiting, done, num_run = collections.deque(chosen), {}, 0
    while waiting:
        row = waiting.popleft()
        if stop_early and _cannot_win(row, done):
            report(f"{len(waiting) + 1} more methods cannot win by the plan, corrected by what was measured")
            break
        settings = overrides | dict(row.overrides)
        key = trials.key(config_lib.to_json(_with(config, settings)))
        trial = trials.get(key)
        if trial is not None and retry_failed and trial["status"] != "ok" and key not in done:
            trials.forget(key)
            trial = None
        if trial is None:
            if (max_trials is not None and num_run >= max_trials) or (deadline and time.monotonic() > deadline):
                continue
            if not trials.claim(key, trial_seconds):
                report(f"{row.method}: another sweep measures it")
                continue
            num_run += 1
            try:
                result = run_process({"recipe": recipe, "overrides": settings}, trial_seconds)
            except BaseException:
                trials.release(key)
                raise
            trial = {"method": row.method, "overrides": _complete(settings, result), "ended": time.time()} | result
            trial["predicted_step_time"] = row.predicted
            trials.put(key, trial)
        done[key] = trial
        report(f"{row.method}: {summary(trial)}")
        if trial["status"] == "device memory" and (smaller := _smaller(row, config, settings, trials)):
            waiting.appendleft(smaller)
    return list(done.values())


def _complete(settings: dict[str, str], result: dict[str, Any]) -> dict[str, str]:
    """Every key that a plan sets, `auto` as it was resolved: tools/plan.py finds measured layouts by them."""
    defaults = {f"parallel.{key}": "none" for key in ("remat", "offload")}
    defaults |= {"parallel.strategy": "ddp", "parallel.tensor": "1"}
    resolved = {"micro_batch_size": str(result["micro_batch_size"])} if "micro_batch_size" in result else {}
    return defaults | settings | resolved


def _cannot_win(row: Row, done: dict[str, dict[str, Any]]) -> bool:
    measured = [trial for trial in done.values() if trial["status"] == "ok" and trial["predicted_step_time"]]
    if row.predicted is None or len(measured) < 3:
        return False
    lowest = min(trial["step_time"] / trial["predicted_step_time"] for trial in measured)
    return row.predicted * lowest > min(trial["step_time"] for trial in measured)


def _smaller(row: Row, config: ConfigDict, settings: dict[str, str], trials: Trials) -> Row | None:
    size = settings.get("micro_batch_size", "auto")
    if size == "auto":  # the trainer has tried all
        return None
    num_shards = trials.num_devices // int(settings.get("parallel.tensor", 1))
    per_shard = config.batch_size // num_shards
    smaller = next((d for d in range(int(size) - 1, 0, -1) if per_shard % d == 0), None)
    if smaller is None:
        return None
    return dataclasses.replace(row, overrides=tuple((dict(row.overrides) | {"micro_batch_size": str(smaller)}).items()))


def _with(config: ConfigDict, settings: dict[str, str]) -> ConfigDict:
    config = config.copy_and_resolve_references()
    for key, value in settings.items():
        config_lib.override(config, key, value)
    return config


def run_process(request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The result of `sweep.trial` in a fresh process, or what became of that process."""
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder) / name for name in ("request.json", "result.json", "output")]
        files[0].write_text(json.dumps(request))
        with open(files[2], "w") as output:
            process = subprocess.Popen(
                [*TRIAL, str(files[0]), str(files[1])],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its own children end with it, and Ctrl-C reaches us alone
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return {"status": "time-out", "error": f"no end within {seconds:.0f} s"}
            finally:
                _end(process)
        if files[1].exists():
            return json.loads(files[1].read_text())
        last = [line for line in files[2].read_text(errors="replace").splitlines() if line.strip()][-1:]
        code, error = process.returncode, (last or ["no output"])[0][:300]
    if code == -9:  # what a kernel that is out of memory does
        return {"status": "host memory", "error": "the process was killed"}
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return {"status": "device memory" if "out of memory" in error.lower() else "other", "error": f"{ended}: {error}"}


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
        process.wait()


def summary(trial: dict[str, Any]) -> str:
    if trial["status"] != "ok":
        return f"{trial['status']}: {trial['error'][:120]}"
    mfu = "" if trial["mfu"] is None else f", MFU {100 * trial['mfu']:.0f} %"
    memory = f", {trial['peak_bytes'] / 2**30:.2f} GiB" if trial["peak_bytes"] else ""
    return (
        f"{trial['step_time']:.4g} s +- {trial['spread']:.2g}, {trial['tokens_per_second']:,.0f}/s{mfu}{memory}, "
        f"micro-batch {trial['micro_batch_size']}"
    )


def best(done: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest trial that went well."""
    good = [trial for trial in done if trial["status"] == "ok"]
    return min(good, key=lambda trial: trial["step_time"], default=None)
