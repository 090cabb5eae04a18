"""Halves of surrogate pairs, which JSON can spell and no tokenizer can read."""

from collections.abc import Iterator

from bertsmith.tasks.examples import BadLine, ChoiceExample, Example, Question, TaggedExample, TextExample


def half_character(example: Example) -> BadLine | None:
    """What is wrong with an example that holds half a character; nothing where all are whole."""
    for text in _texts(example):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"character {error.start} is half a surrogate pair ({text[error.start]!a})"
            return BadLine(what, example.where, "replace the character by U+FFFD")
    return None


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
