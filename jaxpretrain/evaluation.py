"""Batches onto the devices, and the loss of a validation split."""

import math
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpretrain.data.dataset import Dataset
from jaxpretrain.data.ngrams import MAX_TRAIN_TOKENS, held_out_entropies
from jaxpretrain.signals import StopSignal
from jaxpretrain.step import Batch, TrainStep


def place(batch: dict[str, np.ndarray], train_step: TrainStep) -> Batch:
    """This host's rows of a batch -> the global array on the mesh's devices."""
    sharding = train_step.batch["tokens"].sharding
    return {key: jax.make_array_from_process_local_data(sharding, rows) for key, rows in batch.items()}


def own_rows(batch_size: int) -> slice:
    """The rows of a global batch that this host reads."""
    per_host = batch_size // jax.process_count()
    return slice(jax.process_index() * per_host, (jax.process_index() + 1) * per_host)


def evaluate(
    train_step: TrainStep, params: Any, validation: Dataset, max_tokens: int = 0, stop: StopSignal | None = None
) -> tuple[float, int] | None:
    """Mean loss, nats per token, over the validation split or its first rows, and the number of tokens.

    Every token counts once: batches are filled up with rows that are masked. `max_tokens`, if not 0, is rounded up to
    whole rows, whatever the micro-batch and the devices. None if `stop` came.
    """
    size = train_step.eval_batch_size
    rows, sums = own_rows(size), []
    for i in range(num_eval_batches(validation, size, max_tokens)):
        if stop and stop.requested:
            return None
        batch = place(eval_batch(validation, i, size, max_tokens, rows), train_step)
        sums.append(train_step.evaluate(params, batch))
        if i >= 2:  # two batches in flight: the host does not run ahead and fill the device's memory
            jax.block_until_ready(sums[i - 2])
    losses, counts = np.array(jax.device_get(sums), np.float64).T
    return float(losses.sum() / counts.sum()), int(counts.sum())


def eval_batch(
    validation: Dataset, i: int, batch_size: int, max_tokens: int, rows: slice = slice(None)
) -> dict[str, np.ndarray]:
    """Batch `i` of an evaluation; rows past `max_tokens` are padding."""
    batch = validation.eval_batch(i, batch_size, rows)
    if max_tokens:
        index = i * batch_size + np.arange(batch_size)[rows]
        batch["segment_ids"][index >= math.ceil(max_tokens / validation.seq_len)] = 0
    return batch


def num_eval_batches(validation: Dataset, batch_size: int, max_tokens: int) -> int:
    num_batches = validation.num_batches(batch_size)
    if not max_tokens:
        return num_batches
    return min(num_batches, math.ceil(math.ceil(max_tokens / validation.seq_len) / batch_size))


def ngram_baseline(train: Dataset, validation: Dataset, config: ConfigDict) -> str:
    """Unigram and bigram entropies of the tokens that `evaluate` sees, counted on the first epoch of training."""
    size, max_tokens = config.batch_size, config.eval.max_tokens
    batches = [
        eval_batch(validation, i, size, max_tokens) for i in range(num_eval_batches(validation, size, max_tokens))
    ]
    valid = np.concatenate([batch["tokens"][batch["segment_ids"] > 0] for batch in batches])
    num_steps = max(1, min(train.num_rows, MAX_TRAIN_TOKENS // config.seq_len) // config.batch_size)
    counted = np.concatenate([train.batch(step)["tokens"].ravel() for step in range(num_steps)])
    unigram, bigram = held_out_entropies(counted, valid, config.model.vocab_size)
    return f"held-out entropy, nats per token: unigram {unigram:.4f}, bigram {bigram:.4f}"
