"""Raw token files: nanoGPT's `.bin` and OLMo's `.npy`, and the headers that look-alikes have.

nanoGPT's and OLMo's files are bare uint16 or uint32 tokens (OLMo's have no NumPy header, whatever their name says;
nanogpt data/openwebtext/prepare.py, olmo/data/memmap_dataset.py). Two files that are met under the same names are
recognised by their first bytes and read too: a real `.npy`, and llm.c's `.bin` with its header of 256 int32.
"""

import ast
import struct

import numpy as np

from jaxpretrain.data import storage
from jaxpretrain.data.windows import Pieces

_LLMC_HEADER_BYTES = 1024
_LLMC_DTYPES = {
    20240520: "<u2",
    20240801: "<u4",
}  # magic of GPT-2's and of Llama 3's files (llm.c dev/data/data_common.py)
_LOOK = 1 << 16  # tokens that are looked at for a wrong data.dtype


def open_tokens(paths: str, dtype: str) -> Pieces:
    """The token files that `paths` names, in that order; folders and globs sorted.

    Raises ValueError naming the file that is missing, empty, truncated, or plainly not of `dtype`.
    """
    files = storage.Files(storage.list_files(paths, (".bin", ".npy")))
    starts, lengths, dtypes = [], [], []
    for i, path in enumerate(files.paths):
        begin, end = int(files.starts[i]), int(files.starts[i + 1])
        head = files.read(begin, min(_LLMC_HEADER_BYTES, end - begin)).tobytes()
        offset, file_dtype = _parse_header(path, head, end - begin) or (0, np.dtype(dtype).newbyteorder("<"))
        size = end - begin - offset
        if size == 0:
            raise ValueError(f"{path}: no tokens in it")
        if size % file_dtype.itemsize:
            raise ValueError(
                f"{path}: {size} bytes are no whole number of {file_dtype.name} tokens; it is truncated or "
                f"data.dtype={dtype} is wrong"
            )
        if offset == 0 and file_dtype.itemsize == 2:
            look = files.read(begin, min(size, 2 * _LOOK)).view("<u2")
            if look.size >= 64 and not look[1::2].any() and look[::2].any():
                raise ValueError(f"{path}: every second uint16 is 0, so it holds uint32; set data.dtype=uint32")
        starts.append(begin + offset)
        lengths.append(size // file_dtype.itemsize)
        dtypes.append(file_dtype)
        if file_dtype != dtypes[0]:
            raise ValueError(
                f"{path}: its tokens are {file_dtype.name}, those of {files.paths[0]} are {dtypes[0].name}; "
                "give each type its own entry in data.mixture"
            )
    return Pieces(files, dtypes[0], np.array(starts, np.int64), np.array(lengths, np.int64))


def _parse_header(path: str, head: bytes, size: int) -> tuple[int, np.dtype] | None:
    """(bytes before the first token, token type) of a file with a header; None for bare tokens."""
    if head.startswith(b"\x93NUMPY"):
        return _parse_npy(path, head, size)
    magic, version, num_tokens = struct.unpack("<iii", head[:12]) if len(head) >= 12 else (0, 0, 0)
    if magic not in _LLMC_DTYPES or not 1 <= version <= 10:
        return None
    dtype = np.dtype(_LLMC_DTYPES[magic])
    expected = _LLMC_HEADER_BYTES + num_tokens * dtype.itemsize
    if size != expected:
        raise ValueError(f"{path}: {size} bytes where its llm.c header says {expected}; truncated? fetch it again")
    return _LLMC_HEADER_BYTES, dtype


def _parse_npy(path: str, head: bytes, size: int) -> tuple[int, np.dtype]:
    width, code = (2, "<H") if head[6] == 1 else (4, "<I")
    offset = 8 + width + struct.unpack(code, head[8 : 8 + width])[0]
    header = ast.literal_eval(head[8 + width : offset].decode("latin1"))
    dtype, shape = np.dtype(header["descr"]), header["shape"]
    if dtype.newbyteorder("<").str not in ("<u2", "<u4", "<i4", "<i8") or dtype.byteorder == ">" or len(shape) != 1:
        raise ValueError(
            f"{path}: a NumPy file of {dtype} {shape}; only one dimension of uint16, uint32, int32 or int64 is read"
        )
    if size != offset + shape[0] * dtype.itemsize:
        raise ValueError(f"{path}: {size} bytes do not fit its NumPy header of {shape[0]} {dtype}; truncated?")
    return offset, dtype
