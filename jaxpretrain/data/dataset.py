"""The data of a run: sources -> rows in an order -> batches, each a pure function of (seed, step).

Row i of the run (i = step * batch_size + position in the batch) is, of its source, row number j, counted over all
epochs; epoch j // num_rows goes through the source's rows by a permutation of its own.
"""

import os
from collections.abc import Iterator

import numpy as np
from ml_collections import ConfigDict

from jaxpretrain.config import data_sources, num_masked_tokens
from jaxpretrain.data import huggingface, megatron, storage, text, tokens
from jaxpretrain.data.masking import Masking
from jaxpretrain.data.mixture import Mixture
from jaxpretrain.data.permutation import fold, permute, scatter
from jaxpretrain.data.read_ahead import read_ahead
from jaxpretrain.data.tokenizer import MaskingTokens, load_tokenizer
from jaxpretrain.data.windows import (
    DocumentWindows,
    Pieces,
    PieceWindows,
    SentenceWindows,
    split_documents,
    split_tail,
)
from jaxpretrain.schema import IMAGE_FAMILIES

_REMOTE_READ_AHEAD = 8  # batches read at once where each costs a round trip
_TRAIN_MASKS, _EVAL_MASKS = 0x3A5C, 0xE7A1  # names of keys, beside those of permutations


class SyntheticWindows:
    """Uniformly random tokens, the same for the same (seed, row); no files."""

    remote = False

    def __init__(self, num_rows: int, row_len: int, num_targets: int, vocab_size: int, key: int):
        self.num_rows, self.num_tokens = num_rows, num_rows * num_targets
        self.row_len, self.vocab_size, self._key = row_len, vocab_size, key

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return np.full(rows.shape, self.row_len)

    def read(self, rows: np.ndarray) -> np.ndarray:
        # A start for each row, scattered over 64 bits so that no two rows are shifts of each other.
        starts = scatter(rows.astype(np.uint64) ^ np.uint64(self._key))
        x = scatter(starts[:, None] + np.arange(self.row_len, dtype=np.uint64))
        x >>= np.uint64(32)
        x *= np.uint64(self.vocab_size)
        x >>= np.uint64(32)
        return x.astype(np.int32)


class Dataset:
    """Batches of one split; `make_dataset` makes it.

    A batch is a dict of `tokens`, int32 [B, T + 1], and, in evaluation and where documents are isolated, `segment_ids`,
    int32 [B, T + 1], 0 on padding. `rows` takes a contiguous part of the global batch, for one host.
    """

    def __init__(self, windows: list, mixture: Mixture, config: ConfigDict, pads: bool = False):
        """`pads`: training rows, too, may be shorter than others."""
        self.seq_len, self.batch_size = config.seq_len, config.batch_size
        self._windows, self._mixture, self._row_len = windows, mixture, windows[0].row_len
        self._seed, self._shuffled = config.seed, config.data.order == "shuffled"
        self._isolate, self._pads = config.data.isolate_documents, pads
        self.num_rows = sum(w.num_rows for w in windows)
        self.num_tokens = sum(w.num_tokens for w in windows)  # targets of one pass over every source
        self.read_ahead = _REMOTE_READ_AHEAD if any(w.remote for w in windows) else 1
        self._eval_ends = np.cumsum([w.num_rows for w in windows])

    @property
    def sizes(self) -> list[list[int]]:
        """Rows and targets of each source: as they are part of the order, a run must find the same when it resumes."""
        return [[int(w.num_rows), int(w.num_tokens)] for w in self._windows]

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """The batch of optimizer step `step` (from 0). Raises ValueError for an id outside the vocabulary."""
        index = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)[rows]
        source, local = self._mixture.assign(index)
        for k, windows in enumerate(self._windows):
            mine = source == k
            epoch, row = np.divmod(local[mine], windows.num_rows)
            if self._shuffled and row.size:
                first = int(epoch[0])  # epochs do not fall within a batch
                keys = [fold(self._seed, k, e) for e in range(first, int(epoch[-1]) + 1)]
                row = permute(row, windows.num_rows, np.array(keys, np.uint64)[epoch - first])
            local[mine] = row
        return self._read(source, local, evaluation=False)

    def batches(self, start_step: int, stop_step: int, rows: slice = slice(None)) -> Iterator[dict[str, np.ndarray]]:
        """`batch` of each step in turn; from remote files several are read at once. Close it, or exhaust it."""
        return read_ahead(lambda step: self.batch(step, rows), start_step, stop_step, self.read_ahead)

    def eval_batches(
        self, num_batches: int, batch_size: int, rows: slice = slice(None)
    ) -> Iterator[dict[str, np.ndarray]]:
        """The first `num_batches` of `eval_batch` in turn, likewise."""
        return read_ahead(lambda i: self.eval_batch(i, batch_size, rows), 0, num_batches, self.read_ahead)

    def num_batches(self, batch_size: int) -> int:
        """Batches of `batch_size` rows that cover the split once."""
        return -(-self.num_rows // batch_size)

    def eval_batch(self, i: int, batch_size: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """Batch `i` of one pass in stored order: every target once; what is missing in the last is padding.

        Every batch has segment_ids, so that one compiled program takes them all.
        """
        index = i * batch_size + np.arange(batch_size, dtype=np.int64)
        assert 0 <= i < self.num_batches(batch_size), i
        source = np.searchsorted(self._eval_ends, index, "right")
        local = index - np.concatenate([[0], self._eval_ends])[source]
        return self._read(source[rows], local[rows], evaluation=True)

    def _lengths(self, source: np.ndarray, local: np.ndarray) -> np.ndarray:
        out = np.zeros(local.shape, np.int64)
        for k, windows in enumerate(self._windows):
            out[source == k] = windows.lengths(local[source == k])
        return out

    def _read(self, source: np.ndarray, local: np.ndarray, evaluation: bool) -> dict[str, np.ndarray]:
        batch = {"tokens": np.zeros((len(local), self._row_len), np.int32)}
        if self._isolate:
            batch["segment_ids"] = np.zeros_like(batch["tokens"])
        elif evaluation or self._pads:
            real = np.arange(self._row_len) < self._lengths(source, local)[:, None]
            batch["segment_ids"] = real.astype(np.int32)
        for k, windows in enumerate(self._windows):
            mine = source == k
            if mine.all():
                batch["tokens"] = windows.read(local)
            elif mine.any():
                batch["tokens"][mine] = windows.read(local[mine])
            if self._isolate and mine.any():
                batch["segment_ids"][mine] = windows.segments(local[mine])
        return batch


class MaskedDataset(Dataset):
    """Batches for a masked language model, some of whose tokens are to be predicted (Devlin et al. 2019, section A.1).

    A batch has `tokens` and `segment_ids` (1, or 0 on padding), int32 [B, T], and `positions` and `targets`,
    int32 [B, M]: which tokens are predicted, and what they were, -1 where a row has fewer than M. Which they are, and
    what is read in their place, follows from the seed and the row's number in the run; in evaluation from the row's
    number in the split.
    """

    def __init__(self, windows: list, mixture: Mixture, config: ConfigDict, tokens: MaskingTokens):
        super().__init__(windows, mixture, config, pads=True)
        fraction, most = config.objective.mask_fraction, num_masked_tokens(config)
        self._mask = Masking(tokens, config.model.vocab_size, fraction, most)

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        index = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)[rows]
        return self._mask(super().batch(step, rows), index, fold(self._seed, _TRAIN_MASKS))

    def eval_batch(self, i: int, batch_size: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        index = i * batch_size + np.arange(batch_size, dtype=np.int64)[rows]
        return self._mask(super().eval_batch(i, batch_size, rows), index, fold(_EVAL_MASKS))


def make_dataset(config: ConfigDict, split: str) -> Dataset:
    """The dataset of a checked config; `split` is "train" or "valid".

    Raises ValueError for data that is missing (saying what to fetch), broken, or smaller than one row.
    """
    assert split in ("train", "valid"), split
    if config.model.family in IMAGE_FAMILIES:
        from jaxpretrain.data.images import make_image_dataset  # needs Pillow

        return make_image_dataset(config, split)
    data = config.data
    if split == "valid" and not data.validation_path and not data.validation_fraction:
        raise ValueError(
            "data.validation_fraction=0.0 and no data.validation_path: there is no validation data; "
            "set one of them, or eval.every=-1"
        )
    if data.validation_path and data.source == "mixture":
        raise ValueError(
            f"data.validation_path={data.validation_path!r} has no effect with data.source='mixture': each of "
            "its sources holds out data.validation_fraction; remove it"
        )
    sources = dict(sorted(data_sources(config).items()))  # by name: config.json does not keep the recipe's order
    masking = _masking_tokens(config) if config.model.family == "encoder" else None
    windows = [_open(config, name, spec, split, k, masking) for k, (name, spec) in enumerate(sources.items())]
    mixture = Mixture(list(sources), [spec["weight"] for spec in sources.values()])
    return MaskedDataset(windows, mixture, config, masking) if masking else Dataset(windows, mixture, config)


def _masking_tokens(config: ConfigDict) -> MaskingTokens:
    tokenizer = load_tokenizer(config.data.tokenizer)
    tokens, vocab_size = tokenizer.masking_tokens, config.model.vocab_size
    if max(tokens.special) >= vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} has no room for the special tokens of data.tokenizer={tokenizer.name!r}; "
            f"set it to {max(tokens.special) + 1} or more"
        )
    return tokens


def _open(config: ConfigDict, name: str, spec: dict, split: str, k: int, masking: MaskingTokens | None):
    """The rows of one source's split; of whole sentences for a masked language model."""
    data, seq_len, vocab_size = config.data, config.seq_len, config.model.vocab_size
    key = "data" if data.source != "mixture" else f"data.mixture.{name}"
    kind, row_len = spec["source"], spec["row_len"]
    if kind == "synthetic":
        _refuse_isolation(data, key, "synthetic tokens")
        num_rows = 1 << 40 if split == "train" else config.batch_size
        row_len = seq_len if masking else seq_len + 1
        return SyntheticWindows(num_rows, row_len, seq_len, vocab_size, fold(config.seed, k, split == "train"))
    if row_len and row_len != seq_len + 1:
        raise ValueError(f"{key}.row_len={row_len} holds rows for seq_len={row_len - 1}, not seq_len={seq_len}")
    path, path_key = spec["path"], f"{key}.path"
    if split == "valid" and data.validation_path:
        path, path_key = data.validation_path, "data.validation_path"
    if not path and kind != "stdlib":
        raise ValueError(f"{path_key} is empty, and {key}.source={kind!r} reads files; {_how_to_get(spec, 'DIR')}")
    # No shell expands the ~ of --config.data.path=~/x.
    path = ",".join(os.path.expanduser(part.strip()) for part in path.split(","))
    try:
        pieces, prefix = _pieces(config, spec, path)
    except storage.MissingFile as error:
        raise ValueError(f"{path_key}={path}: {error}; {_how_to_get(spec, path)}") from error

    if pieces.lengths.sum() == 0:
        raise ValueError(f"{path_key}={path or kind}: no tokens in it; is it the right file?")
    has_documents = kind not in ("tokens", "olmo") and not row_len
    if masking and not has_documents:
        what = "preshuffled rows" if row_len else f"{kind} files"
        raise ValueError(
            f"{key}: {what} do not say where sentences end, which model.family='encoder' packs its rows by; use text, "
            "or Megatron files"
        )
    if not has_documents:
        _refuse_isolation(data, key, "preshuffled rows" if row_len else f"{kind} files")
    stride = seq_len + 1 if row_len else seq_len
    if data.validation_fraction and not data.validation_path:
        if has_documents:
            halves = split_documents(pieces, data.validation_fraction)
        else:
            halves = split_tail(pieces, data.validation_fraction, seq_len, stride)
        pieces = halves[split == "valid"]
    pad = split == "valid"
    if masking:
        ends = megatron.sentence_ends(prefix)
        first, padding = masking.first, masking.padding
        windows = SentenceWindows(pieces, ends, seq_len, vocab_size, first_token=first, padding_token=padding)
    elif has_documents:
        windows = DocumentWindows(pieces, seq_len, vocab_size, isolate=data.isolate_documents, pad=pad)
    else:
        windows = PieceWindows(pieces, seq_len, vocab_size, stride=stride, pad=pad)
    if windows.num_rows == 0:
        raise ValueError(
            f"{path_key}={path or kind}: {int(pieces.lengths.sum())} tokens to {split}, fewer than one row of "
            f"{2 if pad else seq_len + 1}; shorten seq_len={seq_len} or add data"
        )
    return windows


def _pieces(config: ConfigDict, spec: dict, path: str) -> tuple[Pieces, str]:
    """What a source holds, and, if that is documents, the Megatron files that it is in."""
    data, vocab_size, by_line = config.data, config.model.vocab_size, config.model.family == "encoder"
    match spec["source"]:
        case "megatron" if spec["row_len"]:
            return megatron.open_rows(path, spec["row_len"]), ""
        case "tokens" | "olmo":
            return tokens.open_tokens(path, spec["dtype"]), ""
        case "megatron":
            prefix = path
        case "huggingface":
            prefix = huggingface.cached_tokens(
                path,
                tokens_key=spec["tokens_key"],
                text_key=spec["text_key"],
                tokenizer=data.tokenizer,
                cache_dir=data.cache_dir,
                vocab_size=vocab_size,
                by_line=by_line,
            )
        case "text" | "stdlib":
            prefix = text.tokenized(
                spec["source"],
                path,
                spec["text_key"],
                tokenizer=data.tokenizer,
                cache_dir=data.cache_dir,
                vocab_size=vocab_size,
                by_line=by_line,
            )
    return megatron.open_documents(prefix), prefix


def _refuse_isolation(data: ConfigDict, key: str, what: str) -> None:
    if data.isolate_documents:
        raise ValueError(
            f"data.isolate_documents=True, but in {key} {what} do not say where documents begin; "
            "set it to False, or use documents in Megatron files (tools/tokenize_text.py)"
        )


def _how_to_get(spec: dict, path: str) -> str:
    """The command that makes or fetches what `path` should hold."""
    folder = path if path == "DIR" or path.endswith("/") else os.path.dirname(path) or "."
    match spec["source"]:
        case "megatron" if spec["row_len"]:
            kind = "deduped" if "dedup" in path else "standard"
            folder = os.path.dirname(path) if os.path.basename(path) == "document" else path
            return (
                f"Pythia's rows: hf download EleutherAI/pile-{kind}-pythia-preshuffled --repo-type dataset "
                f"--local-dir {folder}"
            )
        case "megatron":
            return f"tokenise text to it: python tools/tokenize_text.py --input=FILES --tokenizer=FILE --output={path}"
        case "tokens":
            return f"nanoGPT writes it: python data/openwebtext/prepare.py, then copy train.bin to {folder}"
        case "olmo":
            return f"fetch the files that OLMo's config lists under data.paths: wget -P {folder} URL"
        case "huggingface":
            command = f"datasets.load_dataset(NAME, split='train').save_to_disk('{path}')"
            return f'write it: python -c "import datasets; {command}"'
        case _:
            return "give text files, folders or globs"
