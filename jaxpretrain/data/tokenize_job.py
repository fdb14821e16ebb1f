"""A corpus tokenised by many processes, restartable at any instant: what `tools/tokenize_text.py` runs.

The input is cut into shards of about SHARD_BYTES, by files and within files, whatever the number of processes.
Each becomes a small Megatron set in `OUTPUT.parts/`, named by a hash of what it was made from; a shard that is
there is complete and is not made again. At the end all are joined in order and the folder is removed.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import multiprocessing
import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from jaxpretrain.data import documents, megatron
from jaxpretrain.data.text import fingerprint, write_documents
from jaxpretrain.data.tokenizer import load_tokenizer

SHARD_BYTES = 16 << 20  # some ten seconds of one process


@dataclasses.dataclass(frozen=True)
class Options:
    """How documents are found in files and tokenised; as `documents.read` and `load_tokenizer`."""

    tokenizer: str
    text_key: str = "text"
    separator: str | None = None
    eod_token: str | None = None
    append_eod: bool = True


@dataclasses.dataclass(frozen=True)
class Shard:
    pieces: tuple[documents.Piece, ...]
    prefix: str
    num_bytes: int  # of input

    @property
    def done(self) -> bool:
        return os.path.exists(self.prefix + ".idx")


class Job:
    """The tokenisation of `files` into `output.bin` and `output.idx`; use as a context manager.

    Entering it raises ValueError where the output exists already or another process works on it.
    """

    def __init__(self, files: Sequence[str], options: Options, output: str):
        self._options, self._output = options, output
        self._folder = pathlib.Path(output + ".parts")
        files = [path for path in files if not self._makes(path)]  # the output may lie in an input folder
        tokenizer = load_tokenizer(options.tokenizer, options.eod_token)
        self._vocab_size = tokenizer.vocab_size
        how = [tokenizer.digest, tokenizer.eod if options.append_eod else None, options.text_key, options.separator]
        self.shards = _plan(files, options.separator, how, self._folder)
        self._joined = str(self._folder / fingerprint("joined", [shard.prefix for shard in self.shards]))

    def _makes(self, path: str) -> bool:
        path = pathlib.Path(path).absolute()
        output = pathlib.Path(self._output).absolute()
        return self._folder.absolute() in path.parents or str(path) in (f"{output}.bin", f"{output}.idx")

    def __enter__(self) -> "Job":
        # The joined set moves out of the folder .bin first, so a .bin alone may be ours or somebody else's.
        ours = self._folder.exists() if os.path.exists(self._output + ".idx") else os.path.exists(self._joined + ".idx")
        for end in (".idx", ".bin"):
            if os.path.exists(self._output + end) and not ours:
                raise ValueError(f"{self._output}{end}: exists already; delete it or choose another --output")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--output={self._output}: cannot be written: {error.strerror}; choose a folder that can"
            ) from error
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context(open(self._folder / "lock", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"--output={self._output}: another process is writing it; wait for it") from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    @property
    def finished(self) -> bool:
        return os.path.exists(self._output + ".idx")

    def tokenize(self, num_workers: int) -> Iterator[Shard]:
        """Makes the shards that are missing; yields every shard as it is done, those done before first."""
        missing = [shard for shard in self.shards if not shard.done]
        yield from (shard for shard in self.shards if shard.done)
        if not missing:
            return
        executor = concurrent.futures.ProcessPoolExecutor(
            min(num_workers, len(missing)), multiprocessing.get_context("spawn"), _start_worker
        )
        try:
            futures = {executor.submit(_tokenize_shard, self._options, shard): shard for shard in missing}
            for future in concurrent.futures.as_completed(futures):
                future.result()
                yield futures[future]
        except concurrent.futures.process.BrokenProcessPool as error:
            raise ValueError(
                "a worker process died, perhaps for want of memory: try fewer --workers; finished shards are kept"
            ) from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        finally:
            executor.shutdown(cancel_futures=True)

    def join(self) -> Iterator[Shard]:
        """Writes the output from the shards, all of them done, and removes them; yields each as it is copied.

        Raises ValueError where there is no document in any of them.
        """
        if not os.path.exists(self._joined + ".idx"):
            with megatron.Writer(self._joined, self._vocab_size) as writer:
                for shard in self.shards:
                    _copy(shard.prefix, writer)
                    yield shard
                if not writer.num_documents:
                    raise ValueError("the input holds no text")
        if os.path.exists(self._joined + ".bin"):  # else it was moved before an interruption
            os.replace(self._joined + ".bin", self._output + ".bin")
        os.replace(self._joined + ".idx", self._output + ".idx")

    def clean(self) -> None:
        shutil.rmtree(self._folder)


def _plan(files: Sequence[str], separator: str | None, how: list, folder: pathlib.Path) -> list[Shard]:
    shards: list[Shard] = []
    pieces: list[documents.Piece] = []
    what: list = []
    num_bytes = 0

    def close_shard() -> None:
        shards.append(Shard(tuple(pieces), str(folder / fingerprint(how, what)), num_bytes))
        pieces.clear()
        what.clear()

    for path, identity in zip(files, documents.identity(files), strict=True):
        for piece in documents.split(path, identity[1], SHARD_BYTES, separator):
            pieces.append(piece)
            what.append([*identity, piece.start, piece.stop])
            num_bytes += piece.num_bytes
            if num_bytes >= SHARD_BYTES:
                close_shard()
                num_bytes = 0
    if pieces:
        close_shard()
    return shards


def _copy(prefix: str, writer: megatron.Writer) -> None:
    path = prefix + ".bin"
    dtype, offsets, lengths = megatron.read_index(prefix + ".idx", os.path.getsize(path))
    if lengths.size:  # else .bin is empty and cannot be mapped
        tokens = np.memmap(path, dtype, "r")
        for start, length in zip((offsets // dtype.itemsize).tolist(), lengths.tolist(), strict=True):
            writer.add_document(tokens[start : start + length])


# ---- in the worker processes ----


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process a core already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Without it the workers of a killed parent would wait for work for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


_load_once = functools.cache(load_tokenizer)


def _tokenize_shard(options: Options, shard: Shard) -> None:
    tokenizer = _load_once(options.tokenizer, options.eod_token)
    texts = (documents.read(piece, options.text_key, options.separator) for piece in shard.pieces)
    with megatron.Writer(shard.prefix, tokenizer.vocab_size) as writer:
        eod = tokenizer.eod if options.append_eod else None
        write_documents(itertools.chain.from_iterable(texts), tokenizer, writer, eod)
