"""Weights to and from Hugging Face's format: safetensors and config.json.

Of GPT-NeoX, GPT-2, Llama, RoBERTa, Mamba, ViT and ConvNeXt.

    python tools/convert_hf.py export --workdir=runs/pythia1b --output=pythia1b-hf [--step=N] [--dtype=bfloat16]
        [--average=TOKENS]
    python tools/convert_hf.py import pythia-70m --workdir=runs/pythia-70m

A Hugging Face folder needs no import to start a run from (--config.checkpoint.init_from=FOLDER) or to evaluate and
sample (--workdir=FOLDER): `import` makes a work directory of its weights, and prints its model for a recipe.
"""

import argparse
import os
import pathlib
import shutil

from jaxpretrain import cli
from jaxpretrain import config as config_lib


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> None:
        raise ValueError(f"{message}; --help lists the flags")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="a run's weights -> a Hugging Face folder")
    export.add_argument("--workdir", required=True, help="of the run")
    export.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    export.add_argument("--average", type=float, metavar="TOKENS", help="export the average over this horizon")
    export.add_argument("--output", required=True, help="the folder to make")
    export.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the weights")
    export.add_argument("--tokenizer", help="tokenizer.json to copy along (default: the run's, unless it is bytes)")
    importer = commands.add_parser("import", help="a Hugging Face folder -> a work directory")
    importer.add_argument("folder", metavar="HF_FOLDER", help="on disk, with safetensors")
    importer.add_argument("--workdir", required=True, help="the directory to make")
    return parser.parse_args(argv)


def _export(args: argparse.Namespace) -> None:
    from jaxpretrain.checkpoint import restore_weights
    from jaxpretrain.interop import huggingface

    params, config = restore_weights(args.workdir, args.step, average=args.average)
    tokenizer = args.tokenizer
    if tokenizer is None and config.data.tokenizer != "bytes":
        tokenizer = config.data.tokenizer
    huggingface.export(params, config, args.output, dtype=args.dtype, tokenizer=tokenizer)
    what = "weights" if args.average is None else f"average over {args.average:,.0f} tokens"
    print(f"{args.output}: {what}, {args.dtype}, {'no tokenizer' if tokenizer is None else tokenizer}")


def _import(args: argparse.Namespace) -> None:
    import jax.numpy as jnp

    from jaxpretrain.checkpoint import Checkpoints
    from jaxpretrain.interop import huggingface
    from jaxpretrain.step import TrainState

    workdir = pathlib.Path(args.workdir)
    if workdir.exists():
        raise ValueError(f"--workdir={workdir} exists; choose another directory or remove it")
    config = huggingface.model_config(args.folder)
    tokenizer = pathlib.Path(args.folder, "tokenizer.json")
    if tokenizer.is_file():
        config.data.tokenizer = str(tokenizer.resolve())
    config_lib.check(config)
    params = huggingface.load_params(args.folder, config)
    # The weights and nothing else: what trains on from them has an optimizer and data of its own.
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(zero, params, {}, None, zero, zero, loss_scale=None, good_steps=None, overflows=None)
    unfinished = workdir.with_name(f"{workdir.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        (unfinished / "config.json").write_text(config_lib.to_json(config))
        checkpoints = Checkpoints(unfinished, config)
        checkpoints.save(0, state)
        checkpoints.close()
        unfinished.rename(workdir)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    default = config_lib.flatten(config_lib.default())
    print(f"{workdir}: in a recipe,")
    for key, value in config_lib.flatten({"seq_len": config.seq_len, "model": config.model}).items():
        if value != default[key]:
            print(f"    config.{key} = {value!r}")
    print(f"train on with --config.checkpoint.init_from={workdir}")


def main(argv: list[str]) -> int:
    args = _parse(argv)
    {"export": _export, "import": _import}[args.command](args)
    return cli.EXIT_DONE


if __name__ == "__main__":
    cli.run(main)
