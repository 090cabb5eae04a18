"""Introspection: the tokens that a model reads, the attention of its heads, the vectors of a word's senses.

Shapes: N tokens, L layers, H heads, M occurrences of a word, D width.
"""

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.seeds import key_of
from bertsmith.data.masking import Masker, Text, read_vocabulary
from bertsmith.inference.head_introspection import check_heads_are_whole
from bertsmith.inference.layer_introspection import Cosines, layer_cosines
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import TextInput, TokenizedText, as_list
from bertsmith.model.encoder_config import need
from bertsmith.packed import pack
from bertsmith.recipe.data_sections import MaskingSection
from bertsmith.text.tokenizer import Encoded

NOWHERE = -1
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")
"""Prefixes of Unicode names of letters in scripts without spaces between words."""

MaskedAs = Literal["", "mask", "random", "kept"]


@dataclass(frozen=True, slots=True)
class InspectedToken:
    """A token, the indices of its three embeddings, and the effect of masking on it."""

    text: str
    id: int
    segment: int
    position: int
    start: int
    """First code point in its own text; -1, like `end`, for a token that the template added."""
    end: int
    masking: MaskedAs
    """Kind of the shown token: a mask, a random token or the token itself; "" if it is not predicted."""
    shown: str
    """Token that the model sees in its place."""


@dataclass(frozen=True, slots=True)
class InspectedTokens:
    """The tokens of a text or a pair, in order."""

    tokens: tuple[InspectedToken, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of every token, in every head of every layer."""

    tokens: tuple[str, ...]
    weights: Tensor
    """[L, H, N, N]: from the token of the row to the token of the column; rows sum to 1."""


@dataclass(frozen=True, slots=True)
class SensePoint:
    """An occurrence of a word, and its point on the map."""

    sentence: int
    start: int
    end: int
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class SenseLayer:
    """A word's vectors after one layer: on a plane, in units of their mean length, and their cosines."""

    plane: Tensor
    """[M, 2], rotated so that it is nearest to the plane of the next layer."""
    similarity: Cosines


@dataclass(frozen=True, slots=True)
class Senses:
    """A word in several sentences: its contextual vectors on a plane, and their cosines."""

    points: tuple[SensePoint, ...]
    similarity: Tensor
    """[M, M]"""
    layers: tuple[SenseLayer, ...]
    """Layers from the word's own vector, which is the same in every sentence, to the last one."""


def inspect_tokens(bert: Bert, text: TextInput, seed: int) -> InspectedTokens:
    """Return the tokens of a text or pair, with a fresh masking as published: 15 %, 80-10-10 of them.

    A model without a mask token masks nothing.
    """
    (encoded,) = bert.reader.encode([text], truncate=False)
    masked = masked_tokens(token_masker(bert), encoded, seed) if bert.tokenizer.has_mask else {}
    token = bert.tokenizer.token
    seen = []
    for index, number in enumerate(encoded.ids):
        start, end = encoded.offsets[index] if encoded.sequence[index] >= 0 else (NOWHERE, NOWHERE)
        shown = masked.get(index, number)
        masking: MaskedAs = "kept" if shown == number else "random"
        if index not in masked:
            masking = ""
        elif shown == bert.tokenizer.mask_id:
            masking = "mask"
        seen.append(
            InspectedToken(
                token(number), number, encoded.segments[index], index, start, end, masking, token(shown)
            )
        )
    return InspectedTokens(tuple(seen))


def inspect_attention(bert: Bert, text: TextInput) -> Attention:
    """Return the attention of every token of a text or pair."""
    check_heads_are_whole(bert)
    (encoded,) = bert.reader.encode([text], truncate=False)
    batch = pack([encoded.ids], [encoded.segments]).to(bert.engine.device)
    with torch.no_grad():
        maps = need(bert.engine.network.encoder.heads, "attention heads").maps(batch)
    weights_LHNN = torch.stack([layer[0] for layer in maps]).float().cpu()
    return Attention(tuple(bert.tokenizer.token(number) for number in encoded.ids), weights_LHNN)


def inspect_senses(
    bert: Bert, word: str, sentences: Iterable[str | TokenizedText], *, max_occurrences: int | None = None
) -> Senses:
    """Return the occurrences of a word in sentences, and the cosines of its contextual vectors."""
    several = bert.reader.tokenize(as_list(sentences))
    encoded = bert.reader.encode(several, truncate=False)
    occurrences = [
        (number, *span) for number, each in enumerate(several) for span in _found(word, str(each.text))
    ]
    if not occurrences:
        remedy = f"write sentences with {word!r} as a separate word"
        raise UserError(f"none of the sentences contains {word!r}", remedy=remedy)
    if max_occurrences is not None and len(occurrences) > max_occurrences:
        what = (
            f"the word occurs {len(occurrences)} times in the sentences; at most {max_occurrences} are shown"
        )
        raise UserError(what)

    groups = [
        [_rows(each, span) for at, *span in occurrences if at == number]
        for number, each in enumerate(encoded)
    ]
    vectors, cosines = layer_cosines(bert, encoded, groups)
    plane = _plane(vectors[-1]).tolist()
    points = [SensePoint(*each, x, y) for each, (x, y) in zip(occurrences, plane, strict=True)]
    planes = _turned([_plane(some_MD) / some_MD.norm(dim=-1).mean() for some_MD in vectors])
    return Senses(tuple(points), cosines[-1].plain, tuple(map(SenseLayer, planes, cosines)))


# ---- masking


def token_masker(bert: Bert) -> Masker:
    """Return a masker as published for a model; reuse it, as it reads the whole vocabulary."""
    masking = MaskingSection()  # its defaults are the published numbers
    vocabulary = read_vocabulary(bert.tokenizer, masking)
    return Masker(masking, vocabulary, max_predictions=bert.reader.longest)


def masked_tokens(masker: Masker, encoded: Encoded, seed: int) -> dict[int, int]:
    """Return the indices of the tokens to predict, and the tokens that are shown there."""
    rows = [row for row, sequence in enumerate(encoded.sequence) if sequence >= 0]
    spans = [encoded.sequence.count(number) for number in sorted({0, *encoded.sequence} - {NOWHERE})]
    text = Text(
        tokens_X=np.array([encoded.ids[row] for row in rows]),
        span_lengths_N=np.array(spans),
        lengths_S=np.array([len(rows)]),
        whole_lengths_S=np.array([len(encoded)]),
        keys_S=np.array([key_of(seed, "look")], np.uint64),
    )
    masks = masker.masks(text, progress=0.0)
    return {
        rows[index]: shown
        for index, shown in zip(masks.indices_P.tolist(), masks.shown_P.tolist(), strict=True)
    }


# ---- senses


def _found(word: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield the offsets at which a word occurs by itself in a text, in upper or lower case."""
    # Not with a regular expression: ignoring case, re takes as many steps as word times text.
    wanted = word.strip().casefold() if isinstance(word, str) else ""
    if not wanted:
        raise UserError("the word is missing", remedy="give the word to compare")
    folded = text.casefold()
    # Some letters fold to several, as \u00df does; if none does, offsets do not change.
    same = len(folded) == len(text)
    letters = range(len(text)) if same else [at for at, letter in enumerate(text) for _ in letter.casefold()]
    begin = folded.find(wanted)
    while begin >= 0:
        end = begin + len(wanted)
        start, stop = letters[begin], letters[end - 1] + 1
        is_half = begin > 0 and letters[begin - 1] == start
        is_half |= end < len(letters) and letters[end] == stop - 1
        inside = _is_spaced(wanted[0]) and _is_word_letter(text[start - 1 : start])
        inside |= _is_spaced(wanted[-1]) and _is_word_letter(text[stop : stop + 1])
        if is_half or inside:
            begin = folded.find(wanted, begin + 1)
        else:
            yield start, stop
            begin = folded.find(wanted, end)


def _is_word_letter(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


def _is_spaced(letter: str) -> bool:
    return not unicodedata.name(letter, "").startswith(UNSPACED)


def _rows(encoded: Encoded, span: list[int]) -> list[int]:
    """Return the indices of the tokens that are pieces of a word."""
    first, last = span
    rows = [
        row
        for row, (start, end) in enumerate(encoded.offsets)
        if encoded.sequence[row] >= 0 and start < last and end > first
    ]
    if not rows:
        raise UserError("the model cannot read any token of the word", remedy="use another word")
    return rows


def _plane(vectors_MD: Tensor) -> Tensor:
    """Return the vectors on their two principal axes [M, 2]; each axis points to its farthest vector."""
    centred_MD = vectors_MD - vectors_MD.mean(0)
    axes_UM, sizes_M, _ = torch.linalg.svd(centred_MD, full_matrices=False)
    points = torch.zeros(len(vectors_MD), 2, dtype=vectors_MD.dtype)
    kept = min(2, len(sizes_M))
    points[:, :kept] = (axes_UM * sizes_M)[:, :kept]
    farthest = points.gather(0, points.abs().argmax(0, keepdim=True))
    return points * torch.where(farthest < 0, -1.0, 1.0)


def _turned(planes: list[Tensor]) -> list[Tensor]:
    """Return the planes of all layers, each rotated or mirrored to be nearest to the next one."""
    turned = planes[-1:]
    for plane_M2 in reversed(planes[:-1]):
        left_22, _, right_22 = torch.linalg.svd(plane_M2.T @ turned[0])
        turned.insert(0, plane_M2 @ (left_22 @ right_22))
    return turned
