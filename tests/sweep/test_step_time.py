"""The sweep: what is measured, resumed, and recorded when trials fail; with trials that do as they are told."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.sweep import step_time
from jaxpretrain.sweep.cache import Trials, devices_of_this_host

CPU = {"device_kind": "cpu", "num_devices": 4, "jax": "0"}
A100 = {"device_kind": "NVIDIA A100-SXM4-80GB", "num_devices": 4, "jax": "0"}

# Each request is noted; strategies misbehave in their own way.
FAKE = """
import json, os, signal, sys, time
request = json.load(open(sys.argv[1]))
open(os.environ["NOTES"], "a").write(json.dumps(request["overrides"]) + "\\n")
strategy, remat = request["overrides"]["parallel.strategy"], request["overrides"]["parallel.remat"]
if strategy == "zero1":
    time.sleep(60)
if strategy == "zero2" and remat == "none":
    os.kill(os.getpid(), signal.SIGKILL)
if strategy == "zero2":
    sys.exit("jaxlib: CUDA error: out of memory")
size = int(request["overrides"].get("micro_batch_size", 2))
if strategy == "fsdp" and remat == "full" or size > 8:
    result = {"status": "device memory", "error": "RESOURCE_EXHAUSTED"}
elif strategy == "fsdp":
    sys.exit("Traceback: something else")
else:
    result = {"status": "ok", "step_time": 1.0 + (remat == "full"), "step_times": [1.0], "spread": 0.0, "mfu": None,
              "tokens_per_second": 1.0, "peak_bytes": 1, "micro_batch_size": size}
json.dump(result, open(sys.argv[2], "w"))
"""


@pytest.fixture
def config():
    return config_lib.load("configs/tiny.py", [])


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes trials fakes; calling it returns the overrides of those that were started since the last call."""
    script, notes = tmp_path / "fake.py", tmp_path / "notes"
    script.write_text(FAKE)
    notes.touch()
    monkeypatch.setattr(step_time, "TRIAL", [sys.executable, str(script)])
    monkeypatch.setenv("NOTES", str(notes))

    def started():
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
        notes.write_text("")
        return lines

    return started


def run(config, workdir, machine=CPU, **options):
    rows = step_time.rows(config, machine, options.pop("space", "paper22"), options.pop("methods", "all"))
    trials = Trials(str(workdir), machine)
    options = dict(trial_seconds=2, report=lambda line: None) | options
    return step_time.sweep("configs/tiny.py", config, rows, trials, {}, **options), rows


def test_every_failure_is_recorded_as_its_kind_and_the_sweep_ends_well(config, fake, tmp_path):
    """22 methods, 18 programs. Fails if ZeRO-2 and FSDP's grad-op are measured twice, or a hang is waited for."""
    done, rows = run(config, tmp_path)
    assert len(rows) == 22 and len(done) == len(fake()) == 16
    kinds = {}
    for trial in done:
        kinds.setdefault(
            (trial["overrides"]["parallel.strategy"], trial["overrides"]["parallel.remat"]), trial["status"]
        )
    assert kinds == {
        ("ddp", "none"): "ok",
        ("ddp", "full"): "ok",
        ("zero1", "none"): "time-out",
        ("zero1", "full"): "time-out",
        ("zero2", "none"): "host memory",
        ("zero2", "full"): "device memory",
        ("fsdp", "none"): "other",
        ("fsdp", "full"): "device memory",
    }
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert sorted(lines, key=str) == sorted(done, key=str)
    assert step_time.best(done)["overrides"] == {
        "parallel.strategy": "ddp",
        "parallel.tensor": "1",
        "parallel.remat": "none",
        "parallel.offload": "none",
        "micro_batch_size": "2",
    }


def test_an_interrupted_sweep_goes_on_and_repeats_nothing(config, fake, tmp_path):
    """Stopped twice. Fails if trials are keyed by their number, or if a trial under way is taken for done."""
    some = dict(methods="free_lunch,naive")
    done, _ = run(config, tmp_path, max_trials=1, **some)
    assert len(done) == len(fake()) == 1
    trials = Trials(str(tmp_path), CPU)
    (key,) = [file.stem for file in (tmp_path / "trials").glob("*.json")]
    assert trials.get(key) == done[0]

    done, _ = run(config, tmp_path, **some)
    assert len(done) == 2 and len(fake()) == 1
    done, _ = run(config, tmp_path, **some)
    assert len(done) == 2 and not fake()


def test_a_trial_is_another_with_other_code_versions_or_config(config, fake, tmp_path, monkeypatch):
    run(config, tmp_path, methods="free_lunch")
    run(config, tmp_path, machine=CPU | {"jax": "1"}, methods="free_lunch")
    config.seed = 7
    run(config, tmp_path, methods="free_lunch")
    monkeypatch.setattr("jaxpretrain.sweep.cache.code_version", lambda: "another")
    run(config, tmp_path, methods="free_lunch")
    assert len(fake()) == 4


def test_failed_trials_are_retried_when_asked(config, fake, tmp_path):
    run(config, tmp_path, trial_seconds=2)
    first = fake()
    done, _ = run(config, tmp_path, retry_failed=True, trial_seconds=2)
    again = fake()
    assert len(done) == len(first) == 16
    assert len(again) == sum(trial["status"] != "ok" for trial in done) == 14


def test_a_claimed_trial_is_left_to_the_other_sweep(config, fake, tmp_path):
    """On a shared file system. Fails without the claim."""
    trials = Trials(str(tmp_path), CPU)
    row = step_time.rows(config, CPU, "paper22", "free_lunch")[0]
    with config.ignore_type():
        settings = dict(row.overrides)
    key = trials.key(config_lib.to_json(step_time._with(config, settings)))
    assert trials.claim(key, 60)
    said = []
    done, _ = run(config, tmp_path, methods="free_lunch", report=said.append)
    assert not done and not fake() and "another sweep" in said[0]
    assert not trials.claim(key, 60)
    assert trials.claim(key, -1)  # it should have ended long ago
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    ).stdout
    (tmp_path / "trials" / f"{key}.claim").write_text(f"{socket.gethostname()} {dead.strip()}")
    assert trials.claim(key, 60)  # who claimed it was killed
    trials.release(key)
    done, _ = run(config, tmp_path, methods="free_lunch")
    assert len(done) == 1


def test_one_sweep_at_a_time_on_the_same_devices(tmp_path, monkeypatch):
    with devices_of_this_host(str(tmp_path)):
        with pytest.raises(ValueError, match="another sweep measures on these devices"):
            with devices_of_this_host(str(tmp_path)):
                pass
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
        with devices_of_this_host(str(tmp_path)):
            pass


def test_on_a_known_device_the_plan_leads(fake, tmp_path):
    """The most promising first; what does not fit goes on smaller; what cannot win is not measured."""
    config = config_lib.load("configs/pythia160m.py", [("data.source", "synthetic")])
    said = []
    done, rows = run(config, tmp_path, A100, space="default", stop_early=True, max_trials=12, report=said.append)
    predicted = [row.predicted for row in rows]
    assert predicted == sorted(predicted)
    started = fake()
    by_strategy = {}
    for overrides in started:
        by_strategy.setdefault(overrides["parallel.strategy"], []).append(int(overrides["micro_batch_size"]))
    assert by_strategy["ddp"][0] > 8  # too much for the fake
    assert by_strategy["ddp"] == sorted(by_strategy["ddp"], reverse=True)


def test_what_cannot_win_is_not_measured():
    def trial(seconds):
        return {"status": "ok", "step_time": seconds, "predicted_step_time": 1.0}

    done = {str(i): trial(seconds) for i, seconds in enumerate((1.4, 1.5, 1.6))}
    slow, fast = step_time.Row("a", (), 1.01), step_time.Row("b", (), 0.99)
    assert step_time._cannot_win(slow, done) and not step_time._cannot_win(fast, done)
    assert not step_time._cannot_win(slow, dict(list(done.items())[:2]))  # too little is known


@pytest.mark.parametrize(
    "space, methods, words",
    [
        ("paper22", "naiv", "--methods=naiv: 'naiv' is none of naive, free_lunch, all"),
        ("default", "all", "--space=default: no plan is made for 'cpu'; set --space=paper22"),
    ],
)
def test_refusals(config, space, methods, words):
    with pytest.raises(ValueError) as error:
        step_time.rows(config, CPU, space, methods)
    assert words in str(error.value)


def test_a_killed_sweep_goes_on_and_leaves_no_trial_behind(tmp_path):
    """The real tool, killed in its first trial; then two methods are measured. Fails without the parent's death signal,
    or if the dead sweep's claim is respected."""
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, str(root / "tools" / "sweep.py"), "step_time", "--config=configs/tiny.py"]
    command += [f"--workdir={tmp_path}", "--methods=free_lunch", "--config.data.source=synthetic"]
    environment = os.environ | {"PYTHONPATH": str(root), "XLA_FLAGS": ""}
    process = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "trials").glob("*.claim")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    process.send_signal(signal.SIGKILL)
    process.wait()
    for child in map(int, children.split()):
        while time.monotonic() < deadline and pathlib.Path(f"/proc/{child}").exists():
            time.sleep(0.05)
        assert not pathlib.Path(f"/proc/{child}").exists()
    assert not list((tmp_path / "trials").glob("*.json"))
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["status"] == "ok" and best["overrides"]["data.source"] == "synthetic"
    assert "--config.parallel.strategy=ddp" in best["command"]
    assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == 1
