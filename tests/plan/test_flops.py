"""Closed-form parameter and FLOP counts against published sizes and counts by hand."""

from ml_collections import ConfigDict

from jaxpretrain import config as config_lib
from jaxpretrain.plan import flops


def make_model(**changes) -> ConfigDict:
    model = config_lib.default().model
    model.update(changes)
    return model


PYTHIA_1B = dict(
    vocab_size=50304, num_layers=16, embed_dim=2048, num_heads=8, mlp_dim=8192, parallel_residual=True, norm_bias=True
)
GPT2 = dict(
    vocab_size=50257,
    num_layers=12,
    embed_dim=768,
    num_heads=12,
    positions="learned",
    max_positions=1024,
    tied_embeddings=True,
)
LLAMA = dict(norm="rmsnorm", norm_bias=False, gated_mlp=True, attention_bias=False, mlp_bias=False)
LLAMA2_7B = dict(LLAMA, vocab_size=32000, num_layers=32, embed_dim=4096, num_heads=32, mlp_dim=11008)
LLAMA3_8B = dict(LLAMA, vocab_size=128256, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14336)


def test_published_parameter_counts():
    """Totals of the published checkpoints. Seen to fail with the key-value heads counted as query heads (kv_heads =
    model.num_heads), and with the position table left out."""
    assert flops.num_parameters(make_model(**PYTHIA_1B), 2048) == 1_011_781_632
    assert flops.num_parameters(make_model(**GPT2), 1024) == 124_439_808
    assert flops.num_parameters(make_model(**LLAMA2_7B), 4096) == 6_738_415_616
    assert flops.num_parameters(make_model(**LLAMA3_8B), 8192) == 8_030_261_248


def test_pythia_published_non_embedding_parameters():
    """The paper's 805,736,448 for Pythia-1B counts neither embedding; biases and norms are in it."""
    model = make_model(**PYTHIA_1B)
    biases_and_norms = 16 * (3 * 2048 + 2048 + 8192 + 2048 + 4 * 2048) + 2 * 2048
    matmul = flops.num_matmul_parameters(model)
    assert matmul - 50304 * 2048 + biases_and_norms == 805_736_448


def test_every_term_by_hand():
    """A small odd model: each number here is one array of it."""
    model = make_model(
        vocab_size=11,
        num_layers=3,
        embed_dim=10,
        num_heads=4,
        num_kv_heads=2,
        head_dim=3,
        mlp_dim=7,
        gated_mlp=True,
        qk_norm=True,
        positions="learned",
    )
    matmul_per_layer = 10 * 12 + 10 * 6 + 10 * 6 + 12 * 10 + 10 * 7 + 10 * 7 + 7 * 10
    other_per_layer = (12 + 6 + 6 + 10) + (7 + 7 + 10) + 2 * (10 + 10) + (12 + 6)
    assert flops.num_matmul_parameters(model) == 3 * matmul_per_layer + 11 * 10
    total = 3 * (matmul_per_layer + other_per_layer) + 11 * 10 + 11 * 10 + 5 * 10 + 20
    assert flops.num_parameters(model, seq_len=5) == total
    assert flops.train_flops_per_token(model, 5) == 6 * (3 * matmul_per_layer + 110) + 6 * 3 * 12 * 5
    assert flops.palm_flops_per_token(model, 5) == 6 * total + 12 * 3 * 12 * 5


def test_tied_unembedding_multiplies_once():
    """Tying changes what is stored, not what is computed. Seen to fail with the unembedding counted only when it is
    untied."""
    tied, untied = make_model(**GPT2), make_model(**(GPT2 | {"tied_embeddings": False}))
    assert flops.train_flops_per_token(tied, 1024) == flops.train_flops_per_token(untied, 1024)
    assert flops.num_parameters(untied, 1024) - flops.num_parameters(tied, 1024) == 50257 * 768


def test_attention_flops_against_the_sum_over_positions():
    """Causal: position t attends to t+1; 2 matrix products, 2 FLOPs a multiply-add, backward twice the forward. The
    closed form drops the diagonal's half, T+1 -> T. Seen to fail with 12 L d T in place of 6 L d T."""
    model, seq_len = make_model(**PYTHIA_1B), 2048
    attention = flops.train_flops_per_token(model, seq_len) - 6 * flops.num_matmul_parameters(model)
    exact = 3 * sum(2 * 2 * 2048 * (t + 1) for t in range(seq_len)) * 16 / seq_len
    assert abs(attention / exact - seq_len / (seq_len + 1)) < 1e-12
