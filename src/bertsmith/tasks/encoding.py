"""From the examples of a split to tokens, for every kind of task."""

from collections.abc import Sequence
from typing import cast

from bertsmith.ground.errors import UserError
from bertsmith.recipe.finetuning import TextSection
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.examples import ChoiceExample, Example, Kind, Question, TaggedExample, TextExample
from bertsmith.tasks.half_characters import half_character
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
    """Stop at half a character: files are searched for them, but examples come from Python, too."""
    for example in examples:
        if fault := half_character(example):
            raise UserError(fault.what, where=fault.where, remedy=fault.remedy)
