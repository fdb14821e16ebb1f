"""Batches read by threads, several at once, and handed over in order."""

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any


def read_ahead(read: Callable[[int], Any], start: int, stop: int, count: int) -> Iterator[Any]:
    """`read(i)` for i from `start` to `stop` - 1, in order, `count` of them at a time.

    What `read` raises is raised where i would come. Closing the iterator waits for the reads that have begun.
    """
    reading, todo = collections.deque(), iter(range(start, stop))
    try:
        while True:
            while len(reading) < count and (i := next(todo, None)) is not None:
                reading.append(_Read(read, i))
            if not reading:
                return
            yield reading.popleft().result()
    finally:
        for one in reading:
            one.join()


class _Read(threading.Thread):
    """One batch on its way. A daemon: the end of the process would wait for the threads of an executor."""

    def __init__(self, read: Callable[[int], Any], i: int):
        super().__init__(name="reader", daemon=True)
        self._arguments, self._batch, self._error = (read, i), None, None
        self.start()

    def run(self) -> None:
        read, i = self._arguments
        try:
            self._batch = read(i)
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join()
        if self._error is not None:
            raise self._error
        return self._batch
