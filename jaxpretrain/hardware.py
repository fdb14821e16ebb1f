"""Accelerators and machines made of them, by the names that people and JAX give them."""

import dataclasses
import difflib
import json
import math
import pathlib
import re

from jaxpretrain.accelerators import ACCELERATORS, GPU_MEMORY_FRACTION, Accelerator, usable_gpu_bytes

__all__ = [
    "ACCELERATORS",
    "GPU_MEMORY_FRACTION",
    "Accelerator",
    "Machine",
    "as_markdown",
    "find",
    "get",
    "parse_machine",
    "read_file",
    "usual_machines",
]

# Of a machine without its GPUs, by their number (arXiv 2410.23261, its plotting code).
_BASE_USD = {1: 1000, 2: 1500, 4: 7500, 8: 10500}
_MOST_IN_A_NODE = 72  # that share fast links: GB200 NVL72
_SYNONYMS = {"h100-80gb": "h100", "h100-sxm": "h100", "v5litepod": "v5e", "b200-180gb": "b200", "h200-141gb": "h200"}
# Chips of the slices that Google offers; v2 to v4 and v5p slices are named by cores, two a chip.
_SIZES_2D, _SIZES_3D = (1, 4, 8, 16, 32, 64, 128, 256), (4, 8, 16, 32, 64, 128)
_SLICES = {  # chips, cores of a chip in the slice's name
    "v2": ((4, 16, 64, 128, 256), 2),
    "v3": ((4, 16, 32, 64, 128, 256), 2),
    "v4": (_SIZES_3D, 2),
    "v5p": (_SIZES_3D, 2),
    "v5e": (_SIZES_2D, 1),
    "v6e": (_SIZES_2D, 1),
    "tpu7x": (_SIZES_3D, 2),
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """`nodes` machines of `count` devices each; the devices of a TPU slice count as one node's."""

    accelerator: Accelerator
    count: int
    nodes: int = 1
    slice: str = ""  # of a TPU: its name

    @property
    def name(self) -> str:
        one = self.slice or f"{self.count} x {self.accelerator.name}"
        return one if self.nodes == 1 else f"{self.nodes} nodes of {one}"

    @property
    def num_devices(self) -> int:
        return self.count * self.nodes

    @property
    def price_usd(self) -> float | None:
        """To buy all of it. Between two sizes a machine is the larger; beyond eight devices it is several for eight."""
        if self.accelerator.price_usd is None:
            return None
        size = min((n for n in _BASE_USD if n >= self.count), default=max(_BASE_USD))
        base = math.ceil(self.count / size) * _BASE_USD[size]
        return self.nodes * (base + self.count * self.accelerator.price_usd)

    @property
    def rent_usd(self) -> float | None:
        """Per hour."""
        rent = self.accelerator.rent_usd
        return None if rent is None else self.num_devices * rent

    @property
    def watts(self) -> float | None:
        """Of the devices."""
        return None if self.accelerator.watts is None else self.num_devices * self.accelerator.watts

    @property
    def aot_target(self) -> str | None:
        return self.accelerator.aot_target and (self.slice or self.accelerator.aot_target)


def find(device_kind: str) -> Accelerator | None:
    """The accelerator that JAX calls `device_kind` (`jax.Device.device_kind`), or None if it is not in the table.

    The whole string has to match: a laptop's "RTX 4090 Laptop GPU" or a MIG slice of an A100 is another device.
    """
    for accelerator in ACCELERATORS:
        if re.fullmatch(accelerator.device_kind, device_kind, re.IGNORECASE):
            return accelerator
    return None


def get(name: str, catalogue: tuple[Accelerator, ...] = ACCELERATORS) -> Accelerator:
    """By the name on a command line, whatever its case and underscores. Raises ValueError naming the nearest."""
    wanted = _normal(name)
    known = {accelerator.name: accelerator for accelerator in catalogue}
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    near = near or [n for n in known if wanted in n][:3]
    hint = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(known)}"
    raise ValueError(f"unknown hardware {name!r}: {hint}")


def parse_machine(
    name: str, count: int | None = None, nodes: int = 1, catalogue: tuple[Accelerator, ...] = ACCELERATORS
) -> Machine:
    """Of `--hardware`, `--count` and `--nodes`: a GPU, 1 by default, or a TPU slice such as `v3-8`, which says it all.

    Raises ValueError for a name, number or slice that there is not.
    """
    for flag, value in (("count", count), ("nodes", nodes)):
        if value is not None and value < 1:
            raise ValueError(f"--{flag}={value}: must be at least 1")
    generation, _, size = _normal(name).rpartition("-")
    generation = _SYNONYMS.get(generation, generation)
    if generation in _SLICES and size.isdecimal():
        if count is not None:
            raise ValueError(f"--count={count} has no effect: {name} is a slice of a given size; name another slice")
        chips, cores = _SLICES[generation]
        if int(size) not in [cores * n for n in chips]:
            sizes = ", ".join(f"{generation}-{cores * n}" for n in chips)
            raise ValueError(f"there is no TPU slice {name!r}: {generation} comes as {sizes}")
        accelerator = get(generation, catalogue)
        count = int(size) // cores * accelerator.devices_per_chip
        return Machine(accelerator, count, nodes, slice=f"{generation}-{int(size)}")
    if (alone := _SYNONYMS.get(_normal(name), _normal(name))) in _SLICES:
        chips, cores = _SLICES[alone]
        raise ValueError(f"--hardware={name}: name a slice, such as {alone}-{max(8, cores * chips[0])}")
    if count is not None and count > _MOST_IN_A_NODE:
        raise ValueError(f"--count={count}: devices of one node, at most {_MOST_IN_A_NODE}; the rest by --nodes")
    return Machine(get(name, catalogue), 1 if count is None else count, nodes)


def usual_machines(count: int | None = None, catalogue: tuple[Accelerator, ...] = ACCELERATORS) -> list[Machine]:
    """What `--hardware=all` looks at: every GPU, 1, 2, 4 and 8 of it or `count`, and TPU slices of up to 8 chips."""
    machines = [
        Machine(accelerator, n)
        for accelerator in catalogue
        if not accelerator.is_tpu
        for n in ((1, 2, 4, 8) if count is None else (count,))
    ]
    slices = [
        parse_machine(f"{generation}-{cores * n}", catalogue=catalogue)
        for generation, (chips, cores) in _SLICES.items()
        for n in chips
        if n <= 8
    ]
    return machines + [s for s in slices if count in (None, s.count)]


def as_markdown() -> str:
    """The catalogue as the table of docs/accelerators.md: figures of one device."""

    def number(value: float | None, unit: float, digits: int = 0) -> str:
        return "" if value is None else f"{value / unit:,.{digits}f}"

    lines = [
        "| name | GiB | usable | 16-bit TFLOP/s | float32 | float8 | GB/s | link | W | USD | USD/h |",
        "|" + "---|" * 11,
    ]
    for a in ACCELERATORS:
        half = a.bfloat16 or a.float16
        kind = "" if a.bfloat16 else " (float16)" if half else ""
        numbers = [number(value, 1e12) for value in (half, a.float32, a.float8)]
        numbers[0] += kind
        lines.append(
            f"| `{a.name}` | {a.memory_bytes / 2**30:.0f} | {a.usable_bytes / 2**30:.1f} | {' | '.join(numbers)} | "
            f"{number(a.memory_bandwidth, 1e9)} | {a.link}, {number(a.link_bandwidth, 1e9)} GB/s | "
            f"{number(a.watts, 1)} | {number(a.price_usd, 1)} | {number(a.rent_usd, 1, 2)} |"
        )
    return "\n".join(lines) + "\n"


def read_file(path: str) -> tuple[Accelerator, ...]:
    """The catalogue with the user's own accelerators, which replace those of the same name.

    The file is a JSON list of objects with the fields of `Accelerator`: docs/accelerators.md.

    Raises ValueError for a file, field or value that cannot be used.
    """
    try:
        entries = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--catalogue={path}: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"--catalogue={path}: must be a list of objects, one for each accelerator")
    own = {}
    for accelerator in (_entry(path, entry) for entry in entries):
        if accelerator.name in own:
            raise ValueError(f"--catalogue={path}: two accelerators are named {accelerator.name}: rename one")
        own[accelerator.name] = accelerator
    return (*(a for a in ACCELERATORS if a.name not in own), *own.values())


_OPTIONAL = {
    "device_kind": "",
    "generation": "unknown",
    "float32_highest": None,
    "float8": None,
    "watts": None,
    "price_usd": None,
    "rent_usd": None,
    "aot_target": None,
    "devices_per_chip": 1,
}
_TEXTS = ("name", "device_kind", "generation", "link", "aot_target")


def _entry(path: str, entry: dict) -> Accelerator:
    fields = [field.name for field in dataclasses.fields(Accelerator)]
    for key in entry:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}"
            raise ValueError(f"--catalogue={path}: unknown field {key!r}: {hint}")
    values = _OPTIONAL | entry
    if missing := [field for field in fields if field not in values and field != "usable_bytes"]:
        raise ValueError(f"--catalogue={path}: {entry.get('name', 'an entry')} lacks {', '.join(missing)}")
    for key, value in values.items():
        if key in _TEXTS:
            good, right = isinstance(value, str), "a text"
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            good, right = is_number and math.isfinite(value) and value > 0, "a number above 0 in SI units"
        may_be_null = _OPTIONAL.get(key, 0) is None or key in ("bfloat16", "float16")
        if not good and not (value is None and may_be_null):
            raise ValueError(f"--catalogue={path}: {key}={value!r} of {values['name']}: write {right}")
    values.setdefault("usable_bytes", usable_gpu_bytes(values["memory_bytes"]))
    if values["usable_bytes"] > values["memory_bytes"]:
        raise ValueError(f"--catalogue={path}: usable_bytes of {values['name']} are more than its memory_bytes")
    values["name"] = _normal(values["name"])
    return Accelerator(**values)


def _normal(name: str) -> str:
    name = name.strip().lower().replace("_", "-")
    return _SYNONYMS.get(name, name)
