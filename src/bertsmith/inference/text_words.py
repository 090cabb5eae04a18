"""The words of a text as its tokenizer cuts them, and texts without some of them."""

import unicodedata
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bertsmith.inference.text_reader import TokenizedText
from bertsmith.tasks.question_windows import tokenized_passages
from bertsmith.text.tokenizer import Encoded

NO_WORD = -1


@dataclass(frozen=True, slots=True)
class Word:
    """A word as written, and its code points in the text."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TextWords:
    """A text or pair, its words, and the word of each token."""

    tokenized: TokenizedText
    words: tuple[tuple[int, Word], ...]
    """Words with the number of their text, 0 or 1 in a pair; punctuation marks are words, too."""
    word_of_token: tuple[int, ...]
    """Word of each token; -1 for special tokens and for white space."""

    @classmethod
    def of(cls, tokenized: TokenizedText) -> "TextWords":
        """Return the words of a text as its tokenizer cuts them, without words that lack a token."""
        encoded, text = tokenized.encoded, tokenized.text
        parts = (text,) if isinstance(text, str) else text
        alone = [TokenizedText(part, _of_part(encoded, number)) for number, part in enumerate(parts)]
        cut = words_of_texts(alone)
        words = [(part, word) for part, of_part in enumerate(cut) for word in of_part]
        ends = [[word.end for word in of_part] for of_part in cut]

        def number_of(part: int, start: int, end: int) -> int:
            """Return the first word that shares a character with a token; words are in order."""
            at = bisect_right(ends[part], start) if part >= 0 else 0
            if part < 0 or at == len(cut[part]) or end <= cut[part][at].start:
                return NO_WORD
            return at + (len(cut[0]) if part else 0)

        spans = zip(encoded.sequence, encoded.offsets, strict=True)
        numbers = [number_of(part, *span) for part, span in spans]
        # If a character became several words, only the first has a token.
        known = sorted(set(numbers) - {NO_WORD})
        renumbered = {word: number for number, word in enumerate(known)} | {NO_WORD: NO_WORD}
        return cls(
            tokenized, tuple(words[each] for each in known), tuple(renumbered[each] for each in numbers)
        )

    def without(self, gone: Collection[int]) -> TokenizedText:
        """Return the text without the tokens of these words."""
        rows = [row for row, word in enumerate(self.word_of_token) if word == NO_WORD or word not in gone]
        return replace(self.tokenized, encoded=self.tokenized.encoded.rows(rows))

    def each_left_out(self) -> Iterator[tuple[int, TokenizedText]]:
        """Yield each word and the text without it, unless the text has only this word."""
        for number, (part, _) in enumerate(self.words):
            rest = self.without({number})
            if part in rest.encoded.sequence:
                yield number, rest


def _of_part(encoded: Encoded, part: int) -> Encoded:
    """Return the tokens of one text of a pair, as of a single text."""
    of_part = encoded.rows([row for row, own in enumerate(encoded.sequence) if own == part])
    return replace(of_part, sequence=[0] * len(of_part))


def words_of_texts(texts: Iterable[TokenizedText]) -> list[list[Word]]:
    """Return the words of each text, without what the tokenizer drops (white space, control characters)."""
    written, ids, offsets, words = [], [], [], []
    for each in texts:
        encoded = each.encoded
        rows = [row for row, own in enumerate(encoded.sequence) if own == 0]
        written.append(str(each.text))
        ids.append(np.array([encoded.ids[row] for row in rows], np.int32))
        offsets.append(np.array([encoded.offsets[row] for row in rows], np.int64).reshape(-1, 2))
        words.append([encoded.words[row] for row in rows])
    # It finds the characters of each piece, dropped accents included.
    passages = tokenized_passages(written, ids, offsets)
    found = []
    for text, numbers, first in zip(written, words, passages.starts_D.tolist(), strict=True):
        pieces = zip(numbers, passages.offsets_X2[first : first + len(numbers)].tolist(), strict=True)
        found.append([Word(text[start:end], start, end) for start, end in _spans(text, pieces)])
    return found


def joined_words(words: Sequence[str]) -> list[Word]:
    """Return words with the offsets that they have if joined by single spaces."""
    found, start = [], 0
    for word in words:
        found.append(Word(word, start, start + len(word)))
        start += len(word) + 1
    return found


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
    """True if a word may end here and another start: RoBERTa's rule would cut at every accent."""
    if start != end:
        return start > end  # one character that became several words belongs to the first
    return not (_is_mark(text[start]) or (_is_mark(text[end - 1]) and text[start].isalnum()))


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")
