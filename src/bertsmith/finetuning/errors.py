"""The hardest errors: where the model was surest of something wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.examples import ChoiceExample, Example, Question, TaggedExample, TextExample
from bertsmith.tasks.outcome import Outcome, guesses_of, tags_of
from bertsmith.tasks.squad_scores import f1
from bertsmith.tasks.task_file import TaskNote

MOST_ERRORS = 50


@dataclass(frozen=True, slots=True)
class HardError:
    """Something the model got wrong."""

    where: str
    text: str
    right: str
    guessed: str
    surety: float
    """The probability it gave to its guess; for numbers, how far off it was."""


def hardest_errors(
    note: TaskNote, examples: Sequence[Example], encoded: EncodedSet, outcome: Outcome
) -> list[HardError]:
    """The errors it was surest of, worst first."""
    found = sorted(_errors(note, examples, encoded, outcome), key=lambda error: -error.surety)
    return found[:MOST_ERRORS]


def errors_text(errors: Sequence[HardError]) -> str:
    """The errors as a table for people."""
    lines = ["# The hardest errors", "", "| sure | right | guessed | text | where |", "|---|---|---|---|---|"]
    for error in errors:
        cells = (f"{error.surety:.2f}", error.right, error.guessed, error.text, error.where)
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _errors(
    note: TaskNote, examples: Sequence[Example], encoded: EncodedSet, outcome: Outcome
) -> Iterator[HardError]:
    if note.kind == "span":
        yield from _wrong_answers(examples, outcome)
    elif note.kind == "tag":
        yield from _wrong_tags(note, examples, encoded, outcome)
    elif note.kind == "multilabel":
        yield from _wrong_label_sets(note, examples, encoded, outcome)
    elif note.kind == "regress":
        for example, guess in zip(examples, outcome.scores.tolist(), strict=True):
            if isinstance(example, TextExample) and isinstance(example.label, float):
                off = abs(guess - example.label)
                yield HardError(example.where, _text(example), f"{example.label:g}", f"{guess:.2f}", off)
    else:
        yield from _wrong_classes(note, examples, encoded, outcome)


def _wrong_classes(
    note: TaskNote, examples: Sequence[Example], encoded: EncodedSet, outcome: Outcome
) -> Iterator[HardError]:
    guesses = guesses_of(note, encoded, outcome)
    for number, example in enumerate(examples):
        guess = int(guesses[number])
        if encoded.targets[number] == guess:
            continue
        if note.kind == "choice":
            guessed, surety = str(guess), float(outcome.scores[encoded.items_M1[number] + guess])
        else:
            guessed, surety = note.labels[guess], float(outcome.scores[number, guess])
        yield HardError(example.where, _text(example), _right(example), guessed, surety)


def _wrong_label_sets(
    note: TaskNote, examples: Sequence[Example], encoded: EncodedSet, outcome: Outcome
) -> Iterator[HardError]:
    guesses_MC = guesses_of(note, encoded, outcome)
    # Behind the columns of the model's labels stand those of labels that training does not have.
    known_MC, strange_MC = np.split(encoded.targets, [len(note.labels)], axis=1)
    wrong_M = (known_MC != guesses_MC).any(1) | strange_MC.any(1)
    for number in np.flatnonzero(wrong_M).tolist():
        example, guessed = examples[number], _names(note, guesses_MC[number])
        surety = float(np.abs(outcome.scores[number] - known_MC[number]).max())
        yield HardError(example.where, _text(example), _right(example), guessed, surety)


def _wrong_tags(
    note: TaskNote, examples: Sequence[Example], encoded: EncodedSet, outcome: Outcome
) -> Iterator[HardError]:
    guesses_P = outcome.scores.argmax(-1)
    tagged = tags_of(note, len(examples), encoded, guesses_P)
    surety_P = outcome.scores.max(-1)
    surest = np.zeros(len(examples))
    wrong_P = guesses_P != encoded.targets
    np.maximum.at(surest, encoded.words_P2[wrong_P, 0], surety_P[wrong_P])
    for number, example in enumerate(examples):
        if isinstance(example, TaggedExample) and surest[number] > 0:
            pairs = zip(example.words, example.tags or (), tagged[number], strict=True)
            wrong = [(word, right, guess) for word, right, guess in pairs if right != guess]
            right = " ".join(f"{word}/{tag}" for word, tag, _ in wrong)
            guessed = " ".join(f"{word}/{tag}" for word, _, tag in wrong)
            yield HardError(example.where, _text(example), right, guessed, float(surest[number]))


def _wrong_answers(examples: Sequence[Example], outcome: Outcome) -> Iterator[HardError]:
    for example, answer in zip(examples, outcome.answers, strict=True):
        assert isinstance(example, Question)
        golds = [gold.text for gold in example.answers] or [""]
        if max(f1(gold, answer.text) for gold in golds) == 0:
            yield HardError(
                example.where, example.question, golds[0], answer.text or "no answer", answer.probability
            )


def _names(note: TaskNote, hits: np.ndarray) -> str:
    return ", ".join(label for label, hit in zip(note.labels, hits, strict=True) if hit) or "none"


def _right(example: Example) -> str:
    label = example.label if isinstance(example, TextExample | ChoiceExample) else None
    return (", ".join(label) or "none") if isinstance(label, tuple) else str(label)


def _text(example: Example) -> str:
    if isinstance(example, TextExample):
        return example.texts if isinstance(example.texts, str) else " // ".join(example.texts)
    if isinstance(example, TaggedExample):
        return " ".join(example.words)
    if isinstance(example, ChoiceExample):
        return " // ".join(second for _, second in example.options)
    return example.question
