"""The training loop, read top to bottom."""

import collections
import contextlib
import fcntl
import os
import pathlib
import sys
import time
from collections.abc import Iterator

import jax
from ml_collections import ConfigDict

from jaxpretrain import config as config_lib
from jaxpretrain import hardware
from jaxpretrain.checkpoint import Checkpoints, restore_state
from jaxpretrain.data.dataset import Dataset, make_dataset
from jaxpretrain.data.loader import Loader
from jaxpretrain.evaluation import evaluate, ngram_baseline, own_rows, place
from jaxpretrain.interop import huggingface_config
from jaxpretrain.interop.weights import check_same_model, load_weights
from jaxpretrain.metrics import MetricsLog, has_evaluation
from jaxpretrain.micro_batch import make_fitting_step
from jaxpretrain.models import registry
from jaxpretrain.models.parameter import infos
from jaxpretrain.parallel.mesh import make_mesh, num_data_shards, rows_per_shard
from jaxpretrain.schema import IMAGE_FAMILIES
from jaxpretrain.signals import StopSignal
from jaxpretrain.step import TrainState, TrainStep, weights


def train(config: ConfigDict, workdir: str, stop: StopSignal) -> bool:
    """Trains until `steps`, from where the work directory stands. False if `stop` ended it, after saving.

    Raises ValueError for what the user can mend; whatever ends a run that has begun, its state is saved first.
    """
    if jax.process_count() > 1:
        raise ValueError(f"{jax.process_count()} hosts: training runs on the devices of one host so far")
    with _own(workdir) as folder:
        return _train(config, folder, stop)


def _train(config: ConfigDict, workdir: pathlib.Path, stop: StopSignal) -> bool:
    # --- What the work directory holds: the config of a run that has begun is part of the experiment.
    checkpoints = Checkpoints(workdir, config)
    last_step = checkpoints.latest()
    if last_step is not None:
        old, progress = checkpoints.read(last_step)
        config_lib.check_resume(old, config)
    elif source := config.checkpoint.resume_from or config.checkpoint.init_from:
        check_same_model(source, config)

    # --- Mesh and data: what can be wrong with them is said before the model is compiled.
    mesh = make_mesh(config.parallel.strategy, tensor=config.parallel.tensor, replicas=config.parallel.replicas)
    num_rows = rows_per_shard(config.batch_size, mesh)
    dataset = make_dataset(config, "train")
    validation = make_dataset(config, "valid") if config.eval.every >= 0 else None
    if last_step is not None and progress.get("data", dataset.sizes) != dataset.sizes:
        raise ValueError(
            f"the data is not what this run began with: rows and tokens per source were {progress['data']}, now "
            f"{dataset.sizes}; another order would follow: bring the same data back, or use a new --workdir"
        )
    checkpoints.progress = {"data": dataset.sizes}
    baseline = ngram_baseline(dataset, validation, config) if config.eval.ngrams else None

    # --- Step. `auto` becomes the micro-batch that fits, confirmed by the compiler.
    if last_step is not None and config.micro_batch_size == "auto":
        if num_rows % old.micro_batch_size == 0:  # else: on other devices now
            config.micro_batch_size = old.micro_batch_size
    train_step, step_function = make_fitting_step(config, mesh)
    if stop.requested:
        return False  # nothing is computed yet that a checkpoint does not hold
    _write_atomically(workdir / "config.json", config_lib.to_json(config))

    # --- State, in this order: own checkpoint, resume_from, init_from, scratch.
    if last_step is not None:
        state, origin = checkpoints.restore(last_step, train_step.state), f"resumed at step {last_step}"
    elif config.checkpoint.resume_from:
        state, parent = restore_state(config.checkpoint.resume_from, train_step.state)
        origin = f"resumed {config.checkpoint.resume_from} at step {int(state.step)}"
        if changed := config_lib.differences(parent, config):
            origin += f" ({'; '.join(changed.values())})"
    elif config.checkpoint.init_from:
        state = train_step.init(load_weights(config.checkpoint.init_from, config, train_step.state.params))
        origin = f"started from the weights of {config.checkpoint.init_from}"
    else:
        state, origin = train_step.init(), "started from scratch"
    step = int(state.step)

    # --- Logs.
    log = MetricsLog(
        workdir,
        config,
        device_kind=mesh.devices.flat[0].device_kind,
        num_devices=mesh.size,
        resumed_at=last_step,
        process_index=jax.process_index(),
    )
    log.print(describe(config, train_step, dataset, origin))
    if baseline:
        log.print(baseline)

    # --- Loop. Step n is dispatched, then the metrics of step n - 1 are read while it runs.
    loader = Loader(
        dataset,
        lambda batch: place(batch, train_step),
        step,
        config.steps,
        own_rows(config.batch_size),
        interrupted=lambda: stop.requested,
    )
    unread, divergence, last_saved = collections.deque(), None, time.monotonic()

    def read_metrics(leave: int = 0) -> None:
        nonlocal divergence
        while len(unread) > leave:
            at, metrics = unread.popleft()
            metrics = {key: value.item() for key, value in jax.device_get(metrics).items()}
            log.record(at, metrics, time.perf_counter(), loader.seconds_waited)
            if 0 < config.run.max_bad_steps <= metrics["bad_steps"] and divergence is None:
                divergence = (
                    f"gradients were not finite for {metrics['bad_steps']} steps in a row, up to step {at} (loss "
                    f"{metrics['loss']}); their updates were skipped: look at the data, or lower "
                    "optimizer.learning_rate or lengthen schedule.warmup_steps in a new --workdir "
                    "(checkpoint.resume_from takes the state along); run.max_bad_steps says how many are borne"
                )

    try:
        if step == 0 and 0 in config.checkpoint.at_steps:
            checkpoints.save(0, state)
        if validation and step > 0 and _due(step, config.eval.every, config.steps):
            if not has_evaluation(workdir, step):  # cut short by the stop
                evaluate_and_log(train_step, state, validation, config, log, step, stop)
        while step < config.steps and not stop.requested and divergence is None:
            batch = next(loader, None)
            if batch is None:
                break  # stopped while it waited for input
            state, metrics = step_function(state, batch)
            step += 1
            checkpoints.check()
            unread.append((step, metrics))
            read_metrics(leave=1)

            evaluates = validation is not None and _due(step, config.eval.every, config.steps)
            saves = _save_due(step, config, last_saved)
            if evaluates or saves:
                read_metrics()
            if evaluates:
                evaluate_and_log(train_step, state, validation, config, log, step, stop)
            if saves:
                log.sync()
                checkpoints.save(step, state)
                last_saved = time.monotonic()
            if evaluates or saves:
                log.restart_clock(step, time.perf_counter())
    finally:
        # Reached by the end, a signal or an error alike: nothing that was computed is lost.
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(loader.close)
            cleanup.callback(log.close)
            cleanup.callback(checkpoints.close)
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):  # donated to a step that failed
                cleanup.callback(checkpoints.save, step, state)  # also if the log cannot be written
                read_metrics()
                log.sync()
    if divergence:
        raise ValueError(divergence)
    return not stop.requested


def evaluate_and_log(
    train_step: TrainStep,
    state: TrainState,
    validation: Dataset,
    config: ConfigDict,
    log: MetricsLog,
    step: int,
    stop: StopSignal,
) -> None:
    """The loss of the weights, then of each of their averages; all or, if `stop` came, nothing."""
    results = []
    has_averages = state.averages is not None and bool(state.averages.tokens.any())  # not while all steps were skipped
    for horizon in (None, *(config.average.horizons if has_averages else ())):
        result = evaluate(train_step, weights(state, horizon), validation, config.eval.max_tokens, stop)
        if result is None:
            return
        results.append((horizon, result))
    for horizon, result in results:
        if horizon is None:
            log.record_eval(step, "valid", **result.as_dict())
        else:
            log.record_eval(step, "valid_ewa", horizon=horizon, **result.as_dict())


def describe(config: ConfigDict, train_step: TrainStep, dataset: Dataset, origin: str) -> str:
    """What is about to run, in a few lines."""
    mesh, params = train_step.mesh, train_step.state.params
    device_kind, compute = mesh.devices.flat[0].device_kind, config.precision.compute
    parallel, num_tensor = config.parallel, mesh.shape["tensor"]
    choices = {"tensor": num_tensor, "remat": parallel.remat, "offload": parallel.offload}
    layout = [parallel.strategy, *(f"{key} {value}" for key, value in choices.items() if value not in (1, "none"))]
    shards = f"{num_data_shards(mesh)} " + ("devices" if num_tensor == 1 else f"groups of {num_tensor} devices")
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    is_image = config.model.family in IMAGE_FAMILIES
    rows, unit = ("images", "images") if is_image else ("sequences", "tokens")
    lines = [
        f"{origin}; {sum(param.size for param in jax.tree.leaves(params)):,} parameters, {compute}, "
        f"{mesh.size} x {device_kind}, {', '.join(layout)}" + (f" (mesh: {axes})" if mesh.size > 1 else ""),
        f"batch: {config.batch_size} {'images' if is_image else f'x {config.seq_len} tokens'} = {shards} x "
        f"{train_step.num_micro_batches} accumulation steps x {config.micro_batch_size} {rows}",
        f"data: {dataset.num_tokens:,} {unit}, {config.steps * config.batch_size / dataset.num_rows:.2f} epochs",
    ]
    if train_step.attention:
        lines.append(train_step.attention.why)
    if config.average.horizons:
        tokens_per_step = config.batch_size * config.seq_len
        spans = [f"{horizon:,} {unit} ({horizon / tokens_per_step:,.0f} steps)" for horizon in config.average.horizons]
        lines.append(f"averages of the weights, over {', '.join(spans)}")
    if whole := train_step.strategy.unsharded(infos(registry.build(config)), params):
        sizes = ", ".join(f"{path} ({size:,} bytes on each)" for path, size in whole.items())
        lines.append(f"held by more devices than need be, as their dims do not divide: {sizes}")
    if config.seq_len > 1 and config.seq_len % num_tensor:
        lines.append(f"seq_len={config.seq_len} does not divide by parallel.tensor={num_tensor}: no sequence is split")
    accelerator = hardware.find(device_kind)
    if accelerator and accelerator.peak_flops(compute, config.precision.matmul) is None:
        lines.append(
            f"warning: a {accelerator.name} has no matrix units for {compute} and will be slow; see precision.compute"
        )
    return "\n".join(lines)


@contextlib.contextmanager
def _own(workdir: str) -> Iterator[pathlib.Path]:
    """The work directory, created, tried by writing in it, and locked against a second process.

    Raises ValueError if any of these fails or it holds a Hugging Face model.
    """
    if "://" in workdir:
        raise ValueError(f"--workdir={workdir} is not a local directory: name one, on a disk that all restarts see")
    path = pathlib.Path(workdir)
    if huggingface_config.is_folder(path):  # its config.json would be overwritten
        raise ValueError(
            f"--workdir={workdir} is a Hugging Face model: name another directory, and this one as checkpoint.init_from"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / ".lock", "w")
    except OSError as error:
        raise ValueError(f"--workdir={workdir} cannot be written: {error.strerror}; choose another") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--workdir={workdir} is in use by another process; wait for it or stop it") from None
        except OSError as error:  # a file system without locks
            print(f"warning: {workdir} cannot be locked ({error.strerror}); start one process there", file=sys.stderr)
        yield path


def _write_atomically(path: pathlib.Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _save_due(step: int, config: ConfigDict, last_saved: float) -> bool:
    c = config.checkpoint
    elapsed_minutes = (time.monotonic() - last_saved) / 60
    return (
        _due(step, c.every, config.steps)
        or step in c.at_steps
        or (c.every_minutes > 0 and elapsed_minutes >= c.every_minutes)
    )
