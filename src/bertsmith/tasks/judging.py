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
SPAN_F1 = "span_f1"
OF_ANSWERS = {
    "f1": "f1",
    "exact": "exact",
    "HasAns_f1": "f1_with_answer",
    "HasAns_exact": "exact_with_answer",
    "NoAns_f1": "f1_without_answer",
    "NoAns_exact": "exact_without_answer",
}
"""Our names for those of the official script."""


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
    found = {ours: official[theirs] / PERCENT for theirs, ours in OF_ANSWERS.items() if theirs in official}
    return found | _best_of_any_threshold(questions, outcome) if "NoAns_f1" in official else found


def _best_of_any_threshold(questions: Sequence[Question], outcome: Outcome) -> dict[str, float]:
    """What the best null threshold for this very file would give, as the official script tells it."""
    odds = {answer.key: answer.null_odds for answer in outcome.answers}
    spans = {answer.key: answer.best_span for answer in outcome.answers}
    official = squad_scores(questions, spans, null_odds=odds, threshold=None)
    found: dict[str, float] = {}
    for name in ("best_f1", "best_exact"):
        found |= {name: official[name] / PERCENT, f"{name}_threshold": official[f"{name}_thresh"]}
    return found


def _judged_tags(
    note: TaskNote, examples: Sequence[Example], encoded: EncodedSet, outcome: Outcome
) -> dict[str, float]:
    guesses_P = guesses_of(note, encoded, outcome).astype(np.int64)
    plain = [name for name in note.metrics if name != SPAN_F1] or ["accuracy"]
    of_words = scores_of(plain, encoded.targets, guesses_P)  # refuses words without tags
    if SPAN_F1 not in note.metrics:
        return of_words
    golds = [list(each.tags or ()) for each in examples if isinstance(each, TaggedExample)]
    found = span_scores(golds, tags_of(note, len(golds), encoded, guesses_P), scheme_of(golds))
    of_spans = {SPAN_F1: found.f1, "precision": found.precision, "recall": found.recall}
    # Only types of the file: what runs guess besides differs from run to run.
    of_types = {f"{SPAN_F1}_{name}": each.f1 for name, each in found.by_type.items() if name and each.golds}
    return {**of_spans, **of_words, **of_types}


def deciding(note: TaskNote, measures: Mapping[str, float]) -> float:
    """The measure that decides between runs."""
    return measures[note.metrics[0]]
