"""Token ids of much text: those of the `tokenizers` library, most of them remembered instead of computed.

Natural text repeats its words, so texts are cut into words and each is looked up. That is exact only where
no token, normalisation or pre-tokenisation reaches across a cut: `_choose_encoder` admits the pipelines of
which that can be said, and with every other one a text goes to the library whole.

Everything runs over whole arrays of bytes: many texts are joined by line feeds into one, the borders of all
their words are found at once, and one table lookup (`word_table`) gives the ids of all words. Python sees a
word only when it is new.
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
    """The smallest type that holds every id of a vocabulary of this size."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """The ids of many texts, one after the other, and how many ids and words each text has."""

    ids: NDArray[Any]
    lengths: Numbers
    words: Numbers  # as the pre-tokenizer cuts them


class FastEncoder:
    """Encodes texts as its tokenizer does, without the tokens of the template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.id_type = smallest_id_type(tokenizer.vocabulary_size)
        self._tokenizer, self._encode_batch = tokenizer, _choose_encoder(_Library(tokenizer))

    def encode(self, text: str) -> NDArray[Any]:
        """The ids of a text, as of `Tokenizer.encode` between the tokens of the template."""
        return self.encode_many([text]).ids

    def encode_many(self, texts: Iterable[str]) -> EncodedTexts:
        """The ids of many texts in one row."""
        parts = []
        for batch in _batches(texts):
            try:
                # The last batch may be empty: as a part of its own it still says of which type ids are.
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
    """The library's tokenizer, as the two fast ways need to know it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.id_type = smallest_id_type(tokenizer.vocabulary_size)
        self._reader = tokenizer.closed  # which takes special tokens in a text for ordinary characters
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
        """Each text by the library as a whole: the way that is right for every pipeline."""
        for text in texts:
            text.encode()
        return _listed([self.entry(text) for text in texts], self.id_type)


def _listed(entries: Sequence[Entry], id_type: str) -> EncodedTexts:
    ids = np.array([number for entry in entries for number in entry.ids], id_type)
    lengths, words = [len(entry.ids) for entry in entries], [entry.words for entry in entries]
    return EncodedTexts(ids, np.array(lengths, np.int64), np.array(words, np.int64))


def _choose_encoder(library: _Library) -> EncodeBatch:
    """The fastest way to the ids of texts that is exact for this pipeline."""

    # Runs of spaces, tokens of ModernBERT, never hold a space between two characters that are none.
    def has_lone_space(name: str) -> bool:
        return _has_space(name) and not (name.isspace() and len(name) > 1)

    # A list of what is known to be exact, not of what is known to fail: a pipeline that nobody has thought of
    # is read whole, which is slow and right.
    match library.kind, library.normalizer["type"], _first_cut(library.pipeline["pre_tokenizer"]):
        case "WordPiece", "BertNormalizer", "BertPreTokenizer" if _keep_apart(library, _has_space):
            return _BertWords(library)
        case "BPE", None | "NFC", "ByteLevel" if _keep_apart(library, has_lone_space):
            # With dropout a word is encoded otherwise every time: there is nothing to remember.
            return library.encode_whole if library.pipeline["model"]["dropout"] else _SpacedWords(library)
    return library.encode_whole


def _first_cut(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The pre-tokenizer that cuts first; after it only cuts inside its words are admitted."""
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
    """Whether no token added to the vocabulary can reach across the spaces at which a text is cut."""
    ordinary = [token for token in library.added if not token["special"]]
    if any(token["lstrip"] or token["rstrip"] for token in ordinary):
        return False
    # The library finds special tokens, too, before it passes over them: they could hide an ordinary one.
    names = [token["content"] for token in library.added] if ordinary else []
    return not any(crosses(name) or crosses(library.normalise(name)) for name in names)


def _has_space(name: str) -> bool:
    return any(character.isspace() for character in name)


def _is_plain(library: _Library) -> bool:
    """Whether nothing but one pre-tokenizer stands between the normalised text and the model."""
    return library.pipeline["pre_tokenizer"]["type"] != "Sequence" and all(
        token["special"] for token in library.added
    )


def _encode_words(table: WordTable, text: Bytes, borders: tuple[Mask, Mask]) -> EncodedTexts:
    """The ids of lines whose words begin and end where these masks say; the margin is line feeds."""
    begins, ends = borders
    starts = np.flatnonzero(begins)
    found = table.find(text, starts, lengths=np.flatnonzero(ends) + 1 - starts)
    # The margin's first line feed ends the last line; the others end nothing.
    line_ends = np.flatnonzero(text == _LINE_FEED)[: 1 - MARGIN]
    indices = np.searchsorted(starts, line_ends)
    return EncodedTexts(found.ids, _sums_between(indices, found.counts), _sums_between(indices, found.words))


def _sums_between(indices: Numbers, values: Numbers) -> Numbers:
    """The sum of the values from each index to the next, the first from 0 on."""
    sums: Numbers = np.diff(np.concatenate([[0], np.cumsum(values)]).take(indices), prepend=0)
    return sums


def _bytes_of(lines: str) -> bytes:
    return (lines + "\n" * MARGIN).encode()


# --- WordPiece as of BERT: spaces, ASCII punctuation and Chinese characters end a word ---

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
        if lines.count("\n") >= len(texts):  # to BERT a line feed inside a text is as good as a space
            lines = "\n".join([text.replace("\n", " ") for text in texts])
        # Bytes, not characters: what ends a word is ASCII, or Chinese, which UTF-8 shows in the first byte,
        # and no byte of another character is taken for either. So nothing has to be decoded.
        raw = _bytes_of(lines)
        text = np.frombuffer(raw, np.uint8)
        kinds = np.frombuffer(raw.translate(self._kinds), np.uint8)
        inside = kinds == _WORD
        broken = np.ones(len(kinds), np.bool_)  # no word reaches from the byte before to this one
        broken[1:] = ~inside[:-1]
        if self._cuts_chinese:
            broken[_cuts_around_chinese(text)] = True
        # Words: marks by themselves, and runs of word bytes between cuts.
        begins, ends = (kinds == _MARK for _ in range(2))
        begins |= inside & broken
        ends[:-1] |= inside[:-1] & (broken[1:] | ~inside[1:])
        return _encode_words(self._table, text, (begins, ends))

    def _encode_word(self, raw: bytes) -> Entry:
        word = raw.decode()
        if not (self._is_plain and word.isascii() and word.isprintable()):
            return self._library.entry(word)
        # One plain word: the model alone, in a fifth of the time of the whole pipeline.
        word = word.lower() if self._library.normalizer["lowercase"] else word
        return Entry([token.id for token in self._library.model.tokenize(word)], words=1)


def _cuts_around_chinese(text: Bytes) -> Numbers:
    """The offsets before and after the characters U+4E00 to U+9F7F, each of which is a word by itself."""
    # Not all that BERT takes for Chinese: the library drops characters that its edition of Unicode does not
    # know, and joins what stands beside them. These are as old as Unicode, and most of any text.
    starts = np.flatnonzero((text >= 0xE4) & (text <= 0xE9))
    first_two = text[starts].astype(np.int64) << 8 | text[starts + 1]
    starts = starts[(first_two >= 0xE4B8) & (first_two <= 0xE9BD)]
    return np.concatenate([starts, starts + 3])


# --- byte-level BPE behind the regular expression of GPT-2: a word takes the one space before it along ---

_SPACES = [chr(number) for number in range(0x3001) if chr(number).isspace()]  # U+3000 is the last
_UNCERTAIN = ["  ", *(space for space in _SPACES if space not in " \n")]
_ONE_WORD = re.compile(rb" ?(?:[A-Za-z]+|[0-9]+)")
_OTHER, _APOSTROPHE = 0, 3  # beside _MARK and _WORD


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
        # Two groups: texts that can be cut, and texts that the library reads whole; then in one row again.
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
        # A word begins with the space before it, except the first of a line, which has none.
        line_feeds, begins = text == _LINE_FEED, text == _SPACE
        begins[0] = not line_feeds[0]
        begins[1:] |= line_feeds[:-1] & ~line_feeds[1:]
        if self._is_plain:
            # Where punctuation meets a letter or digit: no match of the expression reaches over such a
            # meeting, but for an apostrophe and what follows it ('s, 'll).
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
        # As with BERT's words, the model alone; it knows a space as "Ġ".
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
    """Whether each space stands alone, so that the regular expression must cut there."""
    return not any(mark in text for mark in _UNCERTAIN)
