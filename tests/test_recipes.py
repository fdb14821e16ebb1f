import ast
import functools
import math
import pathlib

import jax
import pytest

from jaxpretrain import config as schema
from jaxpretrain.models import registry
from jaxpretrain.optim.schedules import make_schedule
from jaxpretrain.schema import ATTENTION_FAMILIES, IMAGE_FAMILIES

RECIPES = sorted(path.stem for path in pathlib.Path("configs").glob("[!_]*.py"))

# Published parameter counts: model cards (Pythia), released weights (GPT-2, Llama 2 7B and 13B, Llama 3 8B).
PUBLISHED = {
    "pythia14m": 14_067_712,
    "pythia31m": 30_494_720,
    "pythia70m": 70_426_624,
    "pythia160m": 162_322_944,
    "pythia410m": 405_334_016,
    "pythia1b": 1_011_781_632,
    "pythia1_4b": 1_414_647_808,
    "pythia2_8b": 2_775_208_960,
    "pythia6_9b": 6_857_302_016,
    "pythia12b": 11_846_072_320,
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_xl": 1_557_611_200,
    "gpt2_small:nobias": 124_373_760,  # nanoGPT prints 124,354,560 decayed and 19,200 other parameters
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama3_8b": 8_030_261_248,
    # As `transformers` counts what these configurations make: tests/models has the sources of each.
    "roberta_base": 124_697_433,
    "roberta_large": 355_412_057,
    "mamba130m": 129_135_360,
    "mamba370m": 371_516_416,
    "mamba790m": 793_204_224,
    "mamba1p4b": 1_372_178_432,
    "mamba2p8b": 2_768_345_600,
    "vit_small:1k": 22_050_664,
    "vit_base:1k": 86_567_656,
    "vit_large:1k": 304_326_632,
    "vit_large": 325_688_657,
    "convnext_tiny:1k": 28_589_128,
    "convnext_small:1k": 50_223_688,
    "convnext_base:1k": 88_591_464,
    "convnext_large:1k": 197_767_336,
    "convnext_large": 229_799_953,
    "convnext_xlarge": 392_900_177,
}


def olmo_count(layers: int, width: int, rows: int) -> int:
    """Critical-batch-size paper's code: square matrices 12 L d^2, four norms a layer and a last one, two embeddings."""
    return 12 * layers * width**2 + 4 * layers * width + width + 2 * rows * width


PUBLISHED |= {
    "cbs85m": olmo_count(12, 768, 50304),
    "cbs151m": olmo_count(12, 1024, 50304),
    "cbs302m": olmo_count(24, 1024, 50304),
    "cbs604m": olmo_count(12, 2048, 50304),
    "cbs1_2b": olmo_count(24, 2048, 50304),
    "cbs2_4m": olmo_count(3, 256, 32128),
    "cbs9_4m": olmo_count(3, 512, 32128),
    "cbs19m": olmo_count(6, 512, 32128),
    "cbs42m": olmo_count(6, 768, 32128),
}


@functools.cache
def load(recipe: str):
    name, _, arg = recipe.partition(":")
    return schema.load(f"configs/{name}.py:{arg}")


def num_parameters(recipe: str) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(registry.build(load(recipe))))


@pytest.mark.parametrize("recipe", RECIPES)
def test_loads_and_its_docstring_gives_command_and_hardware(recipe):
    load(recipe)
    docstring = ast.get_docstring(ast.parse(pathlib.Path(f"configs/{recipe}.py").read_text()))
    assert f"python -m jaxpretrain.main --config=configs/{recipe}.py" in docstring
    assert f"--workdir=runs/{recipe}" in docstring
    assert "Hardware: " in docstring


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_parameter_count_is_the_published_one(recipe):
    """Of the abstract model, nothing allocated. Fails if the position table or a bias is left out, and with any
    wrong size: Llama's mlp_dim left at 4 widths, Pythia 6.9B's embedding at 50,304 rows."""
    assert num_parameters(recipe) == PUBLISHED[recipe]


@pytest.mark.parametrize("size", ["39m", "67m", "102m", "162m", "271m"])
def test_the_small_llamas_have_the_size_of_their_name(size):
    assert round(num_parameters(f"llama2_{size}") / 1e6) == int(size.removesuffix("m"))


def documentation_row(recipe: str) -> str:
    """The recipe's line in docs/recipes.md."""
    config = load(recipe)
    c, s, m = config.optimizer, config.schedule, config.model
    rate = f"{c.learning_rate:g}"
    if s.name != "constant":
        rate += f" → {c.learning_rate * max(s.final_fraction, s.floor_fraction):.3g}"
    shape, rows = f"{m.num_layers} × {m.embed_dim}", f"{config.batch_size} × {config.seq_len}"
    if m.family in ATTENTION_FAMILIES:
        shape += f", {m.num_heads}"
    if m.family == "convnext":
        shape = " ".join(
            f"{depth} × {width}" for depth, width in zip(m.convnext.depths, m.convnext.widths, strict=True)
        )
    if m.family in IMAGE_FAMILIES:
        rows = f"{config.batch_size} of {m.image.size}²"
    cells = [
        f"`{recipe}`",
        f"{num_parameters(recipe):,}",
        shape,
        rows,
        f"{config.steps:,}",
        f"{rate} {s.name}",
        f"{s.warmup_steps:,}",
        f"{c.b1:g}, {c.b2:g}",
        f"{c.weight_decay:g}",
        config.precision.compute,
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_documentation_says_what_the_recipe_does(recipe):
    """docs/recipes.md is also where a change of a recipe shows in review: paste the line that is missing."""
    assert documentation_row(recipe) in pathlib.Path("docs/recipes.md").read_text().splitlines()


# name: batch, length, steps, peak rate, last rate, warm-up, b1, b2, weight decay, precision, tokens (billions)
HYPERPARAMETERS = {
    "pythia14m": (1024, 2048, 143_000, 1e-3, 1e-4, 1430, 0.9, 0.95, 0.1, "float16", 299.892736),
    "pythia160m": (1024, 2048, 143_000, 6e-4, 6e-5, 1430, 0.9, 0.95, 0.1, "float16", 299.892736),
    "pythia1b": (1024, 2048, 143_000, 3e-4, 3e-5, 1430, 0.9, 0.95, 0.1, "bfloat16", 299.892736),
    "pythia1b:deduped": (1024, 2048, 143_000, 3e-4, 3e-5, 1430, 0.9, 0.95, 0.1, "float16", 299.892736),
    "pythia12b": (1024, 2048, 143_000, 1.2e-4, 1.2e-5, 1430, 0.9, 0.95, 0.1, "float16", 299.892736),
    "gpt2_small": (480, 1024, 100_000, 6e-4, 3e-5, 2000, 0.9, 0.95, 0.0, "bfloat16", 49.152),
    "gpt2_medium": (480, 1024, 50_000, 3e-4, 1.83846e-4, 2000, 0.9, 0.95, 0.1, "bfloat16", 24.576),
    "gpt2_xl": (480, 1024, 50_000, 1e-4, 5.64423e-5, 2000, 0.9, 0.95, 0.1, "bfloat16", 24.576),
    "llama2_39m": (256, 512, 7_800, 6e-4, 0, 78, 0.9, 0.95, 0.1, "bfloat16", 1.0223616),
    "llama2_1b": (256, 512, 200_000, 2e-4, 0, 2000, 0.9, 0.95, 0.1, "bfloat16", 26.2144),
    "llama2_13b": (8, 2048, 10_000, 1e-4, 0, 100, 0.9, 0.95, 0.1, "bfloat16", 0.16384),
    "llama3_8b": (8, 2048, 10_000, 1e-4, 0, 100, 0.9, 0.95, 0.1, "bfloat16", 0.16384),
    "cbs151m": (256, 512, 23_438, 3.16e-3, 3.16e-3, 5859, 0.95, 0.995, 0.0, "bfloat16", 3.072065536),
    "cbs151m:batch_size=16384": (16384, 512, 367, 3.16e-3, 3.16e-3, 91, 0.95, 0.95, 0.0, "bfloat16", 3.078619136),
    "cbs1_2b": (256, 512, 187_500, 3.16e-3, 3.16e-3, 46_875, 0.95, 0.995, 0.0, "bfloat16", 24.576),
    "roberta_large": (8192, 512, 500_000, 4e-4, 0, 30_000, 0.9, 0.98, 0.01, "float16", 2097.152),
    "mamba2p8b": (128, 4096, 572_204, 8e-4, 1e-5, 57_220, 0.9, 0.95, 0.1, "bfloat16", 299.999690752),
    "vit_large": (4096, 1, 311_948, 1e-3, 0, 10_000, 0.9, 0.999, 0.03, "float32", 1.277739008),
    "convnext_xlarge": (4096, 1, 311_940, 4e-3, 1e-6, 17_330, 0.9, 0.999, 0.05, "float32", 1.27770624),
    "convnext_large:1k": (4096, 1, 93_600, 4e-3, 1e-6, 6_240, 0.9, 0.999, 0.05, "float32", 0.3833856),
    "cbs42m": (256, 512, 100_000, 1e-3, 1e-5, 5000, 0.9, 0.95, 1e-4, "bfloat16", 13.1072),
}


@pytest.mark.parametrize("recipe", HYPERPARAMETERS)
def test_hyperparameters_are_the_published_ones(recipe):
    """Written out here once more, so that a change of a family's shared file shows what it does to each model."""
    batch, length, steps, peak, last, warmup, b1, b2, decay, precision, tokens = HYPERPARAMETERS[recipe]
    config = load(recipe)
    assert (config.batch_size, config.seq_len, config.steps) == (batch, length, steps)
    assert batch * length * steps / 1e9 == pytest.approx(tokens, rel=1e-12)
    c = config.optimizer
    eps = 1e-6 if recipe.startswith("roberta") else 1e-8
    clip = 0.0 if recipe.startswith(("roberta", "convnext")) else 1.0
    assert (c.learning_rate, c.b1, c.b2, c.eps, c.weight_decay, c.clip) == (peak, b1, b2, eps, decay, clip)
    assert config.schedule.warmup_steps == warmup and config.precision.compute == precision
    schedule = make_schedule(config)
    assert float(schedule(warmup)) == pytest.approx(peak)
    assert float(schedule(steps)) == pytest.approx(last, rel=1e-4, abs=1e-9)
    assert float(schedule(0)) == pytest.approx(0.1 * peak if recipe.startswith("cbs") else 0)


def test_pythia_keeps_the_154_published_checkpoints():
    c = load("pythia1b").checkpoint
    kept = {*c.at_steps, *range(c.keep_every, 143_001, c.keep_every)}
    assert c.every == c.keep_every and len(kept) == 154


def test_pythia_reads_the_published_rows_in_order():
    data = load("pythia410m").data
    assert (data.order, data.row_len, data.validation_fraction) == ("sequential", 2049, 0)
    assert data.path == "data/pile-standard-pythia-preshuffled/document"
    assert load("pythia410m:deduped").data.path == "data/pile-deduped-pythia-preshuffled/document"


@pytest.mark.parametrize("recipe", RECIPES)
def test_runs_without_its_data_and_in_bfloat16(recipe):
    """What a recipe says about files and loss scales does not stand in the way of a trial on random tokens."""
    config = schema.load(f"configs/{recipe}.py", [("data.source", "synthetic"), ("precision.compute", "bfloat16")])
    assert config.data.path == config.data.validation_path == ""


def test_initialisation_of_the_largest_pythias_is_what_their_step_0_shows():
    """EleutherAI/pythia issue 135: standard deviations 0.02 and 0.0025 = 0.02 / sqrt(2 * 32) at 6.9B."""
    assert load("pythia6_9b").model.init == load("pythia12b").model.init == "gpt2"
    assert load("pythia2_8b").model.init == "gpt_neox"


def test_batch_size_of_the_critical_batch_size_models():
    """beta2, warm-up and horizon follow the flag; a batch size outside the study's table is refused."""
    table = {64: (0.999, 0.9995), 512: (0.99, 0.9995), 2048: (0.95, 0.998), 16384: (0.95, 0.99)}
    for batch_size, (b2, decay) in table.items():
        config = load(f"cbs302m:batch_size={batch_size}")
        assert (config.batch_size, config.optimizer.b2) == (batch_size, b2)
        assert config.schedule.warmup_steps == 12_000_000 // (4 * batch_size)
        assert math.exp(-batch_size * 512 / config.average.horizons[0]) == pytest.approx(decay, rel=1e-7)
    with pytest.raises(ValueError, match="batch_size=96: the study's table has 64, 128"):
        load("cbs302m:batch_size=96")


def test_llama_31_scales_the_rotary_frequencies():
    rotary = load("llama3_8b:llama31").model.rotary
    assert (rotary.scaling, rotary.theta, rotary.factor, rotary.original_max_positions) == ("llama3", 5e5, 8, 8192)
    assert load("llama3_8b").model.rotary.scaling == "none"
