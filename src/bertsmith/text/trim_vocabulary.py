"""Trim a vocabulary: remove pieces that a user's texts never need; these are split as before."""

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.text.tokenizer import Tokenizer

CHUNK = 1024
"""Number of texts to tokenize at once."""
MARKS = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's mark for a space."""
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""The pieces that spell characters outside the vocabulary, in models with byte fallback."""


@dataclass(frozen=True, slots=True)
class TrimmedVocabulary:
    """A smaller tokenizer, and the old ids of its pieces, in the order of the new ids."""

    tokenizer: Tokenizer
    kept: tuple[int, ...]


def seen_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[set[int]]:
    """Yield sets of the ids that occur in texts, each for CHUNK texts."""
    pending = iter(texts)
    while chunk := list(islice(pending, CHUNK)):
        yield {number for encoded in tokenizer.encode_many(chunk) for number in encoded.ids}


def trimmed_vocabulary(tokenizer: Tokenizer, seen: Collection[int]) -> TrimmedVocabulary:
    """Keep these ids, special and added tokens, and the pieces that spell new words; drop the rest.

    Texts with all ids in `seen` are split as before, because their pieces are all kept: WordPiece takes the
    longest piece, BPE makes the same merges, and Unigram finds the same most likely split.
    """
    pipeline = json.loads(tokenizer.spec.pipeline)
    numbers = _numbers(pipeline["model"], where=tokenizer.spec.where)
    added = {token["content"]: int(token["id"]) for token in pipeline["added_tokens"]}
    pieces = {number: piece for piece, number in numbers.items()}
    kept = {pieces[number] for number in seen if number in pieces}
    kept |= added.keys() & numbers.keys()
    if pipeline["model"]["type"] == "BPE":
        kept |= _parts_of(kept, pipeline["model"])
    if unknown := _unknown(pipeline["model"]):
        kept.add(unknown)
    kept |= _spelled_with(kept, numbers, pipeline["model"])
    old = sorted({numbers[piece] for piece in kept} | set(added.values()))
    new = {number: index for index, number in enumerate(old)}
    _renumber(pipeline, kept, new)
    spec = tokenizer.spec
    smaller = Tokenizer(type(spec)(json.dumps(pipeline), spec.settings, spec.where))
    return TrimmedVocabulary(smaller, tuple(old))


def _numbers(model: dict[str, Any], *, where: str) -> dict[str, int]:
    """Return the id of each piece."""
    if model["type"] == "Unigram":
        return {piece: number for number, (piece, _) in enumerate(model["vocab"])}
    if model["type"] not in ("WordPiece", "BPE"):
        what = f"a {model['type']} vocabulary cannot be trimmed"
        raise UserError(what, where=where, remedy="use a WordPiece, BPE or Unigram vocabulary")
    return dict(model["vocab"])


def _unknown(model: dict[str, Any]) -> str:
    if model["type"] == "Unigram":
        return "" if model.get("unk_id") is None else str(model["vocab"][model["unk_id"]][0])
    return str(model.get("unk_token") or "")


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the merges as pairs; older files write both parts in one word."""
    return [tuple(each.split(" ", 1) if isinstance(each, str) else each) for each in model["merges"]]


def _merged(pair: tuple[str, str], model: dict[str, Any]) -> str:
    return pair[0] + pair[1].removeprefix(model.get("continuing_subword_prefix") or "")


def _parts_of(kept: Collection[str], model: dict[str, Any]) -> set[str]:
    """Return every piece on the way to these pieces, by all merges that lead to them."""
    ways: dict[str, list[tuple[str, str]]] = {}
    for pair in _merges(model):
        ways.setdefault(_merged(pair, model), []).append(pair)
    found, pending = set(kept), list(kept)
    while pending:
        for pair in ways.get(pending.pop(), ()):
            pending += [part for part in pair if part not in found]
            found.update(pair)
    return found


def _spelled_with(kept: Collection[str], numbers: Collection[str], model: dict[str, Any]) -> set[str]:
    """Return single-character pieces (in use or ASCII) and byte pieces, so that new words are not unknown."""
    prefix = model.get("continuing_subword_prefix") or ""
    bare = {piece: piece.removeprefix(prefix).lstrip(MARKS) for piece in numbers}
    known = {character for piece in kept for character in bare[piece]}
    # Byte-level BPE writes every text with 256 characters and needs all of them.
    single = {piece for piece, text in bare.items() if len(text) <= 1}
    in_bytes = BYTES.intersection(numbers if model.get("byte_fallback") else ())
    if model["type"] == "BPE":
        return single | in_bytes
    used = {piece for piece in single if not bare[piece] or bare[piece] in known or bare[piece].isascii()}
    return used | in_bytes


def _renumber(pipeline: dict[str, Any], kept: set[str], new: dict[int, int]) -> None:
    """Reduce the pipeline to the kept pieces, and replace all ids by the new ones."""
    model = pipeline["model"]
    if model["type"] == "Unigram":
        unknown = model.get("unk_id")
        model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in new]
        model["unk_id"] = None if unknown is None else new[unknown]
    else:
        model["vocab"] = {piece: new[number] for piece, number in model["vocab"].items() if piece in kept}
    if model["type"] == "BPE":
        pairs = [pair for pair in _merges(model) if {*pair, _merged(pair, model)} <= kept]
        model["merges"] = [list(pair) for pair in pairs]
    for token in pipeline["added_tokens"]:
        token["id"] = new[token["id"]]
    _renumber_template(pipeline.get("post_processor"), new)


def _renumber_template(processor: dict[str, Any] | None, new: dict[int, int]) -> None:
    """Replace the ids of special tokens in a template."""
    if processor is None:
        return
    for part in processor.get("processors", ()):
        _renumber_template(part, new)
    for name in ("sep", "cls"):  # in BERT's and RoBERTa's own processors: the token and its id
        if isinstance(processor.get(name), list):
            processor[name][1] = new[processor[name][1]]
    if isinstance(processor.get("special_tokens"), dict):
        for token in processor["special_tokens"].values():
            token["ids"] = [new[number] for number in token["ids"]]
