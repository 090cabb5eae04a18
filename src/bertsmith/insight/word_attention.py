"""Attention between words, computed from attention between pieces.

Attention to a word is the sum of the attention to its pieces. Attention from a word is the mean over its
pieces (Clark et al. 2019, section 4.1) or the attention from its first piece (the paper's released code).

Shapes: G texts, N tokens of the longest text, H heads, W words of the text with most words, P pieces of all
words, M values of all heads in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bertsmith.core.arrays import ranges
from bertsmith.inference.loaded_model import Bert
from bertsmith.packed import moved_to_device
from bertsmith.text.tokenizer import Encoded

FromPieces = Literal["mean", "first"]


@dataclass(frozen=True, slots=True)
class EncodedWords:
    """The tokens of a text that is given as words, and for each word the rows of its pieces."""

    encoded: Encoded
    pieces: tuple[tuple[int, ...], ...]


def encode_words(bert: Bert, sentences: Sequence[Sequence[str]]) -> list[EncodedWords | None]:
    """Tokenize sentences that are given as words; None for a sentence that is too long for the model."""
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
    """Matrices that turn rows and columns of pieces into rows and columns of words."""

    rows_GWN: Tensor
    columns_GNW: Tensor

    @classmethod
    def of(cls, texts: Sequence[EncodedWords], mode: FromPieces, device: torch.device) -> "WordMaps":
        """Build the maps of texts; shorter texts are padded with empty words and tokens."""
        words_G = np.array([len(text.pieces) for text in texts])
        words, length = int(words_G.max()), max(len(text.encoded) for text in texts)
        pieces = list(chain.from_iterable(text.pieces for text in texts))
        counts = np.fromiter(map(len, pieces), np.int64, len(pieces))
        piece_P = np.fromiter(chain.from_iterable(pieces), np.int64, int(counts.sum()))
        text_P = np.repeat(np.repeat(np.arange(len(texts)), words_G), counts)
        word_P = np.repeat(ranges(np.zeros_like(words_G), words_G), counts)
        nth_P = ranges(np.zeros_like(counts), counts)
        fraction_P = 1 / np.repeat(counts, counts) if mode == "mean" else nth_P == 0
        # The maps are mostly zeros: send only the nonzero entries to a GPU.
        in_rows_P = (text_P * words + word_P) * length + piece_P
        in_columns_P = (text_P * length + piece_P) * words + word_P
        places_2P = moved_to_device(torch.from_numpy(np.stack([in_rows_P, in_columns_P])), device)
        fractions_P = moved_to_device(torch.from_numpy(fraction_P.astype(np.float32)), device)
        rows, columns = torch.zeros(2, len(texts) * words * length, device=device)
        return cls(
            rows.scatter_(0, places_2P[0], fractions_P).view(len(texts), words, length),
            columns.scatter_(0, places_2P[1], 1.0).view(len(texts), length, words),
        )

    def words(self, weights_GHNN: Tensor) -> Tensor:
        """Return the attention between words [G, H, W, W], without the attention to [CLS] and [SEP]."""
        # All heads of a text in one product: many small products are slow on a CPU.
        texts, heads, length, _ = weights_GHNN.shape
        to_words_GMW = weights_GHNN.float().flatten(1, 2) @ self.columns_GNW
        beside_GNHW = to_words_GMW.view(texts, heads, length, -1).transpose(1, 2)
        words_GWM = self.rows_GWN @ beside_GNHW.flatten(2)
        return words_GWM.view(*words_GWM.shape[:2], heads, -1).transpose(1, 2)

    def between_words(self, weights_GHNN: Tensor) -> Tensor:
        """Return the attention between different words [G, H, W, W]."""
        words_GHWW = self.words(weights_GHNN)
        words_GHWW.diagonal(0, 2, 3).zero_()
        return words_GHWW
