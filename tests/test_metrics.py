"""metrics.jsonl, step times and MFU, the optional loggers, and what they may never do to a run."""

import io
import json
import os
import pathlib
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain import metrics
from jaxpretrain.plan import flops

TRAIN_KEYS = [
    *("step", "split", "loss", "tokens", "step_time", "tokens_per_second", "mfu", "mfu_palm"),
    *("grad_norm", "learning_rate", "data_wait", "bad_steps"),
]


def make_config(**log):
    config = config_lib.default()
    config.steps = 100
    config.log.every = 1
    config.log.update(log)
    return config


def make_log(workdir, config=None, **kwargs):
    kwargs = {"device_kind": "NVIDIA A100-SXM4-80GB", "num_devices": 2, "out": io.StringIO()} | kwargs
    return metrics.MetricsLog(workdir, config or make_config(), **kwargs)


def host_metrics(loss=2.0, **more):
    return {"loss": np.float32(loss), "grad_norm": np.float32(1.5), "learning_rate": 1e-3, "bad_steps": 0, **more}


def read(workdir):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = (workdir / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_train_line(tmp_path):
    log = make_log(tmp_path)
    log.record(1, host_metrics(), now=10.0, data_wait=0.5)
    log.record(2, host_metrics(loss=0.1), now=10.5, data_wait=0.75)
    first, line = read(tmp_path)
    assert list(line) == TRAIN_KEYS
    assert first["step_time"] is first["tokens_per_second"] is first["mfu"] is None  # it holds the compilation
    assert (line["step"], line["split"], line["tokens"]) == (2, "train", 2 * 8 * 256)
    assert line["step_time"] == 0.5
    assert line["tokens_per_second"] == 8 * 256 / 0.5
    assert line["data_wait"] == 0.25
    assert np.float32(line["loss"]) == np.float32(0.1)  # to the bit
    config = make_config()
    assert line["mfu"] == pytest.approx(4096 * flops.train_flops_per_token(config) / (2 * 312e12))
    assert line["mfu_palm"] == pytest.approx(4096 * flops.palm_flops_per_token(config) / (2 * 312e12))


def test_other_metrics_and_numbers_that_are_not_finite(tmp_path):
    """Seen to fail with allow_nan=True and the value left as it is: NaN is not JSON."""
    log = make_log(tmp_path)
    log.record(1, host_metrics(loss=np.nan, loss_scale=np.float32(65536)) | {"grad_norm": np.float32(np.inf)}, now=0.0)
    (line,) = read(tmp_path)
    assert line["loss"] is None and line["grad_norm"] is None
    assert line["loss_scale"] == 65536


def test_step_timer_counts_the_steps_between():
    """Seen to fail with the steps of an interval taken as one."""
    timer = metrics.StepTimer()
    assert timer.take() is None
    timer.completed(10, 3.0)
    assert timer.take() is None
    timer.completed(20, 8.0)
    timer.completed(30, 18.0)
    assert timer.take() == 0.75
    assert timer.take() is None


def test_step_time_is_the_mean_since_the_last_line(tmp_path):
    log = make_log(tmp_path, make_config(every=10))
    for step in range(1, 31):
        log.record(step, host_metrics(), now=5.0 + 0.25 * step, data_wait=0.125 * step)
    assert [(line["step"], line["step_time"], line["data_wait"]) for line in read(tmp_path)] == [
        (10, 0.25, 0.125),
        (20, 0.25, 0.125),
        (30, 0.25, 0.125),
    ]


def test_the_last_step_is_logged(tmp_path):
    config = make_config(every=7)
    config.steps = 10
    log = make_log(tmp_path, config)
    for step in range(1, 11):
        log.record(step, host_metrics(), now=float(step))
    assert [line["step"] for line in read(tmp_path)] == [7, 10]


def test_evaluation_and_saves_are_not_step_time(tmp_path):
    """Also where a step from before the pause is recorded after it. Seen to fail with `restart` left out, and with
    late steps timed."""
    log = make_log(tmp_path)
    log.record(1, host_metrics(), now=1.0)
    log.record(2, host_metrics(), now=2.0)
    log.record_eval(2, "valid", 3.0)
    log.restart_clock(2, now=100.0)
    log.record(3, host_metrics(), now=101.0)
    log.restart_clock(4, now=200.0)  # step 4 is complete, its metrics are not read yet
    log.record(4, host_metrics(), now=200.001)
    log.record(5, host_metrics(), now=201.0)
    times = {line["step"]: line["step_time"] for line in read(tmp_path) if line["split"] == "train"}
    assert times == {1: None, 2: 1.0, 3: 1.0, 4: None, 5: 1.0}


def test_eval_line(tmp_path):
    log = make_log(tmp_path)
    log.record_eval(50, "valid_ewa", np.float32(3.25), horizon=1e6, eval_tokens=1000)
    assert read(tmp_path) == [
        {"step": 50, "split": "valid_ewa", "loss": 3.25, "tokens": 50 * 8 * 256, "horizon": 1e6, "eval_tokens": 1000}
    ]


def record_at_mfu(log, step_and_mfu, config):
    """Records a first step and then steps whose times imply the given MFUs on the log's two A100s."""
    per_step = config.batch_size * config.seq_len * flops.train_flops_per_token(config)
    now = 0.0
    log.record(1, host_metrics(), now=now)
    for step, mfu in step_and_mfu:
        now += per_step / (mfu * 2 * 312e12)
        log.record(step, host_metrics(), now=now)


def test_mfu_bounds(tmp_path, capsys):
    """Above 0.8 flagged, above 1 refused. Seen to fail with each bound moved by a tenth."""
    log = make_log(tmp_path)
    record_at_mfu(log, [(2, 0.79), (3, 0.81), (4, 0.99), (5, 1.01), (6, 2.0)], make_config())
    lines = read(tmp_path)[1:]
    assert [line["mfu"] and round(line["mfu"], 2) for line in lines] == [0.79, 0.81, 0.99, None, None]
    assert ["mfu_suspect" in line for line in lines] == [False, True, True, False, False]
    assert lines[3]["mfu_palm"] is None
    warnings = capsys.readouterr().err
    assert warnings.count("impossible") == 1 and "StepTimer" in warnings
    printed = log._out.getvalue().splitlines()
    assert "check the timer" in printed[3] and "check the timer" not in printed[2]


def test_a_timer_without_synchronisation_is_refused(tmp_path, capsys):
    """Steps "complete" as fast as they can be dispatched: the mistake behind published MFUs above 100 %."""
    config = make_config(every=10)
    log = make_log(tmp_path, config, device_kind="TPU v2", num_devices=1)
    for step in range(1, 21):
        log.record(step, host_metrics(), now=1e-6 * step)
    assert [line["mfu"] for line in read(tmp_path)] == [None, None]
    assert "impossible" in capsys.readouterr().err


@pytest.mark.parametrize("device_kind, compute", [("cpu", "bfloat16"), ("Tesla V100-SXM2-16GB", "bfloat16")])
def test_no_mfu_without_a_peak(tmp_path, device_kind, compute):
    config = make_config()
    config.precision.compute = compute
    log = make_log(tmp_path, config, device_kind=device_kind)
    log.record(1, host_metrics(), now=0.0)
    log.record(2, host_metrics(), now=1.0)
    assert read(tmp_path)[1]["mfu"] is None and read(tmp_path)[1]["tokens_per_second"] == 2048
    assert f"MFU: none; jaxpretrain/hardware.py has no {compute} peak for '{device_kind}'" in log._out.getvalue()


def test_plain_output(tmp_path):
    log = make_log(tmp_path)
    log.record(1, host_metrics(), now=0.0)
    log.record(2, host_metrics(), now=2.0)
    log.record_eval(2, "valid", 3.25, eval_tokens=1234)
    definition, first, second, evaluation = log._out.getvalue().splitlines()
    assert definition.startswith("MFU = tokens/s x ") and "(2 x 312 TFLOP/s: a100-80gb, dense, bfloat16)" in definition
    assert first == "step 1/100  loss 2.0000"
    assert second.startswith("step 2/100  loss 2.0000  tokens/s 1,024  MFU 0.0%  left 0:03:16")
    assert evaluation == "step 2  valid loss 3.2500  eval_tokens 1,234"


def test_images_are_called_so(tmp_path):
    """To people; metrics.jsonl has one set of keys. Seen to fail: tokens/s under a header of images."""
    log = make_log(tmp_path, config_lib.load("configs/tiny_vit.py", [("log.every", "1")]))
    log.record(1, host_metrics(), now=0.0)
    log.record(2, host_metrics(), now=2.0)
    log.record_eval(2, "valid", 3.25, eval_tokens=1234, accuracy=0.5)
    assert "images/s" in log._out.getvalue() and "token" not in log._out.getvalue().partition("\n")[2]
    assert "valid loss 3.2500  eval_images 1,234  accuracy 0.5" in log._out.getvalue()
    assert read(tmp_path)[1]["tokens_per_second"] and read(tmp_path)[2]["eval_tokens"] == 1234


def test_progress_line_on_a_terminal(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    log = make_log(tmp_path, out=Terminal())
    log.record(1, host_metrics(), now=0.0)
    log.record(2, host_metrics(loss=1.25), now=2.0)
    log.print("[saved] step 2")
    log.close()
    text = log._out.getvalue()
    assert "step 2/100  loss 1.2500  tokens/s 1,024" in text and "left 0:03:16" in text
    assert "[saved] step 2" in text  # not taken for markup


def test_other_processes_write_nothing(tmp_path, capsys):
    """Seen to fail with the check left out of `print`."""
    log = make_log(tmp_path, make_config(tensorboard=True), process_index=1, out=None)
    log.record(1, host_metrics(), now=0.0)
    log.record_eval(1, "valid", 1.0)
    log.restart_clock(1, 1.0)
    log.sync()
    log.print("text")
    log.close()
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr() == ("", "")


def run_steps(workdir, start, stop, **kwargs):
    log = make_log(workdir, **kwargs)
    for step in range(start + 1, stop + 1):
        log.record(step, host_metrics(loss=1 / step), now=float(step))
        if step % 5 == 0:
            log.record_eval(step, "valid", 1 / step)
    log.sync()
    log.close()


def test_resume_leaves_one_clean_history(tmp_path):
    """Seen to fail with `>=` for `>` in truncate_after (the checkpoint's own step is lost)."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    run_steps(tmp_path / "whole", 0, 20)
    run_steps(tmp_path / "cut", 0, 13)
    run_steps(tmp_path / "cut", 10, 17, resumed_at=10)
    run_steps(tmp_path / "cut", 15, 20, resumed_at=15)
    history = [[(line["step"], line["split"], line["loss"]) for line in read(tmp_path / d)] for d in ("whole", "cut")]
    assert history[0] == history[1]


def test_from_scratch_starts_an_empty_history(tmp_path):
    """Killed before the first checkpoint, with an evaluation of step 0 in the log."""
    log = make_log(tmp_path)
    log.record_eval(0, "valid", 5.0)
    log.record(1, host_metrics(), now=0.0)
    log.close()
    make_log(tmp_path).close()
    assert read(tmp_path) == []


@pytest.mark.parametrize("tail", [b'{"step": 10, "spl', b'{"step": 10}', b"\0" * 100, b"\0" * 100 + b"\n", b"\n"])
def test_a_torn_last_line_is_dropped(tmp_path, tail):
    """What a kill or a power cut leaves. Seen to fail without the check for the line's end (`{"step": 10}`)."""
    run_steps(tmp_path, 0, 9)
    lines = read(tmp_path)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    metrics.truncate_after(tmp_path / "metrics.jsonl", 10)
    assert read(tmp_path) == lines


def test_lines_are_written_at_once(tmp_path):
    """A kill -9 after record() loses nothing. Seen to fail without the flush."""
    log = make_log(tmp_path)
    log.record(1, host_metrics(), now=0.0)
    assert len(read(tmp_path)) == 1
    log.close()


@pytest.mark.parametrize("key, package", [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_stops_before_training(tmp_path, monkeypatch, key, package):
    """Seen to fail with the import moved into the thread. Nothing of an earlier run is touched."""
    run_steps(tmp_path, 0, 3)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"log.{key}=True needs {package}: pip install 'jaxpretrain\[{key}\]'"):
        make_log(tmp_path, make_config(**{key: True}))
    assert len(read(tmp_path)) == 3


def fake_tensorboard(monkeypatch, add_scalar):
    writer = types.SimpleNamespace(add_scalar=add_scalar, flush=lambda: None, close=lambda: None)
    module = types.SimpleNamespace(SummaryWriter=lambda *args, **kwargs: writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)


def test_a_hanging_logger_does_not_hold_the_run(tmp_path, monkeypatch, capsys):
    """The gate opens only after every step is recorded, or, for the mutation, after a while. Seen to fail with a
    `put` that waits for room in the queue."""
    monkeypatch.setattr(metrics, "_QUEUE_LEN", 10)
    monkeypatch.setattr(metrics, "_CLOSE_TIMEOUT", 0.1)
    gate = threading.Event()
    opener = threading.Timer(10, gate.set)
    opener.start()
    fake_tensorboard(monkeypatch, lambda *args: gate.wait())
    log = make_log(tmp_path, make_config(tensorboard=True))
    for step in range(1, 101):
        log.record(step, host_metrics(), now=float(step))
    log.close()
    assert not gate.is_set() and log._side_loggers[0]._thread.is_alive()
    opener.cancel()
    gate.set()
    assert len(read(tmp_path)) == 100
    assert "TensorBoard was too slow" in capsys.readouterr().err


def test_a_failing_logger_does_not_kill_the_run(tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise ConnectionError("no route to host")

    fake_tensorboard(monkeypatch, fail)
    log = make_log(tmp_path, make_config(tensorboard=True))
    for step in range(1, 11):
        log.record(step, host_metrics(), now=float(step))
    log.close()
    assert len(read(tmp_path)) == 10
    assert "TensorBoard stopped: ConnectionError: no route to host" in capsys.readouterr().err


def tensorboard_events(workdir):
    """(step, tag, value) of every scalar and (step, None, None) of every session start, in the order of writing."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(workdir.glob("tensorboard/events*"), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()  # records of length, checksum, event, checksum
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.session_log.status == 1:  # START
                events.append((event.step, None, None))
            events += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return events


def test_tensorboard_goes_on_where_the_checkpoint_was(tmp_path):
    """The viewer discards steps from a session start's step on. Seen to fail without purge_step."""
    pytest.importorskip("tensorboardX", reason="needs the tensorboard extra")
    config = make_config(tensorboard=True)
    run_steps(tmp_path, 0, 8, config=config)
    run_steps(tmp_path, 5, 10, config=config, resumed_at=5)
    kept = []
    for step, tag, value in tensorboard_events(tmp_path):
        if tag is None:
            kept = [event for event in kept if event[0] < step]
        elif tag == "train/loss":
            kept.append((step, round(value, 5)))
    assert kept == [(step, round(1 / step, 5)) for step in range(1, 11)]


WANDB_RUN = """
import sys
from jaxpretrain import config, metrics

workdir, start, stop, resumed_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), eval(sys.argv[4])
config = config.default()
config.log.every, config.log.wandb = 1, True
log = metrics.MetricsLog(workdir, config, device_kind="cpu", num_devices=1, resumed_at=resumed_at)
for step in range(start + 1, stop + 1):
    log.record(step, {"loss": 1 / step, "grad_norm": 1.0, "learning_rate": 1e-3}, now=float(step))
log.close()
"""


def run_wandb(workdir, *args, **environment):
    """A process of its own, as W&B keeps its settings for the life of one."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    root = pathlib.Path(metrics.__file__).parents[1]
    env = kept | {"HOME": str(workdir), "PYTHONPATH": str(root), "WANDB_SILENT": "true"} | environment
    command = [sys.executable, "-c", WANDB_RUN, str(workdir), *map(str, args)]
    return subprocess.run(command, env=env, cwd=workdir, capture_output=True, text=True, timeout=120)


def test_wandb_offline_resumes_the_same_run(tmp_path):
    """Two starts, two offline folders of one run id, which `wandb sync` joins. Seen to fail with a new id each time."""
    pytest.importorskip("wandb", reason="needs the wandb extra")
    for args in ((0, 8, None), (5, 10, 5)):
        result = run_wandb(tmp_path, *args, WANDB_MODE="offline")
        assert result.returncode == 0 and "Weights & Biases stopped" not in result.stderr, result.stderr
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    run_id = (tmp_path / "wandb_id").read_text()
    assert [file.name for file in files] == 2 * [f"run-{run_id}.wandb"]
    assert all(b"train/loss" in file.read_bytes() for file in files)
    assert [line["step"] for line in read(tmp_path)] == list(range(1, 11))


def test_wandb_without_a_login_stops_before_training(tmp_path):
    pytest.importorskip("wandb", reason="needs the wandb extra")
    result = run_wandb(tmp_path, 0, 1, None)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ValueError: log.wandb=True, but no one is logged in: run `wandb login`, or set WANDB_MODE")
    assert not (tmp_path / "metrics.jsonl").exists()
