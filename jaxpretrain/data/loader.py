"""Batches read and placed on the devices ahead of their use, by one thread."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxpretrain.data.dataset import Dataset

_CLOSE_TIMEOUT = 5.0  # seconds that `close` waits for reads to end
_PLACED_AHEAD = 2  # placed batches that wait: the next one, and one more for steps of uneven length


class Loader:
    """Iterates over `place(dataset.batch(step, rows))` for steps `start_step` ... `stop_step` - 1.

    A thread takes `dataset.batches`, which may read several ahead, and places them. What it raises
    is raised where the batch is asked for; while `interrupted()` and no batch is there yet, the iteration ends.
    `seconds_waited`: the time that iteration has waited for a batch so far.
    Use as a context manager or call `close()`, which joins the threads but for those that hang in a read; these do not
    keep the process from ending.
    """

    def __init__(
        self,
        dataset: Dataset,
        place: Callable[[dict], Any],
        start_step: int,
        stop_step: int,
        rows: slice = slice(None),
        interrupted: Callable[[], bool] = lambda: False,
    ):
        self.seconds_waited = 0.0
        self._next, self._stop_step, self._interrupted = start_step, stop_step, interrupted
        self._placed: queue.Queue = queue.Queue(_PLACED_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(dataset, place, rows), name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next >= self._stop_step or self._closed.is_set():
            raise StopIteration
        start = time.perf_counter()
        while True:
            try:
                batch, error = self._placed.get(timeout=0.5)
                break
            except queue.Empty:
                if self._interrupted():
                    raise StopIteration from None
        self.seconds_waited += time.perf_counter() - start
        if error is not None:
            self.close()
            raise error
        self._next += 1
        return batch

    def close(self) -> None:
        self._closed.set()
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        while self._thread.is_alive() and time.monotonic() < deadline:  # it may be waiting to hand over a batch
            try:
                self._placed.get_nowait()
            except queue.Empty:
                pass
            self._thread.join(0.01)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _run(self, dataset: Dataset, place: Callable[[dict], Any], rows: slice) -> None:
        try:
            with contextlib.closing(dataset.batches(self._next, self._stop_step, rows)) as batches:
                for batch in batches:
                    self._placed.put((place(batch), None))
                    if self._closed.is_set():
                        return
        except BaseException as error:  # whatever it is, the caller must see it
            self._placed.put((None, error))
