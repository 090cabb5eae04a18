"""A user's own study, from a TOML file: stages, trials and a grid (docs/studies.md has an example)."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from bertsmith.core.errors import UserError, in_file
from bertsmith.core.files import read_text
from bertsmith.insight.report import Report
from bertsmith.recipe.load import leaves, load_recipe
from bertsmith.recipe.section import Count, RuleError, Section
from bertsmith.recipe.toml_text import value_text
from bertsmith.recipe.validation_errors import user_error
from bertsmith.studies.cells import Failure, Model, Stage
from bertsmith.studies.comparison import comparison
from bertsmith.studies.stages import (
    MODEL,
    Device,
    finetuning_stage,
    known_model,
    pretraining_stage,
    teacher_inputs,
)
from bertsmith.studies.study import Row, Seeds, Trial
from bertsmith.tasks.catalogue import OWN, task_named
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.task_recipe import finetuning_recipe

Values = dict[str, Any]
GIVEN_ELSEWHERE = {
    "run.seed": "give seeds and finetuning_seeds at the top of the file",
    "start.model": "give it as model of the stage",
    "distill.teacher": "give it as teachers of the stage",
    "distill.teachers": "give it as teachers of the stage",
}
"""Remedies for the keys of recipes that a study sets by itself."""


class StageTable(Section):
    """One stage of the file: pre-training if it has a recipe, fine-tuning if it has a task."""

    recipe: str = ""
    """Preset or recipe file of a pre-training stage."""
    store: str = ""
    """Token store of a pre-training stage."""
    task: str = ""
    """Task of a fine-tuning stage; custom for an own table."""
    data: str = ""
    """Data of a fine-tuning stage."""
    columns: dict[str, str | float] = {}
    """custom: roles of the table's columns, for example text and label (the fields of CustomSpec)."""
    model: str = ""
    """Stage or model folder to begin with; empty: pre-training starts from scratch."""
    teachers: tuple[str, ...] = ()
    """Stages or model folders to learn from."""
    set: dict[str, Any] = {}
    """Any keys of the recipe."""

    @model_validator(mode="after")
    def is_one_kind(self) -> "StageTable":
        pretrains, finetunes = bool(self.recipe and self.store), bool(self.task and self.data and self.model)
        if pretrains == finetunes or bool(self.recipe) == bool(self.task):
            what = "a stage has either recipe and store, or task, data and model"
            raise RuleError(what, keys=("recipe", "store", "task", "data", "model"), remedy="see the example")
        if pretrains and len(self.teachers) > 1:
            raise RuleError("pre-training has one teacher", keys=("teachers",), remedy="remove the others")
        return self


class StudyFile(Section):
    """The whole file."""

    question: str
    """Title of the report."""
    seeds: Count = 1
    """Number of pre-training seeds, or of fine-tuning seeds if the study only fine-tunes."""
    finetuning_seeds: Count = 1
    """Number of fine-tuning seeds for each pre-training seed."""
    stages: Annotated[dict[str, StageTable], Field(min_length=1)]
    """Stages by name, each after the stages that it begins with."""
    trials: dict[str, Values] = {}
    """Changed keys of each trial, as STAGE.KEY; the first trial is the baseline."""
    grid: Values = {}
    """Lists of values of keys, as STAGE.KEY: each trial is run with each combination."""

    @model_validator(mode="after")
    def stages_are_in_order(self) -> "StudyFile":
        before: list[str] = []
        for name, table in self.stages.items():
            for given in (table.model, *table.teachers):
                if given in self.stages and given not in before:
                    what = f"stages.{name} begins with {given}, which does not come before it"
                    raise RuleError(
                        what, keys=("stages",), remedy="write each stage after the stages that it begins with"
                    )
            before.append(name)
        return self

    @model_validator(mode="after")
    def grids_have_values(self) -> "StudyFile":
        for key, values in leaves(self.grid).items():
            if not isinstance(values, list) or not values:
                raise RuleError(f"grid.{key} is not a list of values", keys=("grid",), remedy="write [1, 2]")
        return self


def read_study(file: Path, *, device: Device, seeds: int | None = None) -> "OwnStudy":
    """Read a study; the given device replaces "auto" in its runs. Raise if the file is invalid."""
    text = read_text(file, remedy="give a study in TOML (bertsmith study run --help has an example)")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not valid TOML ({error})", where=str(file), remedy="correct it there") from error
    try:
        found = _validated(values if seeds is None else {**values, "seeds": seeds})
    except UserError as error:
        raise replace(error, where=str(file)) from error
    sets = {name: table.set for name, table in found.stages.items()}
    for key in (key for each in (*found.trials.values(), found.grid, sets) for key in leaves(each)):
        stage, _, changed = key.partition(".")
        if stage not in found.stages or not changed:
            what = f"{key!r} names none of the stages ({', '.join(found.stages)})"
            raise UserError(what, where=str(file), remedy="write STAGE.KEY, for example model.optim.peak_lr")
        if changed in GIVEN_ELSEWHERE:
            what = f"a study does not set {key} directly"
            raise UserError(what, where=str(file), remedy=GIVEN_ELSEWHERE[changed])
    return OwnStudy(file.stem, found, device)


def _validated(values: Values) -> StudyFile:
    try:
        return StudyFile.model_validate(values)
    except ValidationError as error:
        raise user_error(error, values, {}, StudyFile) from error


@dataclass(frozen=True, slots=True)
class OwnStudy:
    """A study from a file."""

    name: str
    file: StudyFile
    device: Device
    """Device of the runs with "auto"."""

    def trials(self) -> list[Trial]:
        """Return each trial with each point of the grid, for each last stage; bad recipes are trials, too."""
        used = {name for table in self.file.stages.values() for name in (table.model, *table.teachers)}
        last = [name for name in self.file.stages if name not in used]
        found = []
        for measured in last:
            for name, changed in self._variants():
                table = measured if len(last) > 1 else ""
                try:
                    tables = self._tables(changed)
                    stages = {seeds: self._stage(measured, tables, seeds) for seeds in self._seeds(measured)}
                except UserError as error:
                    impossible = Failure(error.spelled(in_file).line(), where=error.where, repeats=True)
                    found.append(Trial(name, {}, table, impossible))
                else:
                    found.append(Trial(name, stages, table))
        return found

    def report(self, rows: Sequence[Row]) -> Report:
        """Return a table for each last stage."""
        return comparison(self.name, self.file.question, rows)

    def _variants(self) -> Iterator[tuple[str, Values]]:
        grid = leaves(self.file.grid)
        for name, changed in (self.file.trials or {"": {}}).items():
            for point in product(*grid.values()):
                chosen = dict(zip(grid, point, strict=True))
                shown = [f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()]
                yield (
                    ", ".join([*([name] if name else []), *shown]) or "baseline",
                    {**leaves(changed), **chosen},
                )

    def _seeds(self, measured: str) -> list[Seeds]:
        """Return the seeds of a last stage, which depend on the stages before it."""
        chain = list(self._chain(measured))
        if not any(table.recipe for table in chain):
            return [Seeds(0, seed) for seed in range(max(self.file.seeds, self.file.finetuning_seeds))]
        tuned = range(self.file.finetuning_seeds if any(table.task for table in chain) else 1)
        return [Seeds(*each) for each in product(range(self.file.seeds), tuned)]

    def _chain(self, name: str) -> Iterator[StageTable]:
        table = self.file.stages[name]
        yield table
        for before in {table.model, *table.teachers} & self.file.stages.keys():
            yield from self._chain(before)

    def _tables(self, changed: Values) -> Mapping[str, StageTable]:
        """Return the stages with the changes of a trial; raise if they are not a valid study."""
        stages: dict[str, Values] = {name: table.model_dump() for name, table in self.file.stages.items()}
        for table in stages.values():
            table["set"] = leaves(table["set"])
        for key, value in changed.items():
            stage, _, own = key.partition(".")
            place = stages[stage] if own in StageTable.model_fields else stages[stage]["set"]
            place[own] = value
        return _validated({"question": self.file.question, "stages": stages}).stages

    def _stage(self, name: str, tables: Mapping[str, StageTable], seeds: Seeds) -> Stage:
        """Return a stage with the seeds of a run."""
        table = tables[name]

        def known(given: str) -> Stage | Model:
            return self._stage(given, tables, seeds) if given in tables else known_model(given)

        settings, teachers = leaves(table.set), table.teachers
        inputs = teacher_inputs([known(each) for each in teachers])
        if table.model:
            inputs = {MODEL: known(table.model), **inputs}
        if table.recipe:
            # The inputs replace these keys; the recipe only has to show that they exist.
            settings |= {"start.model": table.model} if table.model else {}
            settings |= {"distill.teacher": teachers[0]} if teachers else {}
            options = _lines({"run.seed": seeds.pretraining, **settings}, name)
            recipe = load_recipe(table.recipe, options=options)
            return pretraining_stage(
                recipe, Path(table.store).expanduser(), device=self.device, inputs=inputs
            )
        settings |= {"distill.teachers": list(teachers)} if teachers else {}
        task = custom_task(_spec(table.columns, name)) if table.task == OWN else task_named(table.task)
        options = _lines({"run.seed": seeds.finetuning, **settings}, name)
        tuned = finetuning_recipe(task, options=options)
        return finetuning_stage(tuned, task, Path(table.data).expanduser(), device=self.device, inputs=inputs)


def _lines(settings: Mapping[str, Any], stage: str) -> list[tuple[str, str]]:
    return [(f"stages.{stage}", f"{key}={value_text(value)}") for key, value in settings.items()]


def _spec(columns: Mapping[str, str | float], stage: str) -> CustomSpec:
    if unknown := columns.keys() - {each.name for each in fields(CustomSpec)}:
        remedy = f"choose from {', '.join(each.name for each in fields(CustomSpec))}"
        raise UserError(f"unknown column {min(unknown)!r}", where=f"stages.{stage}.columns", remedy=remedy)
    if missing := {"text", "label"} - columns.keys():
        what = f"lacks the column of the {max(missing)}"
        raise UserError(
            what, where=f"stages.{stage}.columns", remedy='columns = { text = "...", label = "..." }'
        )
    return CustomSpec(**columns)  # type: ignore[arg-type]
