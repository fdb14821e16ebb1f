import json
import re

import jax
import pytest

from jaxpretrain import config as schema
from jaxpretrain import schema as schema_lib

TINY = "configs/tiny.py"


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe whose get_config assigns `lines`; returns its path."""

    def write(lines: str = "", signature: str = "", header: str = "") -> str:
        body = "".join(f"    {line}\n" for line in lines.splitlines())
        path = tmp_path / "recipe.py"
        path.write_text(
            f"{header}\nfrom jaxpretrain import config as schema\n\n\ndef get_config({signature}):\n"
            f"    config = schema.default()\n{body}    return config\n"
        )
        return str(path)

    return write


def refusal(spec: str, overrides=()) -> str:
    """The one-line message with which `spec` is refused."""
    with pytest.raises(ValueError) as raised:
        schema.load(spec, overrides)
    message = str(raised.value)
    assert "\n" not in message
    return message


# ---- misspelt keys and flags, in the three places


def test_misspelt_key_in_the_file(recipe):
    """Fails if check() skips flat keys that are not in the schema (`continue` for the raise)."""
    message = refusal(recipe("config.optimizer.learnign_rate = 1e-3"))
    assert "recipe.py" in message and "'optimizer.learnign_rate'" in message
    assert "did you mean 'optimizer.learning_rate'?" in message


def test_misspelt_section_in_the_file(recipe):
    """ml_collections answers this one, over two lines: ours names the recipe and its line, in one."""
    message = refusal(recipe("config.modle.num_layers = 2"))
    assert re.search(r"recipe\.py, line 7: .*modle.*model", message)


def test_misspelt_key_in_the_argument_string():
    assert "did you mean 'optimizer.learning_rate'?" in refusal(f"{TINY}:optimizer.learning_rte=1e-3")
    assert "did you mean 'deduped'?" in refusal("configs/pythia1b.py:dedupd")


def test_misspelt_key_on_the_command_line():
    assert "did you mean 'model.num_layers'?" in refusal(TINY, [("modle.num_layers", "2")])
    # The right name in the wrong section.
    assert "did you mean 'optimizer.weight_decay'?" in refusal(TINY, [("w.weight_decay", "0")])
    assert "did you mean 'data.mixture.web.source'?" in refusal(TINY, [("data.mixture.web.sorce", "text")])


def test_key_without_value_in_the_argument_string():
    assert "needs a value, steps=..." in refusal(f"{TINY}:steps")


# ---- wrong types and values


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("steps", "7", 7),
        ("steps", "1e3", 1000),
        ("optimizer.learning_rate", "1e-3", 1e-3),
        ("optimizer.learning_rate", "1", 1.0),
        ("log.tensorboard", "true", True),
        ("log.tensorboard", "False", False),
        ("micro_batch_size", "auto", "auto"),
        ("micro_batch_size", "4", 4),
        ("checkpoint.at_steps", "1,2,4", (1, 2, 4)),
        ("checkpoint.at_steps", "8", (8,)),
        ("checkpoint.at_steps", "", ()),
        ("average.horizons", "1e6,20_000_000", (1_000_000, 20_000_000)),
        ("optimizer.no_decay", "norm_scale,bias,embedding", ("norm_scale", "bias", "embedding")),
        ("optimizer.no_decay", "", ()),
        ("log.wandb_project", "17", "17"),
    ],
)
def test_command_line_text_becomes_the_type_of_the_key(key, text, value):
    config = schema.default()
    schema.override(config, key, text)
    assert schema.flatten(config)[key] == value
    assert type(schema.flatten(config)[key]) is type(value)


@pytest.mark.parametrize(
    "key, text, expected",
    [
        ("steps", "many", "expected int"),
        ("steps", "1.5", "expected int"),
        ("steps", "True", "expected int"),
        ("optimizer.learning_rate", "fast", "expected float"),
        ("log.tensorboard", "1", "expected bool"),
        ("micro_batch_size", "big", "expected int or 'auto'"),
        ("checkpoint.at_steps", "1,two", "expected whole numbers"),
        ("average.horizons", "1.5", "expected whole numbers"),
    ],
)
def test_wrong_type_on_the_command_line(key, text, expected):
    message = refusal(TINY, [(key, text)])
    assert message.startswith(f"{key}=") and expected in message


@pytest.mark.parametrize(
    "key, hint",
    [
        ("optimizer.lr_multipliers", "optimizer.lr_multipliers.NAME"),
        ("optimizer.lr_multiplier.embedding", "optimizer.lr_multipliers.embedding"),
        ("data.mixture", "data.mixture.NAME"),
    ],
)
def test_sections_whose_keys_are_the_users(key, hint):
    assert refusal(TINY, [(key, "1")]) == f"unknown config key {key!r}: did you mean {hint!r}?"


def test_wrong_type_in_the_file(recipe):
    message = refusal(recipe("config.steps = 'many'"))
    assert re.search(r"recipe\.py, line 7: .*'steps'", message)


def test_a_recipe_may_set_micro_batch_size(recipe):
    """Fails if the default is a plain "auto": ml_collections then takes strings only."""
    assert schema.load(recipe("config.micro_batch_size = 4")).micro_batch_size == 4
    assert schema.load(recipe()).micro_batch_size == "auto"


@pytest.mark.parametrize(
    "key, text, part",
    [
        ("steps", "0", "must be at least 1"),
        ("seed", "-1", "must be at least 0"),
        ("seed", str(1 << 32), "must be below 2**32"),
        ("micro_batch_size", "0", "at least 1"),
        ("optimizer.learning_rate", "-1e-3", "must be at least 0"),
        ("optimizer.b2", "1.0", "must be below 1"),
        ("model.init", "gpt", "did you mean 'gpt2'?"),
        ("model.num_heads", "7", "not divisible by model.num_heads=7"),
        ("model.num_kv_heads", "3", "does not divide model.num_heads=5"),
        ("model.norm_bias", "True", "no effect with model.norm='rmsnorm'"),
        ("model.rotary.fraction", "0.03", "in pairs"),
        ("data.validation_fraction", "1", "below 1"),
        ("data.source", "mixture", "needs data.mixture"),
        ("schedule.decay_steps", "1", "ends before"),
        ("average.horizons", "0,5", "above 0"),
        ("average.horizons", "5,5.0", "distinct"),
    ],
)
def test_values_that_cannot_be(key, text, part):
    message = refusal(TINY, [(key, text)])
    assert key in message and part in message


# ---- keys that nothing reads


@pytest.mark.parametrize(
    "key, text",
    [
        ("model.max_positions", "512"),
        ("model.rotary.factor", "2"),
        ("data.path", "somewhere"),
        ("data.row_len", "2049"),
        ("data.mixture.web.path", "somewhere"),
        ("precision.initial_loss_scale", "128"),
        ("log.wandb_project", "mine"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(key, text):
    """Fails if _unread returns {}, or, the mixture's, if it looks for the key `data.mixture` in the flat config."""
    message = refusal(TINY, [(key, text)])
    assert "has no effect: it is read only when" in message


@pytest.mark.parametrize(
    "typed, words",
    [
        ([("model.max_positions", "64")], "model.family is 'encoder', or 'decoder' with model.positions='learned'"),
        ([("data.source", "synthetic"), ("data.order", "sequential")], "images are not synthetic"),
        (
            [("data.source", "synthetic"), ("data.validation_fraction", "0.3")],
            "data.validation_path is empty and images are not synthetic",
        ),
    ],
)
def test_what_models_of_images_do_not_read_is_refused(typed, words):
    """Seen to fail: the positions' words were a decoder's alone, the others did nothing."""
    message = refusal("configs/tiny_vit.py", typed)
    assert message.startswith(f"{typed[-1][0]}=") and f"it is read only when {words};" in message


def test_the_largest_seed_is_one_of_its_own():
    """Why larger ones are refused: the key of 2**32 is that of 0."""
    keys = [tuple(jax.random.key_data(jax.random.key(seed)).tolist()) for seed in (0, (1 << 32) - 1, 1 << 32)]
    assert keys[0] != keys[1] and keys[2] == keys[0]
    assert schema.load(TINY, [("seed", str((1 << 32) - 1))]).seed == (1 << 32) - 1


def test_a_key_that_nothing_reads_is_refused_in_the_file(recipe):
    message = refusal(recipe("config.schedule.name = 'constant'\nconfig.schedule.decay_steps = 100"))
    assert "recipe.py" in message and "schedule.decay_steps=100 has no effect" in message


def test_what_an_override_makes_pointless_returns_to_its_default(recipe):
    """A recipe's own float16 settings are no mistake of someone who asks for bfloat16; what they type is."""
    path = recipe("config.precision.compute = 'float16'\nconfig.precision.initial_loss_scale = 4096.0")
    assert schema.load(path).precision.initial_loss_scale == 4096
    config = schema.load(path, [("precision.compute", "bfloat16")])
    assert config.precision.initial_loss_scale == schema.default().precision.initial_loss_scale
    both = [("precision.compute", "bfloat16"), ("precision.initial_loss_scale", "128")]
    assert "has no effect" in refusal(path, both)
    assert "has no effect" in refusal(f"{path}:precision.initial_loss_scale=128", both[:1])


# ---- optimizers, schedules and rules by batch size


@pytest.mark.parametrize("key", schema_lib.OPTIMIZERS_THAT_READ)
@pytest.mark.parametrize("name", schema_lib.CHOICES["optimizer.name"])
def test_optimizer_keys_are_refused_by_optimizers_that_ignore_them(name, key):
    """Fails if the loop over OPTIMIZERS_THAT_READ binds `names` late."""
    values = dict(mu_dtype="bfloat16", nu_dtype="bfloat16", blocks="v1_0")
    typed = [("optimizer.name", name), ("schedule.name", "constant"), (f"optimizer.{key}", values.get(key, "0.5"))]
    if name in schema_lib.OPTIMIZERS_THAT_READ[key]:
        schema.load(TINY, [*typed, ("optimizer.b2", "0.9")] if key == "nu_dtype" else typed)
    else:
        message = refusal(TINY, typed)
        assert message.startswith(f"optimizer.{key}=") and "optimizer.name is one of" in message


_SCHEDULE_FREE = [("optimizer.name", "schedule_free_adamw"), ("schedule.name", "constant")]
_WSD = [("schedule.name", "wsd")]


@pytest.mark.parametrize(
    "typed, part",
    [
        ([("optimizer.name", "adamv")], "did you mean 'adamw'?"),
        ([("optimizer.mu_dtype", "int8")], "only adam_mini has it"),
        ([("optimizer.nu_dtype", "bfloat16"), ("optimizer.b2", "0.995")], "below 0.995 only"),
        ([("optimizer.nu_dtype", "float16")], "It is one of float32, bfloat16"),
        ([("optimizer.name", "sgd"), ("optimizer.momentum", "1")], "optimizer.momentum=1.0: must be below 1"),
        (
            [("optimizer.name", "sgd"), ("optimizer.momentum", "0"), ("optimizer.mu_dtype", "bfloat16")],
            "optimizer.mu_dtype='bfloat16' has no effect: sgd with optimizer.momentum=0",
        ),
        (_SCHEDULE_FREE[:1], "set schedule.name='constant'"),
        ([*_SCHEDULE_FREE, ("optimizer.b1", "0")], "optimizer.b1=0.0 with schedule_free_adamw"),
        ([("schedule.warmup_tokens", "4096")], "schedule.warmup_steps=20 and schedule.warmup_tokens=4096 are both set"),
        ([("schedule.name", "inverse_sqrt"), ("schedule.warmup_steps", "0")], "needs a warm-up"),
        ([("schedule.name", "inverse_sqrt"), ("schedule.decay_steps", "50")], "schedule.decay_steps=50 has no effect"),
        ([("schedule.decay_shape", "exponential")], "schedule.name is 'wsd'"),
        ([*_WSD, ("schedule.decay_shape", "exponential"), ("schedule.final_fraction", "0")], "fall to 0 at once"),
        ([*_WSD, ("schedule.decay_fraction", "0")], "must be above 0 and at most 1"),
        ([*_WSD, ("schedule.decay_fraction", "0.95")], "begins at step 15, before the end of schedule.warmup_steps=20"),
        ([*_WSD, ("schedule.decay_length", "500")], "schedule.decay_length=500: the decay to step 300 begins at step"),
        ([*_WSD, ("schedule.decay_length", "9"), ("schedule.decay_fraction", "0.5")], "schedule.decay_length is 0"),
        ([("scaling.learning_rate", "sqrt")], "scaling.base_batch_size is above 0"),
        ([("scaling.base_batch_size", "256")], "scaling.base_batch_size=256 has no effect without a rule"),
        (
            [("optimizer.name", "sm3"), ("scaling.base_batch_size", "256"), ("scaling.b2", "tokens")],
            "scaling.b2='tokens' has no effect",
        ),
        ([("optimizer.lr_multipliers.embedding", "-1")], "must be at least 0"),
        ([("optimizer.lr_multipliers.embedding", "much")], "expected float"),
    ],
)
def test_optimizer_settings_that_cannot_be(typed, part):
    assert part in refusal(TINY, typed)


def test_bfloat16_second_moment_is_checked_with_the_b2_that_is_used():
    """Fails if the check reads optimizer.b2: 0.98 ** (8 / 64) is 0.9975."""
    typed = [("optimizer.nu_dtype", "bfloat16"), ("scaling.base_batch_size", "64"), ("scaling.b2", "tokens")]
    assert "b2=0.9975" in refusal(TINY, typed)


def test_learning_rate_multipliers_from_every_place(recipe):
    """A recipe, the argument string, the command line; and through config.json."""
    path = recipe("config.optimizer.lr_multipliers = dict(embedding=2, bias=0.5)")
    config = schema.load(f"{path}:optimizer.lr_multipliers.bias=3", [("optimizer.lr_multipliers.mlp_in", "0.1")])
    assert config.optimizer.lr_multipliers.to_dict() == dict(embedding=2.0, bias=3.0, mlp_in=0.1)
    restored = schema.from_json(schema.to_json(config))
    assert schema.flatten(restored) == schema.flatten(config)
    with pytest.raises(ValueError, match=r"optimizer\.lr_multipliers\.mlp_in was None, now 0\.1"):
        schema.check_resume(schema.load(f"{path}:optimizer.lr_multipliers.bias=3"), config)


# ---- recipes, their flags, and what their code may do wrong


def test_parse_arg():
    flags = schema.parse_arg("small,width=64,rate=1e-3,steps=5", small=False, width=32, rate=1.0, other="x")
    assert vars(flags) == dict(small=True, width=64, rate=1e-3, other="x")
    with pytest.raises(ValueError, match="width='wide': expected int"):
        schema.parse_arg("width=wide", width=32)
    with pytest.raises(ValueError, match="expected int"):
        schema.parse_arg("width", width=32)  # a bare name means True
    with pytest.raises(ValueError, match="unknown config key 'tall'"):
        schema.parse_arg("tall", width=32)


def test_flags_reach_the_recipe_and_later_places_win(recipe):
    """Order: recipe, argument string, command line. Fails if load() applies `overrides` before the argument string."""
    path = recipe("config.steps = schema.parse_arg(arg, long=False).long and 50 or 5", signature="arg=''")
    assert schema.load(path).steps == 5
    assert schema.load(f"{path}:long").steps == 50
    assert schema.load(f"{path}:long,steps=60").steps == 60
    assert schema.load(f"{path}:long,steps=60", [("steps", "70")]).steps == 70


def test_missing_recipe():
    assert refusal("configs/pythia.py").startswith("--config=configs/pythia.py: no such file")


@pytest.mark.parametrize(
    "text, part",
    [
        ("def get_config(:\n", r"recipe\.py, line 1: SyntaxError: invalid syntax"),
        ("import jaxpretrain.nowhere\n", r"recipe\.py, line 1: ModuleNotFoundError: .*nowhere"),
        ("x = 1\n", r"has no get_config\(\)"),
        ("def get_config():\n    pass\n", r"returned None; end it with `return config`"),
        ("def get_config():\n    return 1 / 0\n", r"recipe\.py, line 2: ZeroDivisionError: division by zero"),
        ("def get_config():\n    return int('x')\n", r"recipe\.py: invalid literal"),
    ],
)
def test_a_broken_recipe_is_named_with_its_line(tmp_path, text, part):
    """Fails if load() catches ValueError only."""
    path = tmp_path / "recipe.py"
    path.write_text(text)
    assert re.search(part, refusal(str(path)))


def test_an_error_in_a_shared_file_names_that_file(tmp_path, recipe):
    (tmp_path / "_shared_by_test_config.py").write_text("def shared():\n    return unheard_of\n")
    path = recipe("shared()", header="from _shared_by_test_config import shared")
    assert re.search(r"_shared_by_test_config\.py, line 2: NameError", refusal(path))


def test_a_recipe_that_drops_the_schema_is_refused(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(
        "import ml_collections\n\n\ndef get_config():\n    return ml_collections.ConfigDict({'steps': 5})\n"
    )
    assert "start the recipe from jaxpretrain.config.default()" in refusal(str(path))


# ---- mixtures


def test_mixture_entries_are_checked_like_data_itself(recipe):
    """Fails if the choices are looked up by `key` instead of `_schema_key(key)`."""
    path = recipe(
        "config.data.source = 'mixture'\n"
        "config.data.mixture = dict(code=dict(weight=1), web=dict(weight=3, source='text', path='web.txt'))"
    )
    config = schema.load(path)
    assert schema.data_sources(config) == {
        "code": {"weight": 1.0, **schema.data_source_defaults()},
        "web": {"weight": 3.0, **schema.data_source_defaults(), "source": "text", "path": "web.txt"},
    }
    assert "It is one of stdlib, text" in refusal(path, [("data.mixture.web.source", "texts")])
    assert "must be above 0" in refusal(path, [("data.mixture.web.weight", "0")])
    assert "do not nest" in refusal(path, [("data.mixture.web.source", "mixture")])
    assert schema.load(path, [("data.mixture.web.weight", "2")]).data.mixture.web.weight == 2.0
    assert not schema.load(path, [("data.source", "stdlib")]).data.mixture


def test_one_source_is_a_mixture_of_one():
    assert schema.data_sources(schema.default()) == {"data": {"weight": 1.0, **schema.data_source_defaults()}}


# ---- config.json and resuming


@pytest.mark.parametrize("path", [TINY, "configs/pythia70m.py", "configs/llama2_39m.py"])
def test_json_round_trip(path):
    """Tuples included, empty or not. Fails if from_json() skips values that are empty or 0."""
    config = schema.load(path, [("micro_batch_size", "4"), ("checkpoint.at_steps", "1,2")])
    restored = schema.from_json(schema.to_json(config))
    assert schema.flatten(restored) == schema.flatten(config)
    assert restored.checkpoint.at_steps == (1, 2) and restored.micro_batch_size == 4
    schema.check(restored)
    schema.check_resume(restored, config)


def test_a_mixture_survives_json(recipe):
    path = recipe("config.data.source = 'mixture'\nconfig.data.mixture = dict(code=dict(weight=2.0))")
    config = schema.load(path)
    assert schema.data_sources(schema.from_json(schema.to_json(config))) == schema.data_sources(config)


def test_keys_younger_than_a_config_json_get_their_defaults():
    saved = json.loads(schema.to_json(schema.load(TINY)))
    del saved["optimizer"]["clip"]
    assert schema.from_json(json.dumps(saved)).optimizer.clip == schema.default().optimizer.clip


@pytest.mark.parametrize(
    "key, text",
    [
        ("parallel.strategy", "fsdp"),
        ("kernels.attention", "xla"),
        ("micro_batch_size", "2"),
        ("checkpoint.every", "7"),
        ("eval.every", "7"),
        ("log.every", "7"),
        ("run.max_bad_steps", "3"),
    ],
)
def test_may_change_on_resume(key, text):
    schema.check_resume(schema.load(TINY), schema.load(TINY, [(key, text)]))


@pytest.mark.parametrize(
    "key, text",
    [
        ("seed", "1"),
        ("batch_size", "16"),
        ("model.num_layers", "2"),
        ("optimizer.learning_rate", "1e-4"),
        ("schedule.warmup_steps", "7"),
        ("data.order", "sequential"),
        ("precision.compute", "bfloat16"),
        ("steps", "1000"),  # the cosine of tiny.py ends with the steps
    ],
)
def test_may_not_change_on_resume(key, text):
    saved, config = schema.load(TINY), schema.load(TINY, [(key, text)])
    before, now = schema.flatten(saved)[key], schema.flatten(config)[key]
    with pytest.raises(ValueError, match=re.escape(f"{key} was {before!r}, now {now!r}")):
        schema.check_resume(saved, config)


@pytest.mark.parametrize(
    "independent",
    [
        [("schedule.name", "constant")],
        [("schedule.name", "inverse_sqrt")],
        [("schedule.decay_steps", "200")],
        [("schedule.name", "wsd"), ("schedule.decay_steps", "200"), ("schedule.decay_length", "50")],
    ],
)
def test_steps_may_grow_where_the_schedule_does_not_depend_on_them(independent):
    """Fails if `now > before` becomes `now != before`."""
    short, long = (schema.load(TINY, [*independent, ("steps", steps)]) for steps in ("250", "500"))
    schema.check_resume(short, long)
    with pytest.raises(ValueError, match="steps was 500, now 250"):
        schema.check_resume(long, short)


@pytest.mark.parametrize("length", [("schedule.decay_length", "50"), ("schedule.decay_fraction", "0.5")])
def test_steps_may_not_grow_where_the_decay_ends_with_them(length):
    """A wsd that decays over the last steps, however many, would have decayed elsewhere. Use checkpoint.resume_from."""
    short, long = (schema.load(TINY, [("schedule.name", "wsd"), length, ("steps", steps)]) for steps in ("250", "500"))
    with pytest.raises(ValueError, match="steps was 250, now 500"):
        schema.check_resume(short, long)


def test_every_rule_is_about_a_key_of_the_schema():
    known = set(schema.flatten(schema.default()))
    rules = {*schema.CHOICES, *schema.AT_LEAST, *schema.READ_WHEN} - {"data.mixture", "optimizer.lr_multipliers"}
    assert rules <= known
    assert all(any(f"{key}.".startswith(prefix) for key in known) for prefix in schema.FREE_ON_RESUME)


@pytest.mark.parametrize("source", ["images", "parquet", "arrayrecord", "digits"])
def test_a_mixture_of_images_is_refused(source):
    """Seen to fail: an UnboundLocalError, when the data was read."""
    overrides = [("data.source", "mixture"), ("data.mixture.a.source", source)]
    overrides += [("data.mixture.a.path", "x")] * (source != "digits")
    assert f"data.mixture.a.source='{source}' has images" in refusal("configs/tiny_mamba.py", overrides)


def test_randaugment_is_bounded():
    overrides = [("data.images.randaugment_ops", "2"), ("data.images.randaugment_magnitude", "100")]
    assert "must be at most 10" in refusal("configs/tiny_vit.py", overrides)


@pytest.mark.parametrize(
    "recipe, key, value",
    [
        ("configs/tiny_vit.py", "data.text_key", "nonsense"),
        ("configs/tiny_vit.py", "data.tokens_key", "x"),
        ("configs/tiny_vit.py", "data.cache_dir", "/x"),
        ("configs/tiny_mamba.py", "data.image_key", "foo"),
    ],
)
def test_fields_of_the_other_kind_of_dataset_are_refused(recipe, key, value):
    """Hugging Face datasets have text or images. Seen to fail: the source alone was looked at."""
    overrides = [("data.source", "huggingface"), ("data.path", "x"), (key, value)]
    assert refusal(recipe, overrides).startswith(f"{key}={value!r} has no effect")
