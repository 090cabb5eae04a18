"""How many examples of a split are too long and were cut."""

from collections.abc import Sequence

import numpy as np

from bertsmith.examples.template import Templates, read_templates
from bertsmith.recipe.finetuning import TextSection
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.examples import ChoiceExample, Example, TextExample
from bertsmith.tasks.sequences import pieces_of
from bertsmith.text.tokenizer import Tokenizer

MOST_LOOKED_AT = 1000
"""So many of the examples that fill their sequence are looked at; the others are taken to be like them."""


def cut_share(
    examples: Sequence[Example], encoded: EncodedSet, tokenizer: Tokenizer, text: TextSection
) -> float:
    """The share of examples of which not everything is shown; where windows show all of them, 0."""
    if text.long_texts == "windows" or encoded.kind in ("tag", "span"):
        return 0.0
    full_N = np.diff(encoded.starts_N1) >= text.longest
    full = np.flatnonzero(np.logical_or.reduceat(full_N, encoded.items_M1[:-1]))
    looked_at = full[:: -(-len(full) // MOST_LOOKED_AT) or 1]
    if not len(looked_at):
        return 0.0
    templates = read_templates(tokenizer)
    cut = sum(_longest(examples[place], tokenizer, templates) > text.longest for place in looked_at)
    return cut / len(looked_at) * len(full) / len(examples)


def _longest(example: Example, tokenizer: Tokenizer, templates: Templates) -> int:
    """The tokens of the longest of an example's sequences, were it shown whole."""
    sequences = _sequences(example)
    count = len(sequences[0])
    template = templates.single if count == 1 else templates.pair
    pieces = pieces_of([text for texts in sequences for text in texts], tokenizer)
    return template.specials(count) + int(pieces.lengths_N.reshape(-1, count).sum(axis=1).max())


def _sequences(example: Example) -> Sequence[tuple[str, ...]]:
    if isinstance(example, ChoiceExample):
        return example.options
    assert isinstance(example, TextExample)
    return [(example.texts,) if isinstance(example.texts, str) else example.texts]
