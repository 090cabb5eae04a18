"""Texts without some of their words: what a model reads of them once the tokens of these words are gone."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from bertsmith.inference.predictor import Word, words_of_texts
from bertsmith.inference.text_reader import TokenizedText
from bertsmith.text.tokenizer import Encoded

NO_WORD = -1


@dataclass(frozen=True, slots=True)
class TextWords:
    """A text or a pair, its words, and which of them each token belongs to."""

    tokenized: TokenizedText
    words: tuple[tuple[int, Word], ...]
    """Each with the number of its text, 0 or 1 in a pair; punctuation marks are words, too."""
    word_of_token: tuple[int, ...]
    """-1 of special tokens, and of tokens of white space."""

    @classmethod
    def of(cls, tokenized: TokenizedText) -> "TextWords":
        """The words of a text as its tokenizer cuts them, those of which a token is there."""
        encoded, text = tokenized.encoded, tokenized.text
        parts = (text,) if isinstance(text, str) else text
        alone = [TokenizedText(part, _of_part(encoded, number)) for number, part in enumerate(parts)]
        words = [(part, word) for part, cut in enumerate(words_of_texts(alone)) for word in cut]
        numbers = [
            _word_at(words, part, span) for part, span in zip(encoded.sequence, encoded.offsets, strict=True)
        ]
        # A character that became several words belongs to the first: the others have no token.
        known = sorted(set(numbers) - {NO_WORD})
        renumbered = {word: number for number, word in enumerate(known)} | {NO_WORD: NO_WORD}
        return cls(
            tokenized, tuple(words[each] for each in known), tuple(renumbered[each] for each in numbers)
        )

    def without(self, gone: Collection[int]) -> TokenizedText:
        """The text without the tokens of these words."""
        rows = [row for row, word in enumerate(self.word_of_token) if word == NO_WORD or word not in gone]
        return replace(self.tokenized, encoded=self.tokenized.encoded.rows(rows))

    def each_left_out(self) -> Iterator[tuple[int, TokenizedText]]:
        """Each word with the text without it, but for a word that is all there is of its text."""
        for number, (part, _) in enumerate(self.words):
            rest = self.without({number})
            if part in rest.encoded.sequence:
                yield number, rest


def _word_at(words: Sequence[tuple[int, Word]], part: int, span: tuple[int, int]) -> int:
    start, end = span
    for number, (of_part, word) in enumerate(words):
        if of_part == part and start < word.end and end > word.start:
            return number
    return NO_WORD


def _of_part(encoded: Encoded, part: int) -> Encoded:
    """The tokens of one text of a pair, as of a text by itself."""
    of_part = encoded.rows([row for row, own in enumerate(encoded.sequence) if own == part])
    return replace(of_part, sequence=[0] * len(of_part))
