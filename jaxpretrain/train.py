"""The training loop, read top to bottom."""

import collections
import math
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpretrain import config as config_lib
from jaxpretrain.checkpoint import Checkpoints, restore_params, restore_state
from jaxpretrain.data.dataset import Dataset, make_dataset
from jaxpretrain.data.loader import Loader
from jaxpretrain.data.ngrams import MAX_TRAIN_TOKENS, held_out_entropies
from jaxpretrain.interop import huggingface, huggingface_config
from jaxpretrain.metrics import MetricsLog
from jaxpretrain.parallel.mesh import make_mesh, num_data_shards
from jaxpretrain.parallel.micro_batch import make_fitting_step
from jaxpretrain.signals import StopSignal
from jaxpretrain.step import Batch, TrainStep


def train(config: ConfigDict, workdir: str, stop: StopSignal) -> bool:
    """Trains until `steps`, from where the work directory stands. False if `stop` ended it, after saving.

    Raises ValueError for what the user can mend; whatever ends a run that has begun, its state is saved first.
    """
    # --- Work directory: the config of a run that has begun is part of the experiment.
    workdir = prepare_workdir(workdir)
    saved = workdir / "config.json"
    checkpoints = Checkpoints(workdir, config)
    last_step = checkpoints.latest()
    if last_step is not None:
        old = config_lib.from_json(saved.read_text())
        config_lib.check_resume(old, config)

    # --- Data: what can be wrong with it is said before the model is compiled.
    dataset = make_dataset(config, "train")
    validation = make_dataset(config, "valid") if config.eval.every >= 0 else None

    # --- Mesh and step. `auto` becomes the micro-batch that fits, confirmed by the compiler.
    mesh = make_mesh(config.parallel.strategy)
    if last_step is not None and config.micro_batch_size == "auto":
        if config.batch_size % (num_data_shards(mesh) * old.micro_batch_size) == 0:  # else: on other devices now
            config.micro_batch_size = old.micro_batch_size
    train_step, step_function = make_fitting_step(config, mesh)
    if stop.requested:
        return False  # nothing is computed yet that a checkpoint does not hold
    _write_atomically(saved, config_lib.to_json(config))

    # --- State, in this order: own checkpoint, resume_from, init_from, scratch.
    if last_step is not None:
        state, origin = checkpoints.restore(last_step, train_step.state), f"resumed at step {last_step}"
    elif config.checkpoint.resume_from:
        state = restore_state(config.checkpoint.resume_from, train_step.state)
        origin = f"resumed {config.checkpoint.resume_from} at step {int(state.step)}"
    else:
        state, origin = train_step.init(), "started from scratch"
        if config.checkpoint.init_from:
            state.params = load_params(config.checkpoint.init_from, config, train_step)
            origin = f"started from the weights of {config.checkpoint.init_from}"
    first_step = int(state.step)

    # --- Logs.
    device = mesh.devices.flat[0]
    log = MetricsLog(
        workdir,
        config,
        device_kind=device.device_kind,
        num_devices=mesh.size,
        resumed_at=last_step,
        process_index=jax.process_index(),
    )
    log.print(describe(config, train_step, origin))
    if config.eval.ngrams:
        log.print(ngram_baseline(dataset, validation, config, train_step))

    # --- Loop. Step n is dispatched, then the metrics of step n - 1 are read while it runs.
    rows = _own_rows(config.batch_size)
    loader = Loader(dataset, lambda batch: place(batch, train_step), first_step, config.steps, rows)
    step, unread, divergence, last_saved = first_step, collections.deque(), None, time.monotonic()

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
        if validation and step > 0 and _due(step, config.eval.every, config.steps) and not log.has_evaluation(step):
            evaluate_and_log(train_step, state.params, validation, config, log, step, stop)  # cut short by the stop
        while step < config.steps and not stop.requested and divergence is None:
            state, metrics = step_function(state, next(loader))
            step += 1
            checkpoints.check()
            unread.append((step, metrics))
            read_metrics(leave=1)

            evaluates = validation is not None and _due(step, config.eval.every, config.steps)
            saves = _save_due(step, config, last_saved)
            if evaluates or saves:
                read_metrics()
            if evaluates:
                evaluate_and_log(train_step, state.params, validation, config, log, step, stop)
            if saves:
                log.sync()
                checkpoints.save(step, state)
                last_saved = time.monotonic()
            if evaluates or saves:
                log.restart_clock(step, time.perf_counter())
    finally:
        # Reached by the end, a signal or an error alike: nothing that was computed is lost.
        loader.close()
        try:
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):  # donated to a step that failed
                read_metrics()
                log.sync()
                checkpoints.save(step, state)
        finally:
            checkpoints.close()
            log.close()
    if divergence:
        raise ValueError(divergence)
    return not stop.requested


def evaluate(
    train_step: TrainStep, params: Any, validation: Dataset, max_tokens: int = 0, stop: StopSignal | None = None
) -> tuple[float, int] | None:
    """Mean loss, nats per token, over the validation split or its first `max_tokens`, and the number of tokens.

    Every token counts once: rows are padded to whole batches and the padding is masked. None if `stop` came.
    """
    batch_size = train_step.eval_batch_size
    rows = _own_rows(batch_size)
    sums = []
    for i in range(_num_eval_batches(validation, batch_size, max_tokens)):
        if stop and stop.requested:
            return None
        batch = place(validation.eval_batch(i, batch_size, rows), train_step)
        sums.append(train_step.evaluate(params, batch))
        if i >= 2:  # two batches in flight: the host does not run ahead and fill the device's memory
            jax.block_until_ready(sums[i - 2])
    losses, counts = np.array(jax.device_get(sums), np.float64).T
    return float(losses.sum() / counts.sum()), int(counts.sum())


def evaluate_and_log(
    train_step: TrainStep,
    params: Any,
    validation: Dataset,
    config: ConfigDict,
    log: MetricsLog,
    step: int,
    stop: StopSignal,
) -> None:
    result = evaluate(train_step, params, validation, config.eval.max_tokens, stop)
    if result:
        log.record_eval(step, "valid", result[0], eval_tokens=result[1])


def ngram_baseline(train: Dataset, validation: Dataset, config: ConfigDict, train_step: TrainStep) -> str:
    """Unigram and bigram entropies of the tokens that `evaluate` sees, counted on the first epoch of training."""
    size = train_step.eval_batch_size
    num_batches = _num_eval_batches(validation, size, config.eval.max_tokens)
    valid = [validation.eval_batch(i, size) for i in range(num_batches)]
    valid = np.concatenate([batch["tokens"][batch["segment_ids"] > 0] for batch in valid])
    num_steps = max(1, min(train.num_rows, MAX_TRAIN_TOKENS // config.seq_len) // config.batch_size)
    counted = np.concatenate([train.batch(step)["tokens"].ravel() for step in range(num_steps)])
    unigram, bigram = held_out_entropies(counted, valid, config.model.vocab_size)
    return f"held-out entropy, nats per token: unigram {unigram:.4f}, bigram {bigram:.4f}"


def _num_eval_batches(validation: Dataset, batch_size: int, max_tokens: int) -> int:
    num_batches = validation.num_batches(batch_size)
    return min(num_batches, math.ceil(max_tokens / (batch_size * validation.seq_len))) if max_tokens else num_batches


def _own_rows(batch_size: int) -> slice:
    """The rows of a global batch that this host reads."""
    per_host = batch_size // jax.process_count()
    return slice(jax.process_index() * per_host, (jax.process_index() + 1) * per_host)


def place(batch: dict[str, np.ndarray], train_step: TrainStep) -> Batch:
    """This host's rows of a batch -> the global array on the mesh's devices."""
    sharding = train_step.batch["tokens"].sharding
    return {key: jax.make_array_from_process_local_data(sharding, rows) for key, rows in batch.items()}


def load_params(source: str, config: ConfigDict, train_step: TrainStep) -> Any:
    """The weights of a work directory or a Hugging Face folder, laid out for `train_step`."""
    if huggingface_config.is_folder(source):
        return huggingface.load_params(source, config, like=train_step.state.params)
    return restore_params(source, like=train_step.state.params)[0]


def describe(config: ConfigDict, train_step: TrainStep, origin: str) -> str:
    """What is about to run, in a few lines."""
    mesh = train_step.mesh
    num_params = sum(param.size for param in jax.tree.leaves(train_step.state.params))
    device_kind = mesh.devices.flat[0].device_kind
    lines = [
        f"{origin}; {num_params:,} parameters, {config.precision.compute}, {mesh.size} x {device_kind}, "
        f"{config.parallel.strategy}",
        f"batch: {config.batch_size} x {config.seq_len} tokens = {mesh.size} devices x {train_step.num_micro_batches} "
        f"accumulation steps x {config.micro_batch_size} sequences",
        train_step.attention.why,
    ]
    unsharded = train_step.strategy.unsharded()
    if unsharded:
        lines.append(f"held whole by every device, as no dim divides by {mesh.shape['fsdp']}: {', '.join(unsharded)}")
    return "\n".join(lines)


def prepare_workdir(workdir: str) -> pathlib.Path:
    """Creates the directory and tries to write in it. Raises ValueError if either fails or it holds a model."""
    path = pathlib.Path(workdir)
    if huggingface_config.is_folder(path):  # its config.json would be overwritten
        raise ValueError(
            f"--workdir={workdir} is a Hugging Face model: name another directory, and this one as checkpoint.init_from"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--workdir={workdir} cannot be written: {error.strerror}; choose another") from error
    return path


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
