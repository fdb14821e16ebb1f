"""The configuration: how recipes and the command line change the defaults of schema.py, and what is refused.

A recipe is a Python file with `get_config()`, or `get_config(arg)` where it has flags of its own, that
starts from `default()` and assigns keys. On the command line:

    --config=configs/tiny.py:flag,key=value --config.optimizer.learning_rate=1e-3

Nothing is read silently: a key that is not in the schema, or that has no effect in this configuration,
is a `ValueError` that says what to write instead.
"""

import ast
import difflib
import importlib.util
import inspect
import json
import math
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxpretrain.checks import check_combinations
from jaxpretrain.schema import (
    AT_LEAST,
    CHOICES,
    FORMS,
    FREE_ON_RESUME,
    MIXTURE_ENTRY,
    READ_WHEN,
    SOURCES_THAT_READ,
    SYNONYMS,
    data_source_defaults,
    default,
)

__all__ = [
    "check",
    "check_resume",
    "data_sources",
    "default",
    "differences",
    "from_json",
    "load",
    "num_masked_tokens",
    "override",
    "parse_arg",
    "reset_unread",
    "to_json",
]


def flatten(config: Mapping, prefix: str = "") -> dict[str, Any]:
    """Nested mapping -> {"a.b.c": value}. An empty nested mapping has no entry."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping | ConfigDict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat


def _nearest(key: str, known: Iterable[str]) -> str:
    known = list(known)
    if "." not in key:  # in an argument string the section may be left out
        names = [k.rsplit(".", 1)[-1] for k in known]
        match = [known[names.index(name)] for name in difflib.get_close_matches(key, names, n=1, cutoff=0.5)]
    else:
        match = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not match:  # the right last name in the wrong section
        match = [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]][:1]
    return f"did you mean {match[0]!r}?" if match else "see jaxpretrain/schema.py for all keys"


def _default_of(key: str) -> Any:
    """The default of `key`; raises KeyError where the schema has no such key."""
    parts = key.split(".")
    if parts[:2] == ["data", "mixture"] and len(parts) == 4:
        return MIXTURE_ENTRY[parts[3]]
    if parts[:2] == ["optimizer", "lr_multipliers"] and len(parts) == 3:
        return 1.0
    return _SCHEMA[key]


def _schema_key(key: str) -> str:
    """`data.source` for `data.mixture.NAME.source`, the section for an lr_multiplier, other keys as they are."""
    parts = key.split(".")
    if parts[:2] == ["optimizer", "lr_multipliers"]:
        return "optimizer.lr_multipliers"
    return f"data.{parts[3]}" if parts[:2] == ["data", "mixture"] and len(parts) == 4 else key


_SCHEMA = flatten(default())
_OPEN = ("data.mixture.", "optimizer.lr_multipliers.")  # sections whose keys are the user's


def _unknown_key(key: str, extra: Iterable[str] = ()) -> ValueError:
    known = [*_SCHEMA, *extra]
    parts = key.split(".")
    if parts[:2] == ["data", "mixture"] and len(parts) == 4:
        known = [".".join([*parts[:3], k]) for k in MIXTURE_ENTRY]
    open_section = difflib.get_close_matches(".".join(parts[:2]) + ".", _OPEN, n=1, cutoff=0.9)
    if open_section and len(parts) <= 3:
        return ValueError(
            f"unknown config key {key!r}: did you mean '{open_section[0]}{'.'.join(parts[2:]) or 'NAME'}'?"
        )
    return ValueError(f"unknown config key {key!r}: {_nearest(key, known)}")


def _convert(key: str, value: Any, like: Any) -> Any:
    """`value`, text from the command line or what a recipe assigned, in the type of the default `like`."""
    expected, example = type(like).__name__, repr(like)
    text = isinstance(value, str) and not isinstance(like, str)
    if key == "micro_batch_size":  # the one key with two types
        if value == "auto":
            return value
        like, text, expected, example = 1, isinstance(value, str), "int or 'auto'", "1"
    if text:
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = {"true": True, "false": False}.get(value.lower(), value)
    if isinstance(like, tuple):  # of strings like the default's, else of numbers
        item = str if like and isinstance(like[0], str) else int
        expected, example = ("words", "a,b") if item is str else ("whole numbers", "1000,20000")
        if isinstance(value, str):
            value = tuple(filter(None, (part.strip() for part in value.split(","))))
        value = tuple(value) if isinstance(value, list | tuple) else (value,)
        value = tuple(int(v) if isinstance(v, float) and v.is_integer() else v for v in value)  # 1e9
        if all(type(v) is item for v in value):
            return value
    elif isinstance(like, bool):
        if isinstance(value, bool):
            return value
    elif isinstance(like, int):
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(like, float):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, str):
        return value
    raise ValueError(f"{key}={value!r}: expected {expected}, as in {key}={example}")


def _assign(config: ConfigDict, key: str, value: Any) -> None:
    node = config
    *parents, last = key.split(".")
    for parent in parents:
        if parent not in node:
            node[parent] = ConfigDict()
        node = node[parent]
    with node.ignore_type():
        node[last] = value


def override(config: ConfigDict, key: str, text: str) -> None:
    """Sets `key` from the command line's text. Raises ValueError for an unknown key or a wrong type."""
    try:
        like = _default_of(key)
    except KeyError:
        raise _unknown_key(key) from None
    _assign(config, key, _convert(key, text, like))


def parse_arg(arg: str, **flags: Any) -> types.SimpleNamespace:
    """A recipe's own flags out of the `flag,key=value` after the colon of `--config=FILE:...`.

    `flags` are their names and defaults; a bare name means True. Items that name a key of the
    schema are left to the loader; anything else is a ValueError.
    """
    values = dict(flags)
    for key, text in _items(arg):
        if key in flags:
            values[key] = _convert(key, True if text is None else text, flags[key])
        elif key not in _SCHEMA and not key.startswith(_OPEN):
            raise _unknown_key(key, flags)
    return types.SimpleNamespace(**values)


def _items(arg: str) -> list[tuple[str, str | None]]:
    items = []
    for item in filter(None, arg.split(",")):
        key, equals, text = item.partition("=")
        items.append((key.strip(), text.strip() if equals else None))
    return items


def load(spec: str, overrides: Iterable[tuple[str, str]] = ()) -> ConfigDict:
    """The checked config of `FILE[:flag,key=value,...]` with the command line's `(key, text)` overrides.

    What the recipe set and an override makes pointless (the loss scale of a run turned to bfloat16) goes back
    to its default; what was typed and has no effect is refused.
    Raises ValueError, with the key, the value and the fix, for whatever is wrong in any of the three places.
    """
    file, _, arg = spec.partition(":")
    path = pathlib.Path(file)
    if not path.is_file():
        raise ValueError(f"--config={file}: no such file; the recipes are in configs/, e.g. configs/tiny.py")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)  # recipes of a family share a file beside them
    try:
        module_spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ValueError("has no get_config(); see configs/tiny.py")
        takes_arg = bool(inspect.signature(module.get_config).parameters)
        if not takes_arg:
            parse_arg(arg)
        config = module.get_config(arg) if takes_arg else module.get_config()
        if not isinstance(config, ConfigDict):
            raise ValueError(f"get_config() returned {config!r}; end it with `return config`")
        check(config)
    except Exception as error:  # whatever a recipe's own code may raise
        raise ValueError(f"--config={file}: {_one_line(error, folder)}") from error
    finally:
        sys.path.remove(folder)
    typed = [(key, text) for key, text in _items(arg) if key in _SCHEMA or key.startswith(_OPEN)]
    typed += overrides
    for key, text in typed:
        if text is None:
            raise ValueError(f"--config={file}:{key}: a config key needs a value, {key}=...")
        override(config, key, text)
    reset_unread(config, [name for name, _ in typed])
    check(config)
    return config


def reset_unread(config: ConfigDict, typed: Iterable[str]) -> None:
    """Keys that nothing reads in this config go back to their defaults, but for those that the user typed."""
    for key in _unread(config):
        if not any(f"{name}.".startswith(f"{key}.") for name in typed):
            _assign(config, key, ConfigDict() if key == "data.mixture" else _default_of(key))


def _one_line(error: Exception, folder: str) -> str:
    """What went wrong in a recipe of `folder`, with file and line unless the message was written for users."""
    message = " ".join(str(error).split())
    if isinstance(error, ValueError):
        return message
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename, error.lineno))
    where = [
        f"{name}, line {line}: " for name, line in places if name and pathlib.Path(name).parent == pathlib.Path(folder)
    ]
    return f"{where[-1] if where else ''}{type(error).__name__}: {message}"


def check(config: ConfigDict) -> None:
    """Raises ValueError for an unknown key, a wrong type or value, keys that contradict, and keys nothing reads."""
    flat = flatten(config)
    for key, value in flat.items():
        try:
            like = _default_of(key)
        except KeyError:
            raise _unknown_key(key) from None
        _assign(config, key, _convert(key, value, like))
    missing = [key for key in _SCHEMA if key not in flat]
    if missing:
        raise ValueError(f"config key {missing[0]!r} is missing: start the recipe from jaxpretrain.config.default()")
    flat = flatten(config)
    for key, value in flat.items():
        choices = CHOICES.get(_schema_key(key), (value,))
        if value not in choices:
            match = [SYNONYMS[value]] if value in SYNONYMS else difflib.get_close_matches(value, choices, n=1)
            hint = f"did you mean {match[0]!r}? " if match else ""
            raise ValueError(f"{key}={value!r}: {hint}It is one of {', '.join(choices)}")
        if key in FORMS:
            expression, words = FORMS[key]
            if not re.fullmatch(expression, value):
                raise ValueError(f"{key}={value!r}: must be {words}")
        minimum = AT_LEAST.get(_schema_key(key), value)
        if value < minimum:
            raise ValueError(f"{key}={value}: must be at least {minimum}")
    for key, value in _unread(config).items():
        words = READ_WHEN[_schema_key(key)][1]
        raise ValueError(f"{key}={value!r} has no effect: it is read only when {words}; remove one of the two")
    check_combinations(config)


def _unread(config: ConfigDict) -> dict[str, Any]:
    """The keys, with their values, that differ from the default although nothing reads them in this config."""
    flat = {**flatten(config), "data.mixture": config.data.mixture.to_dict()}
    unread = {
        key: flat[key]
        for key, (applies, _) in READ_WHEN.items()
        if flat[key] != _SCHEMA.get(key, {}) and not applies(config)
    }
    for name, entry in config.data.mixture.items():
        source = entry.get("source", MIXTURE_ENTRY["source"])
        for key, sources in SOURCES_THAT_READ.items():
            read = source in sources and key not in ("image_key", "label_key")  # mixtures are of text
            if entry.get(key, MIXTURE_ENTRY[key]) != MIXTURE_ENTRY[key] and not read:
                unread[f"data.mixture.{name}.{key}"] = entry[key]
    return unread


def data_sources(config: ConfigDict) -> dict[str, dict[str, Any]]:
    """Name -> {weight, source, path, ...} of each source of a checked config; one entry unless it is a mixture."""
    if config.data.source != "mixture":
        return {"data": {"weight": 1.0, **{k: config.data[k] for k in data_source_defaults()}}}
    return {name: {**MIXTURE_ENTRY, **entry.to_dict()} for name, entry in config.data.mixture.items()}


def num_masked_tokens(config: ConfigDict) -> int:
    """The most tokens of a row that a masked language model is to predict."""
    return math.ceil(config.objective.mask_fraction * config.seq_len)


def to_json(config: ConfigDict) -> str:
    return json.dumps(config.to_dict(), indent=2) + "\n"


def from_json(text: str) -> ConfigDict:
    """The config that `to_json` wrote; keys that this version has and the writer had not get their defaults."""
    config = default()
    for key, value in flatten(json.loads(text)).items():
        _assign(config, key, value)
    return config


def differences(saved: ConfigDict, config: ConfigDict) -> dict[str, str]:
    """What `config` changes of the experiment of `saved`: key -> the change in words."""
    old, new = flatten(saved), flatten(config)
    return {
        key: f"{key} was {old.get(key)!r}, now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not f"{key}.".startswith(FREE_ON_RESUME)
    }


def check_resume(saved: ConfigDict, config: ConfigDict) -> None:
    """Raises ValueError, with the differences, if `config` changes what a run that has begun may not change."""
    refused = differences(saved, config)
    independent = config.schedule.name in ("constant", "inverse_sqrt") or config.schedule.decay_steps > 0
    if independent and config.steps > saved.steps:
        refused.pop("steps", None)
    if refused:
        raise ValueError(
            f"cannot resume with another experiment: {'; '.join(refused.values())}; "
            "use a new --workdir (checkpoint.init_from takes the weights along) or the old values"
        )
