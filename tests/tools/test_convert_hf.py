"""tools/convert_hf.py: a Hugging Face folder to a work directory and back."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxpretrain import checkpoint
from jaxpretrain import config as config_lib
from jaxpretrain.interop import huggingface
from jaxpretrain.models import registry
from jaxpretrain.models.parameter import Info, infos

ROOT = pathlib.Path(__file__).parents[2]
TOOL = ROOT / "tools" / "convert_hf.py"


@pytest.fixture(scope="module")
def main():
    spec = importlib.util.spec_from_file_location("convert_hf", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """A Hugging Face folder."""
    config = config_lib.default()
    config.model.update(dict(embed_dim=32, num_layers=2, parallel_residual=True))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda info: rng.standard_normal(info.shape, np.float32),
        infos(registry.build(config)),
        is_leaf=lambda x: isinstance(x, Info),
    )
    huggingface.export(params, config, tmp_path / "hf")
    return tmp_path / "hf"


def test_there_and_back(main, folder, tmp_path, capsys):
    """Mutation seen to fail: the float32 default of --dtype made bfloat16."""
    assert main(["import", str(folder), f"--workdir={tmp_path / 'run'}"]) == 0
    printed = capsys.readouterr().out
    assert "config.model.parallel_residual = True" in printed and "num_heads" not in printed
    params, config = checkpoint.restore_weights(str(tmp_path / "run"))
    assert config == config_lib.from_json((tmp_path / "run" / "config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, params, huggingface.load_params(folder, config))

    assert main(["export", f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'again'}", "--step=0"]) == 0
    for file in folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_nothing_is_overwritten(main, folder, tmp_path):
    (tmp_path / "kept").mkdir()
    with pytest.raises(ValueError, match="--workdir=.*kept exists"):
        main(["import", str(folder), f"--workdir={tmp_path / 'kept'}"])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        main(["import", str(folder), f"--workdir={tmp_path / 'run'}"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "kept"]


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "required: command"),
        (["convert"], "invalid choice"),
        (["export", "--workdir=runs/x"], "required: --output"),
        (["export", "--workdir=runs/x", "--output=y", "--dtype=int8"], "int8"),
        (["export", "--workdir=runs/x", "--output=y", "--stp=1"], "--stp=1"),
        (["import", "--workdir=runs/x"], "required: HF_FOLDER"),
    ],
)
def test_wrong_flags(main, argv, words):
    with pytest.raises(ValueError) as error:
        main(argv)
    assert words in str(error.value)


def test_an_error_is_one_line_and_exit_code_1(tmp_path):
    command = [sys.executable, TOOL, "import", "nowhere", "--workdir=run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: nowhere: holds no config.json")
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
