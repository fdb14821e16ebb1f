"""Trains small models on real text with every optimizer, on CPU cores, and says how they compare.

    python tools/compare_optimizers.py quality --workdir=DIR [--jobs=2] [--minutes=N]
    python tools/compare_optimizers.py averaging --workdir=DIR [--jobs=2] [--minutes=N]

quality: learning rates are swept for all alike on one seed, from two, by factors of 2 until the best has a worse
neighbour on either side; then each optimizer's best runs on NUM_SEEDS seeds. A seed stands for the initial parameters
and the order of the data, the same for all, so that differences are taken pair by pair.
averaging: at a large batch, a constant rate with averaged weights against a cosine decay, each at its best rate.

Every finished run leaves a file in DIR/trials and is not run again: the same command goes on where it was stopped, and
in the end writes DIR/{quality,averaging}.md and .svg. docs/benchmarks/optimizers.md holds what it wrote.
"""

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import pathlib
import signal
import statistics
import time

NUM_SEEDS = 4
NUM_EVALS = {"quality": 1, "averaging": 4}  # of a run, the last at its end
EVAL_TOKENS = 65_536
MICRO_BATCH_SIZE = 2  # the fastest on one core, as its cache holds the activations

_COMMON = {
    "seq_len": 256,
    "batch_size": 8,
    "steps": 300,
    "model.vocab_size": 256,
    "model.num_layers": 6,
    "model.embed_dim": 128,
    "model.num_heads": 4,
    "data.source": "stdlib",
    "precision.compute": "float32",
    "schedule.name": "cosine",
    "schedule.warmup_steps": 30,
}
MODELS = {  # as configs/_llama.py and _pythia.py describe them, but for the sizes
    "llama": {
        "model.num_kv_heads": 2,
        "model.mlp_dim": 352,
        "model.norm": "rmsnorm",
        "model.norm_bias": False,
        "model.attention_bias": False,
        "model.mlp_bias": False,
        "model.activation": "silu",
        "model.gated_mlp": True,
        "model.init": "llama",
    },
    "pythia": {"model.rotary.fraction": 0.25, "model.parallel_residual": True, "model.init": "gpt_neox"},
}
# Optimizer -> what it sets, and the learning rate that the sweep starts from.
OPTIMIZERS = {
    "adamw": ({}, 2e-3),
    "adam_mini": ({"optimizer.name": "adam_mini"}, 2e-3),
    **{
        f"adam_mini {blocks}": ({"optimizer.name": "adam_mini", "optimizer.blocks": blocks}, 2e-3)
        for blocks in ("value_whole", "v1_0", "fan_out", "slim", "per_tensor")
    },
    "muon": ({"optimizer.name": "muon"}, 2e-3),
    "lion": ({"optimizer.name": "lion", "optimizer.b2": 0.98}, 2.5e-4),
    "adafactor": ({"optimizer.name": "adafactor"}, 8e-3),
    "schedule_free_adamw": ({"optimizer.name": "schedule_free_adamw", "schedule.name": "constant"}, 4e-3),
}
# At the learning rate of another, which they store in fewer bits; for the first model.
FEWER_BITS = {
    "adamw bf16 moments": ("adamw", {"optimizer.mu_dtype": "bfloat16", "optimizer.nu_dtype": "bfloat16"}),
    "adam_mini bf16 m": ("adam_mini", {"optimizer.mu_dtype": "bfloat16"}),
    "adam_mini int8 m": ("adam_mini", {"optimizer.mu_dtype": "int8"}),
}

_LARGE_BATCH = {"batch_size": 32, "steps": 120, "schedule.warmup_steps": 15}
_BATCH_TOKENS = 32 * 256
_TOKENS = 120 * _BATCH_TOKENS
HORIZONS = (_TOKENS // 32, _TOKENS // 16, _TOKENS // 8)
AVERAGING = {
    "cosine": {},
    "constant": {"schedule.name": "constant", "average.horizons": ",".join(map(str, HORIZONS))},
}


def run_trial(file: pathlib.Path, overrides: dict, num_evals: int) -> None:
    """Trains, and writes the validation losses (nats per token): [step, loss, {horizon: loss of the average}]."""
    import jax

    from jaxpretrain import config as config_lib
    from jaxpretrain.data.dataset import make_dataset
    from jaxpretrain.evaluation import evaluate
    from jaxpretrain.parallel.mesh import make_mesh
    from jaxpretrain.step import make_train_step, weights

    config = config_lib.default()
    for key, value in (overrides | {"micro_batch_size": MICRO_BATCH_SIZE}).items():
        config_lib.override(config, key, str(value))
    config_lib.check(config)
    train_step = make_train_step(config, make_mesh("ddp", jax.devices()[:1]))
    training, validation = make_dataset(config, "train"), make_dataset(config, "valid")
    state, curve, start = train_step.init(), [], time.time()
    for step in range(1, config.steps + 1):
        state, metrics = train_step.step(state, training.batch(step - 1))
        if step % math.ceil(config.steps / num_evals) == 0 or step == config.steps:
            losses = [
                evaluate(train_step, weights(state, horizon), validation, EVAL_TOKENS).loss
                for horizon in (None, *config.average.horizons)
            ]
            curve.append([step, losses[0], dict(zip(config.average.horizons, losses[1:], strict=True))])
            if not math.isfinite(losses[0]):
                break
    parameters = sum(leaf.size for leaf in jax.tree.leaves(train_step.state.params))
    result = dict(overrides=overrides, parameters=parameters, seconds=time.time() - start, curve=curve)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(result))
    temporary.rename(file)


class Trials:
    """Runs trials, `jobs` at a time, each on a core of its own, and remembers their results."""

    def __init__(self, workdir: pathlib.Path, jobs: int, minutes: float, num_evals: int):
        self._num_evals = num_evals
        self._folder, self._jobs, self._deadline = workdir / "trials", jobs, time.time() + 60 * minutes
        self._folder.mkdir(parents=True, exist_ok=True)
        self.results = {}

    def run(self, trials: dict[str, dict]) -> bool:
        """Trial name -> overrides; fills `results`. False if the time was up before all were done."""
        todo = {name: overrides for name, overrides in trials.items() if not self._file(name).exists()}
        cores = sorted(os.sched_getaffinity(0))
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        for i in range(self._jobs):
            queue.put(cores[i % len(cores)])
        with concurrent.futures.ProcessPoolExecutor(self._jobs, context, _use_one_core, (queue,)) as pool:
            # At a Ctrl-C the pool would wait for the runs; at a SIGTERM it would leave them behind.
            signal.signal(signal.SIGINT, lambda *_: [w.kill() for w in multiprocessing.active_children()])
            futures = {}
            pending = list(todo.items())
            while pending or futures:
                while pending and len(futures) < self._jobs and time.time() < self._deadline:
                    name, overrides = pending.pop(0)
                    futures[pool.submit(run_trial, self._file(name), overrides, self._num_evals)] = name
                if not futures:
                    break
                for future in concurrent.futures.wait(futures, return_when="FIRST_COMPLETED").done:
                    name = futures.pop(future)
                    future.result()
                    print(f"{name}: {self._load(name)['curve'][-1][1]:.4f}", flush=True)
        for name, overrides in trials.items():
            if self._file(name).exists():
                self.results[name] = self._load(name)
                if self.results[name]["overrides"] != overrides:
                    raise ValueError(f"{self._file(name)} is of other settings: remove it to run it again")
        return all(name in self.results for name in trials)

    def loss(self, name: str) -> float:
        """At the end; infinite for a run that diverged."""
        loss = self.results[name]["curve"][-1][1]
        return loss if math.isfinite(loss) else math.inf

    def _file(self, name: str) -> pathlib.Path:
        return self._folder / f"{name.replace(' ', '-')}.json"

    def _load(self, name: str) -> dict:
        return json.loads(self._file(name).read_text())


def _use_one_core(cores) -> None:
    os.sched_setaffinity(0, {cores.get()})  # XLA then takes one thread
    os.environ["JAX_PLATFORMS"] = "cpu"


def sweep(trials: Trials, prefixes: dict[str, tuple[dict, float]]) -> dict[str, float] | None:
    """Prefix -> (overrides, first rate) to prefix -> best rate, whose neighbours were worse; None if time was up.

    A trial is named `PREFIX lr RATE seed 0`.
    """
    rates = {prefix: {first, 2 * first} for prefix, (_, first) in prefixes.items()}
    while True:
        todo = {
            trial_name(prefix, rate, 0): overrides | {"optimizer.learning_rate": rate, "seed": 0}
            for prefix, (overrides, _) in prefixes.items()
            for rate in sorted(rates[prefix])
        }
        if not trials.run(todo):
            return None
        best, settled = {}, True
        for prefix, tried in rates.items():
            best[prefix] = min(tried, key=lambda rate: trials.loss(trial_name(prefix, rate, 0)))
            for neighbour in (best[prefix] / 2, best[prefix] * 2):
                if neighbour not in tried:
                    tried.add(neighbour)
                    settled = False
        if settled:
            return best


def trial_name(prefix: str, rate: float, seed: int) -> str:
    return f"{prefix} lr {rate:g} seed {seed}"


def quality(trials: Trials, workdir: pathlib.Path) -> None:
    contenders = {
        f"{model} {name}": (_COMMON | MODELS[model] | overrides, rate)
        for model in MODELS
        for name, (overrides, rate) in OPTIMIZERS.items()
    }
    best = sweep(trials, contenders)
    if best is None:
        print("time is up; run the same command to go on")
        return
    model = next(iter(MODELS))
    for name, (like, overrides) in FEWER_BITS.items():
        contenders[f"{model} {name}"] = (contenders[f"{model} {like}"][0] | overrides, 0.0)
        best[f"{model} {name}"] = best[f"{model} {like}"]
    seeds = range(NUM_SEEDS)
    final = {
        trial_name(prefix, best[prefix], seed): overrides | {"optimizer.learning_rate": best[prefix], "seed": seed}
        for prefix, (overrides, _) in contenders.items()
        for seed in seeds
    }
    if not trials.run(final):
        print("time is up; run the same command to go on")
        return
    lines = []
    for model in MODELS:
        prefixes = [prefix for prefix in contenders if prefix.split()[0] == model]
        parameters = trials.results[trial_name(prefixes[0], best[prefixes[0]], 0)]["parameters"]
        lines += [
            f"\n{model}, {parameters:,} parameters, {_COMMON['steps'] * 8 * 256:,} tokens:\n",
            "| optimizer | best rate | loss, mean of seeds ± standard error | minus AdamW's, 95 % interval |",
            "|---|---|---|---|",
        ]
        adamw = [trials.loss(trial_name(f"{model} adamw", best[f"{model} adamw"], seed)) for seed in seeds]
        for prefix in prefixes:
            losses = [trials.loss(trial_name(prefix, best[prefix], seed)) for seed in seeds]
            error = statistics.stdev(losses) / math.sqrt(NUM_SEEDS)
            name = prefix.partition(" ")[2]
            difference = "" if name == "adamw" else interval([a - b for a, b in zip(losses, adamw, strict=True)])
            lines.append(f"| {name} | {best[prefix]:g} | {statistics.mean(losses):.4f} ± {error:.4f} | {difference} |")
    write(workdir / "quality.md", lines)
    plot_quality(trials, contenders, best, workdir / "quality.svg")


def interval(differences: list[float]) -> str:
    from scipy import stats

    mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    half = float(stats.t.ppf(0.975, len(differences) - 1)) * error
    return f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"


def plot_quality(trials: Trials, contenders: dict, best: dict[str, float], file: pathlib.Path) -> None:
    """Loss against learning rate, seed 0; one panel a model."""
    figure, axes = subplots(len(MODELS))
    for panel, model in zip(axes, MODELS, strict=True):
        for prefix in contenders:
            if prefix.split()[0] != model or prefix.partition(" ")[2] in FEWER_BITS:
                continue
            start = f"{prefix} lr "
            points = sorted(
                (result["overrides"]["optimizer.learning_rate"], trials.loss(name))
                for name, result in trials.results.items()
                if name.startswith(start) and name.endswith(" seed 0")
            )
            name = prefix.partition(" ")[2]
            style = "--" if " " in name else "-"  # variants of one optimizer
            panel.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
        bests = [trials.loss(trial_name(prefix, rate, 0)) for prefix, rate in best.items() if prefix.startswith(model)]
        panel.set(title=model, xscale="log", xlabel="learning rate", ylim=(min(bests) - 0.05, max(bests) + 0.2))
    axes[0].set_ylabel("validation loss, nats per token")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(file)


def averaging(trials: Trials, workdir: pathlib.Path) -> None:
    common = _COMMON | MODELS["llama"] | _LARGE_BATCH
    contenders = {f"averaging {name}": (common | overrides, 2e-3) for name, overrides in AVERAGING.items()}
    best = sweep(trials, contenders)
    if best is None:
        print("time is up; run the same command to go on")
        return
    lines = [
        f"\nllama, batches of {_BATCH_TOKENS:,} tokens, {_TOKENS:,} tokens in all:\n",
        "| schedule | best rate | weights | loss |",
        "|---|---|---|---|",
    ]
    figure, (panel,) = subplots(1)
    for prefix, rate in best.items():
        curve = trials.results[trial_name(prefix, rate, 0)]["curve"]
        schedule, tokens = prefix.split()[1], [_BATCH_TOKENS * step for step, *_ in curve]
        lines.append(f"| {schedule} | {rate:g} | last | {curve[-1][1]:.4f} |")
        panel.plot(tokens, [loss for _, loss, _ in curve], marker="o", markersize=3, label=f"{schedule}, last weights")
        for horizon in curve[-1][2]:
            lines.append(
                f"| {schedule} | {rate:g} | average over {int(horizon):,} tokens | {curve[-1][2][horizon]:.4f} |"
            )
            label = f"{schedule}, average over {int(horizon):,} tokens"
            panel.plot(tokens, [averages[horizon] for *_, averages in curve], "--", label=label)
    panel.set(xlabel="tokens", ylabel="validation loss, nats per token", ylim=(None, curve[0][1] + 0.1))
    panel.legend(fontsize=7)
    write(workdir / "averaging.md", lines)
    figure.savefig(workdir / "averaging.svg")


def subplots(num_panels: int):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["axes.prop_cycle"] = pyplot.cycler(color=pyplot.get_cmap("tab20").colors[::2] + ((0, 0, 0),))
    figure, axes = pyplot.subplots(1, num_panels, figsize=(5 * num_panels + 1, 4), squeeze=False, layout="constrained")
    return figure, axes[0]


def write(file: pathlib.Path, lines: list[str]) -> None:
    text = "\n".join(lines)
    file.write_text(text + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("quality", "averaging"))
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="of the trials and the report")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after that")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    study = quality if args.study == "quality" else averaging
    try:
        study(Trials(args.workdir, args.jobs, args.minutes, NUM_EVALS[args.study]), args.workdir)
    except concurrent.futures.BrokenExecutor:
        raise SystemExit("stopped; the same command goes on") from None


if __name__ == "__main__":
    main()
