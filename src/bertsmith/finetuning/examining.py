"""How far a model has come: what it says of the development sets, and how right that is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertsmith.finetuning.material import Sheet
from bertsmith.finetuning.number_scale import NumberScale
from bertsmith.finetuning.thresholds import threshold_report, tuned_threshold
from bertsmith.inference.task_model import TaskModel
from bertsmith.tasks.examples import Question
from bertsmith.tasks.judging import judged
from bertsmith.tasks.outcome import Outcome, outcome_of
from bertsmith.tasks.task_file import TaskNote


@dataclass(frozen=True, slots=True)
class Examination:
    """What a model says of each exam, and how right it is."""

    note: TaskNote
    """As the model is to be asked: with the null threshold that was tuned on the first exam, if any."""
    outcomes: dict[str, Outcome]
    measures: dict[str, dict[str, float]]

    @property
    def deciding(self) -> dict[str, float]:
        """The measures on the exam that decides."""
        return next(iter(self.measures.values()))


def examine(model: TaskModel, exams: Mapping[str, Sheet], *, scale: NumberScale | None = None) -> Examination:
    """Ask the model about each exam; a null threshold that is to be tuned is tuned on the first.

    The scale is that of numbers which the model learns and does not yet give as they are.
    """
    note, outcomes = model.note, _outcomes(model, exams, scale)
    if note.answers.null_threshold == "tuned" and exams:
        name = next(iter(exams))
        threshold = tuned_threshold(_questions(exams[name]), outcomes[name].answers)
        note = with_threshold(note, threshold)
        outcomes = {name: _decided(note, exams[name], outcome) for name, outcome in outcomes.items()}
    measures = {
        name: judged(note, sheet.examples, sheet.encoded, outcomes[name]) for name, sheet in exams.items()
    }
    return Examination(note, outcomes, measures)


def parts_of_first(exams: Mapping[str, Sheet]) -> dict[str, list[int]]:
    """The exams whose questions the first one asks, too (RACE's schools), with their places in it."""
    if not exams:
        return {}
    first, *others = exams
    if exams[first].encoded.kind != "choice":  # of others, no published set has such parts
        return {}
    places = {example: place for place, example in enumerate(exams[first].examples)}
    return {
        name: [places[example] for example in exams[name].examples]
        for name in others
        if places.keys() >= set(exams[name].examples)
    }


def with_threshold(note: TaskNote, threshold: float) -> TaskNote:
    """The note with this null threshold."""
    return note.model_copy(update={"answers": note.answers.model_copy(update={"null_threshold": threshold})})


def tuning_report(model: TaskModel, exams: Mapping[str, Sheet], examination: Examination) -> dict[str, Any]:
    """How the null threshold was tuned on the first exam, and how well that carries over."""
    name, sheet = next(iter(exams.items()))
    best_spans = _decided(model.note, sheet, examination.outcomes[name])
    threshold = examination.note.answers.null_threshold
    assert isinstance(threshold, float)
    return threshold_report(_questions(sheet), best_spans.answers, threshold=threshold)


def _outcomes(model: TaskModel, exams: Mapping[str, Sheet], scale: NumberScale | None) -> dict[str, Outcome]:
    """What the model says of each exam; no question is asked twice."""
    outcomes: dict[str, Outcome] = {}
    parts = parts_of_first(exams)
    for name, sheet in exams.items():
        if name in parts:
            first = next(iter(exams))
            outcomes[name] = _part(exams[first], outcomes[first], parts[name])
        else:
            said = model.outcome(sheet.examples, sheet.encoded)
            outcomes[name] = said if scale is None else Outcome(scale.told(said.scores))
    return outcomes


def _part(sheet: Sheet, outcome: Outcome, places: list[int]) -> Outcome:
    options = np.split(outcome.scores, sheet.encoded.items_M1[1:-1])
    return Outcome(np.concatenate([options[place] for place in places]))


def _decided(note: TaskNote, sheet: Sheet, outcome: Outcome) -> Outcome:
    """The answers that the same scores come to under another threshold."""
    return outcome_of(note, sheet.examples, sheet.encoded, outcome.scores)


def _questions(sheet: Sheet) -> list[Question]:
    return [example for example in sheet.examples if isinstance(example, Question)]
