"""The small recipes learn, on this CPU, more than what takes no network: as a user runs them, minutes each."""

import json
import subprocess
import sys

import numpy as np
import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.data.dataset import make_dataset


def train(recipe: str, workdir) -> tuple[dict, str]:
    """The last evaluation, and what was printed."""
    command = [sys.executable, "-m", "jaxpretrain.main", f"--config=configs/{recipe}.py", f"--workdir={workdir}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == "valid"][-1], result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "baseline"), [("tiny_mamba", "bigram "), ("tiny_roberta", "unigram ")])
def test_text(tmp_path, recipe, baseline):
    """Below the held-out entropy that is printed at the start."""
    evaluation, out = train(recipe, tmp_path)
    entropy = float(out.split(baseline)[1].split()[0].rstrip(","))
    assert evaluation["loss"] < entropy - 0.1


def pixels(config, split: str) -> tuple[np.ndarray, np.ndarray]:
    dataset = make_dataset(config, split)
    batches = [dataset.eval_batch(i, 100) for i in range(dataset.num_batches(100))]
    labels = np.concatenate([batch["labels"][:, 0] for batch in batches])
    images = np.concatenate([batch["images"] for batch in batches]).reshape(len(labels), -1) / 255.0
    return images[labels >= 0], labels[labels >= 0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny_vit", "tiny_convnext"])
def test_digits(tmp_path, recipe):
    """At least 2 points above logistic regression on the same images, at its best regularisation for them."""
    from sklearn import linear_model

    config = config_lib.load("configs/tiny_vit.py")
    train_set, valid_set = pixels(config, "train"), pixels(config, "valid")
    models = [linear_model.LogisticRegression(C=c, max_iter=1000).fit(*train_set) for c in (0.03, 0.1, 0.3)]
    baseline = max(model.score(*valid_set) for model in models)
    evaluation, _ = train(recipe, tmp_path)
    assert evaluation["accuracy"] >= baseline + 0.02
