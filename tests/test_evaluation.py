"""Evaluations with nothing to evaluate."""

import types

import numpy as np
import pytest

from jaxpretrain import evaluation


def test_an_evaluation_without_targets_names_the_keys(monkeypatch):
    """A mask so thin that no row of the validation split has one. Seen to fail: a division by zero at the run's end."""
    train_step = types.SimpleNamespace(
        eval_batch_size=2, evaluate=lambda params, batch: {"loss": np.float32(0), "targets": np.float32(0)}
    )
    monkeypatch.setattr(evaluation, "place", lambda batch, train_step: batch)
    monkeypatch.setattr(evaluation, "eval_batches", lambda *args: (batch for batch in [{}]))
    with pytest.raises(ValueError, match=r"^eval\.max_tokens=24: .*objective\.mask_fraction$"):
        evaluation.evaluate(train_step, None, None, max_tokens=24)
