"""What a task model says of texts, as people read it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Classification:
    """The class of a text, or its classes where it may have any number of them."""

    label: str
    """The most probable one."""
    probability: float
    """Of that label."""
    probabilities: dict[str, float]
    """Of every label; they add up to 1 unless a text may have several labels."""
    labels: tuple[str, ...]
    """The one label; where a text may have several, all with a probability of at least 0.5."""
    is_several: bool = False
    """Whether a text may have any number of them."""


@dataclass(frozen=True, slots=True)
class TaggedWord:
    """A word of a sentence and its tag."""

    word: str
    tag: str
    start: int
    """First code point in the sentence; a sentence given in words counts as joined by single spaces."""
    end: int
    """Past the last code point."""
    probability: float


@dataclass(frozen=True, slots=True)
class Entity:
    """A stretch of a text, and what it is."""

    type: str
    text: str
    """text[start:end], to the letter."""
    start: int
    end: int
    probability: float
    """The mean of its words' probabilities."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of several pairs is right."""

    index: int
    """Counted from 0."""
    probabilities: tuple[float, ...]
    """Of each pair; they add up to 1."""
