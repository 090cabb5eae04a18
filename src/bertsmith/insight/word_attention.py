"""Attention between words, from attention between pieces.

Attention to a word is the sum of that to its pieces. Attention from a word is the mean of that from its
pieces (Clark et al. 2019, section 4.1) or that from its first piece (what the paper's released code does).

Shapes: G texts of one length N, H heads, W words of the longest of them, M numbers of all heads in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
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
        rows_GWN, columns_GNW = np.zeros((len(texts), words, length)), np.zeros((len(texts), length, words))
        for number, text in enumerate(texts):
            for word, pieces in enumerate(text.pieces):
                for piece in pieces:
                    columns_GNW[number, piece, word] = 1
                asked = pieces if mode == "mean" else pieces[:1]
                for piece in asked:
                    rows_GWN[number, word, piece] = 1 / len(asked)
        rows, columns = torch.from_numpy(rows_GWN), torch.from_numpy(columns_GNW)
        return cls(rows.float().to(device), columns.float().to(device))

    def words(self, weights_GHNN: Tensor) -> Tensor:
        """The attention between words [G, H, W, W]; what goes to [CLS] and [SEP] is left out."""
        # All heads of a text in one product: on a CPU many small products take longer than their numbers.
        texts, heads, length, _ = weights_GHNN.shape
        to_words_GMW = weights_GHNN.float().flatten(1, 2) @ self.columns_GNW
        beside_GNHW = to_words_GMW.view(texts, heads, length, -1).transpose(1, 2)
        words_GWM = self.rows_GWN @ beside_GNHW.flatten(2)
        return words_GWM.view(*words_GWM.shape[:2], heads, -1).transpose(1, 2)

    def between_words(self, weights_GHNN: Tensor) -> Tensor:
        """The same without what a word attends to itself."""
        words_GHWW = self.words(weights_GHNN)
        words_GHWW.diagonal(0, 2, 3).zero_()
        return words_GHWW
