"""Files of text -> documents: plain text, JSON lines and parquet, plain or compressed (.gz, .zst).

A plain text file is one document, or several where a separator is given. Each line of a JSON-lines file
(.jsonl, .json, .ndjson) is an object with the text under one key; each row of a parquet file has it in one
column. Any other file is plain text. Empty documents and nulls are left out. Files may be remote (gs://).
"""

import dataclasses
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from jaxpretrain.data import storage

_CHUNK_BYTES = 1 << 20
_REMOTE_CHUNK_BYTES = 32 << 20  # storage.Files fetches its parts at once
_ZSTD_CHUNK_BYTES = 1 << 17  # text may unpack to ten times its size


@dataclasses.dataclass(frozen=True)
class Piece:
    """What of a file: the records that begin in bytes [start, stop), or a parquet file's row groups [start, stop)."""

    path: str
    start: int = 0
    stop: int | None = None  # None: to the end
    num_bytes: int = 0  # on disk


def find_files(paths: str | Sequence[str]) -> list[str]:
    """The files that `paths` name: files, folders, globs; also several in one string with commas between.

    A folder stands for every file in it and below, sorted, without hidden ones and __pycache__.
    Raises ValueError for a path that leads to no file.
    """
    found: list[str] = []
    for path in _parts([paths] if isinstance(paths, str) else paths):
        if storage.is_remote(path):
            files = storage.list_files(path)
        elif os.path.isdir(path):
            files = sorted(_walk(path))
        elif os.path.exists(path):
            files = [path]
        else:
            files = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
        if not files:
            what = "holds no file" if os.path.isdir(path) else "no such file, folder or glob that matches one"
            raise storage.MissingFile(f"{path}: {what}")
        found += files
    if not found:
        raise ValueError("no input: name a file, a folder or a glob")
    return list(dict.fromkeys(found))  # a file that two globs match counts once


def _parts(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        # A comma may also be part of a name.
        parts = [path] if os.path.exists(path) else path.split(",")
        yield from (os.path.expanduser(part.strip()) for part in parts if part.strip())


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))


def identity(files: Sequence[str]) -> list[tuple[str, int, int]]:
    """(path, bytes, mtime in ns) of each file: what must be unchanged for earlier work on them to hold.

    Of a remote file the mtime is 0: one that was replaced by another of the same size is taken for the old one.
    """
    described = []
    for path in files:
        if storage.is_remote(path):
            described.append((path, storage.Files([path]).size, 0))
        else:
            try:
                stat = os.stat(path)
            except OSError as error:
                raise ValueError(f"{path}: {error.strerror}") from error
            described.append((os.path.abspath(path), stat.st_size, stat.st_mtime_ns))
    return described


def split(path: str, size: int, piece_bytes: int, separator: str | None = None) -> list[Piece]:
    """The pieces of a file of `size` bytes, of about `piece_bytes`: together, in order, the file's documents.

    What cannot be entered in the middle is one piece: a compressed file, and a plain text that is one document.
    """
    if kind(path) == "parquet":
        return _split_parquet(path, piece_bytes)
    mark = b"\n" if kind(path) == "json" else (separator or "").encode()
    # Such as "\n\n": in a longer run of newlines it depends on the start of the search where a document begins.
    overlaps_itself = any(mark.startswith(mark[-length:]) for length in range(1, len(mark)))
    if not mark or overlaps_itself or path.endswith((".gz", ".zst")):
        return [Piece(path, num_bytes=size)]
    return [
        Piece(path, start, min(start + piece_bytes, size), min(piece_bytes, size - start))
        for start in range(0, size, piece_bytes)
    ]


def read(piece: Piece, text_key: str = "text", separator: str | None = None) -> Iterator[str]:
    """The documents of a piece, none of them empty.

    Raises ValueError, with the file and the line, row or byte, for what is not UTF-8, JSON or parquet, lacks
    `text_key`, or is truncated.
    """
    try:
        if kind(piece.path) == "parquet":
            documents = _read_parquet(piece, text_key)
        elif kind(piece.path) == "json":
            documents = _read_json_lines(piece, text_key)
        else:
            documents = _read_text(piece, separator)
        yield from filter(None, documents)
    except OSError as error:
        raise ValueError(f"{piece.path}: {error.strerror or error}") from error


def kind(path: str) -> str:
    """ "json" (lines), "parquet" or "text", by the file's name."""
    stem = path.lower().removesuffix(".gz").removesuffix(".zst")
    if stem.endswith(".parquet"):
        return "parquet"
    return "json" if stem.endswith((".jsonl", ".json", ".ndjson")) else "text"


# ---- plain text ----


def _read_text(piece: Piece, separator: str | None) -> Iterator[str]:
    if separator:
        records = _records(piece.path, separator.encode(), piece.start, piece.stop)
    else:
        records = iter([(0, b"".join(_chunks(piece.path)))])
    for offset, content in records:
        try:
            yield content.decode("utf-8-sig" if offset == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{piece.path}: byte {offset + error.start} (0x{content[error.start]:02x}) is not UTF-8; "
                "convert the file (iconv -t utf-8) or leave it out"
            ) from error


# ---- JSON lines ----


def _read_json_lines(piece: Piece, text_key: str) -> Iterator[str]:
    for offset, line in _records(piece.path, b"\n", piece.start, piece.stop):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            raise _bad_line(piece, offset, f"byte {offset + error.start} of the file is not UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise _bad_line(piece, offset, f"invalid JSON: {error}") from error
        if not isinstance(record, dict):
            raise _bad_line(piece, offset, f"a JSON {type(record).__name__}, not an object with a text")
        if text_key not in record:
            raise _bad_line(piece, offset, _no_key(text_key, record))
        text = record[text_key]
        if not isinstance(text, str | None):
            raise _bad_line(piece, offset, f"{text_key!r} is {type(text).__name__}, not text")
        if text and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                message = f"{text_key!r} holds half a surrogate pair at character {error.start}, which is no character"
                raise _bad_line(piece, offset, message) from error
        yield text


def _bad_line(piece: Piece, offset: int, message: str) -> ValueError:
    # Counted only now: a piece may begin anywhere.
    newlines, seen = 0, 0
    for chunk in _chunks(piece.path):
        newlines += chunk[: offset - seen].count(b"\n")
        seen += len(chunk)
        if seen >= offset:
            break
    return ValueError(f"{piece.path}: line {newlines + 1}: {message}")


def _no_key(text_key: str, keys: Any) -> str:
    return f"no {text_key!r} among its keys {', '.join(sorted(keys)) or '(none)'}: set data.text_key (--text-key)"


# ---- parquet ----


def _parquet(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading parquet needs pyarrow: pip install 'jaxpretrain[hf]'") from error
    try:
        return pyarrow.parquet.ParquetFile(_open(path))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a parquet file, or truncated: {_first_line(error)}") from error


def _split_parquet(path: str, piece_bytes: int) -> list[Piece]:
    metadata = _parquet(path).metadata
    pieces, start, num_bytes = [], 0, 0
    for group in range(metadata.num_row_groups):
        num_bytes += metadata.row_group(group).total_byte_size
        if num_bytes >= piece_bytes or group + 1 == metadata.num_row_groups:
            pieces.append(Piece(path, start, group + 1, num_bytes))
            start, num_bytes = group + 1, 0
    return pieces


def _read_parquet(piece: Piece, text_key: str) -> Iterator[str]:
    import pyarrow

    file = _parquet(piece.path)
    names = file.schema_arrow.names
    if text_key not in names:
        raise ValueError(f"{piece.path}: {_no_key(text_key, names)}")
    column_type = file.schema_arrow.field(text_key).type
    if not (pyarrow.types.is_string(column_type) or pyarrow.types.is_large_string(column_type)):
        raise ValueError(f"{piece.path}: {text_key!r} is {column_type}, not text: set data.text_key (--text-key)")
    stop = file.num_row_groups if piece.stop is None else piece.stop
    try:
        for batch in file.iter_batches(1024, row_groups=range(piece.start, stop), columns=[text_key]):
            yield from batch.column(0).to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{piece.path}: damaged: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


# ---- bytes ----


def _records(path: str, separator: bytes, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
    """(offset, record) of each record between separators that begins in bytes [start, stop) of the file."""
    # The first separator that ends at or after `start` ends the previous piece's last record.
    offset = max(start - len(separator), 0)
    in_previous = start > 0
    buffer = bytearray()
    for chunk in _chunks(path, offset):
        search_from = max(len(buffer) - len(separator) + 1, 0)
        buffer += chunk
        begin = 0
        while (end := buffer.find(separator, search_from)) >= 0:
            if not in_previous:
                if stop is not None and offset + begin >= stop:
                    return
                yield offset + begin, bytes(buffer[begin:end])
            in_previous = False
            begin = search_from = end + len(separator)
        del buffer[:begin]
        offset += begin
    if buffer and not in_previous and (stop is None or offset < stop):
        yield offset, bytes(buffer)


def _chunks(path: str, start: int = 0) -> Iterator[bytes]:
    """The content of a file from byte `start`, decompressed."""
    if path.endswith(".zst"):
        assert start == 0
        yield from _zstd_chunks(path)
        return
    with _open(path) as file:
        unpacked = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
        unpacked.seek(start)
        try:
            while chunk := unpacked.read(_CHUNK_BYTES):
                yield chunk
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: truncated or damaged gzip file: {error}; fetch it again") from error


def _zstd_chunks(path: str) -> Iterator[bytes]:
    # Frame by frame, and not by zstandard's stream_reader, which takes a truncated file for a shorter one.
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(f"{path}: reading .zst needs zstandard: pip install 'jaxpretrain[hf]'") from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # zstd --long=31 needs it
    frame = None  # the frame that is being read; None between frames
    with _open(path) as file:
        try:
            while chunk := file.read(_ZSTD_CHUNK_BYTES):
                while chunk:
                    frame = frame or decompressor.decompressobj()
                    content = frame.decompress(chunk)
                    chunk = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
                    if content:
                        yield content
        except zstandard.ZstdError as error:
            raise ValueError(f"{path}: damaged zstd file: {error}; fetch it again") from error
    if frame is not None:
        raise ValueError(f"{path}: truncated zstd file; fetch it again")


def _open(path: str) -> BinaryIO:
    if storage.is_remote(path):
        return io.BufferedReader(_RemoteFile(path), _REMOTE_CHUNK_BYTES)
    return open(path, "rb")


class _RemoteFile(io.RawIOBase):
    """A remote file as Python's readers want it."""

    def __init__(self, url: str):
        self._files = storage.Files([url])
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._files.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        length = max(min(len(buffer), self._files.size - self._position), 0)
        buffer[:length] = self._files.read(self._position, length).data
        self._position += length
        return length
