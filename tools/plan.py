"""Can I train it, how, how long, at what cost: answered for accelerators that are not here.

    python tools/plan.py --config=configs/pythia1b.py --hardware=a100-80gb --count=4
    python tools/plan.py --config=configs/pythia1b.py --hardware=all --budget-usd=2000
    python tools/plan.py --config=all --hardware=v4-8 --deadline-days=30
    python tools/plan.py --predict=runs.csv --output=predicted.csv

Ranks layouts on one machine, machines for one model, or models on one machine (--config=all: the recipes in configs/);
several of both, with commas, make a table of days. Names: GPUs as a100-80gb or rtx-3090, --count of them in each of
--nodes; TPUs by slice, as v4-8. --workdir=DIR takes what tools/sweep.py measured there, and leaves plan.json and
plan.html.
"""

import json
import os
import pathlib
import re

os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is run; compilers of --verify need no device

from jaxpretrain import cli, hardware
from jaxpretrain import config as config_lib

# Keys of the config that a plan is about.
CHOSEN = (*(f"parallel.{key}" for key in ("strategy", "tensor", "replicas", "remat", "offload")), "micro_batch_size")
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def parse(argv: list[str]):
    parser = cli.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", metavar="NAME|all", help="an accelerator, a TPU slice, or all")
    parser.add_argument("--count", type=int, metavar="N", help="GPUs in a node")
    parser.add_argument("--nodes", type=int, default=1, metavar="M")
    parser.add_argument("--catalogue", metavar="FILE.json", help="accelerators of your own: docs/accelerators.md")
    parser.add_argument("--space", choices=("paper22", "default", "full"), default="default")
    parser.add_argument("--verify", type=int, default=0, metavar="K", help="compile the best K for the hardware")
    parser.add_argument("--budget-usd", type=float, metavar="N")
    parser.add_argument("--deadline-days", type=float, metavar="N")
    parser.add_argument(
        "--job-hours", type=float, metavar="N", help="the limit of a queue, which cuts the run into jobs"
    )
    parser.add_argument("--workdir", metavar="DIR")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--predict", metavar="FILE.csv", help="a table of runs: docs/plan.md")
    parser.add_argument("--output", metavar="FILE.csv", help="of --predict")
    return parser.parse(argv)


def main(argv: list[str]) -> int:
    arguments, overrides = parse(argv)
    if arguments.predict or arguments.output:
        return predict(arguments)
    from jaxpretrain.plan import report

    check(arguments)
    catalogue = hardware.read_file(arguments.catalogue) if arguments.catalogue else hardware.ACCELERATORS
    if arguments.hardware.lower() == "all":
        machines = hardware.usual_machines(arguments.count, catalogue=catalogue)
    else:
        names = arguments.hardware.split(",")
        machines = [hardware.parse_machine(n, arguments.count, arguments.nodes, catalogue=catalogue) for n in names]
    if arguments.config == "all":
        recipes = sorted(str(file) for file in CONFIGS.glob("[a-z]*.py") if not file.stem.startswith("tiny"))
    else:  # a comma before another recipe, not one between its flags
        recipes = re.split(r",(?=[^,=]*\.py\b)", arguments.config)
    for key, _ in overrides:
        if key in CHOSEN:
            raise ValueError(f"--config.{key} has no effect: the plan chooses it; remove it")
    configs = {recipe: config_lib.load(recipe, overrides) for recipe in recipes}
    answer = report.answer(
        configs,
        dict(overrides),
        machines,
        space=arguments.space,
        workdir=arguments.workdir,
        job_hours=arguments.job_hours,
        budget_usd=arguments.budget_usd,
        deadline_days=arguments.deadline_days,
        verify=arguments.verify,
    )
    print(report.to_text(answer))
    if arguments.json:
        write(arguments.json, json.dumps(answer, indent=1) + "\n", "--json")
    if arguments.workdir:
        from jaxpretrain.plan.page import page

        folder = pathlib.Path(arguments.workdir)
        write(folder / "plan.json", json.dumps(answer, indent=1) + "\n", "--workdir")
        write(folder / "plan.html", page(answer), "--workdir")
        print(f"{folder}/plan.json and {folder}/plan.html written")
    return cli.EXIT_DONE


def check(arguments) -> None:
    """Raises ValueError for flags that are missing, impossible or without effect."""
    if not arguments.config:
        raise ValueError("--config is missing: name a recipe, e.g. --config=configs/pythia1b.py, or all")
    if not arguments.hardware:
        raise ValueError("--hardware is missing: name an accelerator or TPU slice, e.g. a100-80gb or v4-8, or all")
    if arguments.config == "all" and arguments.hardware.lower() == "all":
        raise ValueError("--config=all and --hardware=all together answer no question: name one of the two")
    for flag in ("budget_usd", "deadline_days", "job_hours"):
        value = getattr(arguments, flag)
        if value is not None and not value > 0:
            raise ValueError(f"--{flag.replace('_', '-')}={value:g}: must be above 0")
    if arguments.verify < 0:
        raise ValueError(f"--verify={arguments.verify}: must be 0 or more")


def predict(arguments) -> int:
    for flag in ("predict", "output"):
        if not getattr(arguments, flag):
            raise ValueError(f"--{flag} is missing: --predict reads a table, --output names the file for the result")
    for flag in ("config", "hardware", "count", "workdir", "json", "budget_usd", "deadline_days"):
        if getattr(arguments, flag) is not None:
            raise ValueError(f"--{flag.replace('_', '-')} has no effect with --predict; remove it")
    from jaxpretrain.plan.predict import predict_file

    num_rows = predict_file(arguments.predict, arguments.output)
    print(f"{num_rows} rows predicted: {arguments.output}")
    return cli.EXIT_DONE


def write(file: str | pathlib.Path, text: str, flag: str) -> None:
    try:
        pathlib.Path(file).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(file).write_text(text)
    except OSError as error:
        raise ValueError(f"{flag}={file} cannot be written: {error.strerror}; choose another") from error


if __name__ == "__main__":
    cli.run(main)
