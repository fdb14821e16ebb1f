"""What signals do to a program that is busy in C."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxpretrain.signals import EXIT_INTERRUPTED

# Hours in one call that runs no Python, as a compilation does.
BUSY = """
import hashlib
from jaxpretrain.signals import StopSignal

with StopSignal() as stop:
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.fixture
def busy():
    root = pathlib.Path(__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", BUSY], cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_second_interrupt_quits_at_once(busy, first):
    """Seen to fail with handlers that Python runs, in the place of the thread: they would wait for the call to end."""
    for signum in (first, signal.SIGTERM, signal.SIGINT):  # a second SIGTERM changes nothing
        assert busy.poll() is None
        busy.send_signal(signum)
        time.sleep(0.2)  # or two of a kind become one
    out, _ = busy.communicate(timeout=60)
    assert busy.returncode == EXIT_INTERRUPTED
    assert out.count("Ctrl-C again") == 1
