"""Many fine-tuning runs, one table: each run has its own folder, and what is finished is not done again."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from bertsmith.finetuning.folder import Assignment, TuningFolder, refuse_other_run
from bertsmith.finetuning.job import FinetuningResult, finetune
from bertsmith.ground.files import write_json
from bertsmith.recipe.finetuning import FinetuningRecipe
from bertsmith.training.watch import Watch

GRID: dict[str, tuple[Any, ...]] = {
    "run.examples": (16, 32),
    "optim.peak_lr": (5e-5, 3e-5, 2e-5),
    "run.epochs": (2.0, 3.0, 4.0),
}
"""Devlin et al. 2018, A.3."""


SPREAD = "spread.json"
"""Beside the folders of runs: what each came to, which did best, and how they spread."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a study."""

    name: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Spread:
    """A measure over several runs."""

    mean: float
    median: float
    deviation: float
    """Standard deviation of the sample; 0 for a single run."""
    least: float
    most: float
    runs: int


class Stopped(Exception):
    """A run of the study was asked to stop; what is finished stays."""


def run_cells(cells: Sequence[Cell], watch: Watch) -> list[FinetuningResult]:
    """Run each cell that is not finished yet, one after the other; the results of all.

    Beside the folders of cells their spread is written.
    """
    for cell in cells:
        refuse_other_run(TuningFolder(cell.assignment.out), cell.assignment)
    results = []
    for number, cell in enumerate(cells, start=1):
        watch.note(f"[{number}/{len(cells)}] {cell.name}")
        result = finetune(cell.assignment, watch)
        if not result.finished:
            raise Stopped(cell.name)
        results.append(result)
    for place in dict.fromkeys(result.folder.parent for result in results):
        _write_spread(place, {each.folder.name: each for each in results if each.folder.parent == place})
    return results


def over_seeds(assignment: Assignment, seeds: int) -> list[Cell]:
    """The same run with its own seed and those after it, so many in all."""
    first = assignment.recipe.run.seed
    return [_cell(assignment, {"run.seed": seed}, f"seed-{seed}") for seed in range(first, first + seeds)]


def over_grid(assignment: Assignment, grid: Mapping[str, Sequence[Any]] | None = None) -> list[Cell]:
    """The same run with every combination of the paper's settings."""
    chosen = GRID if grid is None else grid
    cells = []
    for values in product(*chosen.values()):
        changed = dict(zip(chosen, values, strict=True))
        name = "_".join(f"{key.rpartition('.')[2]}-{value:g}" for key, value in changed.items())
        cells.append(_cell(assignment, changed, name))
    return cells


def spread_of(values: Sequence[float]) -> Spread:
    """Mean, median and spread of a measure over runs."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    mean, median = statistics.mean(values), statistics.median(values)
    return Spread(mean, median, deviation, min(values), max(values), len(values))


def spreads_of(results: Sequence[FinetuningResult]) -> dict[str, dict[str, Spread]]:
    """For each split and measure, how it spreads over the runs."""

    def spread(split: str, measure: str) -> Spread:
        return spread_of([result.measures[split][measure] for result in results])

    return {
        split: {measure: spread(split, measure) for measure in measures}
        for split, measures in results[0].measures.items()
    }


def plain_spreads(spreads: Mapping[str, Mapping[str, Spread]]) -> dict[str, dict[str, dict[str, float]]]:
    """Spreads for machines."""
    return {
        split: {measure: asdict(spread) for measure, spread in measures.items()}
        for split, measures in spreads.items()
    }


def best_of(results: Mapping[str, FinetuningResult]) -> str:
    """The name of the run that did best by the deciding measure of the first split; nothing without one."""

    def value(name: str) -> float:
        return next(iter(next(iter(results[name].measures.values())).values()))

    return max(results, key=value) if all(result.measures for result in results.values()) else ""


def _write_spread(place: Path, results: Mapping[str, FinetuningResult]) -> None:
    facts = {
        "runs": {name: result.measures for name, result in results.items()},
        "best": best_of(results),
        "spreads": plain_spreads(spreads_of(list(results.values()))),
    }
    write_json(place / SPREAD, facts)


def _cell(assignment: Assignment, changed: Mapping[str, Any], name: str) -> Cell:
    recipe = with_values(assignment.recipe, changed)
    return Cell(name, replace(assignment, recipe=recipe, out=assignment.out / name))


def with_values(recipe: FinetuningRecipe, changed: Mapping[str, Any]) -> FinetuningRecipe:
    """The recipe with other values under some dotted keys."""
    values = recipe.model_dump()
    for key, value in changed.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    return FinetuningRecipe.model_validate(values)
