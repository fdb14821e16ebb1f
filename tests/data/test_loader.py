import threading
import time

import numpy as np
import pytest

from jaxpretrain.data.dataset import Dataset
from jaxpretrain.data.loader import Loader


class Steps(Dataset):
    """A dataset whose batch of step i is i, and that fails where told to."""

    def __init__(self, read_ahead=1, fail_at=None):
        self.read_ahead, self.fail_at, self.read = read_ahead, fail_at, []

    def batch(self, step, rows=slice(None)):
        if step == self.fail_at:
            raise ValueError(f"bad token at step {step}")
        time.sleep(0.001 * (step % 3))
        self.read.append(step)
        return {"tokens": np.arange(8)[rows] + 100 * step}


@pytest.mark.parametrize("read_ahead", [1, 4])
def test_order_placement_and_end(read_ahead):
    """Mutation seen to fail: `popleft` -> `pop` (with read_ahead=4)."""
    with Loader(Steps(read_ahead), lambda batch: -batch["tokens"], 5, 30, slice(2, 4)) as loader:
        batches = list(loader)
        assert [b.tolist() for b in batches] == [[-100 * s - 2, -100 * s - 3] for s in range(5, 30)]
        assert next(loader, None) is None
        assert loader.seconds_waited > 0


def test_reads_ahead_but_not_without_end():
    """Mutation seen to fail: an unbounded queue."""
    dataset = Steps()
    with Loader(dataset, lambda batch: batch, 0, 1000) as loader:
        next(loader)
        deadline = time.monotonic() + 10
        while len(dataset.read) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert 4 <= len(dataset.read) <= 6


@pytest.mark.parametrize("read_ahead", [1, 4])
def test_errors_surface_in_order(read_ahead):
    """Mutation seen to fail: the `except` that hands the error over (the caller then waits for ever)."""
    loader = Loader(Steps(read_ahead, fail_at=3), lambda batch: batch, 0, 10)
    assert [next(loader)["tokens"][0] for _ in range(3)] == [0, 100, 200]
    with pytest.raises(ValueError, match="bad token at step 3"):
        next(loader)
    assert next(loader, None) is None
    loader.close()


def test_errors_of_placement_surface():
    def place(batch):
        raise RuntimeError("out of memory")

    with Loader(Steps(), place, 0, 10) as loader:
        with pytest.raises(RuntimeError, match="out of memory"):
            next(loader)


def test_close_joins_whatever_the_thread_does():
    before = threading.active_count()
    for consumed in (0, 1, 3):
        loader = Loader(Steps(4), lambda batch: batch, 0, 1_000_000)
        for _ in range(consumed):
            next(loader)
        loader.close()
        loader.close()
        assert next(loader, None) is None
    assert threading.active_count() == before


def test_no_steps():
    with Loader(Steps(), lambda batch: batch, 7, 7) as loader:
        assert list(loader) == []
