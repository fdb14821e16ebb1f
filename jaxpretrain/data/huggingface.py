"""A folder of a Hugging Face dataset: arrow shards as `save_to_disk` writes them, or parquet files.

Either holds a column of token ids or one of text, one row a document. Both are turned once into Megatron files in
the token cache, since parquet has no random access and a copy as uint16 is half the size or less.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxpretrain.data import documents, megatron, storage, text

_SPLITS = ("train", "validation", "valid", "val", "dev", "test")


def cached_tokens(
    path: str,
    *,
    tokens_key: str,
    text_key: str,
    tokenizer: str,
    cache_dir: str,
    vocab_size: int,
    by_line: bool = False,
) -> str:
    """The prefix of Megatron files that hold the dataset's tokens, made now where the cache lacks them.

    Args:
      path: a folder, parquet or arrow files, or a glob; several with commas; local or remote.
      tokens_key: the column of token ids (data.tokens_key); "": text_key is tokenised.
      text_key, tokenizer, cache_dir: of the `data` section.
      vocab_size: model.vocab_size.
      by_line: every line of text is a sequence of its own.

    Raises ValueError naming the file for what is missing or no such column, and for ids outside the vocabulary.
    """
    files = find_shards(path)
    identity = ["huggingface", documents.identity(files), tokens_key or text_key]
    if not tokens_key:
        texts = (t for file in files for t in _read_texts(file, text_key))
        return text.tokenize_to_cache(
            texts,
            name=f"data.path={path!r}",
            identity=identity,
            tokenizer=tokenizer,
            cache_dir=cache_dir,
            vocab_size=vocab_size,
            by_line=by_line,
        )
    # Not the vocabulary itself: ids are checked again as they are read.
    folder = text.cache_folder(cache_dir)
    prefix = str(folder / text.fingerprint(identity, megatron.token_dtype(vocab_size).str))
    if not os.path.exists(prefix + ".idx"):
        print(f"data.path={path!r}: copying tokens to {prefix}.bin", flush=True)
        try:
            with megatron.Writer(prefix, vocab_size) as writer:
                for file in files:
                    for tokens in _read_tokens(file, tokens_key, vocab_size):
                        writer.add_document(tokens)
                if not writer.num_documents:
                    raise ValueError(f"data.path={path!r}: holds no tokens under {tokens_key!r}")
        except OSError as error:
            raise ValueError(
                f"data.cache_dir={str(folder)!r}: cannot copy {path} there: {error.strerror or error}; "
                "set it to a folder that can be written and has room"
            ) from error
    return prefix


def find_shards(path: str) -> list[str]:
    """The arrow or parquet files of a dataset, in its order. Raises ValueError where the split is not clear."""
    shards = []
    for part in filter(None, (p.strip().rstrip("/") for p in path.split(","))):
        if storage.exists(f"{part}/dataset_dict.json"):
            splits = split_names(part)
            raise ValueError(
                f"{part}: holds the splits {', '.join(splits)}; set data.path={part}/{splits[0]}"
                + (f" and data.validation_path={part}/{splits[1]}" if len(splits) > 1 else "")
            )
        if storage.exists(f"{part}/state.json"):
            names = _read_json(f"{part}/state.json", lambda state: [e["filename"] for e in state["_data_files"]])
            shards += [f"{part}/{name}" for name in names]
            continue
        found = storage.list_files(part, (".parquet", ".arrow"))
        names = {re.split(r"[-.]", os.path.basename(file))[0] for file in found} & set(_SPLITS)
        if len(names) > 1:
            raise ValueError(
                f"{part}: holds files of the splits {', '.join(sorted(names))}; choose one by a glob, "
                f"such as {os.path.dirname(found[-1])}/{sorted(names)[0]}-*{os.path.splitext(found[-1])[1]}"
            )
        shards += found
    return shards


def split_names(folder: str) -> list[str]:
    """Of a dataset saved with its splits. Raises ValueError where its dataset_dict.json is damaged."""
    return _read_json(f"{folder}/dataset_dict.json", lambda content: [str(name) for name in content["splits"]])


def _read_json(file: str, read: Callable[[Any], list[str]]) -> list[str]:
    """What `read` finds in a JSON file of `save_to_disk`."""
    content = storage.read_file(file)
    try:
        return read(json.loads(content))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file}: damaged, or not of save_to_disk; write or fetch the dataset again") from error


def _read_texts(path: str, key: str) -> Iterator[str]:
    for column in _read_column(path, key):
        if "string" not in str(column.type):
            raise ValueError(f"{path}: {key!r} is {column.type}, not text; set data.text_key, or data.tokens_key")
        yield from filter(None, column.to_pylist())


def _read_tokens(path: str, key: str, vocab_size: int) -> Iterator[np.ndarray]:
    import pyarrow as pa
    import pyarrow.compute

    for column in _read_column(path, key):
        kind = column.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not pa.types.is_integer(kind.value_type):
            raise ValueError(f"{path}: {key!r} is {kind}, not a list of integers; set data.tokens_key to the token ids")
        values = column.flatten()
        if values.null_count:
            raise ValueError(f"{path}: {key!r} holds nulls among its token ids; write the dataset again without them")
        tokens = values.to_numpy()
        if tokens.size and (tokens.max() >= vocab_size or tokens.min() < 0):
            bad = tokens[(tokens >= vocab_size) | (tokens < 0)][0]
            raise ValueError(f"{path}: token id {bad} is outside model.vocab_size={vocab_size}")
        lengths = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy()
        yield from np.split(tokens, np.cumsum(lengths)[:-1])


def _read_column(path: str, key: str) -> Iterator[Any]:
    """The column `key` of a parquet or arrow file, a pyarrow array per record batch."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading it needs pyarrow: pip install 'jaxpretrain[hf]'") from error
    file = storage.Files([path])
    source = pa.BufferReader(pa.py_buffer(file.read(0, file.size)))  # a view of the map where the file is local
    try:
        if path.endswith(".parquet"):
            reader = pyarrow.parquet.ParquetFile(source)
            schema, batches = reader.schema_arrow, None
        else:
            reader = batches = pa.ipc.open_stream(source)
            schema = reader.schema
        if key not in schema.names:
            raise ValueError(
                f"{path}: no column {key!r} among {', '.join(schema.names)}; set data.tokens_key or text_key"
            )
        for batch in reader.iter_batches(columns=[key]) if batches is None else batches:
            yield batch.column(key)
    except pa.ArrowException as error:
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(f"{path}: damaged or truncated, fetch or write it again ({first_line})") from error
