"""`--mode=describe`, as a user runs it: more devices than there are, and nothing allocated."""

import json
import subprocess
import sys

import pytest


def describe(*flags, code=0):
    command = [sys.executable, "-m", "jaxpretrain.main", "--mode=describe", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == code, result.stderr
    return result.stdout if code == 0 else result.stderr.splitlines()[-1]


def test_a_model_of_seven_billion_parameters(tmp_path):
    """Llama-2-7B has 6,738,415,616; on 16 devices AdamW's state is 12 bytes of each over 16."""
    file = tmp_path / "description.json"
    text = describe(
        "--config=configs/llama2_7b.py",
        "--count=16",
        "--config.parallel.strategy=zero2",
        "--config.parallel.offload=optimizer",
        f"--json={file}",
    )
    assert "6,738,415,616 parameters on 16 devices: replica 1 x fsdp 16 x tensor 1" in text
    assert "layers.mlp.gate.kernel" in text and "mlp / fsdp" in text and "pinned_host" not in text
    found = json.loads(file.read_text())
    assert found["num_params"] == 6_738_415_616
    assert found["mesh"] == {"replica": 1, "fsdp": 16, "tensor": 1}
    bytes_per_device = found["bytes_per_device"]
    expected = dict(params=4 / 16, optimizer=8 / 16, averages=0, gradients=4 / 16, micro_batch_gradients=2)
    for kind, size in (expected | dict(compute_copy=2, undonated=0)).items():
        assert bytes_per_device[kind] == pytest.approx(size * found["num_params"], rel=0.001)
    assert found["host_bytes_per_device"] == pytest.approx(bytes_per_device["optimizer"], rel=0.001)
    (query,) = [p for p in found["parameters"] if p["path"] == "layers.attention.query.kernel"]
    assert query["shape"] == [32, 4096, 32, 128] and query["role"] == "query"
    assert query["sharding"] == [None, "fsdp", None, None]
    assert sum(p["bytes_per_device"] for p in found["parameters"]) == bytes_per_device["params"]


def test_parameters_on_the_host_and_what_does_not_divide():
    text = describe(
        "--config=configs/tiny.py",
        "--count=7",
        "--config.parallel.strategy=fsdp",
        "--config.parallel.offload=optimizer+params",
    )
    assert "pinned_host" in text
    assert "held by more devices than need be, as their dims do not divide: " in text
    assert "not to be trained so: batch_size=8 does not divide over 7 devices; try 14" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config=configs/tiny.py", "--count=0"], "error: --count=0: must be at least 1"),
        (
            ["--config=configs/tiny.py", "--count=6", "--config.parallel.tensor=4"],
            "error: parallel.tensor=4 does not divide 6 devices; set one of 1, 2, 3, 6",
        ),
        (
            ["--config=configs/tiny.py", "--mode=train", "--count=2"],
            "error: --count has no effect with --mode=train; add --mode=describe",
        ),
        (
            ["--config=configs/tiny.py", "--config.parallel.remat=half"],
            "error: parallel.remat='half': must be none, full, full:LAYERS, dots, names:A+B, offload or offload:A+B",
        ),
        (
            ["--config=configs/tiny.py", "--config.parallel.remat=full:5"],
            "error: parallel.remat=full:5: layers of the model has 4; set full",
        ),
        (
            ["--config=configs/tiny.py", "--json=/nowhere/x.json"],
            "error: --json=/nowhere/x.json cannot be written: No such file or directory; choose another",
        ),
        (
            ["--config=configs/tiny.py", "--config.parallel.strategy=zero3"],
            "error: parallel.strategy='zero3': did you mean 'fsdp'? It is one of ddp, zero1, zero2, fsdp, hsdp",
        ),
        (
            ["--config=configs/tiny.py", "--config.parallel.offload=averages"],
            "error: parallel.offload='averages': there are no averages; set average.horizons, or remove averages",
        ),
        (
            ["--config=configs/tiny.py", "--config.parallel.replicas=2"],
            "error: parallel.replicas=2 has no effect: it is read only when parallel.strategy is 'hsdp'; "
            "remove one of the two",
        ),
    ],
)
def test_mistakes(flags, message):
    assert describe(*flags, code=1) == message
