"""The words of a text, cut where its tokenizer cuts, with their places in the text."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bertsmith.tasks.passages import read_passages
from bertsmith.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Word:
    """A word as it is written, and its code points in the text."""

    text: str
    start: int
    end: int


def words_of_texts(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[Word]]:
    """The words of each text; what the tokenizer drops (white space, control characters) is in none."""
    passages = read_passages(texts, tokenizer)  # knows each piece's characters, dropped accents included
    encodings = tokenizer.closed.encode_batch(list(texts), add_special_tokens=False)
    found = []
    for text, encoding, which in zip(texts, encodings, passages.which_Q.tolist(), strict=True):
        first, count = int(passages.starts_D[which]), int(passages.lengths_D[which])
        offsets = passages.offsets_X2[first : first + count].tolist()
        spans = _spans(text, zip(encoding.word_ids, offsets, strict=True))
        found.append([Word(text[start:end], start, end) for start, end in spans])
    return found


def joined_words(words: Sequence[str]) -> list[Word]:
    """The places of words that are written with single spaces between them."""
    placed, start = [], 0
    for word in words:
        placed.append(Word(word, start, start + len(word)))
        start += len(word) + 1
    return placed


def _spans(text: str, pieces: Iterable[tuple[int | None, list[int]]]) -> list[list[int]]:
    spans: list[list[int]] = []
    last: int | None = None
    for word, (start, end) in pieces:
        if start == end:  # a piece of white space
            continue
        if spans and (word == last or not _is_border(text, spans[-1][1], start)):
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
        last = word
    return spans


def _is_border(text: str, end: int, start: int) -> bool:
    """Whether a word may end and another start here: RoBERTa's rule would cut around every accent."""
    if start != end:
        return start > end  # one character that became several words belongs to the first
    return not (_is_mark(text[start]) or (_is_mark(text[end - 1]) and text[start].isalnum()))


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")
