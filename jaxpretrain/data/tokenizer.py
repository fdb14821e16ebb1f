"""Tokenizers: bytes, or any Hugging Face `tokenizer.json`, behind one small interface.

Text is encoded as it stands: no token is added before or after it (no beginning-of-sequence token), and a
special token that is spelt out in the text, such as <|endoftext|>, becomes that token, as in `tokenizers`.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence

import numpy as np

# In this order, the first that a tokenizer has is its end-of-document token.
EOD_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


_FIRST_TOKENS, _PADDING_TOKENS, _MASK_TOKENS = ("<s>", "[CLS]"), ("<pad>", "[PAD]"), ("<mask>", "[MASK]")


@dataclasses.dataclass(frozen=True)
class MaskingTokens:
    """What a masked language model needs of a vocabulary beside words."""

    first: int  # begins every row
    padding: int
    mask: int  # stands for a token to predict
    special: tuple[int, ...]  # these three and the others that are never masked, nor drawn in place of a word


class ByteTokenizer:
    """Ids 0..255 are the bytes of the text in UTF-8. No end-of-document token: only an index marks boundaries."""

    name = "bytes"
    digest = "bytes"  # equal digests: equal ids for every text
    vocab_size = 256
    eod = None
    masking_tokens = MaskingTokens(first=256, padding=257, mask=258, special=(256, 257, 258))

    def encode(self, text: str) -> np.ndarray:
        """int32 [num_tokens]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 [num_tokens] of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """What is not UTF-8, which includes every id above 255, reads U+FFFD."""
        ids = np.asarray(ids)
        return np.where((ids < 0) | (ids > 255), 0xFF, ids).astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`; `load_tokenizer` reads it."""

    def __init__(self, path: pathlib.Path, eod_token: str | None):
        import tokenizers

        content = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the Rust library raises nothing more specific
            raise ValueError(f"{path}: not a Hugging Face tokenizer.json: {error}") from error
        # A file saved for fine-tuning may cut or pad what it encodes.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = str(path)
        self.digest = hashlib.sha256(content).hexdigest()
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1  # ids may have holes
        if eod_token is not None and self._tokenizer.token_to_id(eod_token) is None:
            raise ValueError(f"{path}: has no token {eod_token!r} to end a document with (--eod-token)")
        found = map(self._tokenizer.token_to_id, EOD_TOKENS if eod_token is None else [eod_token])
        self.eod = next((id for id in found if id is not None), None)

    @property
    def masking_tokens(self) -> MaskingTokens:
        """Raises ValueError where one of them is missing."""
        found = []
        for names in (_FIRST_TOKENS, _PADDING_TOKENS, _MASK_TOKENS):
            ids = [id for id in map(self._tokenizer.token_to_id, names) if id is not None]
            if not ids:
                raise ValueError(f"{self.name}: has no {' or '.join(names)}, which a masked language model needs")
            found.append(ids[0])
        added = self._tokenizer.get_added_tokens_decoder()
        special = {*found, *(id for id, token in added.items() if token.special)}
        return MaskingTokens(*found, special=tuple(sorted(special)))

    def encode(self, text: str) -> np.ndarray:
        """int32 [num_tokens]."""
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 [num_tokens] of each text; on all cores unless TOKENIZERS_PARALLELISM=false."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(spec: str, eod_token: str | None = None) -> Tokenizer:
    """The tokenizer of `spec`: "bytes", a `tokenizer.json`, or a folder that holds one.

    `eod_token` names the end-of-document token; without it, it is the first of EOD_TOKENS that the vocabulary
    has, if any (attribute `eod`, None where there is none).
    Raises ValueError where the file is missing or is no tokenizer, or `eod_token` is not in it.
    """
    if spec == "bytes":
        if eod_token is not None:
            raise ValueError(f"--eod-token={eod_token}: the tokenizer 'bytes' has no special tokens; leave it out")
        return ByteTokenizer()
    path = pathlib.Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"tokenizer {spec!r}: no such file; give 'bytes' or the path of a Hugging Face tokenizer.json")
    return FileTokenizer(path, eod_token)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError where the tokenizer has ids that a model of `vocab_size` rows lacks."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"data.tokenizer={tokenizer.name!r} has {tokenizer.vocab_size} ids but model.vocab_size={vocab_size}; "
            f"set model.vocab_size to {tokenizer.vocab_size} or more"
        )
