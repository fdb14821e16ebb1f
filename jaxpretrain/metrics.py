"""What a run tells: metrics.jsonl always, TensorBoard and Weights & Biases on request, a progress line on a terminal.

Only process 0 writes or prints; on the others every method returns at once. docs/metrics.md describes the keys.
"""

import datetime
import json
import math
import os
import pathlib
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from ml_collections import ConfigDict
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jaxpretrain import hardware
from jaxpretrain.plan import flops
from jaxpretrain.schema import IMAGE_FAMILIES

MFU_SUSPECT = 0.8  # no training step has been seen to reach this: look at the timer
MFU_IMPOSSIBLE = 1.0
_QUEUE_LEN = 1000  # lines that an optional logger may lag behind before lines are dropped
_CLOSE_TIMEOUT = 30.0  # seconds that the end of a run waits for an optional logger


class StepTimer:
    """Mean time of whole optimizer steps, from the moments at which steps were seen to be complete.

    The first step seen only starts the clock, so compilation is not in any step time.
    """

    def __init__(self):
        self._step, self._now = None, 0.0
        self._elapsed, self._num_steps = 0.0, 0

    def completed(self, step: int, now: float) -> None:
        """`step` optimizer steps are complete at time `now` (seconds of a monotonic clock)."""
        if self._step is not None:
            if step <= self._step:  # a step from before restart()
                return
            self._elapsed += now - self._now
            self._num_steps += step - self._step
        self._step, self._now = step, now

    def restart(self, step: int, now: float) -> None:
        """All `step` steps so far are complete and the device is idle; the time since the last one does not count."""
        self._step, self._now = step, now

    def take(self) -> float | None:
        """Mean seconds per step since the last call; None if no step was timed."""
        mean = self._elapsed / self._num_steps if self._num_steps else None
        self._elapsed, self._num_steps = 0.0, 0
        return mean


class MetricsLog:
    """The log of one run.

    The trainer reads the metrics of step n-1 while step n runs and calls `record` then; after whatever else made
    the device wait (evaluation, a blocking save) it calls `restart_clock`; before each checkpoint, `sync`.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        config: ConfigDict,
        *,
        device_kind: str,
        num_devices: int,
        resumed_at: int | None = None,
        process_index: int = 0,
        out: TextIO | None = None,
    ):
        """Opens the loggers and prints how MFU is counted.

        Args:
          workdir: an existing directory; metrics.jsonl is appended to, tensorboard/ and wandb/ lie beside it.
          config: the run's resolved config.
          device_kind: `jax.Device.device_kind`; num_devices: of the whole run, over all processes.
          resumed_at: the step of the restored checkpoint, whose later lines are cut off; None: a run from
            scratch, all lines are.
          out: where to print, standard output by default.

        Raises:
          ValueError: log.tensorboard or log.wandb without the package, or W&B without a login.
        """
        self._writes = process_index == 0
        if not self._writes:
            return
        self._config = config
        self._workdir = pathlib.Path(workdir)
        self._timer = StepTimer()
        self._last_step = resumed_at or 0
        self._waited_until = None  # (step, cumulative wait) at the last line
        self._flops = flops.train_flops_per_token(config)
        self._palm_flops = flops.palm_flops_per_token(config)
        accelerator = hardware.find(device_kind)
        device_peak = accelerator and accelerator.peak_flops(config.precision.compute, config.precision.matmul)
        self._peak = device_peak and num_devices * device_peak
        self._warned_impossible = False

        self._side_loggers = _side_loggers(self._workdir, config, self._last_step)  # may raise: nothing is open yet
        path = self._workdir / "metrics.jsonl"
        if path.exists():
            truncate_after(path, -1 if resumed_at is None else resumed_at)
        self._file = open(path, "a", encoding="utf-8")
        _fsync_directory(self._workdir)

        self._out = out or sys.stdout
        self._progress = None
        console = Console(file=self._out)
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
            self._progress = Progress(*columns, console=console, refresh_per_second=2)
            self._task = self._progress.add_task("starting", total=config.steps, completed=self._last_step)
            self._progress.start()
        self.print(self._definition(device_kind, accelerator and accelerator.name, num_devices, device_peak))

    def record(self, step: int, metrics: Mapping[str, Any], now: float, data_wait: float = 0.0) -> None:
        """Logs a train step if it is the turn of one (log.every, and the last step).

        Args:
          step: optimizer steps done, including this one.
          metrics: host scalars of this step: loss, grad_norm, learning_rate, and any others, which are logged as
            they are. A number that is not finite becomes null, as JSON has no other word for it.
          now: `time.perf_counter()` when this step was complete.
          data_wait: seconds that the loop has waited for input so far (`Loader`'s total).
        """
        if not self._writes:
            return
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        if self._waited_until is None:  # the first record
            self._waited_until = (step - 1, 0.0)
        self._last_step = step
        self._timer.completed(step, now)
        if self._progress:
            self._progress.update(self._task, completed=step)
        if step % self._config.log.every and step != self._config.steps:
            return
        step_time = self._timer.take()
        tokens_per_step = self._config.batch_size * self._config.seq_len
        tokens_per_second = tokens_per_step / step_time if step_time else None
        since, waited = self._waited_until
        self._waited_until = (step, data_wait)
        rest = dict(metrics)
        line = {
            "step": step,
            "split": "train",
            "loss": rest.pop("loss"),
            "tokens": step * tokens_per_step,
            "step_time": step_time,
            "tokens_per_second": tokens_per_second,
            **self._utilisation(tokens_per_second),
            "grad_norm": rest.pop("grad_norm"),
            "learning_rate": rest.pop("learning_rate"),
            "data_wait": (data_wait - waited) / (step - since),
            **rest,
        }
        self._write(line)
        self._show(line)

    def record_eval(self, step: int, split: str, loss: float, **more: Any) -> None:
        """Logs an evaluation after `step` steps: `split` is valid or valid_ewa, `loss` in nats per target.

        `more` is logged as it is, e.g. `horizon` and `eval_tokens`.
        """
        if not self._writes:
            return
        tokens = step * self._config.batch_size * self._config.seq_len
        line = {"step": step, "split": split, "loss": loss, "tokens": tokens, **more}
        self._write(line)
        also = "".join(f"  {key.replace('token', self._unit)} {_text(value)}" for key, value in more.items())
        self.print(f"step {step}  {split} loss {float(loss):.4f}{also}")

    def restart_clock(self, step: int, now: float) -> None:
        """`StepTimer.restart`, after evaluation, a save or anything else that is not training."""
        if self._writes:
            self._timer.restart(step, now)

    def sync(self) -> None:
        """Returns when every line so far is on disk: call it before the checkpoint of the same step is committed."""
        if self._writes:
            os.fsync(self._file.fileno())

    def print(self, text: str) -> None:
        """Prints a line above the progress line; on process 0 only."""
        if not self._writes:
            return
        try:
            if self._progress:
                self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self._out, flush=True)
        except BrokenPipeError:  # `| head` has seen enough: the run goes on
            self._progress, self._out = None, open(os.devnull, "w")

    def close(self) -> None:
        """Ends the progress line and the loggers; waits for a slow one a while, then says so."""
        if not self._writes:
            return
        if self._progress:
            self._progress.stop()
        self._file.close()
        for logger in self._side_loggers:
            logger.close()

    def _utilisation(self, tokens_per_second: float | None) -> dict[str, Any]:
        if not self._peak or not tokens_per_second:
            return {"mfu": None, "mfu_palm": None}
        mfu = tokens_per_second * self._flops / self._peak
        if mfu > MFU_IMPOSSIBLE:
            if not self._warned_impossible:
                _warn(
                    f"an MFU of {mfu:.2f} is impossible, so none is logged: either StepTimer saw steps as complete "
                    "before they were, or jaxpretrain/hardware.py has a wrong peak for this device"
                )
            self._warned_impossible = True
            return {"mfu": None, "mfu_palm": None}
        suspect = {"mfu_suspect": True} if mfu > MFU_SUSPECT else {}
        palm = self._palm_flops and tokens_per_second * self._palm_flops / self._peak
        return {"mfu": mfu, "mfu_palm": palm, **suspect}

    @property
    def _unit(self) -> str:
        """What people read; the keys of metrics.jsonl are the same for all models, an image counting as one token."""
        return "image" if self._config.model.family in IMAGE_FAMILIES else "token"

    def _definition(self, device_kind: str, name: str | None, num_devices: int, device_peak: float | None) -> str:
        compute = self._config.precision.compute
        if not device_peak:
            return f"MFU: none; jaxpretrain/hardware.py has no {compute} peak for {device_kind!r}"
        return (
            f"MFU = {self._unit}s/s x {self._flops / 1e9:.3g} GFLOP / ({num_devices} x {device_peak / 1e12:.4g} "
            f"TFLOP/s: {name}, dense, {compute}); {flops.definition(self._config)}"
        )

    def _write(self, line: dict[str, Any]) -> None:
        line = {key: _plain(value) for key, value in line.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        for logger in self._side_loggers:
            logger.put(line)

    def _show(self, line: dict[str, Any]) -> None:
        step, steps = line["step"], self._config.steps
        text = f"step {step}/{steps}  loss {float(line['loss']):.4f}"
        if line["step_time"]:
            text += f"  {self._unit}s/s {line['tokens_per_second']:,.0f}"
            if line["mfu"] is not None:
                text += f"  MFU {line['mfu']:.1%}"
                if "mfu_suspect" in line:
                    text += f" (above {MFU_SUSPECT:.0%}: check the timer)"
            text += f"  left {datetime.timedelta(seconds=round((steps - step) * line['step_time']))}"
        if self._progress:
            self._progress.update(self._task, description=text)
        else:
            self.print(text)


def has_evaluation(workdir: str | os.PathLike, step: int, split: str = "valid") -> bool:
    """Whether metrics.jsonl holds an evaluation of `step`."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    if not path.exists():
        return False
    with open(path, encoding="utf-8") as file:
        return any(line["step"] == step and line["split"] == split for line in map(json.loads, file))


def truncate_after(path: str | os.PathLike, step: int) -> None:
    """Cuts metrics.jsonl from its first line past `step`, or from a line that a crash left unfinished.

    Lines are in the order of their steps, so what is cut is one tail, and one system call cuts it whole.
    """
    with open(path, "rb+") as file:
        keep = 0
        for line in file:
            if not line.endswith(b"\n") or _step_of(line) > step:
                break
            keep += len(line)
        file.truncate(keep)
        os.fsync(file.fileno())


def _step_of(line: bytes) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:  # zeros, after the machine went down: nothing from here on was promised
        return math.inf


def _fsync_directory(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _plain(value: Any) -> Any:
    """A NumPy or Python scalar as JSON has it; NaN and infinities as None."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


_Log = Callable[[dict[str, Any]], None]


class _SideLogger:
    """Feeds one optional logger from a thread of its own, so that a slow or failing one costs the run nothing."""

    def __init__(self, name: str, open_logger: Callable[[], tuple[_Log, Callable[[], None]]]):
        """`open_logger`, called in the thread, returns the functions that log a line and that finish."""
        self._name = name
        self._queue: queue.Queue = queue.Queue(_QUEUE_LEN)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._work, args=(open_logger,), name=name, daemon=True)
        self._thread.start()

    def put(self, line: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=_CLOSE_TIMEOUT)
            self._thread.join(_CLOSE_TIMEOUT)
        except queue.Full:
            pass
        if self._thread.is_alive() or self._num_dropped:
            _warn(f"{self._name} was too slow and lacks some lines; metrics.jsonl has them all")

    def _work(self, open_logger: Callable[[], tuple[_Log, Callable[[], None]]]) -> None:
        try:
            log, finish = open_logger()
            while (line := self._queue.get()) is not None:
                log(line)
            finish()
        except Exception as error:  # whatever it is, it is not worth the run
            _warn(f"{self._name} stopped: {type(error).__name__}: {error}; metrics.jsonl goes on")


def _side_loggers(workdir: pathlib.Path, config: ConfigDict, start_step: int) -> list[_SideLogger]:
    loggers = []
    name = config.run.name or workdir.resolve().name
    if config.log.tensorboard:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ValueError(
                "log.tensorboard=True needs tensorboardX: pip install 'jaxpretrain[tensorboard]'"
            ) from None
        loggers.append(("TensorBoard", lambda: _open_tensorboard(SummaryWriter, workdir, start_step)))
    if config.log.wandb:
        try:
            import wandb
            from wandb import init  # noqa: F401  a folder called wandb imports as well, but has no init
        except ImportError:
            raise ValueError("log.wandb=True needs wandb: pip install 'jaxpretrain[wandb]'") from None
        if wandb.setup().settings.mode in (None, "online") and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "log.wandb=True, but no one is logged in: run `wandb login`, or set WANDB_MODE=offline and "
                "`wandb sync` the run later"
            )
        loggers.append(("Weights & Biases", lambda: _open_wandb(wandb, workdir, config, name)))
    return [_SideLogger(*logger) for logger in loggers]


def _open_tensorboard(writer_class: Any, workdir: pathlib.Path, start_step: int) -> tuple[_Log, Callable[[], None]]:
    # purge_step: the viewer drops what an interrupted run had logged beyond its last checkpoint.
    # The suffix: two starts within a second would share a file name.
    writer = writer_class(str(workdir / "tensorboard"), purge_step=start_step + 1, filename_suffix=f".{start_step}")

    def log(line: dict[str, Any]) -> None:
        for tag, value in _tagged(line).items():
            writer.add_scalar(tag, value, line["step"])
        writer.flush()

    return log, writer.close


def _open_wandb(wandb: Any, workdir: pathlib.Path, config: ConfigDict, name: str) -> tuple[_Log, Callable[[], None]]:
    # The id makes a restarted run go on in the same W&B run; W&B skips steps that it already has.
    id_file = workdir / "wandb_id"
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(4))
    run = wandb.init(
        project=config.log.wandb_project,
        name=name,
        id=id_file.read_text(),
        resume="allow",
        dir=str(workdir),
        config=config.to_dict(),
        settings=wandb.Settings(console="off"),
    )

    return lambda line: run.log(_tagged(line), step=line["step"]), run.finish


def _tagged(line: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a line, each under a tag such as train/loss; a curve of its own for each horizon."""
    split = f"{line['split']}_{line['horizon']:g}" if "horizon" in line else line["split"]
    left_out = ("step", "split", "horizon")
    return {f"{split}/{key}": value for key, value in line.items() if key not in left_out and value is not None}
