"""What the trace of a forward counts, against closed forms."""

import pytest

from jaxpretrain import config as config_lib
from jaxpretrain.plan import flops
from jaxpretrain.plan.work import trace


def load(recipe, **overrides):
    settings = [("data.source", "synthetic"), *((key.replace("__", "."), str(v)) for key, v in overrides.items())]
    return config_lib.load(f"configs/{recipe}.py", settings)


# RoBERTa's head is computed for a fixed number of targets, a few more than are masked on average; of Mamba's scan,
# which is no product, the formula counts 9 FLOPs per state.
@pytest.mark.parametrize(
    "recipe, ratio",
    [
        ("pythia1b", 1),
        ("llama2_7b", 1),
        ("llama3_8b", 1),
        ("vit_large", 1),
        ("convnext_tiny", 1),
        ("roberta_large", 1.023),
        ("mamba130m", 0.979),
    ],
)
def test_flops_are_the_formulas(recipe, ratio):
    """1 % is the bar. Fails if layers are counted once, or causal attention twice (each tried)."""
    config = load(recipe)
    work = trace(config)
    counted = 3 * work.forward_flops / work.num_tokens
    assert counted / flops.train_flops_per_token(config) == pytest.approx(ratio, rel=0.002)


def test_kept_bytes_of_a_pythia_layer():
    """16-bit: queries, keys, values and output of attention (4 D), the MLP's hidden units (4 D), the input (D), and in
    float32 what the norms divide by; `full` keeps the input alone."""
    config = load("pythia1b")
    (stack,) = trace(config).stacks
    tokens, dim = config.seq_len, config.model.embed_dim
    assert stack.input_bytes == 2 * tokens * dim == pytest.approx(stack.kept["full"], rel=1e-3)
    assert stack.kept["none"] == pytest.approx(2 * tokens * 9 * dim, rel=0.05)
    assert stack.kept["full"] < stack.kept["dots"] <= stack.kept["none"]


def test_named_results_are_kept_too():
    """Beside the input: names are those of `checkpoint_name`."""
    config = load("pythia1b", parallel__remat="names:mlp_up")
    (stack,) = trace(config).stacks
    added = stack.kept["names:mlp_up"] - stack.kept["full"]
    assert added == pytest.approx(2 * config.seq_len * 4 * config.model.embed_dim, rel=0.01)


def test_attention_that_writes_scores_is_products():
    """`kernels.attention=xla` computes all of the scores, not those of earlier tokens alone, and keeps them."""
    config = load("pythia1b")
    written = load("pythia1b", kernels__attention="xla")
    (fused,), (plain,) = trace(config).stacks, trace(written).stacks
    products = [sum(p.flops for p in stack.products) for stack in (fused, plain)]
    assert plain.attention_flops == 0
    assert products[1] - products[0] == 2 * fused.attention_flops
    scores = config.model.num_heads * config.seq_len**2
    assert plain.kept["none"] - fused.kept["none"] > 2 * scores


def test_a_sequence_grows_linearly_but_for_attention():
    short, long = (trace(load("pythia160m", seq_len=n)).stacks[0] for n in (512, 1024))
    assert long.kept["none"] == pytest.approx(2 * short.kept["none"], rel=0.01)
    assert long.attention_flops == 4 * short.attention_flops
