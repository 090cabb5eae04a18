"""The feature-based table of the BERT paper: six ways to read frozen layers, compared with fine-tuning."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.core.files import write_json, write_text
from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import FinetuningResult
from bertsmith.recipe.finetuning_schema import PUBLISHED_FEATURES
from bertsmith.studies.sweep import Spread, Trial, over_seeds, plain_spreads, run_trials, spreads_of
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
    """Spreads over the seeds, by split and metric."""
    layer_weights: dict[str, float]
    """Learned weights of a weighted sum, as means over the seeds; empty for other strategies."""
    seconds: float


def features_table(request: FeaturesTableRequest, callback: ProgressCallback) -> list[FeaturesRow]:
    """Run all rows; reuse the runs that an earlier call has finished."""
    trials = {strategy.key: _trials(request, strategy) for strategy in STRATEGIES}
    results = iter(run_trials([trial for each in trials.values() for trial in each], callback))
    rows = [_row(strategy, [next(results) for _ in trials[strategy.key]]) for strategy in STRATEGIES]
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


def _row(strategy: Strategy, results: Sequence[FinetuningResult]) -> FeaturesRow:
    weights = {
        name: statistics.fmean(result.layer_weights[name] for result in results)
        for name in results[0].layer_weights
    }
    seconds = sum(result.seconds for result in results)
    return FeaturesRow(strategy, spreads_of(results), weights, seconds)


def table_text(rows: Sequence[FeaturesRow], task: Task) -> str:
    """Format the table as Markdown, in per cent as in the paper."""
    metric = task.deciding_metric.name
    published = task.name == PUBLISHED_ON
    splits = list(rows[0].spreads)
    headings = ["features", *(f"{split} {metric.replace('_', ' ')}" for split in splits), "runs", "seconds"]
    headings += ["published (dev)"] if published else []
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row in rows:
        cells = [row.strategy.title, *(_shown(row.spreads[split][metric]) for split in splits)]
        cells += [str(row.spreads[splits[0]][metric].runs), f"{row.seconds:.0f}"]
        cells += [f"{row.strategy.published:.1f}"] if published else []
        lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        if row.layer_weights:
            lines += ["", f"Learned weights, {row.strategy.title}: {_weights(row.layer_weights)}."]
    if published:
        lines += ["", "Published: Devlin et al. 2018, table 7 (BERT Base, five runs)."]
    return "\n".join(lines) + "\n"


def _shown(spread: Spread) -> str:
    deviation = "" if spread.deviation is None else f" ± {PERCENT * spread.deviation:.1f}"
    return f"{PERCENT * spread.mean:.1f}{deviation}"


def _weights(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in weights.items())


def plain_table(rows: Sequence[FeaturesRow]) -> dict[str, Any]:
    """Return the table in a form for JSON."""
    return {
        row.strategy.key: {
            "title": row.strategy.title,
            "spreads": plain_spreads(row.spreads),
            "layer_weights": row.layer_weights,
            "published_conll2003_dev": row.strategy.published,
            "seconds": row.seconds,
        }
        for row in rows
    }
