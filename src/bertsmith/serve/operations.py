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


@dataclass(frozen=True, slots=True)
class Operation:
    """A computation that a model does for several requests at once."""

    name: str
    ability: str
    """The ability that a model needs."""
    predict: Callable[[Bert, Sequence[Any], Options], Sequence[Any]]
    """Function that returns a result for each input."""
    windowed: bool = False
    """True if long texts are read in windows."""
    obeys_folder: bool = False
    """True if the folder of a fine-tuned model decides what happens to long texts."""
    reads_masks: bool = False
    """True if a mask token in a text is a mask, not plain text."""
    joint: bool = False
    """True if all texts of a request are one input, with one result."""
    predict_in_steps: Callable[[Bert, Sequence[Any], Options], Steps[Sequence[Any]]] | None = None
    """Like `predict`, in steps: other requests get a turn between two batches of a long text."""

    def takes_long_texts(self, *, is_finetuned: bool) -> bool:
        """Return True if a text may be longer than what the model reads at once."""
        return self.windowed or (self.obeys_folder and is_finetuned)


def _fill(bert: Bert, texts: Inputs, options: Options) -> list[list[Json]]:
    (top,) = options
    found = zip(texts, bert.fill_each(texts, top=top), strict=True)
    return [
        masks_to_json(mask_offsets_in(str(each.text), each.encoded, bert.tokenizer), guesses)
        for each, guesses in found
    ]


def _next(bert: Bert, pairs: Inputs, _: Options) -> list[Any]:
    return bert.next_sentences(pairs)


def _classify(bert: Bert, texts: Inputs, _: Options) -> Steps[list[Any]]:
    return bert.classify_in_steps(texts)


def _score(bert: Bert, texts: Inputs, _: Options) -> Steps[list[float]]:
    return bert.score_in_steps(texts)


def _tag(bert: Bert, texts: Inputs, _: Options) -> Steps[list[Json]]:
    found = zip(texts, (yield from bert.tag_in_steps(texts)), strict=True)
    return [tags_to_json(words, bert.entities_of(str(each.text), words)) for each, words in found]


def _answer(bert: Bert, pairs: Inputs, options: Options) -> Steps[list[Json]]:
    (best,) = options
    found = yield from bert.answers_in_steps(pairs, best=best)
    return [answers_to_json(each) for each in found]


def _in_steps(
    name: str, in_steps: Callable[[Bert, Inputs, Options], Steps[list[Any]]], **long_texts: bool
) -> Operation:
    """Return an operation that can be computed a batch at a time."""
    return Operation(
        name,
        name,
        lambda bert, inputs, options: finished(in_steps(bert, inputs, options)),
        predict_in_steps=in_steps,
        **long_texts,
    )


def _choose(bert: Bert, requests: Sequence[Inputs], _: Options) -> list[Any]:
    return bert.choose_each(requests)


def _embed(bert: Bert, texts: Inputs, _: Options) -> list[Any]:
    # The routes cut and normalise vectors; return a row for each, not a list of numbers.
    return list(bert.embed(texts, normalize=False).numpy())


def _show_tokens(bert: Bert, texts: Inputs, options: Options) -> list[Any]:
    (seed,) = options
    return [inspect_tokens(bert, each, seed=seed) for each in texts]


def _show_attention(bert: Bert, texts: Inputs, _: Options) -> list[Any]:
    return [inspect_attention(bert, each) for each in texts]


def _show_senses(bert: Bert, requests: Sequence[Inputs], options: Options) -> list[Any]:
    word, most = options
    return [inspect_senses(bert, word, sentences, max_occurrences=most) for sentences in requests]


def _show_embedding(bert: Bert, texts: Inputs, options: Options) -> list[Any]:
    (token,) = options
    return [inspect_embedding(bert, each, token) for each in texts]


def _show_heads(bert: Bert, texts: Inputs, _: Options) -> list[Any]:
    return [inspect_heads(bert, each) for each in texts]


def _show_head(bert: Bert, texts: Inputs, options: Options) -> list[Any]:
    layer, head = options
    return [inspect_head(bert, each, layer, head) for each in texts]


def _show_head_steps(bert: Bert, texts: Inputs, options: Options) -> list[Any]:
    layer, head, token = options
    return [inspect_head_steps(bert, each, layer, head, token) for each in texts]


def _show_similarity(bert: Bert, requests: Sequence[Inputs], _: Options) -> list[Any]:
    return [inspect_similarity(bert, texts) for texts in requests]


def _show_guesses(bert: Bert, texts: Inputs, options: Options) -> list[Any]:
    (top,) = options
    return [inspect_guesses(bert, each, top=top) for each in texts]


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("fill", "fill", _fill, reads_masks=True),
        Operation("next", "next", _next),
        _in_steps("classify", _classify, obeys_folder=True),
        _in_steps("score", _score, obeys_folder=True),
        _in_steps("tag", _tag, windowed=True),
        _in_steps("answer", _answer, windowed=True),
        Operation("choose", "choose", _choose, obeys_folder=True, joint=True),
        Operation("embed", "embed", _embed),
        Operation("look/tokens", "look", _show_tokens),
        Operation("look/attention", "look", _show_attention),
        Operation("look/senses", "look", _show_senses, joint=True),
        Operation("look/embedding", "look", _show_embedding),
        Operation("look/heads", "look", _show_heads),
        Operation("look/head", "look", _show_head),
        Operation("look/head-steps", "look", _show_head_steps),
        Operation("look/similarity", "look", _show_similarity, joint=True),
        Operation("look/guesses", "fill", _show_guesses, reads_masks=True),
    )
}
