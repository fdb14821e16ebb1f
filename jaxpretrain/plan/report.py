"""The question that a command line of tools/plan.py asks, its answer as a dict, and the same as text."""

import io
from typing import Any

from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from jaxpretrain.hardware import Machine
from jaxpretrain.plan.answer import Measurements, machine_rows, name_of, pareto
from jaxpretrain.plan.search import Subject
from jaxpretrain.schema import IMAGE_FAMILIES

_SHOWN = 14  # rows of a table
_QUESTIONS = {  # by whether there are several models, and several machines
    (False, False): "layouts",
    (False, True): "machines",
    (True, False): "models",
    (True, True): "grid",
}


def answer(
    configs: dict[str, ConfigDict],
    overrides: dict[str, str],
    machines: list[Machine],
    *,
    space: str,
    workdir: str | None,
    job_hours: float | None,
    budget_usd: float | None,
    deadline_days: float | None,
    verify: int,
) -> dict[str, Any]:
    """Rows for one model on one machine (`question`: layouts), on several (machines), or for several models (models).

    Raises ValueError where nothing fits, or nothing within the budget or before the deadline, naming what is nearest.
    """
    measured = Measurements.read(workdir) if workdir and Measurements.exist(workdir) else None
    subjects = {recipe: Subject(config, overrides) for recipe, config in configs.items()}
    tables = {
        (recipe, machine.name): machine_rows(subject, machine, recipe, space, measured, job_hours, verify)
        for recipe, subject in subjects.items()
        for machine in machines
        if subject.can_run_on(machine)
    }
    question = _QUESTIONS[len(subjects) > 1, len(machines) > 1]
    if question == "layouts":
        rows = next(iter(tables.values()), [])
    else:
        rows = [table[0] | {"naive_days": _naive_days(table)} for table in tables.values() if table]
    fitting = sorted((r for r in rows if r["fits"]), key=lambda r: r["days"])
    recipe = next(iter(subjects))
    if not fitting:
        raise ValueError(_nothing_fits(subjects[recipe], recipe, machines, space, rows))
    affordable = [r for r in fitting if _within(r, budget_usd, deadline_days)]
    if not affordable:
        raise ValueError(_not_within(fitting, budget_usd, deadline_days))
    if question == "models":  # the largest first
        affordable.sort(key=lambda r: -r["flops"])
    others = [r for r in rows if not r["fits"]]
    config = configs[recipe]
    return {
        "question": question,
        "space": space,
        "recipe": recipe,
        "budget_usd": budget_usd,
        "deadline_days": deadline_days,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "models": [name_of(recipe) for recipe in configs],
        "machines": [machine.name for machine in machines],
        "unit": " or ".join(dict.fromkeys(_unit(config) for config in configs.values())),
        "best": affordable[0],
        "pareto": [r["machine"] for r in pareto(affordable)] if question == "machines" else [],
        "rows": affordable + ([] if budget_usd or deadline_days else others),
    }


def _naive_days(table: list[dict[str, Any]]) -> float | None:
    """Where the space has the naive method, and that fits."""
    return next((r["days"] for r in table if r["method"] == "naive" and r["fits"]), None)


def _unit(config: ConfigDict) -> str:
    return "images" if config.model.family in IMAGE_FAMILIES else "tokens"


def _within(row: dict[str, Any], budget_usd: float | None, deadline_days: float | None) -> bool:
    in_budget = budget_usd is None or (row["cost_usd"] is not None and row["cost_usd"] <= budget_usd)
    return in_budget and (deadline_days is None or row["days"] <= deadline_days)


def _not_within(rows: list[dict[str, Any]], budget_usd: float | None, deadline_days: float | None) -> str:
    priced = [r for r in rows if r["cost_usd"] is not None]
    parts = []
    if budget_usd is not None and priced:
        r = min(priced, key=lambda r: r["cost_usd"])
        parts.append(
            f"the cheapest is {r['model']} on {r['machine']} for {r['cost_usd']:,.0f} USD in {days_text(r['days'])}"
        )
    if deadline_days is not None or not parts:
        r = rows[0]
        parts.append(
            f"the fastest is {r['model']} on {r['machine']} in {days_text(r['days'])}, {usd_text(r['cost_usd'])}"
        )
    flags = {"--budget-usd": budget_usd, "--deadline-days": deadline_days}
    limits = [f"{flag}={value:g}" for flag, value in flags.items() if value is not None]
    return f"{' and '.join(limits)}: nothing is within that; {'; '.join(parts)}"


def _nothing_fits(subject: Subject, recipe: str, machines: list[Machine], space: str, rows: list) -> str:
    """Names the smallest machine of the catalogue on which something does."""
    from jaxpretrain.hardware import usual_machines

    what = (
        f"{rows[0]['model']} does not fit on {machines[0].name} by any method" if rows else f"{recipe} cannot run there"
    )
    if rows:
        what += (
            f": at least {rows[0]['peak_bytes'] / 2**30:.1f} GiB per device, of {rows[0]['usable_bytes'] / 2**30:.1f}"
        )
    same = machines[0].accelerator
    larger = [m for m in usual_machines(None) if subject.can_run_on(m)]
    # The same device first, more of it; then any, by memory in all.
    larger.sort(key=lambda m: (m.accelerator != same, m.num_devices * m.accelerator.memory_bytes))
    for machine in larger:
        found = machine_rows(subject, machine, recipe, space, None)
        if found and found[0]["fits"]:
            return f"{what}; the nearest machine on which it does is {machine.name}: {found[0]['method']}"
    return f"{what}, nor on any machine of up to 8 devices in the catalogue; name more with --nodes or a larger slice"


def to_text(answer: dict[str, Any]) -> str:
    """For a terminal: the table, and of the best row what takes its time, memory and money, and its commands."""
    best, question = answer["best"], answer["question"]
    run = f"{answer['steps']:,} steps of {answer['batch_size']:,}"
    title = {
        "layouts": f"{best['model']} on {best['machine']}: {run}",
        "machines": f"{best['model']}: {run}",
        "models": f"models on {best['machine']}, those that need most computing first",
        "grid": "days of each model on each machine; in brackets, by the naive method",
    }[question]
    lines = [title, "", _grid(answer) if question == "grid" else _table(answer)]
    if answer["pareto"]:
        lines += ["", f"no other is both faster and cheaper than each of: {', '.join(answer['pareto'])}"]
    return "\n".join(line.rstrip() for line in [*lines, "", *_details(best)])


def _table(answer: dict[str, Any]) -> str:
    question = answer["question"]
    rows = [r for r in answer["rows"] if r["fits"]]
    names = {"layouts": ("method",), "machines": ("machine", "method"), "models": ("model", "method")}[question]
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name)
    for name in ("micro-batch", "days", f"{answer['unit']}/s", "MFU", "GiB", "of", "limit", "USD"):
        table.add_column(name, justify="left" if name == "limit" else "right")
    shown = _trade_offs(rows) if question == "layouts" and answer["space"] != "paper22" else rows
    shown = shown[: _SHOWN if answer["space"] != "paper22" else None]
    for r in shown:
        table.add_row(
            *(r[name] for name in names),
            str(r["micro_batch_size"]),
            _number(r["days"]),
            f"{r['tokens_per_second']:,.0f}",
            f"{100 * r['mfu']:.0f} %",
            f"{r['peak_bytes'] / 2**30:.1f}{'*' if r.get('verified') else ''}",
            f"{r['usable_bytes'] / 2**30:.1f}",
            r["limit"],
            "" if r["cost_usd"] is None else f"{r['cost_usd']:,.0f}",
        )
    left_out, misfits = len(rows) - len(shown), len(answer["rows"]) - len(rows)
    what = "are slower and need no less memory" if question == "layouts" else "more"
    notes = [f"{left_out} {what}"] * (left_out > 0) + [f"{misfits} do not fit"] * (misfits > 0)
    if any(r.get("verified") for r in rows):
        notes.append("* by the compiler")
    return _text(table) + (f"\n({'; '.join(notes)}; --json=FILE has all)" if notes else "")


def _trade_offs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows in their order, those that need less memory than all that are faster."""
    least, front = float("inf"), []
    for r in rows:
        if r["peak_bytes"] < least:
            front.append(r)
            least = r["peak_bytes"]
    return front


def _grid(answer: dict[str, Any]) -> str:
    cells = {(r["model"], r["machine"]): r for r in answer["rows"]}
    table = Table("model", *answer["machines"], box=None, pad_edge=False)
    for model in answer["models"]:
        texts = []
        for machine in answer["machines"]:
            r = cells.get((model, machine))
            if r is None or not r["fits"]:
                texts.append("does not fit")
                continue
            naive = "" if r["naive_days"] is None else f" ({_number(r['naive_days'])})"
            dollars = "" if r["cost_usd"] is None else f", {r['cost_usd']:,.0f} USD"
            texts.append(f"{_number(r['days'])}{naive}{dollars}")
        table.add_row(model, *texts)
    return _text(table)


def _text(table: Table) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text().rstrip()


def _details(best: dict[str, Any]) -> list[str]:
    cost, step, memory = best["cost"], best["step"], best["memory"]
    energy = "power not published" if cost["kwh"] is None else f"{cost['kwh']:,.0f} kWh, {cost['kg_co2']:,.0f} kg CO2"
    host = f"; {best['host_bytes'] / 2**30:.0f} GiB of a node's own memory" if best["host_bytes"] else ""
    return [
        f"best: {best['method']} on {best['machine']}, {days_text(best['days'])}"
        f" ({best['label']}: within {100 * best['band']:.0f} %)",
        f"  step of {best['step_time']:.3g} s: {_shares(step)}",
        f"  memory of {best['peak_bytes'] / 2**30:.1f} GiB: {_shares(memory)}{host}",
        f"  of the days, {cost['training_days']:.2f} training, {cost['checkpoint_days']:.2f} saving, "
        f"{cost['evaluation_days']:.2f} evaluating, {cost['restart_days']:.2f} after failures",
        f"  bought {usd_text(cost['purchase_usd'])} (five years of the machine: {usd_text(best['machine_usd'])}), "
        f"rented {usd_text(cost['cloud_usd'])}; {energy}",
        f"train:    {best['command']}",
        f"measure:  {best['measure']}",
    ]


def _shares(parts: dict[str, float]) -> str:
    total = sum(parts.values())
    shares = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {100 * value / total:.0f} %" for name, value in shares if value / total >= 0.005)


def _number(days: float) -> str:
    return f"{days:.1f}" if days >= 1 else f"{days:.2g}"


def days_text(days: float) -> str:
    return f"{_number(days)} days" if days < 730 else f"{days / 365:.1f} years"


def usd_text(dollars: float | None) -> str:
    return "no price known" if dollars is None else f"{dollars:,.0f} USD"
