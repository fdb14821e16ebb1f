"""Trains, evaluates or samples: `python -m jaxpretrain.main --config=configs/tiny.py --workdir=runs/tiny`."""

import os
import pathlib

from jaxpretrain import cli
from jaxpretrain.signals import StopSignal


def main(argv: list[str]) -> int:
    parser = cli.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", help="the run's directory; eval and sample also take a Hugging Face folder")
    parser.add_argument("--mode", choices=("train", "eval", "sample"), default="train")
    parser.add_argument("--prompt", help="sample: the text to continue")
    arguments, overrides = parser.parse(argv)
    if not arguments.workdir:
        raise ValueError("--workdir is missing: name a directory for config, metrics and checkpoints")
    if arguments.prompt is not None and arguments.mode != "sample":
        raise ValueError(f"--prompt has no effect with --mode={arguments.mode}; add --mode=sample")

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
