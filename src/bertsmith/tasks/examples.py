"""What the files of tasks hold, one class for each kind; labels are still the words of the file."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["classify", "multilabel", "regress", "tag", "span", "choice"]
"""One of several classes; any number of classes; a number; a tag for each word; a span of the passage; one of
several texts."""
TEXT_KINDS: tuple[Kind, ...] = ("classify", "multilabel", "regress")
"""Those whose examples are texts or pairs with a label or a number."""


@dataclass(frozen=True, slots=True)
class TextExample:
    """A text or a pair with its class, classes or number."""

    key: str
    """The example's id in the file, or its place."""
    texts: str | tuple[str, str]
    label: str | float | tuple[str, ...] | None
    """None where the file has none, as in the test sets of GLUE."""
    where: str
    """File and line."""


@dataclass(frozen=True, slots=True)
class TaggedExample:
    """A sentence in words, each with its tag."""

    key: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: int
    """Sentences with the same number are context of each other."""
    where: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of a passage."""

    text: str
    start: int
    """First code point in the passage."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a passage."""

    key: str
    question: str
    passage: str
    answers: tuple[Answer, ...]
    """All golds; empty where the question has none, or none is known."""
    labelled: bool
    """Whether an empty `answers` says that the passage holds no answer (SQuAD 2.0)."""
    article: str
    where: str


@dataclass(frozen=True, slots=True)
class ChoiceExample:
    """Several pairs of texts, one of which is right."""

    key: str
    options: tuple[tuple[str, str], ...]
    label: int | None
    where: str


Example = TextExample | TaggedExample | Question | ChoiceExample


@dataclass(frozen=True, slots=True)
class BadLine:
    """What a reader gives in place of an example that it cannot take."""

    what: str
    where: str
    remedy: str


@dataclass(frozen=True, slots=True)
class BadLabel(BadLine):
    """An example that cannot be taken for its label alone: it can be predicted all the same."""

    example: Example
