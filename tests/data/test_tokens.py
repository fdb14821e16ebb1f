import struct

import numpy as np
import pytest

from jaxpretrain.data import tokens

TOKENS = np.random.default_rng(0).integers(1, 50_000, 5000)


def read(pieces, i=0):
    size = pieces.dtype.itemsize
    return pieces.files.read(int(pieces.starts[i]), int(pieces.lengths[i]) * size).view(pieces.dtype).tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bare_tokens(tmp_path, dtype, server):
    """nanoGPT's .bin, OLMo's header-less .npy, local and remote."""
    for name in ("train.bin", "part-0.npy"):
        TOKENS.astype(dtype).tofile(tmp_path / name)
        server.files["tokens/" + name] = TOKENS.astype(dtype).tobytes()
        assert read(tokens.open_tokens(str(tmp_path / name), dtype)) == TOKENS.tolist()
    pieces = tokens.open_tokens("gs://bucket/tokens", dtype)
    assert pieces.lengths.tolist() == [5000, 5000]
    assert read(pieces, 1) == TOKENS.tolist()


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4", "<i8"])
def test_real_numpy_header(tmp_path, dtype):
    """Mutation seen to fail: `offset = 8 + width` without the header's own length."""
    np.save(tmp_path / "x.npy", TOKENS.astype(dtype))
    pieces = tokens.open_tokens(str(tmp_path / "x.npy"), "uint16")
    assert pieces.dtype == np.dtype(dtype)
    assert read(pieces) == TOKENS.tolist()


@pytest.mark.parametrize("magic, dtype", [(20240520, "<u2"), (20240801, "<u4")])
def test_llmc_header(tmp_path, magic, dtype):
    header = struct.pack("<256i", magic, 1, len(TOKENS), *[0] * 253)
    (tmp_path / "x.bin").write_bytes(header + TOKENS.astype(dtype).tobytes())
    assert read(tokens.open_tokens(str(tmp_path / "x.bin"), "uint16")) == TOKENS.tolist()
    (tmp_path / "x.bin").write_bytes(header + TOKENS.astype(dtype).tobytes()[:-2])
    with pytest.raises(ValueError, match=r"x\.bin: \d+ bytes where its llm\.c header says \d+"):
        tokens.open_tokens(str(tmp_path / "x.bin"), "uint16")


@pytest.mark.parametrize(
    "array, message",
    [
        (TOKENS.astype("f4"), r"a NumPy file of float32 \(5000,\)"),
        (TOKENS.astype(">u2"), r"a NumPy file of >u2 \(5000,\)"),
        (TOKENS.reshape(50, 100), r"a NumPy file of int64 \(50, 100\)"),
    ],
)
def test_numpy_files_of_other_things(tmp_path, array, message):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ValueError, match=rf"x\.npy: {message}"):
        tokens.open_tokens(str(tmp_path / "x.npy"), "uint16")


def test_damage_is_named(tmp_path):
    path = tmp_path / "x.bin"

    def attempt(data, dtype="uint16"):
        path.write_bytes(data)
        return tokens.open_tokens(str(path), dtype)

    with pytest.raises(ValueError, match=r"x\.bin: 9999 bytes are no whole number of uint16 tokens"):
        attempt(TOKENS.astype("u2").tobytes()[:-1])
    with pytest.raises(ValueError, match=r"x\.bin: 9998 bytes are no whole number of uint32 tokens"):
        attempt(TOKENS.astype("u2").tobytes()[:-2], "uint32")
    with pytest.raises(ValueError, match=r"x\.bin: no tokens in it"):
        attempt(b"")
    with pytest.raises(ValueError, match=r"x\.bin: .* so it holds uint32; set data\.dtype=uint32"):
        attempt(TOKENS.astype("u4").tobytes())
    np.save(tmp_path / "x.npy", TOKENS)
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"x\.npy: \d+ bytes do not fit its NumPy header of 5000 int64"):
        tokens.open_tokens(str(tmp_path / "x.npy"), "uint16")
    with pytest.raises(ValueError, match=r"nothing\.bin: no such file"):
        tokens.open_tokens(str(tmp_path / "nothing.bin"), "uint16")
    TOKENS.astype("u2").tofile(tmp_path / "y.bin")
    np.save(tmp_path / "x.npy", TOKENS)
    with pytest.raises(ValueError, match=r"y\.bin: its tokens are uint16, those of .*x\.npy are int64"):
        tokens.open_tokens(f"{tmp_path}/x.npy,{tmp_path}/y.bin", "uint16")
