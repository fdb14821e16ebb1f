"""Bytes of local and remote files by range: memory maps, and TensorStore's key-value store for URLs.

A path without "://" is local. `gs://bucket/key` (and `s3://`, `http://`, `file://`, `memory://`) is read by byte
ranges, many in flight at once; nothing is ever downloaded whole unless it is asked for whole.
"""

import collections
import concurrent.futures
import fnmatch
import functools
import glob
import os
from collections.abc import Sequence

import numpy as np
import tensorstore as ts

_CHUNK = 8 << 20  # bytes of one request of a long read: long enough to hide the latency of an object store
_IN_FLIGHT = 8  # requests of a long read at once
_RETRIES = 8  # with growing pauses, some two minutes; TensorStore's own 32 look like a hang where nothing answers
_PROBES = 7  # one-byte requests at once, when the size of a remote file is searched
_SIZES_AT_ONCE = 16  # files whose sizes are searched at once
_CONCURRENCY = 128  # requests at once over all files: rows are small, so latency is what is hidden


class MissingFile(ValueError):
    """There is no file of that name."""


def is_remote(path: str) -> bool:
    return "://" in path


def list_files(paths: str, suffixes: Sequence[str] = ("",)) -> list[str]:
    """Files that `paths` names: a file, a folder (searched recursively) or a glob; several with commas.

    Folders and globs are sorted by name and keep only names that end in one of `suffixes`.
    Raises ValueError naming the part of `paths` that matches nothing.
    """
    files = []
    for part in filter(None, (p.strip() for p in paths.split(","))):
        found = _list_remote(part, suffixes) if is_remote(part) else _list_local(part, suffixes)
        if not found:
            wanted = " or ".join(s for s in suffixes if s)
            raise MissingFile(f"{part}: no such file" + (f", nor files there that end in {wanted}" if wanted else ""))
        files += found
    return files


def exists(path: str) -> bool:
    """Whether there is a file of exactly this name."""
    if not is_remote(path):
        return os.path.isfile(path)
    return _probe(_open_url(path), path, 0) is not None


def read_file(path: str) -> bytes:
    """The whole of a file. Raises ValueError if it is missing."""
    file = Files([path])
    return file.read(0, file.size).tobytes()


class Files:
    """Files laid end to end, addressed by byte.

    Attributes: `paths`; `starts`, int64 [num_files + 1], the address of each file's first byte, then the total;
    `size`, bytes; `remote`, whether any byte comes over a network.
    Raises ValueError naming the first file that is missing or may not be read.
    """

    def __init__(self, paths: Sequence[str]):
        self.paths = list(paths)
        self._parts = [_open_url(path) if is_remote(path) else _map(path) for path in self.paths]
        with concurrent.futures.ThreadPoolExecutor(_SIZES_AT_ONCE) as pool:
            sizes = list(pool.map(_size, self._parts, self.paths))
        self.starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self.size = int(self.starts[-1])
        self.remote = any(map(is_remote, self.paths))

    def locate(self, address: int) -> tuple[str, int]:
        """The file that holds the byte at `address`, and the byte's offset in it."""
        part = int(np.searchsorted(self.starts, address, "right")) - 1
        return self.paths[part], address - int(self.starts[part])

    def read(self, address: int, length: int) -> np.ndarray:
        """uint8 [length] from `address`; remote ranges in pieces, a few in flight."""
        edges = range(address, address + length, _CHUNK)
        if not self.remote or len(edges) <= 1:
            return self.read_many([address], [length])[0]
        out = np.empty(length, np.uint8)
        waiting = collections.deque()
        for edge in [*edges, *[None] * _IN_FLIGHT]:
            if edge is not None:
                waiting.append((edge, self._start(edge, min(_CHUNK, address + length - edge), None)))
            if waiting and (edge is None or len(waiting) >= _IN_FLIGHT):
                done, pieces = waiting.popleft()
                data = self._finish(pieces)
                out[done - address : done - address + data.size] = data
        return out

    def read_many(self, addresses: Sequence[int], lengths: Sequence[int]) -> list[np.ndarray]:
        """uint8 arrays of the given lengths; remote ranges all requested at once, neighbours merged."""
        batch = ts.Batch() if self.remote else None
        started = [self._start(int(a), int(n), batch) for a, n in zip(addresses, lengths, strict=True)]
        if batch is not None:
            batch.submit()
        return [self._finish(pieces) for pieces in started]

    def gather(self, addresses: np.ndarray, length: int) -> np.ndarray:
        """uint8 [N, length]: `length` bytes from each of `addresses`, int64 [N]."""
        if not self.remote and len(self.paths) == 1:
            return _windows(self._parts[0], length)[addresses]
        out = np.empty((len(addresses), length), np.uint8)
        part = np.searchsorted(self.starts, addresses, "right") - 1
        whole = addresses + length <= self.starts[part + 1]
        if self.remote:
            whole[:] = False
        for p in np.unique(part[whole]):
            rows = whole & (part == p)
            out[rows] = _windows(self._parts[p], length)[addresses[rows] - self.starts[p]]
        rest = np.flatnonzero(~whole)
        for row, data in zip(rest, self.read_many(addresses[rest], [length] * len(rest)), strict=True):
            out[row] = data
        return out

    def _start(self, address: int, length: int, batch: ts.Batch | None) -> list:
        """Begins to read a range: for each file it touches, the array (local) or (file, future)."""
        assert 0 <= address <= address + length <= self.size, (address, length, self.size)
        pieces = []
        part = int(np.searchsorted(self.starts, address, "right")) - 1
        while length > 0:
            offset = address - int(self.starts[part])
            n = min(length, int(self.starts[part + 1]) - address)
            if is_remote(self.paths[part]):
                future = self._parts[part].read("", byte_range=slice(offset, offset + n), batch=batch)
                pieces.append((self.paths[part], future))
            elif n:
                pieces.append(self._parts[part][offset : offset + n])
            address, length, part = address + n, length - n, part + 1
        return pieces

    def _finish(self, pieces: list) -> np.ndarray:
        arrays = []
        for piece in pieces:
            if isinstance(piece, tuple):
                path, future = piece
                try:
                    piece = np.frombuffer(future.result().value, np.uint8)
                except Exception as error:
                    raise OSError(f"{path}: {_first_line(error)}") from error
            arrays.append(piece)
        return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.uint8), *arrays])


def _windows(data: np.ndarray, length: int) -> np.ndarray:
    """View [size - length + 1, length] of every stretch of `length` bytes, so that a gather copies whole rows."""
    return np.lib.stride_tricks.sliding_window_view(data, length)


def _map(path: str) -> np.ndarray:
    try:
        if os.path.getsize(path) == 0:  # cannot be mapped
            return np.empty(0, np.uint8)
        return np.asarray(np.memmap(path, np.uint8, "r"))
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise MissingFile(f"{path}: no such file") from error
        raise ValueError(f"{path}: {error.strerror or error}") from error


def _list_local(part: str, suffixes: Sequence[str]) -> list[str]:
    if os.path.isfile(part):
        return [part]
    if os.path.isdir(part):
        found = [os.path.join(folder, name) for folder, _, names in os.walk(part) for name in names]
    else:
        found = [path for path in glob.glob(part, recursive=True) if os.path.isfile(path)]
    return sorted(path for path in found if path.endswith(tuple(suffixes)))


def _list_remote(part: str, suffixes: Sequence[str]) -> list[str]:
    wild = min((part.find(c) for c in "*?[" if c in part), default=-1)
    if wild < 0 and exists(part):
        return [part]
    folder = part[: part.rindex("/", 0, wild) + 1] if wild >= 0 else part.rstrip("/") + "/"
    try:
        keys = _open_url(folder).list().result()
    except NotImplementedError as error:
        raise ValueError(f"{part}: {part.split(':')[0]}:// cannot list files; name each, with commas") from error
    except Exception as error:
        raise ValueError(f"{part}: {_first_line(error)}") from error
    found = [folder + key.decode() for key in keys]
    if wild >= 0:
        depth = part.count("/")  # as locally, * stays within a folder
        found = [url for url in found if fnmatch.fnmatchcase(url, part) and (url.count("/") == depth or "**" in part)]
    return sorted(url for url in found if url.endswith(tuple(suffixes)))


@functools.cache
def _context() -> ts.Context:
    """Shared, so that connections are reused and every `memory://` is the same store."""
    retries = {"max_retries": _RETRIES}
    limit = {"limit": _CONCURRENCY}
    return ts.Context(
        {
            "gcs_request_retries": retries,
            "http_request_retries": retries,
            "gcs_request_concurrency": limit,
            "http_request_concurrency": limit,
        }
    )


def _open_url(url: str) -> ts.KvStore:
    try:
        return ts.KvStore.open(url, context=_context()).result()
    except Exception as error:
        raise ValueError(f"{url}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].split(" [source locations")[0]


def _probe(store: ts.KvStore, url: str, offset: int) -> bool | None:
    """Whether the file has a byte at `offset`; None where there is no file."""
    return _result(store.read("", byte_range=slice(offset, offset + 1)), url)


def _result(future: ts.Future, url: str) -> bool | None:
    try:
        return True if future.result().state == "value" else None
    except Exception as error:
        if "OUT_OF_RANGE" in str(error):
            return False
        raise ValueError(f"{url}: {_first_line(error)}") from error


def _size(part: np.ndarray | ts.KvStore, path: str) -> int:
    """Bytes of a file. The key-value store has no "stat": the last byte is searched, several probes a round."""
    if not is_remote(path):
        return part.size
    if _probe(part, path, 0) is None:
        raise MissingFile(f"{path}: no such file")
    low, high = 0, 1 << 48  # low <= size < high
    probes = [1 << k for k in range(0, 48, 4)]  # a byte at offset p - 1 means that size >= p
    while high - low > 1:
        futures = [part.read("", byte_range=slice(p - 1, p)) for p in probes]
        for p, future in zip(probes, futures, strict=True):
            if _result(future, path):
                low = max(low, p)
            else:
                high = min(high, p)
        probes = sorted({low + (high - low) * i // (_PROBES + 1) for i in range(1, _PROBES + 1)} - {low})
    return low
