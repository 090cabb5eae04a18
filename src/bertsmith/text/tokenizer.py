"""Text to token ids and back, over the `tokenizers` library: WordPiece, byte-level BPE, unigram.

Text is data: a special token written in a text is ordinary characters, unless the caller allows it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Encoding, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from bertsmith.core.errors import UserError
from bertsmith.core.files import lone_surrogate
from bertsmith.text.tokenizer_files import (
    USUAL_WORD_CHARACTERS,
    TokenizerSpec,
    open_pipeline,
    read_spec,
    write_spec,
)
from bertsmith.text.tokenizer_settings import (
    BERT_NAMES,
    FETCH_AGAIN,
    GPT_NAMES,
    ROBERTA_NAMES,
    ROLES,
    Settings,
    extra_special,
    max_length,
    token_name,
)

# Any text works: only the surrounding template tokens matter.
_SAMPLE = "a"
MAX_ID_FACTOR, MAX_SPARE_IDS = 10, 100_000
"""Limits for ids beyond the pieces: each id needs a row of the embedding, whether or not it has a piece."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One text, or a pair, as tokens: five parallel lists."""

    ids: list[int]
    segments: list[int]
    offsets: list[tuple[int, int]]  # in code points of the original string of the token's own sequence
    sequence: list[int]  # 0 first text, 1 second text, -1 special token of the template
    words: list[int | None]  # index of the pre-tokenizer's word in its sequence; None for a special token

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, rows: Sequence[int]) -> "Encoded":
        """Return the tokens with these indices."""
        return Encoded(
            ids=[self.ids[row] for row in rows],
            segments=[self.segments[row] for row in rows],
            offsets=[self.offsets[row] for row in rows],
            sequence=[self.sequence[row] for row in rows],
            words=[self.words[row] for row in rows],
        )


def truncate_longest_first(encoded: Encoded, limit: int) -> Encoded:
    """Truncate to `limit` tokens: the longer text, on a tie the second, loses last tokens until they fit."""
    # Google's rule. The library's own truncation sometimes leaves the odd token to the other text.
    first, second = encoded.sequence.count(0), encoded.sequence.count(1)
    capacity = limit - (len(encoded) - first - second)
    if capacity < 0:
        raise UserError(f"{limit} tokens cannot hold the special tokens", remedy="allow longer sequences")
    rows = [row for row, sequence in enumerate(encoded.sequence) if sequence < 0]  # the template's
    for sequence, kept in enumerate(_longest_first(first, second, capacity)):
        rows += [row for row, number in enumerate(encoded.sequence) if number == sequence][:kept]
    return encoded.rows(sorted(rows))


def _longest_first(first: int, second: int, capacity: int) -> tuple[int, int]:
    """Return how many tokens of each text are kept."""
    kept_first = min(first, max(capacity - second, (capacity + 1) // 2))
    return kept_first, min(second, capacity - kept_first)


class Tokenizer:
    """Encodes and decodes text; made by `load` or `from_library`, immutable and picklable."""

    def __init__(self, spec: TokenizerSpec) -> None:
        library = open_pipeline(spec)
        vocabulary = library.get_vocab()
        _check_ids(library, vocabulary, spec=spec)
        self._roles = _find_roles(spec.settings, vocabulary)
        self._special = _find_special(library, self._roles, spec.settings)
        self.special_ids: Final = frozenset(self._special.values())
        """Ids that ordinary text never yields, and the id of the unknown token."""
        pipeline = _flag_special(library.to_str(), self._special)
        # The pipeline now has the added tokens. If it changes (`with_words`), it must be their only source.
        settings = {key: value for key, value in spec.settings.items() if key != "added_tokens_decoder"}
        self.spec: Final = TokenizerSpec(pipeline, self._roles | settings, spec.where)
        """Spec that the tokenizer is built from."""
        self.vocabulary_size: Final = max(vocabulary.values()) + 1
        """Number of embedding rows: the highest id, added tokens included, plus one."""
        self.max_length: Final = max_length(spec.settings)
        """Longest text in tokens according to tokenizer_config.json; None if it does not limit it."""
        self.gaps: Final = tuple(sorted(set(range(self.vocabulary_size)) - set(vocabulary.values())))
        """Ids below the highest that do not have a token."""
        self.closed: Final = self._make_reader(frozenset())
        """The library's tokenizer that recognises no special tokens in texts."""
        self._readers = {frozenset[str](): self.closed}
        pair = _encoded(self.closed.encode(_SAMPLE, _SAMPLE))
        self._divides_pairs = bool(_between(pair, 0, 1))
        self._lead = len(_between(pair, -1, 0))

    @classmethod
    def load(cls, folder: Path | str, *, max_word_characters: int = USUAL_WORD_CHARACTERS) -> "Tokenizer":
        """Load the tokenizer of a model folder; longer words are unknown (vocab.txt only)."""
        return cls(read_spec(Path(folder).expanduser(), max_word_characters=max_word_characters))

    @classmethod
    def from_library(cls, library: Library, *, settings: Mapping[str, Any] | None = None) -> "Tokenizer":
        """Build a tokenizer from a library tokenizer; settings have the keys of a tokenizer_config.json."""
        return cls(TokenizerSpec(library.to_str(), dict(settings or {})))

    def save(self, folder: Path | str) -> None:
        """Write the files that `load` here and AutoTokenizer of transformers open."""
        write_spec(self.spec, Path(folder).expanduser())

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[TokenizerSpec]]:
        # Not the library's own pickle, which does not keep special tokens closed.
        return Tokenizer, (self.spec,)

    def encode(self, text: str, *, allow_special: tuple[str, ...] = ()) -> Encoded:
        """Encode one text in its template; only the allowed special tokens are recognised in the text."""
        _check_text(text, where="text")
        return _encoded(self._reader(allow_special).encode(text))

    def encode_pair(self, first: str, second: str, *, allow_special: tuple[str, ...] = ()) -> Encoded:
        """Encode two texts in the template for pairs; `sep_id` divides them if the template does not."""
        _check_text(first, where="first text")
        _check_text(second, where="second text")
        return self._divided(_encoded(self._reader(allow_special).encode(first, second)))

    def encode_many(
        self, texts: Iterable[str | tuple[str, str]], *, allow_special: tuple[str, ...] = (), first: int = 0
    ) -> list[Encoded]:
        """Encode texts and pairs as one by one, but on all cores; errors number them from `first`."""
        if isinstance(texts, str):
            raise UserError("a single text was given where several are expected", remedy='write ["..."]')
        listed = list(texts)
        for number, text in enumerate(listed, start=first):
            for part in text if isinstance(text, tuple) and len(text) == 2 else (text,):
                _check_text(part, index=number)
        encoded = map(_encoded, self._reader(allow_special).encode_batch(listed))
        given = zip(listed, encoded, strict=True)
        return [self._divided(each) if isinstance(text, tuple) else each for text, each in given]

    def prepare_masks(self) -> None:
        """Build the reader of masks in texts, if there is a mask; this is slow for a large vocabulary."""
        if self.has_mask:
            self._reader((self.mask_token,))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of these ids, without the special tokens."""
        numbers = [int(number) for number in ids]
        for number in numbers:
            self.token(number)
        return self.closed.decode(numbers)

    def token(self, number: int) -> str:
        """Return the token with this id."""
        token = self.closed.id_to_token(number) if 0 <= number < self.vocabulary_size else None
        if token is None:
            raise UserError(
                f"no token has id {number}", remedy=f"ids run from 0 to {self.vocabulary_size - 1}"
            )
        return token

    def id(self, token: str) -> int:
        """Return the id of this token."""
        number = self.closed.token_to_id(token)
        if number is None:
            raise UserError(f"{token!r} is not in the vocabulary", remedy="encode it as text instead")
        return number

    def words_of(self, text: str) -> list[str]:
        """Return the normalised words into which a text is cut before they become pieces."""
        library = self.closed
        plain = library.normalizer.normalize_str(text) if library.normalizer else text
        parts = library.pre_tokenizer.pre_tokenize_str(plain) if library.pre_tokenizer else [(plain, (0, 0))]
        return [part for part, _ in parts]

    @property
    def has_mask(self) -> bool:
        """True if it has a mask token."""
        return "mask_token" in self._roles

    @property
    def mask_token(self) -> str:
        """The mask token, as written in texts if `allow_special` includes it."""
        return self._role("mask_token")

    @property
    def mask_id(self) -> int:
        """Id of the mask token."""
        return self.id(self._role("mask_token"))

    @property
    def unknown_id(self) -> int:
        """Id of the unknown token."""
        return self.id(self._role("unk_token"))

    @property
    def pad_id(self) -> int:
        """Id of the padding token; another one in GPT-2, which lacks it: packed texts are not padded."""
        return self.id(self._either("pad_token", "eos_token"))

    @property
    def cls_id(self) -> int:
        """Id of the token before the first text."""
        return self.id(self._role("cls_token"))

    @property
    def sep_id(self) -> int:
        """Id of the token after each text, or between documents (GPT-2)."""
        return self.id(self._either("sep_token", "eos_token"))

    @property
    def ends(self) -> tuple[int, int]:
        """Ids of the first and last token of a text, in a model that generates text."""
        begins = self._either("bos_token", "cls_token", "eos_token")
        return self.id(begins), self.id(self._either("eos_token", "sep_token"))

    def id_of_role(self, role: str) -> int | None:
        """Return the id of the token with this role (for example cls_token), or None."""
        return self.id(self._roles[role]) if role in self._roles else None

    def _divided(self, pair: Encoded) -> Encoded:
        """Put the token between documents between two texts that have nothing between them (GPT-2)."""
        if not self._divides_pairs:
            row = self._lead + pair.sequence.count(0)
            pair.ids.insert(row, self.sep_id)
            pair.segments.insert(row, 0)
            if "sep_token" not in self._roles:  # a GPT, which has no segments
                pair.segments[:] = [0] * len(pair.ids)
            pair.offsets.insert(row, (0, 0))
            pair.sequence.insert(row, -1)
            pair.words.insert(row, None)
        return pair

    def _either(self, *roles: str) -> str:
        """Return the token of the first of these roles that has one."""
        return self._role(next((role for role in roles if role in self._roles), roles[0]))

    def _role(self, role: str) -> str:
        if role not in self._roles:
            remedy = f"name its {role} in tokenizer_config.json"
            raise UserError(f"this tokenizer lacks a {role}", where=self.spec.where, remedy=remedy)
        return self._roles[role]

    def _reader(self, allow_special: tuple[str, ...]) -> Library:
        allowed = frozenset((allow_special,) if isinstance(allow_special, str) else allow_special)
        if allowed not in self._readers:  # two threads may both build it, with equal results
            self._readers[allowed] = self._make_reader(allowed)
        return self._readers[allowed]

    def _make_reader(self, allowed: frozenset[str]) -> Library:
        """Build a library tokenizer that recognises only the allowed special tokens in a text."""
        if unknown := allowed - self._special.keys():
            remedy = f"its special tokens are {' '.join(self._special)}"
            raise UserError(f"{min(unknown)!r} is not a special token of this tokenizer", remedy=remedy)
        closed = {literal: number for literal, number in self._special.items() if literal not in allowed}
        pipeline = _flag_special(self.spec.pipeline, closed)
        library = open_pipeline(TokenizerSpec(pipeline, {}, self.spec.where))
        library.encode_special_tokens = True
        if not isinstance(library.model, models.Unigram):
            closed.pop(self._roles.get("unk_token", ""), None)  # ordinary text may yield the unknown token
        # With encode_special_tokens the library treats a literal as text, but the model may still pick it if
        # its own vocabulary has it: ALBERT's unigram pieces "[CLS]" and "<pad>" have the best score of all.
        leaks = [literal for literal, number in closed.items() if _leaks(library, literal, number)]
        if leaks:
            # No piece crosses a cut, so one cut after the first character of each literal is enough.
            starts = "|".join(f"{re.escape(literal[0])}(?={re.escape(literal[1:])})" for literal in leaks)
            cut = pre_tokenizers.Split(Regex(starts), behavior="isolated")
            original = [library.pre_tokenizer] if library.pre_tokenizer else []
            library.pre_tokenizer = pre_tokenizers.Sequence([*original, cut])
        for literal in leaks:
            if _leaks(library, literal, closed[literal]):
                what = f"cannot keep the special token {literal!r} apart from text"
                raise UserError(what, where=self.spec.where)
        return library


def _encoded(encoding: Encoding) -> Encoded:
    sequence = [-1 if number is None else number for number in encoding.sequence_ids]
    return Encoded(encoding.ids, encoding.type_ids, encoding.offsets, sequence, encoding.word_ids)


def _check_text(text: object, *, where: str = "", index: int | None = None) -> None:
    if not isinstance(text, str):
        what = f"is {type(text).__name__}, not a text or a pair"
        raise UserError(what, where=where, index=index, remedy="a text is a str, a pair a tuple of two")
    if fault := lone_surrogate(text):
        remedy = "decode the source as UTF-8, or replace the character by U+FFFD"
        raise UserError(fault, where=where, index=index, remedy=remedy)


# --- which tokens are special ---


def _check_ids(library: Library, vocabulary: dict[str, int], *, spec: TokenizerSpec) -> None:
    numbers = set(vocabulary.values())
    added = json.loads(spec.pipeline).get("added_tokens") or []
    fault = ""
    if max(numbers, default=0) > MAX_ID_FACTOR * len(numbers) + MAX_SPARE_IDS:
        fault = f"the highest id is {max(numbers)}, though there are {len(numbers)} pieces"
    elif len(numbers) < len(vocabulary):
        fault = "two pieces share an id"
    elif not set(library.encode("", "").ids) <= numbers:
        fault = "the template adds an id that no piece has"
    elif any(vocabulary.get(token["content"]) != token["id"] for token in added):
        # The library would silently renumber such a token, and the model would read another embedding.
        fault = "an added token cannot have the id it states"
    if fault:
        raise UserError(fault, where=spec.where, remedy=FETCH_AGAIN)


def _find_roles(settings: Settings, vocabulary: dict[str, int]) -> dict[str, str]:
    """Return the token of each role (mask, separator ...), from the settings or else by the usual names."""
    usual = {role: [name, ROBERTA_NAMES[role]] for role, name in BERT_NAMES.items()}
    candidates = usual | {role: [name] for role in ROLES if (name := token_name(settings, role))}
    present = {role: [name for name in names if name in vocabulary] for role, names in candidates.items()}
    roles = {role: names[0] for role, names in present.items() if names}
    is_gpt = "sep_token" not in roles and GPT_NAMES["eos_token"] in vocabulary
    return (GPT_NAMES if is_gpt else {}) | roles


def _find_special(library: Library, roles: Mapping[str, str], settings: Settings) -> dict[str, int]:
    """Return the special tokens with their ids: declared, added by the template, or named in the settings."""
    added = library.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if token.special}
    pair = library.encode("", "")
    template = [number for number, text in zip(pair.ids, pair.sequence_ids, strict=True) if text is None]
    special |= {str(library.id_to_token(number)): number for number in template}
    names = [*roles.values(), *extra_special(settings)]
    numbers = {name: library.token_to_id(name) for name in names}
    return special | {name: number for name, number in numbers.items() if number is not None}


def _flag_special(pipeline: str, special: Mapping[str, int]) -> str:
    """Return the pipeline with exactly these tokens flagged as special."""
    parts = json.loads(pipeline)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added: dict[str, dict[str, Any]] = {token["content"]: token for token in parts["added_tokens"]}
    for content, number in special.items():
        added.setdefault(content, {"id": number, "content": content, **plain})
    # All tokens are kept, in the order of their ids: the library renumbers those outside the model.
    in_order = sorted(added.values(), key=lambda token: token["id"])
    parts["added_tokens"] = [token | {"special": token["content"] in special} for token in in_order]
    return json.dumps(parts)


# --- keeping special tokens out of ordinary text ---


def _leaks(library: Library, literal: str, number: int) -> bool:
    """True if the model spells a special token with ordinary characters."""
    # Checked on words after normalisation: lower-casing turns "<PAD>" in a text into "<pad>".
    texts = [around.replace("{}", literal) for around in ("{}", "a{}a", "1{}1", ".{}.", " {} ")]
    words = texts
    if library.pre_tokenizer is not None:
        words = [word for text in texts for word, _ in library.pre_tokenizer.pre_tokenize_str(text)]
    tokens = (token for word in words for token in library.model.tokenize(word))
    # Odd characters have the unknown id too, so the id alone proves nothing; a unigram token has its text.
    whole = isinstance(library.model, models.Unigram)
    return any(token.id == number and (not whole or token.value == literal) for token in tokens)


# ---- templates: read from the tokenizer itself, not from its files, and used to build every sequence


@dataclass(frozen=True, slots=True)
class Inserted:
    """Consecutive special tokens, and their segments."""

    ids: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Template:
    """Special tokens before, between and after the spans of text in a sequence."""

    lead: Inserted
    between: Inserted
    tail: Inserted
    text_segments: tuple[int, int]
    """Segments of the first span and of all later ones."""

    def specials(self, spans: int) -> int:
        """Return the number of special tokens in a sequence with this many spans."""
        return len(self.lead) + (spans - 1) * len(self.between) + len(self.tail)


@dataclass(frozen=True, slots=True)
class Templates:
    """Templates of BERT: [CLS] A [SEP], [CLS] A [SEP] B [SEP]; RoBERTa: <s> A </s>, <s> A </s></s> B </s>."""

    single: Template
    """Template of one segment; documents in it are divided by one separator (RoBERTa's FULL-SENTENCES)."""
    pair: Template


def read_templates(tokenizer: Tokenizer) -> Templates:
    """Read the templates of a tokenizer."""
    alone = tokenizer.encode(_SAMPLE)
    pair = tokenizer.encode_pair(_SAMPLE, _SAMPLE)
    text = _segment_of(alone, 0)
    separator = Inserted((tokenizer.sep_id,), (text,))
    return Templates(
        single=Template(_between(alone, -1, 0), separator, _between(alone, 0, 1), (text, text)),
        pair=Template(
            _between(pair, -1, 0),
            _between(pair, 0, 1),
            _between(pair, 1, 2),
            (_segment_of(pair, 0), _segment_of(pair, 1)),
        ),
    )


def join_pair(first: Encoded, second: Encoded, template: Template, *, limit: int | None = None) -> Encoded:
    """Join two texts encoded by `encode` as `encode_pair` would, truncated to the limit."""
    bounds = [
        (each.sequence.index(0), each.sequence.count(0)) if 0 in each.sequence else (0, 0)
        for each in (first, second)
    ]
    kept = [count for _, count in bounds]
    if limit is not None and sum(kept) + template.specials(2) > limit:
        kept = list(_longest_first(kept[0], kept[1], limit - template.specials(2)))
    joined = Encoded([], [], [], [], [])
    texts = zip((first, second), bounds, kept, template.text_segments, strict=True)
    for number, (encoded, (begin, _), count, segment) in enumerate(texts):
        _insert(joined, template.between if number else template.lead)
        joined.ids.extend(encoded.ids[begin : begin + count])
        joined.segments.extend([segment] * count)
        joined.offsets.extend(encoded.offsets[begin : begin + count])
        joined.sequence.extend([number] * count)
        joined.words.extend(encoded.words[begin : begin + count])
    _insert(joined, template.tail)
    return joined


def encode_ids(ids: Sequence[int], template: Template, *, prompt: Sequence[int] = ()) -> Encoded:
    """Return token ids after those of a prompt, like `encode` for a text; all offsets are 0.

    If the ids already begin and end with the template's special tokens, those are not repeated.
    """
    lead, tail = template.lead.ids, template.tail.ids
    end = len(ids) - len(tail)
    if len(lead) <= end and (*ids[: len(lead)], *ids[end:]) == (*lead, *tail):
        ids = ids[len(lead) : end]
    if {*lead, *tail}.issuperset(ids):
        ids, prompt = (), ()  # special tokens and a prompt alone are not a text
    encoded = Encoded([], [], [], [], [])
    _insert(encoded, template.lead)
    encoded.ids.extend([*prompt, *ids])
    count = len(prompt) + len(ids)
    encoded.segments.extend([template.text_segments[0]] * count)
    encoded.offsets.extend([(0, 0)] * count)
    encoded.sequence.extend([0] * count)
    encoded.words.extend([None] * count)
    _insert(encoded, template.tail)
    return encoded


def _insert(encoded: Encoded, inserted: Inserted) -> None:
    """Append special tokens."""
    encoded.ids.extend(inserted.ids)
    encoded.segments.extend(inserted.segments)
    encoded.offsets.extend([(0, 0)] * len(inserted))
    encoded.sequence.extend([-1] * len(inserted))
    encoded.words.extend([None] * len(inserted))


def _between(encoded: Encoded, before: int, after: int) -> Inserted:
    """Return the special tokens after the text numbered `before` and before the one numbered `after`."""
    first = max((row for row, text in enumerate(encoded.sequence) if 0 <= text <= before), default=-1) + 1
    last = min((row for row, text in enumerate(encoded.sequence) if text >= after), default=len(encoded))
    return Inserted(tuple(encoded.ids[first:last]), tuple(encoded.segments[first:last]))


def _segment_of(encoded: Encoded, text: int) -> int:
    return encoded.segments[encoded.sequence.index(text)]
