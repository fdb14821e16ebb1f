"""Text -> tokens in Megatron files, kept in a cache, so that a run tokenises its text once.

For much text `tools/tokenize_text.py` does the same ahead of time, in parallel (data/tokenize_job.py).
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxpretrain.data import documents, megatron, stdlib
from jaxpretrain.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

_FORMAT_VERSION = 1  # a change of what is made from the same text and tokenizer must raise it
# One call of the tokenizer: enough documents to keep all cores busy, not so much text that memory grows.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4 << 20


def tokenized(
    source: str,
    path: str = "",
    text_key: str = "text",
    *,
    tokenizer: str = "bytes",
    cache_dir: str = "",
    vocab_size: int | None = None,
    by_line: bool = False,
) -> str:
    """The prefix of the Megatron files that hold a source of text, tokenised now where the cache lacks it.

    Args:
      source, path, text_key: of a `data` section: "stdlib", or "text" with files, folders or globs.
      tokenizer, cache_dir: data.tokenizer, data.cache_dir.
      vocab_size: model.vocab_size, where the tokenizer must fit one.
      by_line: every line of a document is a sequence of its own.

    An end-of-document token follows each document, or line, where the tokenizer has one. The number of tokens and their
    SHA-256 are printed when they are made. Raises ValueError for bad text, tokenizer or cache directory.
    """
    assert source in ("stdlib", "text"), source
    if source == "stdlib":
        files, texts = [str(file) for file in stdlib.files()], stdlib.documents()
    elif not path:
        raise ValueError("data.source='text' needs data.path: a file, a folder or a glob")
    else:
        files = documents.find_files(path)
        texts = itertools.chain.from_iterable(documents.read(documents.Piece(file), text_key) for file in files)
    return tokenize_to_cache(
        texts,
        name=f"data.source={source!r}" if source == "stdlib" else f"data.path={path!r}",
        identity=[source, documents.identity(files), text_key],
        tokenizer=tokenizer,
        cache_dir=cache_dir,
        vocab_size=vocab_size,
        by_line=by_line,
    )


def tokenize_to_cache(
    texts: Iterable[str],
    *,
    name: str,
    identity: Any,
    tokenizer: str = "bytes",
    cache_dir: str = "",
    vocab_size: int | None = None,
    by_line: bool = False,
) -> str:
    """The prefix of the Megatron files that hold `texts`, which are read only where the cache lacks them.

    `identity`, of JSON types, must differ where the texts may; the tokenizer is added to it. `name` is what
    messages call them. Processes that want the same text at once wait for the first; an interrupted one leaves
    nothing that is taken for complete. Raises ValueError as `tokenized`.
    """
    loaded = load_tokenizer(tokenizer)
    if vocab_size is not None:
        check_vocabulary(loaded, vocab_size)
    folder = cache_folder(cache_dir)
    prefix = str(folder / fingerprint(identity, loaded.digest, loaded.eod, *["by line"] * by_line))
    if not _complete(prefix):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _lock(prefix + ".lock", name) as held:
                if not _complete(prefix):
                    for stale in folder.glob(os.path.basename(prefix) + ".*.tmp") if held else ():
                        stale.unlink()  # of a process that was killed
                    _make(texts, name, loaded, prefix, by_line)
        except OSError as error:
            raise ValueError(
                f"data.cache_dir={str(folder)!r}: cannot keep tokens there: {error.strerror or error}; "
                "set it to a folder that can be written and has room"
            ) from error
    return prefix


def cache_folder(cache_dir: str) -> pathlib.Path:
    """Where tokens are kept: data.cache_dir, or jaxpretrain/tokens in the user's cache directory."""
    return pathlib.Path(cache_dir).expanduser() if cache_dir else _default_folder()


def fingerprint(*parts: Any) -> str:
    """A hash of JSON-able parts and of the version of what this module makes of them."""
    return hashlib.sha256(json.dumps([_FORMAT_VERSION, *parts]).encode()).hexdigest()[:24]


def write_documents(
    texts: Iterable[str], tokenizer: Tokenizer, writer: megatron.Writer, eod: int | None, by_line: bool = False
) -> None:
    """Tokenises `texts` into `writer`, each followed by `eod` unless that is None.

    Every text is tokenised whole, whatever its length: no tokenizer says where a text may be cut and keep its
    tokens. A text of no tokens is left out. `by_line`: lines that are not blank are sequences of their own, each
    followed by `eod`; without one they keep their line ends.
    """
    end = np.array([] if eod is None else [eod], np.int32)

    def sentences(text: str) -> list[str]:
        return [line for line in text.splitlines(keepends=eod is None) if line.strip()] if by_line else [text]

    for batch in _batches(texts):
        parts = [sentences(text) for text in batch]
        encoded = iter(tokenizer.encode_documents([sentence for part in parts for sentence in part]))
        for part in parts:
            ids = itertools.islice(encoded, len(part))
            writer.add_document(*[np.concatenate([tokens, end]) for tokens in ids if tokens.size])


def _default_folder() -> pathlib.Path:
    """As the XDG base directory specification says."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base, "jaxpretrain", "tokens")


def _complete(prefix: str) -> bool:
    return all(os.path.exists(prefix + end) for end in (".json", ".idx", ".bin"))


@contextlib.contextmanager
def _lock(path: str, name: str) -> Iterator[bool]:
    """Held by one process at a time; the system lets go of it when its holder dies. Yields whether it is held.

    It only saves work: the writer's own files have unique names and are renamed when complete. So a file system
    without locks will do.
    """
    held = True
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{name}: another process tokenises it; waiting", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            held = False
        yield held


def _make(texts: Iterable[str], name: str, tokenizer: Tokenizer, prefix: str, by_line: bool) -> None:
    print(f"{name}: tokenising with {tokenizer.name!r}", flush=True)
    with megatron.Writer(prefix, tokenizer.vocab_size) as writer:
        write_documents(texts, tokenizer, writer, tokenizer.eod, by_line)
        if not writer.num_documents:
            raise ValueError(f"{name}: holds no text")
    with open(prefix + ".bin", "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    about = dict(
        name=name, tokenizer=tokenizer.name, documents=writer.num_documents, tokens=writer.num_tokens, sha256=digest
    )
    unfinished = f"{prefix}.{os.getpid()}.json.tmp"
    pathlib.Path(unfinished).write_text(json.dumps(about, indent=2) + "\n")
    os.replace(unfinished, prefix + ".json")
    counts = f"{writer.num_documents:,} documents, {writer.num_tokens:,} tokens, sha256 {digest[:16]}"
    print(f"{name}: {counts}, in {prefix}.bin", flush=True)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, characters = [], 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
