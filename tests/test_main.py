"""The command line: what a mistake looks like, and the modes eval and sample."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxpretrain import cli, evaluation, inference, main
from jaxpretrain.checkpoint import restore_weights
from jaxpretrain.interop import huggingface

REPOSITORY = pathlib.Path(__file__).parents[1]
RECIPE = f"--config={REPOSITORY}/configs/tiny.py"
VOCAB_SIZE = 256
SMALL = {
    "steps": 3,
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "model.num_heads": 2,
    "model.mlp_dim": 64,
    "model.gated_mlp": True,  # as Hugging Face's Llama has it
    "model.activation": "silu",
    "seq_len": 32,
    "batch_size": 8,
    "eval.ngrams": False,
    "kernels.attention": "xla",
    "data.source": "tokens",
    "data.validation_fraction": 0.2,
}


def flags(**keys):
    return [f"--config.{key}={value}" for key, value in keys.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Token files, and `run`, a finished run."""
    folder = tmp_path_factory.mktemp("main")
    tokens = np.random.default_rng(0).integers(32, 127, 20_000).astype(np.uint16)
    tokens.tofile(folder / "good.bin")
    tokens[::50] = 300
    tokens.tofile(folder / "outside.bin")
    (folder / "odd.bin").write_bytes(tokens.tobytes()[:-1])
    (folder / "file").touch()
    assert main.main([RECIPE, f"--workdir={folder}/run", *small(folder)]) == cli.EXIT_DONE
    return folder


def small(folder, **changes):
    return flags(**{**SMALL, "data.path": folder / "good.bin", **changes})


@pytest.fixture
def call(monkeypatch, capfd):
    """call(*arguments) -> exit code, lines of stdout, lines of stderr; as the program, but in this process."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["main", *map(str, arguments)])
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # to be put back
        with pytest.raises(SystemExit) as exit:
            cli.run(main.main)
        out, errors = capfd.readouterr()
        return exit.value.code, out.splitlines(), own_lines(errors)

    return call


def own_lines(errors):
    """Without what the CUDA plugin says where there is no driver, which cannot be turned off."""
    return [line for line in errors.splitlines() if not re.search("cudart|absl::Init", line)]


def contents(folder):
    """Of all files but the lock of a work directory."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


# What is typed beside RECIPE and the small keys -> what the one line says.
MISTAKES = {
    "misspelt key": (["--config.optimizer.lerning_rate=1"], "optimizer.lerning_rate.*optimizer.learning_rate"),
    "key without a value": (["--config.steps"], "--config.steps needs a value"),
    "wrong type": (["--config.steps=many"], "steps='many'.*int"),
    "steps=0": (["--config.steps=0"], "steps=0.*at least 1"),
    "micro_batch_size": (["--config.micro_batch_size=3"], "micro_batch_size=3.*batch_size=8.*try 1"),
    "devices": (["--config.batch_size=12"], "batch_size=12.*8 devices"),
    "token out of range": (["--config.data.path={folder}/outside.bin"], r"outside.bin.*300.*model.vocab_size"),
    "truncated file": (["--config.data.path={folder}/odd.bin"], "odd.bin.*39999 bytes"),
    "missing file": (["--config.data.path={folder}/none.bin"], "data.path=.*none.bin.*prepare.py"),
    "unwritable directory": (["--workdir={folder}/file/run"], "--workdir=.*file/run cannot be written.*another"),
    "directory that is a file": (["--workdir={folder}/file"], "--workdir=.*file cannot be written.*another"),
    "misspelt flag": (["--wrokdir=x"], "'--wrokdir'.*--workdir"),
    "stray word": (["steps=3"], "'steps'"),
    "unknown mode": (["--mode=trian"], "--mode.*'trian'.*'train'"),
    "prompt without sample": (["--prompt=a"], "--prompt has no effect.*--mode=sample"),
    "key that nothing reads": (["--config.precision.loss_scale_interval=5"], "loss_scale_interval.*no effect"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_new_directory(mistake, folder, tmp_path, call):
    """One line on stderr, exit code 1, and no config, metrics or checkpoint comes into being."""
    typed, expected = MISTAKES[mistake]
    typed = [text.format(folder=folder) for text in typed]
    before = contents(folder)
    code, _, errors = call(RECIPE, f"--workdir={tmp_path}/new", *small(folder), *typed)
    assert code == 1
    assert len(errors) == 1 and re.search(expected, errors[0]), errors
    assert contents(folder) == before
    if mistake != "token out of range":  # which is met on the way
        assert not contents(tmp_path)


@pytest.mark.parametrize(
    "typed, expected",
    [
        (["--workdir=x"], "--config is missing.*configs/tiny.py"),
        ([RECIPE], "--workdir is missing"),
        ([RECIPE, "--workdir="], "--workdir is missing"),
        (["--config=configs/tyni.py", "--workdir=x"], "configs/tyni.py: no such file"),
        ([RECIPE + ":steps=3,lerning_rate=1", "--workdir=x"], "'lerning_rate'.*optimizer.learning_rate"),
        (
            ["--config={folder}/recipe.py", "--workdir=x"],
            "recipe.py: .*'optimizer.weight_dekay'.*optimizer.weight_decay",
        ),
    ],
)
def test_mistakes_in_what_is_named(typed, expected, folder, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "recipe.py").write_text(
        "from jaxpretrain import config as schema\n\n\ndef get_config():\n    config = schema.default()\n"
        "    config.optimizer.weight_dekay = 1.0\n    return config\n"
    )
    code, _, errors = call(*[text.format(folder=folder) for text in typed])
    assert code == 1
    assert len(errors) == 1 and re.search(expected, errors[0]), errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"model.mlp_dim": 128}, "model.mlp_dim was 64, now 128.*--workdir"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"batch_size": 16}, "batch_size was 8, now 16"),
        ({"steps": 2}, "steps was 3, now 2"),
    ],
)
def test_another_experiment_in_the_same_directory(changes, expected, folder, call):
    """Seen to fail with config.json written before it is compared."""
    before = contents(folder / "run")
    code, _, errors = call(RECIPE, f"--workdir={folder}/run", *small(folder, **changes))
    assert code == 1
    assert len(errors) == 1 and re.search(expected, errors[0]), errors
    assert contents(folder / "run") == before


def test_as_a_process(folder, tmp_path):
    """The same in processes of their own: nothing else reaches stderr; --debug adds the traceback."""

    def call(*arguments):
        command = [
            sys.executable,
            "-m",
            "jaxpretrain.main",
            RECIPE,
            f"--workdir={tmp_path}/new",
            *small(folder),
            *arguments,
        ]
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
        return result.returncode, own_lines(result.stderr)

    code, errors = call("--config.stepps=3")
    assert code == 1 and len(errors) == 1 and errors[0].startswith("error: ")
    code, errors = call(f"--config.data.path={folder}/outside.bin")  # after JAX, Orbax and all are loaded and at work
    assert code == 1 and len(errors) == 1 and errors[0].startswith("error: ")
    code, errors = call("--config.stepps=3", "--debug")
    assert code == 1 and errors[0].startswith("Traceback") and errors[-1].startswith("error: ")


def test_a_hugging_face_folder_is_not_trained_in(folder, hugging_face, call):
    """Its config.json would be gone. Seen to fail without the check."""
    before = contents(hugging_face)
    code, _, errors = call(RECIPE, f"--workdir={hugging_face}", *small(folder))
    assert code == 1
    assert len(errors) == 1 and "checkpoint.init_from" in errors[0]
    assert contents(hugging_face) == before


# --- Eval and sample


@pytest.fixture(scope="module")
def hugging_face(folder, tmp_path_factory):
    """The finished run's weights as a Hugging Face folder, without a tokenizer."""
    path = tmp_path_factory.mktemp("export") / "model"
    params, config = restore_weights(str(folder / "run"))
    huggingface.export(params, config, path)
    return path


@pytest.fixture
def losses(monkeypatch):
    """The losses that evaluation.evaluate returns from now on, to the bit."""
    losses, evaluate = [], evaluation.evaluate

    def spy(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        losses.append(result.loss)
        return result

    monkeypatch.setattr(evaluation, "evaluate", spy)
    return losses


def logged_loss(folder):
    *_, last = map(json.loads, open(folder / "run" / "metrics.jsonl"))
    assert last["split"] == "valid"
    return last["loss"]


def test_eval(folder, hugging_face, call, losses):
    """Exactly the loss that training logged at its end; with the command of training, without, and from the export.

    Seen to fail with the parameters of `init` evaluated in the place of the restored ones.
    """
    code, out, errors = call(RECIPE, f"--workdir={folder}/run", *small(folder), "--mode=eval")
    assert (code, errors) == (0, [])
    assert out == [f"valid loss {logged_loss(folder):.4f} nats per token over 4,031 tokens of {folder}/run"]
    call(f"--workdir={folder}/run", "--mode=eval")
    data = {key: SMALL[key] for key in ("data.source", "data.validation_fraction", "seq_len", "kernels.attention")}
    data |= {"data.path": folder / "good.bin", "precision.compute": "float32", "micro_batch_size": 1}
    code, _, errors = call(f"--workdir={hugging_face}", "--mode=eval", *flags(**data))
    assert (code, errors) == (0, [])
    assert losses == [logged_loss(folder)] * 3


def test_eval_of_schedule_free(folder, tmp_path, call, losses):
    """The loss that training logged, of the optimizer's average, also for what starts from it.

    Seen to fail with the parameters restored alone.
    """
    changes = {"optimizer.name": "schedule_free_adamw", "schedule.name": "constant", "schedule.warmup_steps": 0}
    keys = small(folder, **changes, **{"average.horizons": 500})
    call(RECIPE, f"--workdir={tmp_path}", *keys)
    logged = [json.loads(line) for line in open(tmp_path / "metrics.jsonl")]
    logged = {line["split"]: line["loss"] for line in logged}
    code, _, errors = call(f"--workdir={tmp_path}", "--mode=eval")
    assert (code, errors) == (0, [])
    assert losses == [pytest.approx(logged["valid"], rel=1e-6)] and logged["valid"] != logged["valid_ewa"]
    flag = f"--config.checkpoint.init_from={tmp_path}"
    call(RECIPE, f"--workdir={tmp_path}/child", *small(folder, steps=1), flag, "--config.optimizer.learning_rate=0")
    *_, last = map(json.loads, open(tmp_path / "child" / "metrics.jsonl"))
    assert last["loss"] == pytest.approx(logged["valid"], rel=1e-6)


def test_sample(folder, hugging_face, call):
    code, out, errors = call(f"--workdir={folder}/run", "--mode=sample", "--prompt=Hello")
    assert (code, errors) == (0, [])
    text = "\n".join(out)
    assert text.startswith("Hello") and len(text) > 100
    code, again, errors = call(f"--workdir={folder}/run", "--mode=sample", "--prompt=Hello")
    assert again == out
    code, exported, errors = call(
        f"--workdir={hugging_face}", "--mode=sample", "--prompt=Hello", "--config.precision.compute=float32"
    )
    assert (code, errors, exported) == (0, [], out)


@pytest.mark.parametrize(
    "typed, expected",
    [
        (["--mode=eval", "--config.steps=5"], "--config.steps has no effect with --mode=eval"),
        (["--mode=eval", "--config.average.horizons=5"], "--config.average.horizons has no effect with --mode=eval"),
        (
            ["--mode=eval", "--config.data.images.mixup=0.5"],
            "--config.data.images.mixup has no effect with --mode=eval",
        ),
        (["--mode=sample", "--config.eval.max_tokens=5"], "--config.eval.max_tokens has no effect with --mode=sample"),
        (["--mode=eval", "--config.model.num_layers=2"], "model.num_layers has no effect"),
        (["--mode=eval", RECIPE], "another model than the run"),
        (["--mode=eval", "--workdir={folder}"], "neither a run's work directory nor a Hugging Face folder"),
        (["--mode=sample", "--prompt=" + 40 * "a"], "--prompt has 40 tokens"),
    ],
)
def test_mistakes_with_eval_and_sample(typed, expected, folder, call):
    before = contents(folder / "run")
    code, _, errors = call(f"--workdir={folder}/run", *[text.format(folder=folder) for text in typed])
    assert code == 1
    assert len(errors) == 1 and re.search(expected, errors[0]), errors
    assert contents(folder / "run") == before


def test_init_from_a_broken_hugging_face_folder(folder, hugging_face, tmp_path, call):
    """A tensor that the files lack is named."""
    from safetensors.numpy import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(hugging_face, broken)
    (file,) = broken.glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, file)
    workdir = tmp_path / "new"
    code, _, errors = call(RECIPE, f"--workdir={workdir}", *small(folder), f"--config.checkpoint.init_from={broken}")
    assert code == 1
    assert len(errors) == 1 and name in errors[0] and "broken" in errors[0], errors
    assert not (workdir / "metrics.jsonl").exists()


def test_batch_of_the_run_need_not_divide_over_the_devices_that_evaluate(folder, tmp_path, losses):
    """A run of batch 2 on two devices, evaluated on these eight. Seen to fail with the run's own batch_size."""
    command = [sys.executable, "-m", "jaxpretrain.main", RECIPE, f"--workdir={tmp_path}", *small(folder, batch_size=2)]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, timeout=300)
    config = inference.load_config(str(tmp_path), None, [], "eval")
    inference.evaluate(config, str(tmp_path))
    *_, last = map(json.loads, open(tmp_path / "metrics.jsonl"))
    assert losses[0] == pytest.approx(last["loss"], abs=1e-5)
