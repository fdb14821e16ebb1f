"""Measures on the machine at hand.

    python tools/sweep.py step_time --config=configs/pythia1b.py --workdir=runs/sweep

step_time: which layout is the fastest. Each is measured in a process of its own: whole optimizer steps with the run's
own data, waited for. --space=paper22 has the methods of the academic benchmark (arXiv 2410.23261), and is all that is
known of devices in no catalogue; on others --space=default tries the plan's layouts, the most promising first, until
what is left cannot win. Interrupted anywhere, the same command goes on. It leaves trials/ and trials.jsonl, which
tools/plan.py --workdir reads, and best.json with the command that trains with the fastest.
"""

import json
import pathlib
import shlex

from jaxpretrain import cli


def step_time(argv: list[str]) -> int:
    parser = cli.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", metavar="DIR")
    parser.add_argument("--cmd", choices=("run", "count", "print", "retry-failed"), default="run")
    parser.add_argument("--space", choices=("paper22", "default", "full"), default="paper22")
    parser.add_argument("--methods", default="all", help="naive, free_lunch, all, or several with commas")
    parser.add_argument("--max-trials", type=int, metavar="N", help="start no more than that")
    parser.add_argument("--max-minutes", type=float, metavar="N", help="start no trial after that")
    parser.add_argument("--trial-minutes", type=float, default=30, metavar="N", help="a trial that takes longer failed")
    arguments, overrides = parser.parse(argv)
    if not arguments.workdir:
        raise ValueError("--workdir is missing: name a directory for the trials")
    for flag in ("max_trials", "max_minutes", "trial_minutes"):
        value = getattr(arguments, flag)
        if value is not None and not value > 0:
            raise ValueError(f"--{flag.replace('_', '-')}={value:g}: must be above 0")
    config = cli.load_config(arguments, overrides)

    from jaxpretrain.sweep import step_time as sweep
    from jaxpretrain.sweep.cache import Trials, devices_of_this_host

    seconds = 60 * arguments.trial_minutes
    machine = sweep.probe(seconds)
    rows = sweep.rows(config, machine, arguments.space, arguments.methods)
    trials = Trials(arguments.workdir, machine)
    if arguments.cmd == "count":
        print("\n".join(f"{row.method}: {shlex.join(f'{k}={v}' for k, v in row.overrides)}" for row in rows))
        print(len(rows))
        return cli.EXIT_DONE
    print(f"{len(rows)} methods on {machine['num_devices']} x {machine['device_kind']}")
    with devices_of_this_host(arguments.workdir):
        done = sweep.sweep(
            arguments.config,
            config,
            rows,
            trials,
            dict(overrides),
            trial_seconds=seconds,
            max_trials=0 if arguments.cmd == "print" else arguments.max_trials,
            max_seconds=arguments.max_minutes and 60 * arguments.max_minutes,
            retry_failed=arguments.cmd == "retry-failed",
            stop_early=arguments.space != "paper22",
        )
    best = sweep.best(done)
    if best is None:
        print("nothing was measured yet" if not done else "no method went well; the lines above say why")
        return cli.EXIT_DONE if not done else cli.EXIT_ERROR
    flags = [f"--config.{key}={value}" for key, value in best["overrides"].items()]
    command = shlex.join(
        ["python", "-m", "jaxpretrain.main", f"--config={arguments.config}", "--workdir=runs/NAME", *flags]
    )
    (pathlib.Path(arguments.workdir) / "best.json").write_text(json.dumps(best | {"command": command}, indent=1) + "\n")
    print(
        f"\nfastest of {len(done)} programs: {best['method']}, {best['step_time']:.4g} s per step\ntrain:    {command}"
    )
    return cli.EXIT_DONE


def main(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return cli.EXIT_DONE
    if argv[:1] != ["step_time"]:
        raise ValueError(f"{argv[0] if argv else 'nothing'} is no measurement: name step_time")
    return step_time(argv[1:])


if __name__ == "__main__":
    cli.run(main)
