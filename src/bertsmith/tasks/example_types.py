"""Examples in the files of tasks; labels are still words of the file."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.files import lone_surrogate

Label = str | float | tuple[str, ...]
"""The right result of an example: a class or an option, a number, or several classes, tags or answers."""


class LabelledExample(ABC):
    """The properties of every class of examples, so that callers need not check the type.

    Besides these: `strings` (all of its text), `text_cells` (the text by column, for a table) and `summary`
    (for a list of errors).
    """

    __slots__ = ()

    @property
    @abstractmethod
    def right(self) -> Label | None:
        """The right result, for comparisons; None if unknown."""

    @property
    def is_labelled(self) -> bool:
        """True if the right result is known."""
        return self.right is not None

    @property
    def sequences(self) -> tuple[tuple[str, ...], ...]:
        """The texts of each sequence that may be cut; empty if windows show everything."""
        return ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The classes or tags; empty for a number, an answer or no label."""
        return ()

    @property
    def counted_as(self) -> tuple[str, ...]:
        """The names in a balance of labels."""
        return self.label_names


@dataclass(frozen=True, slots=True)
class TextExample(LabelledExample):
    """A text or a pair with its class, classes or number."""

    key: str
    """Id of the example in the file, or its index."""
    texts: str | tuple[str, str]
    label: Label | None
    """Label; None if the file does not have one, like the test sets of GLUE."""
    where: str
    """File and line."""
    pieces: tuple[NDArray[np.int32], ...] = field(default=(), compare=False)
    """Tokens of each text without special tokens, if already known."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The text, or both texts."""
        return (self.texts,) if isinstance(self.texts, str) else self.texts

    @property
    def strings(self) -> tuple[str, ...]:
        return self.parts

    @property
    def text_cells(self) -> dict[str, str]:
        return dict(zip(("text", "text2"), self.parts, strict=False))

    @property
    def summary(self) -> str:
        return " // ".join(self.parts)

    @property
    def sequences(self) -> tuple[tuple[str, ...], ...]:
        return (self.parts,)

    @property
    def label_names(self) -> tuple[str, ...]:
        if isinstance(self.label, tuple):
            return self.label
        return (self.label,) if isinstance(self.label, str) else ()

    @property
    def right(self) -> Label | None:
        return tuple(sorted(self.label)) if isinstance(self.label, tuple) else self.label


@dataclass(frozen=True, slots=True)
class TaggedExample(LabelledExample):
    """A sentence as words, each with its tag."""

    key: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: int
    """Number of the document; sentences of one document are context of each other."""
    where: str

    @property
    def strings(self) -> tuple[str, ...]:
        return (self.summary,)

    @property
    def text_cells(self) -> dict[str, str]:
        return {"text": self.summary}

    @property
    def summary(self) -> str:
        return " ".join(self.words)

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.tags or ()

    @property
    def right(self) -> Label | None:
        return self.tags


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of a passage."""

    text: str
    start: int
    """First code point in the passage."""


@dataclass(frozen=True, slots=True)
class QuestionTokens:
    """A question and its passage as tokens, without special tokens. Shape: X tokens of the passage."""

    question: NDArray[np.int32]
    passage_X: NDArray[np.int32]
    offsets_X2: NDArray[np.int64]
    """First and past-the-last code point of each token in the passage, as the library returns them."""


@dataclass(frozen=True, slots=True)
class Question(LabelledExample):
    """A question about a passage."""

    key: str
    question: str
    passage: str
    answers: tuple[Answer, ...]
    """All right answers; empty if there is none, or if they are unknown."""
    labelled: bool
    """True if empty `answers` mean that the passage has no answer (SQuAD 2.0)."""
    article: str
    where: str
    tokens: QuestionTokens | None = field(default=None, compare=False)
    """Tokens of the question and the passage, if already known."""

    @property
    def strings(self) -> tuple[str, ...]:
        return self.question, self.passage

    @property
    def text_cells(self) -> dict[str, str]:
        return {"question": self.question, "passage": self.passage}

    @property
    def summary(self) -> str:
        return self.question

    @property
    def right(self) -> Label | None:
        return tuple(sorted({answer.text for answer in self.answers})) if self.is_labelled else None

    @property
    def counted_as(self) -> tuple[str, ...]:
        return ("an answer" if self.answers else "no answer",) if self.is_labelled else ()

    @property
    def is_labelled(self) -> bool:
        return bool(self.answers) or self.labelled


@dataclass(frozen=True, slots=True)
class ChoiceExample(LabelledExample):
    """Several pairs of texts, with the index of the right one."""

    key: str
    options: tuple[tuple[str, str], ...]
    label: int | None
    where: str
    pieces: tuple[NDArray[np.int32], ...] = field(default=(), compare=False)
    """Tokens of both texts of each option without special tokens, if already known."""

    @property
    def strings(self) -> tuple[str, ...]:
        return tuple(text for option in self.options for text in option)

    @property
    def text_cells(self) -> dict[str, str]:
        """The common beginning of all options, and the rest of each option."""
        added = {f"option{index}": second for index, (_, second) in enumerate(self.options)}
        return {"text": self.options[0][0], **added}

    @property
    def summary(self) -> str:
        return " // ".join(second for _, second in self.options)

    @property
    def sequences(self) -> tuple[tuple[str, ...], ...]:
        return self.options

    @property
    def right(self) -> str | None:
        return None if self.label is None else f"option {self.label}"

    @property
    def counted_as(self) -> tuple[str, ...]:
        return () if self.right is None else (self.right,)


Example = TextExample | TaggedExample | Question | ChoiceExample


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that a reader cannot use, in place of an example."""

    what: str
    where: str
    remedy: str


@dataclass(frozen=True, slots=True)
class BadLabel(BadLine):
    """An example with an unusable label; it can still be predicted."""

    example: Example


@dataclass(frozen=True, slots=True)
class Undecided(BadLabel):
    """An example without a label because its annotators disagreed: always skipped, and counted."""


Reader = Callable[[Path], Iterator[Example | BadLine]]
"""Reads the examples of a file in order; a file that cannot be read at all is a UserError."""


def unreadable(example: Example) -> BadLine | None:
    """Return the fault of an example with a lone surrogate, which no tokenizer can read, or None."""
    for text in example.strings:
        if fault := lone_surrogate(text):
            return BadLine(fault, example.where, "replace the character by U+FFFD")
    return None
