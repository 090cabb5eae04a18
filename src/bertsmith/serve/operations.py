"""Operations that a request can ask of a model: many texts in, one result per text out.

A new route of the API is a function in `routes`, its JSON in `schemas`, and an operation here, found by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bertsmith.core.steps import Steps, finished
from bertsmith.inference.fill_mask import mask_offsets_in
from bertsmith.inference.head_introspection import inspect_head, inspect_head_steps, inspect_heads
from bertsmith.inference.introspection import inspect_attention, inspect_senses, inspect_tokens
from bertsmith.inference.layer_introspection import inspect_embedding, inspect_guesses, inspect_similarity
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.outputs import Json, answers_to_json, masks_to_json, tags_to_json
from bertsmith.inference.text_reader import TokenizedText

Inputs = Sequence[TokenizedText]
"""Texts or pairs with their tokens."""
Options = tuple[Any, ...]
"""The options of a batch key."""
Compute = Callable[[Bert, Sequence[Any], Options], Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """A computation that a model does for several requests at once."""

    name: str
    ability: str
    """The ability that a model needs."""
    compute: Compute
    """Function that returns a result for each input."""
    in_steps: bool = False
    """True if it returns `Steps`: other requests get a turn between two batches of a long text."""
    windowed: bool = False
    """True if long texts are read in windows."""
    obeys_folder: bool = False
    """True if the folder of a fine-tuned model decides what happens to long texts."""
    reads_masks: bool = False
    """True if a mask token in a text is a mask, not plain text."""
    joint: bool = False
    """True if all texts of a request are one input, with one result."""

    def predict(self, bert: Bert, inputs: Sequence[Any], options: Options) -> Sequence[Any]:
        """Return a result for each input."""
        found: Any = self.compute(bert, inputs, options)
        return finished(found) if self.in_steps else found

    def takes_long_texts(self, *, is_finetuned: bool) -> bool:
        """True if a text may be longer than the model's limit."""
        return self.windowed or (self.obeys_folder and is_finetuned)


def _fill(bert: Bert, texts: Inputs, options: Options) -> list[list[Json]]:
    (top,) = options
    found = zip(texts, bert.fill_each(texts, top=top), strict=True)
    return [
        masks_to_json(mask_offsets_in(str(each.text), each.encoded, bert.tokenizer), guesses)
        for each, guesses in found
    ]


def _tag(bert: Bert, texts: Inputs, _: Options) -> Steps[list[Json]]:
    tagger = bert.predictor("tag")
    found = zip(texts, (yield from tagger.tag_in_steps(texts)), strict=True)
    return [tags_to_json(words, tagger.entities_of(str(each.text), words)) for each, words in found]


def _answer(bert: Bert, pairs: Inputs, options: Options) -> Steps[list[Json]]:
    (best,) = options
    found = yield from bert.predictor("answer").answers_in_steps(pairs, best=best)
    return [answers_to_json(each) for each in found]


def _choose(bert: Bert, requests: Sequence[Inputs], _: Options) -> list[Any]:
    return bert.choose_each(requests)


def _show_senses(bert: Bert, requests: Sequence[Inputs], options: Options) -> list[Any]:
    word, most = options
    return [inspect_senses(bert, word, sentences, max_occurrences=most) for sentences in requests]


def _for_each(inspect: Callable[..., Any]) -> Compute:
    """Return a function that inspects each input by itself; the options are further arguments."""
    return lambda bert, inputs, options: [inspect(bert, each, *options) for each in inputs]


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("fill", "fill", _fill, reads_masks=True),
        Operation("next", "next", lambda bert, pairs, _: bert.next_sentences(pairs)),
        Operation(
            "classify",
            "classify",
            lambda bert, texts, _: bert.predictor("classify").classify_in_steps(texts),
            in_steps=True,
            obeys_folder=True,
        ),
        Operation(
            "score",
            "score",
            lambda bert, texts, _: bert.predictor("score").score_in_steps(texts),
            in_steps=True,
            obeys_folder=True,
        ),
        Operation("tag", "tag", _tag, in_steps=True, windowed=True),
        Operation("answer", "answer", _answer, in_steps=True, windowed=True),
        Operation("choose", "choose", _choose, obeys_folder=True, joint=True),
        # The routes cut and normalise vectors; return a row for each, not a list of numbers.
        Operation("embed", "embed", lambda bert, texts, _: list(bert.embed(texts, normalize=False).numpy())),
        Operation("look/tokens", "look", _for_each(inspect_tokens)),
        Operation("look/attention", "look", _for_each(inspect_attention)),
        Operation("look/senses", "look", _show_senses, joint=True),
        Operation("look/embedding", "look", _for_each(inspect_embedding)),
        Operation("look/heads", "look", _for_each(inspect_heads)),
        Operation("look/head", "look", _for_each(inspect_head)),
        Operation("look/head-steps", "look", _for_each(inspect_head_steps)),
        Operation("look/similarity", "look", _for_each(inspect_similarity), joint=True),
        Operation("look/guesses", "fill", _for_each(inspect_guesses), reads_masks=True),
    )
}
