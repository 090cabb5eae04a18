"""How far a model has come: what it says of the development sets, and how right that is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bertsmith.finetuning.material import Sheet
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


def examine(model: TaskModel, exams: Mapping[str, Sheet]) -> Examination:
    """Ask the model about each exam; a null threshold that is to be tuned is tuned on the first."""
    note = model.note
    outcomes = {name: model.outcome(sheet.examples, sheet.encoded) for name, sheet in exams.items()}
    if note.answers.null_threshold == "tuned" and exams:
        name = next(iter(exams))
        threshold = tuned_threshold(_questions(exams[name]), outcomes[name].answers)
        note = with_threshold(note, threshold)
        outcomes = {name: _decided(note, exams[name], outcome) for name, outcome in outcomes.items()}
    measures = {
        name: judged(note, sheet.examples, sheet.encoded, outcomes[name]) for name, sheet in exams.items()
    }
    return Examination(note, outcomes, measures)


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


def _decided(note: TaskNote, sheet: Sheet, outcome: Outcome) -> Outcome:
    """The answers that the same scores come to under another threshold."""
    return outcome_of(note, sheet.examples, sheet.encoded, outcome.scores)


def _questions(sheet: Sheet) -> list[Question]:
    return [example for example in sheet.examples if isinstance(example, Question)]
