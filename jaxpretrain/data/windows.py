"""Tokens on storage -> rows of tokens (T = seq_len), found by searching cumulative lengths.

Three ways to cut rows. `DocumentWindows`: documents end to end are one stream, and row r is its tokens
[r T, r T + T]: the next row starts at the last token of the previous one, so every token but the very first is a
target exactly once. `PieceWindows`: the same within each piece (a file) alone, or, for fixed rows, at a stride of
T + 1. For training only full rows count; for validation the last, shorter ones too, padded. `SentenceWindows`: as many
whole sentences as fit into T tokens, padded, for models that see a row's own tokens and predict some of them.
"""

import dataclasses

import numpy as np

from jaxpretrain.data import storage
from jaxpretrain.data.permutation import fold, permute

_SPLIT_KEY = fold(0x5B117)  # no seed: every run holds out the same documents


@dataclasses.dataclass
class Pieces:
    """Stretches of tokens: `starts` (byte addresses in `files`) and `lengths` (tokens), int64 [P]."""

    files: storage.Files
    dtype: np.dtype
    starts: np.ndarray
    lengths: np.ndarray

    def part(self, starts: np.ndarray, lengths: np.ndarray) -> "Pieces":
        """Other pieces of the same files, the empty ones left out."""
        return Pieces(self.files, self.dtype, starts[lengths > 0], lengths[lengths > 0])


def split_documents(documents: Pieces, fraction: float) -> tuple[Pieces, Pieces]:
    """(training, validation) documents: the same `fraction` of them whatever the seed, at least one in each."""
    documents = documents.part(documents.starts, documents.lengths)
    count = len(documents.lengths)
    if count < 2:
        raise ValueError(
            f"{documents.files.paths[0]}: {count} document(s) cannot be split in two; "
            "set data.validation_path, or data.validation_fraction=0 and eval.every=-1"
        )
    num_valid = min(max(round(fraction * count), 1), count - 1)
    valid = np.zeros(count, bool)
    valid[permute(np.arange(num_valid), count, _SPLIT_KEY)] = True
    return tuple(documents.part(documents.starts[keep], documents.lengths[keep]) for keep in (~valid, valid))


def split_tail(pieces: Pieces, fraction: float, seq_len: int, stride: int) -> tuple[Pieces, Pieces]:
    """(training, validation) pieces: the last `fraction` of the rows is held out, at least one row in each."""
    rows = _full_rows(pieces.lengths, seq_len, stride)
    total = int(rows.sum())
    if total < 2:
        raise ValueError(
            f"{pieces.files.paths[0]}: {total} row(s) of seq_len + 1 = {seq_len + 1} tokens cannot be split in two; "
            "shorten seq_len, or set data.validation_path"
        )
    cut = total - min(max(round(fraction * total), 1), total - 1)
    kept = np.clip(cut - (np.cumsum(rows) - rows), 0, rows)  # training rows of each piece
    held_out = np.cumsum(rows) > cut
    lengths = np.where(kept > 0, (kept - 1) * stride + seq_len + 1, 0)
    train = pieces.part(pieces.starts, lengths)
    skipped = kept[held_out] * stride
    starts = pieces.starts[held_out] + skipped * pieces.dtype.itemsize
    return train, pieces.part(starts, pieces.lengths[held_out] - skipped)


def _full_rows(lengths: np.ndarray, seq_len: int, stride: int) -> np.ndarray:
    return np.where(lengths > seq_len, (lengths - seq_len - 1) // stride + 1, 0)


class _Windows:
    """What all share. Attributes: `num_rows`; `num_tokens`, the targets of one epoch; `row_len`, tokens of a row."""

    def __init__(self, pieces: Pieces, row_len: int, vocab_size: int):
        self.files, self.dtype = pieces.files, pieces.dtype
        self.row_len, self.vocab_size, self.remote = row_len, vocab_size, pieces.files.remote

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Tokens that each of `rows` really has, int64 [N]: row_len where it is full."""
        raise NotImplementedError

    def read(self, rows: np.ndarray) -> np.ndarray:
        """int32 [N, row_len], padding after a row's length. Raises ValueError for an id outside the vocabulary."""
        raise NotImplementedError

    def _check_vocab(self, tokens: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """`tokens` as int32, after one pass over the maximum (and minimum, where ids could be negative)."""
        if tokens.size and (int(tokens.max()) >= self.vocab_size or (self.dtype.kind == "i" and int(tokens.min()) < 0)):
            row, col = np.argwhere((tokens >= self.vocab_size) | (tokens < 0))[0]
            path, offset = self.files.locate(self._address(int(rows[row]), int(col)))
            raise ValueError(
                f"{path}: token id {tokens[row, col]} at token {offset // self.dtype.itemsize} (byte {offset}, read as "
                f"{self.dtype.name}) is outside model.vocab_size={self.vocab_size}; "
                "is it the right tokenizer's data, and of this type?"
            )
        return tokens.astype(np.int32)

    def _address(self, row: int, col: int) -> int:
        raise NotImplementedError

    def _gather(self, addresses: np.ndarray) -> np.ndarray:
        return self.files.gather(addresses, self.row_len * self.dtype.itemsize).view(self.dtype)

    def _fill(self, out: np.ndarray, ranges: list[tuple[int, int, int, int]]) -> None:
        """Reads each (row, column, address, number of tokens) into out[row, column:]."""
        data = self.files.read_many([r[2] for r in ranges], [r[3] * self.dtype.itemsize for r in ranges])
        for (row, col, _, count), tokens in zip(ranges, data, strict=True):
            out[row, col : col + count].view(np.uint8)[:] = tokens


class _StreamWindows(_Windows):
    """Rows that are stretches of the documents laid end to end, `total` tokens."""

    def __init__(self, documents: Pieces, row_len: int, vocab_size: int):
        super().__init__(documents, row_len, vocab_size)
        documents = documents.part(documents.starts, documents.lengths)
        self._ends = np.cumsum(documents.lengths)  # of the documents, in the stream
        self._total = int(self._ends[-1]) if len(self._ends) else 0
        # Runs: documents that also lie end to end in the files, merged, so that most rows are one copy.
        begins = np.ones(len(self._ends), bool)
        begins[1:] = documents.starts[1:] != (documents.starts + documents.lengths * self.dtype.itemsize)[:-1]
        self._run_address = documents.starts[begins]
        self._run_start = np.append((self._ends - documents.lengths)[begins], self._total)  # in the stream

    def _run(self, positions: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._run_start, positions, "right") - 1

    def _address_of(self, position: int, run: int) -> int:
        return int(self._run_address[run]) + (position - int(self._run_start[run])) * self.dtype.itemsize

    def _ranges(self, row: int, col: int, first: int, last: int) -> list[tuple[int, int, int, int]]:
        """What `_fill` reads to have tokens [first, last) of the stream in a row from `col` on."""
        ranges, position, run = [], first, int(self._run(first))
        while position < last:
            count = min(last, int(self._run_start[run + 1])) - position
            ranges.append((row, col + position - first, self._address_of(position, run), count))
            position, run = position + count, run + 1
        return ranges


class DocumentWindows(_StreamWindows):
    """Rows across documents end to end. With `isolate`, `segments` numbers the documents within each row."""

    def __init__(self, documents: Pieces, seq_len: int, vocab_size: int, *, isolate: bool = False, pad: bool = False):
        super().__init__(documents, seq_len + 1, vocab_size)
        self.seq_len = seq_len
        full = max(self._total - 1, 0) // seq_len
        self.num_rows = full + (pad and self._total - full * seq_len >= 2)
        self.num_tokens = max(self._total - 1, 0) if pad else full * seq_len
        self._document_ends = self._ends if isolate else None

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return np.minimum(self.row_len, self._total - rows * self.seq_len)

    def read(self, rows: np.ndarray) -> np.ndarray:
        first = rows * self.seq_len
        last = first + self.lengths(rows)
        run = self._run(first)
        whole = first + self.row_len <= self._run_start[run + 1]
        addresses = self._run_address[run] + (first - self._run_start[run]) * self.dtype.itemsize
        if whole.all():
            return self._check_vocab(self._gather(addresses), rows)
        out = np.zeros((len(rows), self.row_len), self.dtype)
        if whole.any():
            out[whole] = self._gather(addresses[whole])
        broken = np.flatnonzero(~whole)
        self._fill(out, [r for row in broken for r in self._ranges(row, 0, int(first[row]), int(last[row]))])
        return self._check_vocab(out, rows)

    def segments(self, rows: np.ndarray) -> np.ndarray:
        """int32 [N, T + 1]: 1, 2, ... for the documents that a row touches, 0 after its length."""
        assert self._document_ends is not None
        first, lengths = rows * self.seq_len, self.lengths(rows)
        begin = np.searchsorted(self._document_ends, first, "right")  # the document of each row's first token
        end = np.searchsorted(self._document_ends, first + lengths - 1, "right")
        counts = end - begin  # boundaries within the row
        row = np.repeat(np.arange(len(rows)), counts)
        boundary = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + begin[row]
        out = np.zeros((len(rows), self.row_len), np.int32)
        out[row, self._document_ends[boundary] - first[row]] = 1
        out = np.cumsum(out, axis=1, dtype=np.int32) + 1
        out[np.arange(self.row_len) >= lengths[:, None]] = 0
        return out

    def _address(self, row: int, col: int) -> int:
        position = row * self.seq_len + col
        return self._address_of(position, int(self._run(position)))


class SentenceWindows(_StreamWindows):
    """Rows of whole sentences: a first token, then as many sentences as fit, across documents, then padding.

    RoBERTa's FULL-SENTENCES (Liu et al. 2019, section 4.2). A sentence that is longer than a row fills rows of its own.

    Args:
      documents: each ends where a sentence ends.
      sentence_ends: byte addresses in `documents.files` at which sentences end, int64, ascending.
      first_token, padding_token: ids of the vocabulary.
    """

    def __init__(
        self,
        documents: Pieces,
        sentence_ends: np.ndarray,
        seq_len: int,
        vocab_size: int,
        *,
        first_token: int,
        padding_token: int,
    ):
        super().__init__(documents, seq_len, vocab_size)
        self.seq_len, self._first_token, self._padding_token = seq_len, first_token, padding_token
        self.num_tokens = self._total
        documents, room = documents.part(documents.starts, documents.lengths), seq_len - 1
        ends = _ends_in_stream(documents, sentence_ends, self.dtype.itemsize)
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        following = np.searchsorted(ends, begins + room, "right")  # the first sentence that does not fit any more
        following = np.maximum(following, np.arange(len(ends)) + 1).tolist()
        chosen, sentence = [], 0
        while sentence < len(ends):
            chosen.append(sentence)
            sentence = following[sentence]
        begin = begins[chosen] if chosen else begins[:0]
        length = np.diff(np.append(begin, self._total))
        num_rows = -(-length // room)  # more than one where a single sentence is too long
        part = np.arange(num_rows.sum()) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
        self._row_begin = np.repeat(begin, num_rows) + part * room
        self._row_length = np.minimum(np.repeat(length, num_rows) - part * room, room)
        self.num_rows = len(self._row_begin)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return self._row_length[rows] + 1

    def read(self, rows: np.ndarray) -> np.ndarray:
        out = np.full((len(rows), self.seq_len), self._padding_token, self.dtype)
        out[:, 0] = self._first_token
        first = self._row_begin[rows].tolist()
        last = (self._row_begin[rows] + self._row_length[rows]).tolist()
        self._fill(out, [r for row in range(len(rows)) for r in self._ranges(row, 1, first[row], last[row])])
        return self._check_vocab(out, rows)

    def _address(self, row: int, col: int) -> int:
        position = int(self._row_begin[row]) + col - 1
        return self._address_of(position, int(self._run(position)))


def _ends_in_stream(documents: Pieces, addresses: np.ndarray, itemsize: int) -> np.ndarray:
    """Where sentences end, from byte addresses in the files to positions in the stream of these documents."""
    document_ends = np.cumsum(documents.lengths)
    first = np.searchsorted(addresses, documents.starts, "right")
    last = np.searchsorted(addresses, documents.starts + documents.lengths * itemsize, "right")
    count = last - first
    document = np.repeat(np.arange(len(count)), count)
    index = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[document]
    within = (addresses[index] - documents.starts[document]) // itemsize
    return within + (document_ends - documents.lengths)[document]


class PieceWindows(_Windows):
    """Rows within each piece; a stride of seq_len shares one token between neighbours, seq_len + 1 none."""

    def __init__(self, pieces: Pieces, seq_len: int, vocab_size: int, *, stride: int, pad: bool = False):
        super().__init__(pieces, seq_len + 1, vocab_size)
        self.seq_len = seq_len
        assert stride in (seq_len, seq_len + 1)
        self._stride, self._starts, self._lengths = stride, pieces.starts, pieces.lengths
        rows = _full_rows(pieces.lengths, seq_len, stride)
        if pad:
            rows = rows + (pieces.lengths - rows * stride >= 2)
        self._row_ends = np.cumsum(rows)
        self._row_starts = self._row_ends - rows
        self.num_rows = int(rows.sum())
        self.num_tokens = int(np.clip(pieces.lengths - 1, 0, rows * seq_len).sum())

    def _find(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(byte address of the first token, tokens from there to the end of the piece) of each row."""
        piece = np.searchsorted(self._row_ends, rows, "right")
        offset = (rows - self._row_starts[piece]) * self._stride
        return self._starts[piece] + offset * self.dtype.itemsize, self._lengths[piece] - offset

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return np.minimum(self.row_len, self._find(rows)[1])

    def read(self, rows: np.ndarray) -> np.ndarray:
        addresses, left = self._find(rows)
        whole = left >= self.row_len
        if whole.all():
            return self._check_vocab(self._gather(addresses), rows)
        out = np.zeros((len(rows), self.row_len), self.dtype)
        if whole.any():
            out[whole] = self._gather(addresses[whole])
        self._fill(out, [(row, 0, int(addresses[row]), int(left[row])) for row in np.flatnonzero(~whole)])
        return self._check_vocab(out, rows)

    def _address(self, row: int, col: int) -> int:
        return int(self._find(np.array([row]))[0][0]) + col * self.dtype.itemsize
