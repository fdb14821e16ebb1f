"""Batches onto the devices, and the loss of a validation split."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
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
    sharding = next(iter(train_step.batch.values())).sharding
    return {key: jax.make_array_from_process_local_data(sharding, rows) for key, rows in batch.items()}


def own_rows(batch_size: int) -> slice:
    """The rows of a global batch that this host reads."""
    per_host = batch_size // jax.process_count()
    return slice(jax.process_index() * per_host, (jax.process_index() + 1) * per_host)


@dataclasses.dataclass(frozen=True)
class Result:
    """Of an evaluation: nats per target, how many targets, and, of images, the part whose likeliest class is right."""

    loss: float
    eval_tokens: int
    accuracy: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Without what does not apply."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


def evaluate(
    train_step: TrainStep, params: Any, validation: Dataset, max_tokens: int = 0, stop: StopSignal | None = None
) -> Result | None:
    """Over the validation split or its first rows.

    Everything counts once: batches are filled up with rows that are masked. `max_tokens`, if not 0, is rounded up to
    whole rows, whatever the micro-batch and the devices. None if `stop` came.
    """
    size = train_step.eval_batch_size
    with contextlib.closing(eval_batches(validation, size, max_tokens, own_rows(size))) as batches:
        sums = []
        for i, batch in enumerate(batches):
            if stop and stop.requested:
                return None
            sums.append(train_step.evaluate(params, place(batch, train_step)))
            if i >= 2:  # two batches in flight: the host does not run ahead and fill the device's memory
                jax.block_until_ready(sums[i - 2])
    sums = jax.device_get(sums)
    total = {key: float(np.sum([batch[key] for batch in sums], dtype=np.float64)) for key in sums[0]}
    if not total["targets"]:
        raise ValueError(
            f"eval.max_tokens={max_tokens}: nothing in the rows that are evaluated is to be predicted; raise it, or "
            "objective.mask_fraction"
        )
    accuracy = total["correct"] / total["targets"] if "correct" in total else None
    return Result(total["loss"] / total["targets"], int(total["targets"]), accuracy)


def eval_batches(
    validation: Dataset, batch_size: int, max_tokens: int, rows: slice = slice(None)
) -> Iterator[dict[str, np.ndarray]]:
    """The batches of an evaluation; rows past `max_tokens` are padding."""
    num_batches, num_rows = validation.num_batches(batch_size), math.ceil(max_tokens / validation.seq_len)
    if max_tokens:
        num_batches = min(num_batches, math.ceil(num_rows / batch_size))
    with contextlib.closing(validation.eval_batches(num_batches, batch_size, rows)) as batches:
        for i, batch in enumerate(batches):
            if max_tokens:
                unread = i * batch_size + np.arange(batch_size)[rows] >= num_rows
                for key, padding in (("segment_ids", 0), ("targets", -1), ("labels", -1)):
                    if key in batch:
                        batch[key][unread] = padding
            yield batch


def ngram_baseline(train: Dataset, validation: Dataset, config: ConfigDict) -> str:
    """Unigram and bigram entropies of the tokens that `evaluate` sees, counted on the first epoch of training.

    Of a masked language model the unigram's, of the tokens to predict: what can be said without context.
    """
    batches = list(eval_batches(validation, config.batch_size, config.eval.max_tokens))
    num_steps = max(1, min(train.num_rows, MAX_TRAIN_TOKENS // config.seq_len) // config.batch_size)
    if config.model.family == "encoder":
        # The targets of training are a sample of its tokens.
        counted = np.concatenate([train.batch(step)["targets"].ravel() for step in range(num_steps)])
        valid = np.concatenate([batch["targets"].ravel() for batch in batches])
        unigram, _ = held_out_entropies(counted[counted >= 0], valid[valid >= 0], config.model.vocab_size)
        return f"held-out entropy, nats per masked token: unigram {unigram:.4f}"
    valid = np.concatenate([batch["tokens"][batch["segment_ids"] > 0] for batch in batches])
    counted = np.concatenate([train.batch(step)["tokens"].ravel() for step in range(num_steps)])
    unigram, bigram = held_out_entropies(counted, valid, config.model.vocab_size)
    return f"held-out entropy, nats per token: unigram {unigram:.4f}, bigram {bigram:.4f}"
