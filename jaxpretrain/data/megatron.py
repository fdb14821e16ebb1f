"""Megatron's MMapIndexedDataset (`PREFIX.bin` + `PREFIX.idx`), read and written, and Pythia's preshuffled shards of it.

`.bin` holds the tokens end to end, without header. `.idx`, little-endian and unaligned:

    offset   bytes   content
    0        9       magic b"MMIDIDX\\0\\0"
    9        8       version, uint64 = 1
    17       1       code of the token type
    18       8       S, number of sequences, uint64
    26       8       D, length of the document index = documents + 1, uint64
    34       4 S     tokens of each sequence, int32
    34+4S    8 S     byte offset of each sequence in .bin, int64
    34+12S   8 D     first sequence of each document, int64; the last entry is S
    34+12S+8D  S     modes, int8, in multimodal sets only

Source: megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM; gpt-neox writes the same.
"""

import array
import glob
import os
import re
import struct
import uuid

import numpy as np

from jaxpretrain.data import storage
from jaxpretrain.data.windows import Pieces

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
HEADER_BYTES = 34
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats: no token file has them
_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
_MAX_UINT16_VOCAB = 65500  # Megatron's rule; the ids above are left for its special tokens
_FIRST_ROWS = 1024  # lengths of a preshuffled set that are checked; the whole index of Pythia's is 2.9 GB


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size < _MAX_UINT16_VOCAB else "<i4")


class Writer:
    """Writes `prefix.bin` and `prefix.idx` document by document; there is no `.idx` before all is complete.

    Tokens are uint16 where `vocab_size` allows, else int32. As a context manager it closes on success and leaves
    nothing behind on an exception.
    """

    def __init__(self, prefix: str, vocab_size: int):
        self.prefix, self.vocab_size = prefix, vocab_size
        self.dtype = token_dtype(vocab_size)
        self.num_documents = self.num_tokens = 0
        self._lengths, self._document_ends = array.array("i"), array.array("q", [0])  # in sequences
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
        unique = uuid.uuid4().hex[:8]  # two processes may write the same cache
        self._bin, self._idx = (f"{prefix}.{unique}.{end}.tmp" for end in ("bin", "idx"))
        self._file = open(self._bin, "wb")

    def add_document(self, *sentences: np.ndarray) -> None:
        """Appends one document of integer token ids [length], whole or sentence by sentence; empty ones are left out.

        Raises ValueError for an id outside the vocabulary or a sequence too long for the format.
        """
        for tokens in sentences:
            if np.size(tokens):
                self._add_sequence(np.asarray(tokens))
        if len(self._lengths) > self._document_ends[-1]:
            self._document_ends.append(len(self._lengths))
            self.num_documents += 1

    def _add_sequence(self, tokens: np.ndarray) -> None:
        if tokens.size >= 1 << 31:
            raise ValueError(f"{self.prefix}: a document of {tokens.size} tokens; the format ends at 2^31, split it")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"{self.prefix}: token id {bad} is outside the vocabulary of {self.vocab_size}")
        self._file.write(tokens.astype(self.dtype).tobytes())
        self._lengths.append(tokens.size)
        self.num_tokens += tokens.size

    def close(self) -> None:
        """Completes both files; the `.idx` appears last, by an atomic rename."""
        self._sync(self._file)
        lengths = np.frombuffer(self._lengths, np.int32)
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        with open(self._idx, "wb") as file:
            header = struct.pack("<QBQQ", 1, _CODES[self.dtype], lengths.size, len(self._document_ends))
            file.write(MAGIC + header)
            file.write(lengths.astype("<i4").tobytes())
            file.write(offsets.astype("<i8").tobytes())
            file.write(np.frombuffer(self._document_ends, np.int64).astype("<i8").tobytes())
            self._sync(file)
        os.replace(self._bin, self.prefix + ".bin")
        os.replace(self._idx, self.prefix + ".idx")

    def abort(self) -> None:
        """Removes what was written."""
        self._file.close()
        for path in (self._bin, self._idx):
            if os.path.exists(path):
                os.remove(path)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @staticmethod
    def _sync(file) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()


def open_documents(paths: str) -> Pieces:
    """The documents of one or more sets: prefixes, `.bin` or `.idx` names, folders or globs, with commas.

    Raises ValueError, naming the file, for a missing or legacy or truncated one, and for sets of different types.
    """
    prefixes = find_prefixes(paths)
    files = storage.Files([prefix + ".bin" for prefix in prefixes])
    starts, lengths, dtypes = [], [], []
    for i, prefix in enumerate(prefixes):
        size = int(files.starts[i + 1] - files.starts[i])
        dtype, doc_starts, doc_lengths = read_index(prefix + ".idx", size)
        starts.append(doc_starts + files.starts[i])
        lengths.append(doc_lengths)
        dtypes.append(dtype)
        if dtype != dtypes[0]:
            raise ValueError(
                f"{prefix}.idx: its tokens are {dtype.name}, those of {prefixes[0]} are {dtypes[0].name}; "
                "give each type its own entry in data.mixture"
            )
    return Pieces(files, dtypes[0], np.concatenate(starts), np.concatenate(lengths))


def sentence_ends(paths: str) -> np.ndarray:
    """Byte addresses, in the files of `open_documents(paths)`, at which their sequences end, int64, ascending.

    A sequence is a document, or a sentence of one where the set was written so.
    """
    prefixes = find_prefixes(paths)
    files = storage.Files([prefix + ".bin" for prefix in prefixes])
    ends = []
    for i, prefix in enumerate(prefixes):
        index = storage.Files([prefix + ".idx"])
        dtype, num_sequences, _ = _read_header(index, prefix + ".idx")
        lengths = index.read(HEADER_BYTES, 4 * num_sequences).view("<i4")
        ends.append(files.starts[i] + np.cumsum(lengths, dtype=np.int64) * dtype.itemsize)
    return np.concatenate(ends)


def find_prefixes(paths: str) -> list[str]:
    """Prefixes of the sets that `paths` names. Raises ValueError where there is none."""
    prefixes = []
    for part in filter(None, (p.strip() for p in paths.split(","))):
        prefix = re.sub(r"\.(bin|idx)$", "", part)
        if storage.exists(prefix + ".idx") or storage.exists(prefix + ".bin"):
            prefixes.append(prefix)
            continue
        try:
            found = {re.sub(r"\.(bin|idx)$", "", f) for f in storage.list_files(part, (".bin", ".idx"))}
        except ValueError as error:
            raise storage.MissingFile(f"no {prefix}.bin and {prefix}.idx") from error
        prefixes += sorted(found)
    for prefix in prefixes:
        if not storage.exists(prefix + ".idx"):
            raise storage.MissingFile(f"{prefix}.idx: no such file, and {prefix}.bin means nothing without it")
    return prefixes


def read_index(path: str, bin_size: int) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Token type, byte offsets [D], lengths [D] (tokens) of the documents of an `.idx` whose `.bin` has `bin_size`."""
    file = storage.Files([path])
    dtype, num_sequences, num_entries = _read_header(file, path)
    expected = HEADER_BYTES + 12 * num_sequences + 8 * num_entries
    if file.size not in (expected, expected + num_sequences):
        raise ValueError(
            f"{path}: {file.size} bytes where its header says {expected}; truncated? fetch or write it again"
        )
    lengths = file.read(HEADER_BYTES, 4 * num_sequences).view("<i4")
    offsets = file.read(HEADER_BYTES + 4 * num_sequences, 8 * num_sequences).view("<i8")
    documents = file.read(HEADER_BYTES + 12 * num_sequences, 8 * num_entries).view("<i8")
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or (offsets != ends[:-1] * dtype.itemsize).any():
        raise ValueError(f"{path}: its sequences do not lie end to end in the .bin file; write it again")
    if num_entries == 0 or documents[0] != 0 or documents[-1] != num_sequences or (np.diff(documents) < 0).any():
        raise ValueError(
            f"{path}: its document index does not run from 0 to the {num_sequences} sequences; write it again"
        )
    check_size(re.sub(r"\.idx$", ".bin", path), bin_size, int(ends[-1]), dtype)
    bounds = ends[documents]
    return dtype, bounds[:-1] * dtype.itemsize, np.diff(bounds)


def check_size(path: str, size: int, num_tokens: int, dtype: np.dtype) -> None:
    expected = num_tokens * dtype.itemsize
    if size != expected:
        what = "truncated: fetch or write it again" if size < expected else "of another set than its .idx"
        raise ValueError(f"{path}: {size} bytes where its index says {expected}; it is {what}")


def _read_header(file: storage.Files, path: str) -> tuple[np.dtype, int, int]:
    head = file.read(0, min(HEADER_BYTES, file.size)).tobytes()
    if head.startswith(LEGACY_MAGIC):
        raise ValueError(
            f"{path}: a legacy index (TNTIDX), not a memory-mapped one; preprocess again with --dataset-impl mmap"
        )
    if len(head) < HEADER_BYTES:
        raise ValueError(f"{path}: {len(head)} bytes, less than a Megatron index's header; truncated? fetch it again")
    if not head.startswith(MAGIC):
        raise ValueError(f"{path}: not a Megatron index, it starts with {head[:9]!r} instead of {MAGIC!r}")
    version, code, num_sequences, num_entries = struct.unpack("<QBQQ", head[len(MAGIC) :])
    if version != 1:
        raise ValueError(f"{path}: index version {version}; only version 1 is known")
    if code not in DTYPES:
        raise ValueError(f"{path}: type code {code} is not one of integers {sorted(DTYPES)}; these are no tokens")
    return np.dtype(DTYPES[code]), num_sequences, num_entries


def open_rows(path: str, row_len: int) -> Pieces:
    """One piece, the whole of a set whose sequences are all `row_len` tokens, such as Pythia's preshuffled.

    `PREFIX.idx` beside either `PREFIX.bin` or shards `PREFIX-00000-of-00020.bin`, a plain split of its bytes, so that
    a row, even a token, may lie across two of them. `path`: the prefix, or the folder that holds one.
    Only the header and the first lengths of the index are read. Raises ValueError naming the file that is wrong.
    """
    prefix, shards = _find_shards(path)
    index = storage.Files([prefix + ".idx"])
    dtype, num_rows, _ = _read_header(index, prefix + ".idx")
    lengths = index.read(HEADER_BYTES, min(4 * min(num_rows, _FIRST_ROWS), index.size - HEADER_BYTES) // 4 * 4)
    for row, length in enumerate(lengths.view("<i4")):
        if length != row_len:
            raise ValueError(f"{prefix}.idx: row {row} has {length} tokens, not data.row_len={row_len}")
    files = storage.Files(shards)
    expected = num_rows * row_len * dtype.itemsize
    if files.size != expected:
        raise ValueError(
            f"{shards[-1]}: the {len(shards)} .bin files hold {files.size} bytes where {prefix}.idx says {expected}; "
            "a shard is missing or truncated: fetch it again"
        )
    if num_rows == 0:
        raise ValueError(f"{prefix}.idx: no rows in it")
    return Pieces(files, dtype, np.zeros(1, np.int64), np.array([num_rows * row_len]))


def _find_shards(path: str) -> tuple[str, list[str]]:
    prefix = re.sub(r"\.(bin|idx)$", "", path.strip())
    if not storage.exists(prefix + ".idx"):
        found = [f for f in storage.list_files(path, (".idx",)) if f.endswith(".idx")]
        if len(found) != 1:
            raise ValueError(f"{path}: {len(found)} .idx files there; data.row_len reads one set, give its prefix")
        prefix = found[0].removesuffix(".idx")
    if storage.exists(prefix + ".bin"):
        return prefix, [prefix + ".bin"]
    escaped = prefix if storage.is_remote(prefix) else glob.escape(prefix)
    try:
        shards = storage.list_files(escaped + "-*-of-*.bin")
    except ValueError as error:
        raise storage.MissingFile(f"{prefix}-00000-of-...bin: no such file beside {prefix}.idx") from error
    for i, shard in enumerate(shards):
        if not re.search(rf"-0*{i}-of-\d+\.bin$", shard):
            raise ValueError(f"{prefix}: shard {i} is missing, {shard} comes in its place; fetch it")
    return prefix, shards
