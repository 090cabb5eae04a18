"""The feature-based table of the BERT paper: six ways to read frozen layers, compared with fine-tuning."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.core.files import write_json, write_text
from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import FinetuningResult
from bertsmith.insight.report import Table
from bertsmith.recipe.finetuning_schema import PUBLISHED_FEATURES
from bertsmith.studies.sweep import (
    Spread,
    Trial,
    failures,
    over_seeds,
    plain_spreads,
    ran_to_their_end,
    run_trials,
    spreads_of,
)
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.callbacks import ProgressCallback

PERCENT = 100


@dataclass(frozen=True, slots=True)
class Strategy:
    """A row of the table: a way to use the encoder, with its settings."""

    key: str
    """Name of the folder with the row's runs."""
    title: str
    """Name in the paper."""
    settings: tuple[str, ...]
    published: float
    """F1 in percent on the development set of CoNLL-2003 (Devlin et al. 2018, table 7)."""


def _features(key: str, title: str, layers: str, combine: str, published: float) -> Strategy:
    settings = ("head.encoder=frozen-features", f"features.layers={layers}", f"features.combine={combine}")
    return Strategy(key, title, settings, published)


STRATEGIES = (
    Strategy("fine-tuning", "fine-tuning", (), 96.4),
    _features("embeddings", "embeddings", "embeddings", "concat", 91.0),
    _features("second-to-last", "second-to-last hidden", "second-to-last", "concat", 95.6),
    _features("last", "last hidden", "last", "concat", 94.9),
    _features("sum-last4", "weighted sum last four hidden", "last4", "weighted-sum", 95.9),
    _features("concat-last4", "concat last four hidden", "last4", "concat", 96.1),
    _features("sum-all", "weighted sum all layers", "all", "weighted-sum", 95.5),
)
PUBLISHED_ON = "ner"


@dataclass(frozen=True, slots=True)
class FeaturesTableRequest:
    """Task, model, data and settings of a features table."""

    task: Task
    model: Path
    data: Path
    out: Path
    seeds: int = 3
    settings: tuple[str, ...] = ()
    """Overrides for all rows."""
    tuning_settings: tuple[str, ...] = ()
    """Overrides for only the fine-tuning row."""
    features_settings: tuple[str, ...] = ()
    """Overrides for only the feature-based rows."""
    skip_bad: bool = False


@dataclass(frozen=True, slots=True)
class FeaturesRow:
    """Results of the runs of one strategy."""

    strategy: Strategy
    spreads: dict[str, dict[str, Spread]]
    """Spreads over the seeds, by split and metric; empty if all runs failed."""
    layer_weights: dict[str, float]
    """Learned weights of a weighted sum, as means over the seeds; empty for other strategies."""
    seconds: float
    failures: dict[str, str]
    """Reasons of runs that failed, by the name of their folder."""

    @classmethod
    def of(cls, strategy: Strategy, results: Sequence[FinetuningResult]) -> "FeaturesRow":
        """Sum up the runs of a strategy."""
        found = ran_to_their_end(results)
        names = found[0].layer_weights if found else {}
        weights = {name: statistics.fmean(each.layer_weights[name] for each in found) for name in names}
        failed = failures({each.folder.name: each for each in results})
        return cls(strategy, spreads_of(found), weights, sum(each.seconds for each in found), failed)


def features_table(request: FeaturesTableRequest, callback: ProgressCallback) -> list[FeaturesRow]:
    """Run all rows; reuse the runs that an earlier call has finished."""
    trials = {strategy: _trials(request, strategy) for strategy in STRATEGIES}
    results = iter(run_trials([trial for each in trials.values() for trial in each], callback))
    rows = [FeaturesRow.of(strategy, [next(results) for _ in each]) for strategy, each in trials.items()]
    write_text(request.out / "table.md", table_text(rows, request.task))
    write_json(request.out / "table.json", plain_table(rows))
    return rows


def _trials(request: FeaturesTableRequest, strategy: Strategy) -> list[Trial]:
    settings = [*request.settings, *strategy.settings]
    options: list[tuple[str, str]] = []
    if strategy.settings:
        options = [("study", f"features.width={PUBLISHED_FEATURES.width}")]  # the user's settings override it
        settings += request.features_settings
    else:
        settings += request.tuning_settings
    recipe = finetuning_recipe(request.task, settings, options=options)
    out = request.out / strategy.key
    assignment = Assignment(request.task, recipe, request.model, request.data, out, skip_bad=request.skip_bad)
    trials = over_seeds(assignment, request.seeds)
    return [replace(trial, name=f"{strategy.title}, {trial.name}") for trial in trials]


def table_text(rows: Sequence[FeaturesRow], task: Task) -> str:
    """Format the table as Markdown, in per cent as in the paper."""
    metric, is_published = task.deciding_metric.name, task.name == PUBLISHED_ON
    splits = next((list(row.spreads) for row in rows if row.spreads), [])
    shown = (f"{split} {metric.replace('_', ' ')}" for split in splits)
    columns = ("features", *shown, "runs", "seconds", *(["published (dev)"] if is_published else []))
    lines, notes = [], []
    for row in rows:
        spreads = [row.spreads[split][metric] if row.spreads else None for split in splits]
        runs = spreads[0].runs if spreads and spreads[0] else 0
        published = [f"{row.strategy.published:.1f}"] if is_published else []
        lines.append((row.strategy.title, *map(_shown, spreads), runs, f"{row.seconds:.0f}", *published))
        if row.layer_weights:
            weights = ", ".join(f"{name} {value:.3f}" for name, value in row.layer_weights.items())
            notes.append(f"Learned weights, {row.strategy.title}: {weights}.")
        notes += [f"{row.strategy.title}, {name} failed: {why}" for name, why in row.failures.items()]
    if is_published:
        notes.append("Published: Devlin et al. 2018, table 7 (BERT Base, five runs).")
    return Table(f"Ways to use an encoder: {task.title}", columns, lines, tuple(notes)).markdown() + "\n"


def _shown(spread: Spread | None) -> str | None:
    if spread is None:
        return None
    deviation = "" if spread.deviation is None else f" ± {PERCENT * spread.deviation:.1f}"
    return f"{PERCENT * spread.mean:.1f}{deviation}"


def plain_table(rows: Sequence[FeaturesRow]) -> dict[str, Any]:
    """Return the table in a form for JSON."""
    return {
        row.strategy.key: {
            "title": row.strategy.title,
            "spreads": plain_spreads(row.spreads),
            "layer_weights": row.layer_weights,
            "published_conll2003_dev": row.strategy.published,
            "seconds": row.seconds,
            "failed": row.failures,
        }
        for row in rows
    }
