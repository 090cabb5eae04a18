"""Text cut into the words that a vocabulary is learned from, exactly where the tokenizer will cut it.

A cutter works in two steps, so that much text is fast: `chunks` cuts at C speed where a word surely ends, and
`words` does the rest, once for each distinct chunk.
"""

import re
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from tokenizers import pre_tokenizers

from bertsmith.text.pipelines import Case, bert_normalizer

_BERT = pre_tokenizers.BertPreTokenizer()
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
_NORMALIZERS = {case: bert_normalizer(case) for case in ("uncased", "cased")}
# Nearly all chunks are printable ASCII, for which both rules are short and the library is ten times slower.
_PLAIN_BERT = re.compile("[0-9A-Za-z]+|[!-~]")
_PLAIN_BYTES = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[!-/:-@\[-`{-~]+| +(?!\S)| +")
# GPT-2's rule never looks back, and only white space can reach over a space: before a space that follows
# anything else, a word ends.
_BEFORE_LONE_SPACE = re.compile(r"(?<=\S)(?= )")


class WordCutter(Protocol):
    """From a text to chunks and from a chunk to words; the chunks' words are the text's words."""

    def chunks(self, text: str) -> list[str]:
        """Parts of a text that can be cut into words one by one."""

    def words(self, chunk: str) -> list[str]:
        """The words of a chunk, as the tokenizer's model will be given them."""


@dataclass(frozen=True, slots=True)
class BertWords:
    """Words as BERT cuts them: at white space and around each punctuation mark and CJK character."""

    case: Case

    def chunks(self, text: str) -> list[str]:
        """What stands between spaces and line ends."""
        return text.replace("\n", " ").split(" ")

    def words(self, chunk: str) -> list[str]:
        """The normalised words of a chunk."""
        if chunk.isascii() and chunk.isprintable():
            return _PLAIN_BERT.findall(chunk.lower() if self.case == "uncased" else chunk)
        normalised = _NORMALIZERS[self.case].normalize_str(chunk)
        return [word for word, _ in _BERT.pre_tokenize_str(normalised)]


@dataclass(frozen=True, slots=True)
class ByteWords:
    """Words as GPT-2 and RoBERTa cut them, a space before a word being part of it, their bytes as characters.

    Each line is a text of its own: no word holds a line end.
    """

    def chunks(self, text: str) -> list[str]:
        """What stands between spaces, with the space before it."""
        return list(chain.from_iterable(map(_BEFORE_LONE_SPACE.split, text.split("\n"))))

    def words(self, chunk: str) -> list[str]:
        """The words of a chunk, "Ġ" standing for a space and so on."""
        if chunk.isascii() and chunk.isprintable():
            return [word.replace(" ", "Ġ") for word in _PLAIN_BYTES.findall(chunk)]
        return [word for word, _ in _BYTE_LEVEL.pre_tokenize_str(chunk)]
