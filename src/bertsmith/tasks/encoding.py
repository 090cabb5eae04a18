"""From the examples of a split to tokens, for every kind of task."""

from collections.abc import Iterator, Sequence
from typing import cast

from bertsmith.ground.errors import UserError
from bertsmith.recipe.finetuning import TextSection
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.examples import ChoiceExample, Example, Kind, Question, TaggedExample, TextExample
from bertsmith.tasks.question_windows import encode_questions
from bertsmith.tasks.tag_encoding import encode_tags
from bertsmith.tasks.text_encoding import encode_choices, encode_texts
from bertsmith.text.tokenizer import Tokenizer


def encode_split(
    kind: Kind,
    examples: Sequence[Example],
    labels: tuple[str, ...],
    tokenizer: Tokenizer,
    text: TextSection,
) -> EncodedSet:
    """The examples as tokens; the labels are the classes or tags in their order."""
    _refuse_half_characters(examples)
    if kind == "tag":
        return encode_tags(cast(Sequence[TaggedExample], examples), labels, tokenizer, text)
    if kind == "span":
        return encode_questions(cast(Sequence[Question], examples), tokenizer, text)
    if kind == "choice":
        return encode_choices(cast(Sequence[ChoiceExample], examples), tokenizer, text)
    return encode_texts(kind, cast(Sequence[TextExample], examples), labels, tokenizer, text)


def _refuse_half_characters(examples: Sequence[Example]) -> None:
    """Stop at half a surrogate pair, which JSON can spell and no tokenizer can read."""
    for example in examples:
        for text in _texts(example):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                what = f"character {error.start} is half a surrogate pair ({text[error.start]!a})"
                remedy = "replace the character by U+FFFD"
                raise UserError(what, where=example.where, remedy=remedy) from error


def _texts(example: Example) -> Iterator[str]:
    match example:
        case TextExample(texts=str(text)):
            yield text
        case TextExample(texts=texts):
            yield from texts
        case TaggedExample(words=words):
            yield " ".join(words)
        case Question(question=question, passage=passage):
            yield from (question, passage)
        case ChoiceExample(options=options):
            for option in options:
                yield from option
