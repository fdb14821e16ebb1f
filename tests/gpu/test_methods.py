"""Every memory-saving method on a real GPU: the CPU's losses, and no more memory than the compiler said.

    JAX_PLATFORMS=cuda python -m pytest tests/gpu

On one GPU or several; half an hour. JAXPRETRAIN_REPORT=FILE collects a line for each trial, for docs/benchmarks.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxpretrain.sweep.space import naive, paper22

ROOT = pathlib.Path(__file__).parents[2]
if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    pytest.skip("needs a GPU: JAX_PLATFORMS=cuda python -m pytest tests/gpu", allow_module_level=True)

# Recipe -> settings of the trials that are compared with the CPU, and of those that are timed, where memory counts.
COMPARED = {"seq_len": "256", "batch_size": "8", "micro_batch_size": "1", "steps": "4", "precision.compute": "float32"}
TIMED = {"batch_size": "32", "micro_batch_size": "4", "steps": "8", "precision.compute": "bfloat16"}
GRADED = [
    {"parallel.strategy": "fsdp", "parallel.remat": remat}
    for remat in ("full:4", "dots", "names:query+key+value+attention", "offload", "offload:attention_projected")
]


def methods(num_devices: int) -> dict[str, dict[str, str]]:
    """By name, without those that are one program here."""
    found = {}
    for method in [*paper22(num_devices), naive("bfloat16")]:
        if method.overrides not in found.values():
            found[method.name] = method.overrides
    found |= {f"fsdp {overrides['parallel.remat']}": overrides for overrides in GRADED}
    if num_devices > 1:
        found |= {
            "hsdp": {"parallel.strategy": "hsdp"},
            "tensor": {"parallel.strategy": "fsdp", "parallel.tensor": "2"},
        }
    return found


@functools.cache
def trial(platform: str, recipe: str, *settings: tuple[str, str]) -> dict:
    command = [sys.executable, "tests/gpu/trial.py", f"--config=configs/{recipe}.py"]
    command += [f"--config.{key}={value}" for key, value in settings]
    environment = {**os.environ, "JAX_PLATFORMS": platform, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def num_devices() -> int:
    command = [sys.executable, "-c", "import jax; print(len(jax.devices()))"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def pytest_generate_tests(metafunc):
    if "method" in metafunc.fixturenames:
        metafunc.parametrize("method", methods(num_devices()).items(), ids=lambda item: item[0])


def test_losses_are_the_cpus(method):
    """In float32 at full precision of the products, whatever is sharded, recomputed or offloaded."""
    name, overrides = method
    settings = COMPARED | overrides | {"precision.matmul": "highest"}
    on_gpu = trial(os.environ["JAX_PLATFORMS"], "pythia160m", *settings.items())
    on_cpu = trial("cpu", "pythia160m", *(COMPARED | {"parallel.strategy": "ddp"}).items())
    assert on_gpu["losses"] == pytest.approx(on_cpu["losses"], rel=2e-5)


@pytest.mark.parametrize("recipe", ["pythia160m", "pythia1b"])
def test_peak_of_memory_is_what_the_compiler_said(method, recipe):
    """cuDNN's scratch memory and fragments come on top; less than said would be a wrong account, too."""
    name, overrides = method
    result = trial(os.environ["JAX_PLATFORMS"], recipe, *(TIMED | overrides).items())
    if report := os.environ.get("JAXPRETRAIN_REPORT"):
        with open(report, "a") as file:
            file.write(json.dumps({"recipe": recipe, "method": name, **result}) + "\n")
    assert 0.8 < result["peak_bytes"] / result["predicted_bytes"] < 1.2
