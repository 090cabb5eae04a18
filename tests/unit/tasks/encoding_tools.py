"""Tokenizers of every kind, texts that are hard on offsets, and examples made from them."""

from pathlib import Path

from hypothesis import strategies as st

from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import Answer, Question, TaggedExample, TextExample
from bertsmith.tasks.kinds.registry import kind_named
from bertsmith.tasks.predictions import PredictedSplit, Predictions
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.text.tokenizer import Tokenizer
from tests.tokenizer_makers import MAKERS, PARAGRAPH

KINDS = [maker.__name__ for maker in MAKERS]
HARD_WORDS = [
    *("cafe\u0301", "x\u0301\u0302", "İstanbul", "Straße", "ΐ", "ﬁrm", "㎏", "½", "𝐂𝐋𝐒", "E\u0301A"),
    *(
        "👩🏽\u200d🏭",
        "👨\u200d👩\u200d👧\u200d👦",
        "🇪🇺",
        "❤️",
        "नमस्ते",
        "铁匠",
        "대장장이",
        "[SEP]",
        "</s>",
        "a.b",
    ),
]
WORDS = [*PARAGRAPH.split(), *HARD_WORDS]
DROPPED = ["\x00", "\u200b", "\u00ad", "\ufffd", "\x07"]
"""Characters that some tokenizers pass over."""

kinds = st.sampled_from(KINDS)
words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=30)
spaces = st.sampled_from([" ", "  ", "\n", "\u00a0", " \t "])


def load_every(folder: Path) -> dict[str, Tokenizer]:
    """A small tokenizer of every kind, by the name of its kind."""
    return {maker.__name__: Tokenizer.load(maker(folder / maker.__name__)) for maker in MAKERS}


def encode_split(kind, examples, labels, tokenizer, text) -> EncodedSet:
    """The examples as the kind of this name encodes them."""
    return kind_named(kind).encode(examples, labels, tokenizer, text)


def evaluated(config: TaskConfig, examples, encoded, predictions: Predictions) -> dict[str, float]:
    """The task's metrics of these predictions."""
    return config.kind.evaluate(config.metrics, config.labels, PredictedSplit(examples, encoded, predictions))


def text_example(texts: str | tuple[str, str], label: object = None, where: str = "here:1") -> TextExample:
    return TextExample("1", texts, label, where)  # type: ignore[arg-type]


def sentence(words: list[str], tags: list[str] | None = None, document: int = 0) -> TaggedExample:
    return TaggedExample("1", tuple(words), None if tags is None else tuple(tags), document, "here:1")


def question(passage: str, answers: list[tuple[str, int]], asked: str = "is it hot", **changes) -> Question:
    settings = {"key": "q", "labelled": True, "article": "", "where": "here:1"} | changes
    return Question(
        question=asked, passage=passage, answers=tuple(Answer(*answer) for answer in answers), **settings
    )


def rows_of(encoded: EncodedSet) -> list[list[int]]:
    """The tokens of each sequence."""
    starts = encoded.starts_N1.tolist()
    return [encoded.tokens_T[start:end].tolist() for start, end in zip(starts, starts[1:], strict=False)]
