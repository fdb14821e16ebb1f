"""Signals as a flag that the training loop reads."""

import os
import signal
import threading
from typing import Any

EXIT_INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


class StopSignal:
    """A context in which SIGTERM and the first Ctrl-C set `requested`; a second Ctrl-C ends the process at once.

    A thread reads the signals from a pipe. Python's own handlers would wait until the main thread comes back from
    C++, where it compiles for minutes, and could break into a print.
    """

    def __init__(self):
        self.requested = False

    def __enter__(self) -> "StopSignal":
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # as set_wakeup_fd asks
        threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True).start()
        self._previous_fd = signal.set_wakeup_fd(self._writing)
        self._previous = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: Any) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._writing)

    def _watch(self, reading: int) -> None:
        while received := os.read(reading, 1):
            if received[0] == signal.SIGINT and self.requested:
                os._exit(EXIT_INTERRUPTED)
            if received[0] in (signal.SIGINT, signal.SIGTERM) and not self.requested:
                self.requested = True
                print("\nstopping after this step; the state will be saved (Ctrl-C again: quit at once)", flush=True)
        os.close(reading)
