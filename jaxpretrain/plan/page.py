"""The answer of tools/plan.py as one page with pictures, that opens from disk without a network."""

import io
import itertools
from typing import Any

from jaxpretrain.plan.report import days_text, to_text, usd_text

_BARS = 10  # layouts in a picture
_INK, _FAINT = "#22303c", "#d8dee4"
_COLOURS = ("#3b6ea5", "#6fa8a0", "#e0a458", "#c8553d", "#8e6c8a", "#8a9a5b", "#b0b7bf", "#5b7b7a")


def page(answer: dict[str, Any]) -> str:
    """HTML, styles and pictures in it. Raises ValueError where a package of the `report` extra is missing."""
    try:
        import jinja2
        import matplotlib
    except ImportError as error:
        raise ValueError(f"the page needs {error.name}: pip install 'jaxpretrain[report]'") from error
    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    matplotlib.rcParams["svg.hashsalt"] = "jaxpretrain"
    matplotlib.rcParams["font.family"] = "sans-serif"
    best, question = answer["best"], answer["question"]
    rows = [row for row in answer["rows"] if row["fits"]][:_BARS]
    name = {"layouts": "method", "machines": "machine", "models": "model", "grid": "machine"}[question]
    labels = [f"{row['model']}, {row['machine']}" if question == "grid" else row[name] for row in rows]
    pictures = [
        (
            "Which models fit which machine, and how long they take",
            "Time by the best method. Green: the naive method fits, too; amber: not, or not asked (--space=paper22).",
            _feasibility(answer),
        ),
        (
            "Days against dollars",
            "Log scales." if question == "grid" else "The line joins the machines that no other beats in both.",
            _days_and_dollars(answer),
        ),
        ("Where the time goes", "Seconds of an optimizer step.", _bars([r["step"] for r in rows], labels, "seconds")),
        (
            "What the memory holds",
            "GiB of each device; the tick is what may be used.",
            _bars(
                [{part: size / 2**30 for part, size in row["memory"].items()} for row in rows],
                labels,
                "GiB",
                limits=[row["usable_bytes"] / 2**30 for row in rows],
            ),
        ),
    ]
    environment = jinja2.Environment(autoescape=True)
    return environment.from_string(_TEMPLATE).render(
        title=_title(answer),
        days=days_text(best["days"]),
        usd=usd_text(best["cost_usd"]),
        best=best,
        band=f"{100 * best['band']:.0f} %",
        pictures=[(title, text, picture) for title, text, picture in pictures if picture],
        text=to_text(answer),
    )


def _title(answer: dict[str, Any]) -> str:
    best = answer["best"]
    return {
        "layouts": f"{best['model']} on {best['machine']}",
        "machines": f"Machines for {best['model']}",
        "models": f"Models on {best['machine']}",
        "grid": f"{len(answer['models'])} models on {len(answer['machines'])} machines",
    }[answer["question"]]


def _days_and_dollars(answer: dict[str, Any]) -> str:
    """Of machines, with those that nothing beats joined; or of all models on each machine."""
    rows = [row for row in answer["rows"] if row["fits"] and row["cost_usd"] is not None]
    if answer["question"] not in ("machines", "grid") or len(rows) < 2:
        return ""
    figure, axes = _figure(8, 5)
    if answer["question"] == "machines":
        axes.scatter(*_places(rows), s=18, color=_FAINT, edgecolor=_COLOURS[0])
        series = [("", [row for row in rows if row["machine"] in answer["pareto"]], _COLOURS[3], "machine")]
    else:
        machines = zip(answer["machines"], itertools.cycle(_COLOURS), strict=False)
        series = [(name, [row for row in rows if row["machine"] == name], colour, "model") for name, colour in machines]
    for name, of_it, colour, label in series:
        of_it.sort(key=lambda row: row["days"])
        axes.plot(*_places(of_it), color=colour, marker="o", markersize=5, linewidth=1.2, label=name)
        for i, row in enumerate(of_it):
            place, above = (row["days"], row["cost_usd"]), (6, 4 if i % 2 == 0 else -11)
            axes.annotate(row[label], place, textcoords="offset points", xytext=above, fontsize=8, color=_INK)
    if answer["question"] == "grid":
        axes.legend(frameon=False, fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="days", ylabel="USD, the cheaper of bought and rented")
    axes.grid(color=_FAINT, linewidth=0.6)
    return _svg(figure)


def _places(rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["days"] for row in rows], [row["cost_usd"] for row in rows]


def _feasibility(answer: dict[str, Any]) -> str:
    """Models x machines."""
    if answer["question"] != "grid":
        return ""
    from matplotlib.patches import Rectangle

    cells = {(row["model"], row["machine"]): row for row in answer["rows"]}
    models, machines = answer["models"], answer["machines"]
    figure, axes = _figure(1.6 + 1.5 * len(machines), 1.0 + 0.55 * len(models))
    for y, model in enumerate(models):
        for x, machine in enumerate(machines):
            row = cells.get((model, machine))
            fits = row is not None and row["fits"]
            colour = _FAINT if not fits else "#f0cf95" if row["naive_days"] is None else "#a9cbb7"
            axes.add_patch(Rectangle((x, y), 0.96, 0.92, color=colour))
            text = days_text(row["days"]) if fits else "does not fit"
            axes.text(x + 0.48, y + 0.46, text, ha="center", va="center", fontsize=10, color=_INK)
    axes.set_xlim(0, len(machines))
    axes.set_ylim(len(models), 0)
    axes.set_xticks([x + 0.48 for x in range(len(machines))], machines)
    axes.set_yticks([y + 0.46 for y in range(len(models))], models)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return _svg(figure)


def _bars(parts: list[dict[str, float]], labels: list[str], unit: str, limits: list[float] | None = None) -> str:
    """Horizontal, stacked, the best on top."""
    figure, axes = _figure(9, 1.3 + 0.42 * len(parts))
    places = range(len(parts), 0, -1)
    left = [0.0] * len(parts)
    names = [name for name in parts[0] if any(part[name] > 0.004 * sum(part.values()) for part in parts)]
    for name, colour in zip(names, _COLOURS, strict=False):
        widths = [part[name] for part in parts]
        axes.barh(places, widths, left=left, height=0.62, label=name, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    if limits:
        axes.vlines(limits, [y - 0.42 for y in places], [y + 0.42 for y in places], color=_INK, linewidth=1.6)
    axes.set_yticks(places, labels)
    axes.set_xlabel(unit)
    axes.legend(ncols=4, frameon=False, fontsize=8.5, loc="lower left", bbox_to_anchor=(0, 1.0))
    axes.grid(axis="x", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    return _svg(figure)


def _figure(width: float, height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    return figure, axes


def _svg(figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return file.getvalue()[file.getvalue().index("<svg") :]


_TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}: plan</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; color: #22303c; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.6rem; margin-bottom: 0.2rem; }
  h2 { font-size: 1.15rem; margin: 2rem 0 0; }
  p { margin: 0.3rem 0; }
  .answer { font-size: 1.25rem; }
  .quiet { color: #5f6f7d; }
  figure { margin: 0.5rem 0; }
  svg { width: 100%; height: auto; }
  pre { background: #f4f6f8; padding: 0.8rem; overflow-x: auto; font-size: 0.8rem; line-height: 1.35; }
  pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
  @media print { body { margin: 0; max-width: none; } pre { font-size: 0.55rem; } figure { break-inside: avoid; } }
</style>
<h1>{{ title }}</h1>
<p class="answer"><b>{{ days }}</b>, {{ usd }}: {{ best.model }} on {{ best.machine }}, {{ best.method }},
micro-batches of {{ best.micro_batch_size }}.</p>
<p class="quiet">Predicted, {{ best.label }}; within {{ band }}. Nothing was run.</p>
<pre class="command">{{ best.command }}</pre>
{% for title, text, picture in pictures %}
<h2>{{ title }}</h2>
<p class="quiet">{{ text }}</p>
<figure>{{ picture|safe }}</figure>
{% endfor %}
<h2>In words</h2>
<pre>{{ text }}</pre>
</html>
"""
