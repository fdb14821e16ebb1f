"""The timer's truth, and a real trial."""

import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.sweep import trial

ROOT = pathlib.Path(__file__).parents[2]


def test_a_step_that_returns_before_its_work_is_done_is_waited_for(monkeypatch):
    """A device that dispatches at once and takes 0.1 s: measured to 2 %.

    Fails if only the metrics are waited for, which are there at once here, or if nothing is.
    """
    delay = 0.1

    class Late:
        """An array that is ready later."""

        def __init__(self):
            self.ready = time.perf_counter() + delay

        def block_until_ready(self):
            time.sleep(max(0.0, self.ready - time.perf_counter()))
            return self

    class Compiled:
        def __call__(self, state, batch):
            return {"params": Late()}, {"loss": jnp.ones(()), "bad_steps": jnp.zeros(())}

        def memory_analysis(self):
            return None

    real = trial.make_fitting_step

    def make_fitting_step(config, mesh):
        train_step, _ = real(config, mesh)
        return train_step, Compiled()

    monkeypatch.setattr(trial, "make_fitting_step", make_fitting_step)
    config = config_lib.load("configs/tiny.py", [("data.source", "synthetic"), ("micro_batch_size", "1")])
    config.batch_size = jax.device_count()
    result = trial.measure(config)
    assert result["status"] == "ok" and len(result["step_times"]) >= 10
    assert result["step_time"] == pytest.approx(delay, rel=0.02)


def test_when_the_warm_up_is_over():
    """The first step, which compiles, never counts; three that agree end it, and so does patience."""
    assert not trial.is_steady([1.0, 1.0, 1.0])
    assert trial.is_steady([9.0, 1.0, 1.0, 1.04])
    assert not trial.is_steady([9.0, 3.0, 2.0, 1.0])
    assert trial.is_steady([9.0, 3.0] * 6)


def test_when_enough_is_measured():
    steady = [1.0 + 0.001 * (i % 3) for i in range(12)]
    assert not trial.enough(steady[:9]) and trial.enough(steady[:10])
    noisy = [1.0 + 0.5 * (i % 2) for i in range(50)]
    assert not trial.enough(noisy[:20]) and trial.enough(noisy[:40])


@pytest.mark.parametrize(
    "error, compiling, kind",
    [
        (MemoryError(), True, "host memory"),
        (RuntimeError("std::bad_alloc"), False, "host memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), True, "device memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False, "device memory"),
        (RuntimeError("ptxas died"), True, "compile"),
        (RuntimeError("ptxas died"), False, "other"),
    ],
)
def test_kinds_of_failure(error, compiling, kind):
    assert trial.failure(error, compiling)["status"] == kind


def test_a_real_trial_in_a_process_of_its_own(tmp_path):
    """Also one whose learning rate makes the loss overflow."""
    results = []
    for name, overrides in (("good", {}), ("bad", {"optimizer.learning_rate": "1e39"})):
        request, result = tmp_path / f"{name}.json", tmp_path / f"{name}.result"
        request.write_text(
            json.dumps({"recipe": "configs/tiny.py", "overrides": {"data.source": "synthetic", **overrides}})
        )
        subprocess.run(
            [sys.executable, "-m", "jaxpretrain.sweep.trial", str(request), str(result)],
            cwd=ROOT,
            check=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
            capture_output=True,
        )
        results.append(json.loads(result.read_text()))
    good, bad = results
    assert good["status"] == "ok" and good["step_time"] > 0 and good["peak_bytes"] > 0 and good["mfu"] is None
    assert len(good["step_times"]) >= 10 and len(good["warm_up_times"]) >= 4
    assert bad["status"] == "non-finite"
