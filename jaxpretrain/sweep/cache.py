"""Trials on disk: one file each, keyed by what the measurement depends on; `trials.jsonl` is derived from them."""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]


class Trials:
    """Of a work directory. Several sweeps may share it: files are written aside and renamed, trials claimed."""

    def __init__(self, workdir: str, machine: dict[str, Any]):
        """`machine`: of `trial.probe`. Raises ValueError if the directory cannot be written."""
        self._workdir, self._machine, self._code = pathlib.Path(workdir), machine, code_version()
        self._folder, self.num_devices = self._workdir / "trials", machine["num_devices"]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--workdir={workdir} cannot be written: {error.strerror}; choose another") from error

    def key(self, config_json: str) -> str:
        """Of the resolved config, the code, the versions and the devices."""
        content = json.dumps([json.loads(config_json), self._code, self._machine], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def get(self, key: str) -> dict[str, Any] | None:
        try:
            return json.loads((self._folder / f"{key}.json").read_text())
        except FileNotFoundError:
            return None

    def put(self, key: str, trial: dict[str, Any]) -> None:
        aside = self._folder / f"{key}.{socket.gethostname()}.{os.getpid()}"
        aside.write_text(json.dumps(trial))
        os.replace(aside, self._folder / f"{key}.json")
        self.release(key)
        self._write_lines()

    def forget(self, key: str) -> None:
        (self._folder / f"{key}.json").unlink(missing_ok=True)

    def claim(self, key: str, seconds: float) -> bool:
        """Whether this process may run the trial: no other that lives has claimed it within the time it may take."""
        file = self._folder / f"{key}.claim"
        try:
            if time.time() - file.stat().st_mtime > seconds or _is_dead(file.read_text()):
                file.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        try:
            with open(file, "x") as claimed:
                claimed.write(f"{socket.gethostname()} {os.getpid()}")
        except FileExistsError:
            return False
        return True

    def release(self, key: str) -> None:
        (self._folder / f"{key}.claim").unlink(missing_ok=True)

    def all(self) -> list[dict[str, Any]]:
        """In the order in which they ended."""
        trials = [json.loads(file.read_text()) for file in self._folder.glob("*.json")]
        return sorted(trials, key=lambda trial: trial["ended"])

    def _write_lines(self) -> None:
        aside = self._workdir / f"trials.jsonl.{socket.gethostname()}.{os.getpid()}"
        aside.write_text("".join(json.dumps(trial) + "\n" for trial in self.all()))
        os.replace(aside, self._workdir / "trials.jsonl")


@contextlib.contextmanager
def devices_of_this_host(workdir: str) -> Iterator[None]:
    """Held while trials run: two sweeps on the same devices would measure each other.

    Sweeps on other hosts, or on other devices of this one by CUDA_VISIBLE_DEVICES, go on. Raises ValueError if taken.
    """
    visible = "".join(c for c in os.environ.get("CUDA_VISIBLE_DEVICES", "all") if c.isalnum() or c in "-,")
    with open(pathlib.Path(workdir) / f".lock-{socket.gethostname()}-{visible}", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--workdir={workdir}: another sweep measures on these devices; wait for it or stop it"
            ) from None
        except OSError as error:  # a file system without locks
            print(
                f"warning: {workdir} cannot be locked ({error.strerror}); start one sweep on each host", file=sys.stderr
            )
        yield


def _is_dead(owner: str) -> bool:
    """Whether the process of a claim is one of this host that has ended; of other hosts nothing is known."""
    host, _, pid = owner.partition(" ")
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def code_version() -> str:
    """Of what a step is made of: the package's files."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(str(file.relative_to(_PACKAGE)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
