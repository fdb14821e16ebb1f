"""Trains, evaluates and samples: `python -m jaxpretrain.main --config=configs/tiny.py --workdir=runs/tiny`."""

import argparse
import os
import pathlib

from ml_collections import ConfigDict

from jaxpretrain import cli, hardware
from jaxpretrain.signals import StopSignal


def main(argv: list[str]) -> int:
    parser = cli.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", help="the run's directory; eval and sample also take a Hugging Face folder")
    parser.add_argument("--mode", choices=("train", "eval", "sample", "describe"), default="train")
    parser.add_argument("--prompt", help="sample: the text to continue")
    parser.add_argument("--count", type=int, help="describe: the number of devices, 1 if not given")
    parser.add_argument("--json", metavar="FILE", help="describe: also write it there")
    arguments, overrides = parser.parse(argv)
    for flag, mode in (("prompt", "sample"), ("count", "describe"), ("json", "describe")):
        if getattr(arguments, flag) is not None and arguments.mode != mode:
            raise ValueError(f"--{flag} has no effect with --mode={arguments.mode}; add --mode={mode}")
    if arguments.mode == "describe":
        if arguments.workdir is not None:
            raise ValueError("--workdir has no effect with --mode=describe; remove it")
        return describe(cli.load_config(arguments, overrides), arguments)
    if not arguments.workdir:
        raise ValueError("--workdir is missing: name a directory for config, metrics and checkpoints")

    # Of a GPU's memory, for JAX (0.75 if not set). The rest is for CUDA, NCCL and kernels' own buffers.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(hardware.GPU_MEMORY_FRACTION))
    # Imported here: a mistake in the flags or the config is reported before JAX is loaded.
    if arguments.mode == "train":
        config = cli.load_config(arguments, overrides)
        with StopSignal() as stop:
            from jaxpretrain.train import train

            use_compilation_cache(config.run.compilation_cache)
            return cli.EXIT_DONE if train(config, arguments.workdir, stop) else cli.EXIT_STOPPED

    from jaxpretrain import inference

    config = cli.load_config(arguments, overrides) if arguments.config else None
    config = inference.load_config(arguments.workdir, config, overrides, arguments.mode)
    use_compilation_cache(config.run.compilation_cache)
    if arguments.mode == "eval":
        print(inference.evaluate(config, arguments.workdir))
    else:
        for text in inference.sample(config, arguments.workdir, arguments.prompt or ""):
            print(text, end="", flush=True)
        print()
    return cli.EXIT_DONE


def describe(config: ConfigDict, arguments: argparse.Namespace) -> int:
    count = 1 if arguments.count is None else arguments.count
    if count < 1:
        raise ValueError(f"--count={count}: must be at least 1")
    # So many CPU devices stand for any: before JAX is imported.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    from jaxpretrain.describe import report

    report(config, count, arguments.json)
    return cli.EXIT_DONE


def use_compilation_cache(folder: str) -> None:
    """Keeps compiled programs, so that a restart does not wait for them; `auto` is the user's cache directory."""
    import jax

    if folder == "auto":
        cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        folder = str(pathlib.Path(cache) / "jaxpretrain" / "compiled")
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)


if __name__ == "__main__":
    cli.run(main)
