"""Tokenizers against known ids and against the `tokenizers` library itself."""

import gzip
import json
import pathlib

import numpy as np
import pytest
import tokenizers

from jaxpretrain.data.tokenizer import check_vocabulary, load_tokenizer

DATA_FILES = pathlib.Path(__file__).parents[1] / "data_files"


@pytest.fixture(scope="module")
def pythia_path(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("pythia") / "tokenizer.json"
    path.write_bytes(gzip.decompress((DATA_FILES / "pythia_tokenizer.json.gz").read_bytes()))
    return str(path)


@pytest.fixture(scope="module")
def pythia(pythia_path):
    return load_tokenizer(pythia_path)


def word_tokenizer(path: pathlib.Path, special_tokens=()) -> tokenizers.Tokenizer:
    """Words a, b, c with ids 0, 1, 2."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.save(str(path))
    return tokenizer


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod) == (256, None)
    assert tokenizer.encode("aé€\n").tolist() == [0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0x0A]
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode(tokenizer.encode("aé€\0\n")) == "aé€\0\n"
    # An id that is no byte, and half a character.
    assert tokenizer.decode([0x61, 300, 0xC3]) == "a\ufffd\ufffd"


def test_pythia(pythia):
    assert pythia.encode("Hello world").tolist() == [12092, 1533]
    assert (pythia.vocab_size, pythia.eod) == (50277, 0)
    assert pythia.decode([12092, 1533]) == "Hello world"
    assert pythia.encode("Hello<|endoftext|>").tolist() == [12092, 0]
    assert pythia.encode("x").dtype == np.int32


def test_documents_equal_single_encodings(pythia, pythia_path):
    """Mutation seen to fail: encode_documents given `texts[::-1]`."""
    reference = tokenizers.Tokenizer.from_file(pythia_path)
    source = pathlib.Path(__file__).read_text()
    texts = ["", "one", "  two  spaces\n\n", "naïve — €", source, source * 5]
    for ids, text in zip(pythia.encode_documents(texts), texts, strict=True):
        assert ids.tolist() == reference.encode(text).ids


def test_settings_of_a_fine_tuned_file_are_dropped(tmp_path):
    """Truncation, padding and a template that adds tokens. Mutations seen to fail: without no_truncation, no_padding,
    add_special_tokens=False."""
    path = tmp_path / "tokenizer.json"
    tokenizer = word_tokenizer(path, ["<s>", "</s>"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 3)])
    tokenizer.save(str(path))
    ids = load_tokenizer(str(path)).encode_documents(["a b c a", "b"])
    assert [i.tolist() for i in ids] == [[0, 1, 2, 0], [1]]


def test_end_of_document_token(tmp_path):
    for tokens, expected in [((), None), (["</s>"], 3), (["</s>", "<|endoftext|>"], 4), (["<|end_of_text|>"], 3)]:
        word_tokenizer(tmp_path / "tokenizer.json", tokens)
        assert load_tokenizer(str(tmp_path / "tokenizer.json")).eod == expected
    assert load_tokenizer(str(tmp_path / "tokenizer.json"), eod_token="b").eod == 1


def test_a_folder_stands_for_its_file(tmp_path):
    word_tokenizer(tmp_path / "tokenizer.json")
    assert load_tokenizer(str(tmp_path)).vocab_size == 3


def test_vocab_size_counts_holes(tmp_path):
    """The largest id decides, not the number of tokens. Mutation seen to fail: get_vocab_size()."""
    word_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["z"] = 9
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path)).vocab_size == 10


def test_check_vocabulary(pythia):
    check_vocabulary(pythia, 50304)
    with pytest.raises(ValueError, match=r"50277 ids but model.vocab_size=256; set model.vocab_size to 50277"):
        check_vocabulary(pythia, 256)


def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match="gpt2.*no such file"):
        load_tokenizer("gpt2")
    (tmp_path / "tokenizer.json").write_text('{"no": "tokenizer"}')
    with pytest.raises(ValueError, match="tokenizer.json: not a Hugging Face tokenizer.json"):
        load_tokenizer(str(tmp_path))
    word_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="no token '<end>'"):
        load_tokenizer(str(tmp_path), eod_token="<end>")
    with pytest.raises(ValueError, match="'bytes' has no special tokens"):
        load_tokenizer("bytes", eod_token="</s>")
