"""How right a model is: the task's own measures over what it says of a split."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.examples import Example, Question, TaggedExample
from bertsmith.tasks.metrics import scores_of
from bertsmith.tasks.outcome import Outcome, guesses_of, tags_of
from bertsmith.tasks.span_scores import span_scores
from bertsmith.tasks.squad_scores import squad_scores
from bertsmith.tasks.tag_schemes import scheme_of
from bertsmith.tasks.task_file import TaskNote

PERCENT = 100


def judged(
    note: TaskNote, examples: Sequence[Example], encoded: EncodedSet, outcome: Outcome
) -> dict[str, float]:
    """The task's measures, as fractions, the deciding one first."""
    if note.kind == "span":
        return _judged_answers(examples, outcome)
    if note.kind == "tag":
        return _judged_tags(note, examples, encoded, outcome)
    guesses = guesses_of(note, encoded, outcome)
    if note.kind == "multilabel":
        guesses = _widened(guesses, encoded.targets.shape[1])
    return scores_of(note.metrics, encoded.targets, guesses)


def _widened(guesses_MC: NDArray[Any], columns: int) -> NDArray[Any]:
    """The guesses with columns for labels that training does not have, which are never guessed."""
    return np.pad(guesses_MC, ((0, 0), (0, columns - guesses_MC.shape[1])))


def final_answers(outcome: Outcome) -> dict[str, str]:
    """The text of the answer to each question, empty where there is none."""
    return {answer.key: answer.text for answer in outcome.answers}


def _judged_answers(examples: Sequence[Example], outcome: Outcome) -> dict[str, float]:
    questions = [example for example in examples if isinstance(example, Question)]
    official = squad_scores(questions, final_answers(outcome), null_odds=None, threshold=None)
    wanted = {"f1": "f1", "exact": "exact", "HasAns_f1": "f1_with_answer", "NoAns_f1": "f1_without_answer"}
    return {ours: official[theirs] / PERCENT for theirs, ours in wanted.items() if theirs in official}


def _judged_tags(
    note: TaskNote, examples: Sequence[Example], encoded: EncodedSet, outcome: Outcome
) -> dict[str, float]:
    guesses_P = guesses_of(note, encoded, outcome).astype(np.int64)
    measures: dict[str, float] = {}
    if "span_f1" in note.metrics:
        golds = [list(each.tags or ()) for each in examples if isinstance(each, TaggedExample)]
        guesses = tags_of(note, len(golds), encoded, guesses_P)
        found = span_scores(golds, guesses, scheme_of(golds))
        measures = {"span_f1": found.f1, "precision": found.precision, "recall": found.recall}
    plain = [name for name in note.metrics if name not in ("span_f1",)] or ["accuracy"]
    return {**measures, **scores_of(plain, encoded.targets, guesses_P)}


def deciding(note: TaskNote, measures: Mapping[str, float]) -> float:
    """The measure that decides between runs."""
    return measures[note.metrics[0]]
