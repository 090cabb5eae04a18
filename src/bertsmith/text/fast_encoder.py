"""Fast tokenization: the same ids as the `tokenizers` library, with most words cached instead of computed.

Natural text repeats its words, so texts are cut into words, and each word is looked up. This is exact only if
no token, normalisation or pre-tokenisation crosses a cut. `_choose_encoder` accepts the pipelines for which
that is certain; any other pipeline gets whole texts from the library.

Everything runs over whole arrays of bytes: many texts are joined by line feeds, the borders of all their
words are found at once, and one table lookup (`word_table`) gives the ids of all words. Python code runs for
new words only.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from string import ascii_letters, digits, punctuation
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.word_table import MARGIN, Bytes, Entry, Numbers, WordTable

IdType = Literal["uint16", "uint32"]
Mask = NDArray[np.bool_]

CHARACTERS_AT_ONCE = 1 << 20
_SPACE, _LINE_FEED = 0x20, 0x0A


def smallest_id_type(vocabulary: int) -> IdType:
    """Return the smallest type that holds every id of a vocabulary of this size."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """The ids of many texts, one after the other, and the number of ids and words in each text."""

    ids: NDArray[Any]
    lengths: Numbers
    words: Numbers  # as split by the pre-tokenizer


class FastEncoder:
    """Encodes texts as its tokenizer does, without the tokens of the template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.id_type = smallest_id_type(tokenizer.vocabulary_size)
        self._tokenizer, self._encode_batch = tokenizer, _choose_encoder(_Library(tokenizer))

    def encode(self, text: str) -> NDArray[Any]:
        """Return the ids of a text, as `Tokenizer.encode` does, without the tokens of the template."""
        return self.encode_many([text]).ids

    def encode_many(self, texts: Iterable[str]) -> EncodedTexts:
        """Return the ids of many texts in one row."""
        parts = []
        for batch in _batches(texts):
            try:
                # The last batch may be empty, but as a part it still defines the type of the ids.
                parts.append(self._encode_batch(batch) if batch else _listed([], self.id_type))
            except UnicodeEncodeError:  # a lone surrogate: the tokenizer raises an error that names it
                self._tokenizer.encode_many(batch)
                raise
        return EncodedTexts(
            ids=np.concatenate([part.ids for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            words=np.concatenate([part.words for part in parts]),
        )


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size > CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    yield batch


EncodeBatch = Callable[[list[str]], EncodedTexts]


class _Library:
    """The library's tokenizer with the properties that the two fast encoders need."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.id_type = smallest_id_type(tokenizer.vocabulary_size)
        self._reader = tokenizer.closed  # treats special tokens in a text as ordinary characters
        self.model = self._reader.model
        self.pipeline: dict[str, Any] = json.loads(self._reader.to_str())
        self.kind: str = self.pipeline["model"]["type"]
        self.normalizer: dict[str, Any] = self.pipeline["normalizer"] or {"type": None}
        self.added: list[dict[str, Any]] = self.pipeline["added_tokens"]

    def entry(self, text: str) -> Entry:
        encoding = self._reader.encode(text, add_special_tokens=False)
        return Entry(encoding.ids, len(set(encoding.word_ids)))

    def normalise(self, text: str) -> str:
        return self._reader.normalizer.normalize_str(text) if self._reader.normalizer else text

    def encode_whole(self, texts: list[str]) -> EncodedTexts:
        """Encode each whole text with the library, which is correct for every pipeline."""
        for text in texts:
            text.encode()
        return _listed([self.entry(text) for text in texts], self.id_type)


def _listed(entries: Sequence[Entry], id_type: str) -> EncodedTexts:
    ids = np.array([number for entry in entries for number in entry.ids], id_type)
    lengths, words = [len(entry.ids) for entry in entries], [entry.words for entry in entries]
    return EncodedTexts(ids, np.array(lengths, np.int64), np.array(words, np.int64))


def _choose_encoder(library: _Library) -> EncodeBatch:
    """Return the fastest encoder that is exact for this pipeline."""

    # Runs of spaces, which are tokens of ModernBERT, never have a space between two non-space characters.
    def has_lone_space(name: str) -> bool:
        return _has_space(name) and not (name.isspace() and len(name) > 1)

    # A list of pipelines known to be exact, not of those known to fail: an unforeseen pipeline reads whole
    # texts, which is slow but correct.
    match library.kind, library.normalizer["type"], _first_cut(library.pipeline["pre_tokenizer"]):
        case "WordPiece", "BertNormalizer", "BertPreTokenizer" if _keep_apart(library, _has_space):
            return _BertWords(library)
        case "BPE", None | "NFC", "ByteLevel" if _keep_apart(library, has_lone_space):
            # With dropout a word is encoded differently every time, so it cannot be cached.
            return library.encode_whole if library.pipeline["model"]["dropout"] else _SpacedWords(library)
    return library.encode_whole


def _first_cut(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Return the type of the first pre-tokenizer; later ones may only cut inside its words, else None."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": [first, *others]}:
            inner = all(other["type"] == "Split" for other in others)
            return _first_cut(first) if inner else None
        case {"type": "ByteLevel", "use_regex": False}:
            return None
        case {"type": str(kind)}:
            return kind
    return None


def _keep_apart(library: _Library, crosses: Callable[[str], bool]) -> bool:
    """True if no token added to the vocabulary can cross the spaces at which texts are cut."""
    ordinary = [token for token in library.added if not token["special"]]
    if any(token["lstrip"] or token["rstrip"] for token in ordinary):
        return False
    # The library also finds special tokens before it ignores them, so they could hide an ordinary token.
    names = [token["content"] for token in library.added] if ordinary else []
    return not any(crosses(name) or crosses(library.normalise(name)) for name in names)


def _has_space(name: str) -> bool:
    return any(character.isspace() for character in name)


def _is_plain(library: _Library) -> bool:
    """True if a single pre-tokenizer is the only step between the normalised text and the model."""
    return library.pipeline["pre_tokenizer"]["type"] != "Sequence" and all(
        token["special"] for token in library.added
    )


def _encode_words(table: WordTable, text: Bytes, borders: tuple[Mask, Mask]) -> EncodedTexts:
    """Encode lines, given masks of the first and last bytes of words; the margin is line feeds."""
    begins, ends = borders
    starts = np.flatnonzero(begins)
    found = table.find(text, starts, lengths=np.flatnonzero(ends) + 1 - starts)
    # The margin's first line feed ends the last line; the others do not end any.
    line_ends = np.flatnonzero(text == _LINE_FEED)[: 1 - MARGIN]
    indices = np.searchsorted(starts, line_ends)
    return EncodedTexts(found.ids, _sums_between(indices, found.counts), _sums_between(indices, found.words))


def _sums_between(indices: Numbers, values: Numbers) -> Numbers:
    """Return the sum of the values up to each index, from the previous index or from 0 on."""
    sums: Numbers = np.diff(np.concatenate([[0], np.cumsum(values)]).take(indices), prepend=0)
    return sums


def _bytes_of(lines: str) -> bytes:
    return (lines + "\n" * MARGIN).encode()


# --- WordPiece as in BERT: spaces, ASCII punctuation and Chinese characters end a word ---

_GAP, _MARK, _WORD = 0, 1, 2


class _BertWords:
    """Cuts at every space and, unless added tokens forbid it, around punctuation and Chinese characters."""

    def __init__(self, library: _Library) -> None:
        self._library = library
        self._is_plain = _is_plain(library)
        self._cuts_chinese = self._is_plain and library.normalizer["handle_chinese_chars"]
        kinds = bytearray([_WORD] * 256)
        kinds[_SPACE] = kinds[_LINE_FEED] = _GAP
        for mark in punctuation.encode() if self._is_plain else b"":
            kinds[mark] = _MARK
        self._kinds = bytes(kinds)
        self._table = WordTable(self._encode_word, id_type=library.id_type)

    def __call__(self, texts: list[str]) -> EncodedTexts:
        lines = "\n".join(texts)
        if lines.count("\n") >= len(texts):  # BERT treats a line feed in a text like a space
            lines = "\n".join([text.replace("\n", " ") for text in texts])
        # Bytes, not characters, so nothing is decoded: a word ends at ASCII, or at Chinese, which UTF-8 shows
        # in the first byte. No byte of another character can be mistaken for either.
        raw = _bytes_of(lines)
        text = np.frombuffer(raw, np.uint8)
        kinds = np.frombuffer(raw.translate(self._kinds), np.uint8)
        inside = kinds == _WORD
        broken = np.ones(len(kinds), np.bool_)  # True if no word continues from the previous byte
        broken[1:] = ~inside[:-1]
        if self._cuts_chinese:
            broken[_cuts_around_chinese(text)] = True
        # Words: single punctuation marks, and runs of word bytes between cuts.
        begins, ends = (kinds == _MARK for _ in range(2))
        begins |= inside & broken
        ends[:-1] |= inside[:-1] & (broken[1:] | ~inside[1:])
        return _encode_words(self._table, text, (begins, ends))

    def _encode_word(self, raw: bytes) -> Entry:
        word = raw.decode()
        if not (self._is_plain and word.isascii() and word.isprintable()):
            return self._library.entry(word)
        # For one plain word, run the model alone, in a fifth of the time of the whole pipeline.
        word = word.lower() if self._library.normalizer["lowercase"] else word
        return Entry([token.id for token in self._library.model.tokenize(word)], words=1)


def _cuts_around_chinese(text: Bytes) -> Numbers:
    """Return the offsets before and after the characters U+4E00 to U+9F7F, each a word by itself."""
    # Not everything that BERT treats as Chinese: the library drops characters unknown to its edition of
    # Unicode and joins their neighbours. These characters are as old as Unicode, and most of any text.
    starts = np.flatnonzero((text >= 0xE4) & (text <= 0xE9))
    first_two = text[starts].astype(np.int64) << 8 | text[starts + 1]
    starts = starts[(first_two >= 0xE4B8) & (first_two <= 0xE9BD)]
    return np.concatenate([starts, starts + 3])


# --- byte-level BPE after the regular expression of GPT-2: a word includes the one space before it ---

_SPACES = [chr(number) for number in range(0x3001) if chr(number).isspace()]  # U+3000 is the last
_UNCERTAIN = ["  ", *(space for space in _SPACES if space not in " \n")]
_ONE_WORD = re.compile(rb" ?(?:[A-Za-z]+|[0-9]+)")
_OTHER, _APOSTROPHE = 0, 3  # in addition to _MARK and _WORD


class _SpacedWords:
    """Cuts before every space and, unless added tokens forbid it, between ASCII letters and punctuation.

    Texts with other white space or two spaces in a row are not cut at all.
    """

    def __init__(self, library: _Library) -> None:
        self._library = library
        self._is_plain = _is_plain(library) and not library.pipeline["pre_tokenizer"]["add_prefix_space"]
        self._table = WordTable(self._encode_word, id_type=library.id_type)

    def __call__(self, texts: list[str]) -> EncodedTexts:
        lines = "\n".join(texts)
        if lines.count("\n") < len(texts) and _is_certain(lines):
            return self._encode_lines(lines)
        # Two groups, texts that can be cut and texts that the library reads whole, are merged in input order.
        certain = np.array(["\n" not in text and _is_certain(text) for text in texts])
        cut = [text for text, is_certain in zip(texts, certain, strict=True) if is_certain]
        whole = [text for text, is_certain in zip(texts, certain, strict=True) if not is_certain]
        by_words = self._encode_lines("\n".join(cut)) if cut else _listed([], self._library.id_type)
        by_library = self._library.encode_whole(whole)
        lengths, words = (np.empty(len(texts), np.int64) for _ in range(2))
        lengths[certain], lengths[~certain] = by_words.lengths, by_library.lengths
        words[certain], words[~certain] = by_words.words, by_library.words
        ids, is_by_words = np.empty(lengths.sum(), by_words.ids.dtype), np.repeat(certain, lengths)
        ids[is_by_words], ids[~is_by_words] = by_words.ids, by_library.ids
        return EncodedTexts(ids, lengths, words)

    def _encode_lines(self, lines: str) -> EncodedTexts:
        raw = _bytes_of(lines)
        text = np.frombuffer(raw, np.uint8)
        # A word begins with the space before it, except the first word of a line.
        line_feeds, begins = text == _LINE_FEED, text == _SPACE
        begins[0] = not line_feeds[0]
        begins[1:] |= line_feeds[:-1] & ~line_feeds[1:]
        if self._is_plain:
            # Between punctuation and a letter or digit: no match of the expression crosses such a border,
            # except for an apostrophe and the text after it ('s, 'll).
            kinds = np.frombuffer(raw.translate(_ASCII_KINDS), np.uint8)
            left, right = kinds[:-1], kinds[1:]
            begins[1:] |= (left == _WORD) & ((right == _MARK) | (right == _APOSTROPHE))
            begins[1:] |= (left == _MARK) & (right == _WORD)
        ends = ~line_feeds
        ends[:-1] &= begins[1:] | line_feeds[1:]
        return _encode_words(self._table, text, (begins, ends))

    def _encode_word(self, raw: bytes) -> Entry:
        if not (self._is_plain and _ONE_WORD.fullmatch(raw)):
            return self._library.entry(raw.decode())
        # As for BERT's words, run the model alone; it writes a space as "Ġ".
        tokens = self._library.model.tokenize(raw.decode().replace(" ", "Ġ"))
        return Entry([token.id for token in tokens], words=1)


def _ascii_kinds() -> bytes:
    kinds = bytearray([_OTHER] * 256)
    for group, kind in ((ascii_letters + digits, _WORD), (punctuation, _MARK), ("'", _APOSTROPHE)):
        for byte in group.encode():
            kinds[byte] = kind
    return bytes(kinds)


_ASCII_KINDS = _ascii_kinds()


def _is_certain(text: str) -> bool:
    """True if every white space is a single space, so that the regular expression must cut there."""
    return not any(mark in text for mark in _UNCERTAIN)
