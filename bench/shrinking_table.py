"""The table and the picture of what shrinking a model costs (bench/shrinking_study.py)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bertsmith.insight.pictures import name_points
from bertsmith.studies.cost_table import pareto_front

Rows = dict[str, dict[str, list[float]]]
"""By what was done and task: a score for each seed, in percent."""
Costs = Mapping[str, Mapping[str, Any]]
"""By what was done: what `bertsmith cost` measured."""


def table_of(rows: Rows, costs: Costs, titles: Mapping[str, str]) -> str:
    """A line for each row, a column for each task under its title."""
    lines = [f"| | weights (M) | disk (MB) | p50 (ms) | {' | '.join(titles.values())} |"]
    lines.append("|---" * (len(titles) + 4) + "|")
    for name, of_row in rows.items():
        cells = [*prices(costs.get(name)), *(spread(of_row.get(task, [])) for task in titles)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def prices(cost: Mapping[str, Any] | None) -> list[str]:
    if cost is None:
        return [""] * 3
    weights, disk = cost["parameters"] / 1e6, cost["disk_bytes"] / 1e6
    return [f"{weights:.1f}", f"{disk:.1f}", f"{1e3 * cost['latency_p50']:.1f}"]


def spread(scores: Sequence[float]) -> str:
    return f"{median(scores):.1f} ({min(scores):.1f}–{max(scores):.1f})" if scores else ""


def draw(rows: Rows, costs: Costs, titles: Mapping[str, str], file: Path) -> None:
    """Quality against latency, a picture for each task; a line joins what no other beats in both."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(task for name in costs for task in rows[name]))
    figure = Figure(figsize=(10, 4.5 * len(tasks)), layout="constrained")
    for axes, task in zip(figure.subplots(len(tasks), squeeze=False)[:, 0], tasks, strict=True):
        there = {name: cost for name, cost in costs.items() if task in rows[name]}
        points = {name: (1e3 * cost["latency_p50"], median(rows[name][task])) for name, cost in there.items()}
        front = pareto_front(points, larger_is_better=True)
        axes.plot(*zip(*(points[name] for name in front), strict=True), color="#8c8c8c", lw=1)
        bars = {name: (min(rows[name][task]), max(rows[name][task])) for name in points}
        for name, (milliseconds, score) in points.items():
            ends = [[score - bars[name][0]], [bars[name][1] - score]]
            colour = "#c44e52" if name in front else "#4c72b0"
            axes.errorbar(milliseconds, score, yerr=ends, fmt="o", ms=5, color=colour, capsize=3)
        axes.set_xlabel("median milliseconds of one text on the CPU")
        axes.set_title(titles[task], loc="left", fontsize=11, weight="bold")
        axes.margins(0.2)
        axes.spines[["top", "right"]].set_visible(False)
        name_points(axes, points, bars=bars)
    figure.savefig(file, dpi=120)
