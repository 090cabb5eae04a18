"""Attention between words, from attention between pieces.

Attention to a word is the sum of that to its pieces. Attention from a word is the mean of that from its
pieces (Clark et al. 2019, section 4.1) or that from its first piece (what the paper's released code does).

Shapes: G texts of one length N, H heads, W words of the longest of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bertsmith.inference.loaded_model import Bert
from bertsmith.text.tokenizer import Encoded

FromPieces = Literal["mean", "first"]


@dataclass(frozen=True, slots=True)
class EncodedWords:
    """Words as one text: its tokens, and for each word the rows of its pieces."""

    encoded: Encoded
    pieces: tuple[tuple[int, ...], ...]


def encode_words(bert: Bert, sentences: Sequence[Sequence[str]]) -> list[EncodedWords | None]:
    """The tokens of sentences whose words are given; None for one that is too long for the model."""
    texts = [" ".join(words) for words in sentences]
    found: list[EncodedWords | None] = []
    for words, each in zip(sentences, bert.reader.tokenize(texts), strict=True):
        fits = len(each) <= bert.reader.longest
        found.append(EncodedWords(each.encoded, _pieces(words, each.encoded)) if fits else None)
    return found


def _pieces(words: Sequence[str], encoded: Encoded) -> tuple[tuple[int, ...], ...]:
    word_at = [number for number, word in enumerate(words) for _ in range(len(word) + 1)]
    rows: list[list[int]] = [[] for _ in words]
    for row, (_, end) in enumerate(encoded.offsets):
        if encoded.sequence[row] >= 0:
            # By its last character: a piece of a byte-level vocabulary may begin with the space before.
            rows[word_at[end - 1]].append(row)
    return tuple(map(tuple, rows))


@dataclass(frozen=True, slots=True)
class WordMaps:
    """What turns rows and columns of pieces into those of words."""

    rows_GWN: Tensor
    columns_GNW: Tensor

    @classmethod
    def of(cls, texts: Sequence[EncodedWords], mode: FromPieces, device: torch.device) -> "WordMaps":
        """The maps of texts of one length; the last words of shorter ones are empty."""
        words, length = max(len(text.pieces) for text in texts), len(texts[0].encoded)
        rows_GWN = torch.zeros(len(texts), words, length)
        columns_GNW = torch.zeros(len(texts), length, words)
        for number, text in enumerate(texts):
            for word, pieces in enumerate(text.pieces):
                columns_GNW[number, list(pieces), word] = 1
                asked = pieces if mode == "mean" else pieces[:1]
                rows_GWN[number, word, list(asked)] = 1 / max(len(asked), 1)
        return cls(rows_GWN.to(device), columns_GNW.to(device))

    def words(self, weights_GHNN: Tensor) -> Tensor:
        """The attention between words [G, H, W, W]; what goes to [CLS] and [SEP] is left out."""
        return self.rows_GWN[:, None] @ (weights_GHNN.float() @ self.columns_GNW[:, None])

    def between_words(self, weights_GHNN: Tensor) -> Tensor:
        """The same without what a word attends to itself."""
        words_GHWW = self.words(weights_GHNN)
        words_GHWW.diagonal(0, 2, 3).zero_()
        return words_GHWW
