"""Text to token ids and back, over the `tokenizers` library: WordPiece, byte-level BPE, unigram.

Text is data: a special token written in a text is ordinary characters, unless the caller names it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from bertsmith.ground.errors import UserError
from bertsmith.text.tokenizer_files import (
    BERT_NAMES,
    FETCH_AGAIN,
    ROBERTA_NAMES,
    ROLES,
    USUAL_LONGEST_WORD,
    Blueprint,
    Settings,
    open_pipeline,
    read_blueprint,
    token_name,
    write_blueprint,
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One text, or a pair, as tokens: the four lists run in parallel."""

    ids: list[int]
    segments: list[int]
    offsets: list[tuple[int, int]]  # in code points of the original string of the token's own sequence
    sequence: list[int]  # 0 first text, 1 second text, -1 a special token of the template

    def __len__(self) -> int:
        return len(self.ids)


def truncate_longest_first(encoded: Encoded, limit: int) -> Encoded:
    """At most `limit` tokens: the longer text, on a tie the second, loses its last token until they fit."""
    # Google's rule. The library's own truncation hands the odd token to the other text in some cases.
    first, second, room = _lengths(encoded, limit)
    if room < 0:
        raise UserError(f"{limit} tokens cannot hold the special tokens", remedy="allow longer sequences")
    kept_first = min(first, max(room - second, (room + 1) // 2))
    return _keep(encoded, first=kept_first, second=min(second, room - kept_first))


def truncate_second(encoded: Encoded, limit: int) -> Encoded:
    """At most `limit` tokens, the second text losing its last ones."""
    first, second, room = _lengths(encoded, limit)
    if room < first:
        what = f"the first text has {first} tokens and {limit} cannot hold them with the special ones"
        raise UserError(what, remedy="shorten the first text or allow longer sequences")
    return _keep(encoded, first=first, second=min(second, room - first))


class Tokenizer:
    """Encodes and decodes text; made by `load` or `from_library`, never changed after, picklable."""

    def __init__(self, blueprint: Blueprint) -> None:
        library = open_pipeline(blueprint)
        vocabulary = library.get_vocab()
        _check_ids(library, vocabulary, blueprint=blueprint)
        self._roles = _find_roles(blueprint.settings, vocabulary)
        self._special = _find_special(library, [*self._roles.values(), *_extra_special(blueprint.settings)])
        pipeline = _flag_special(library.to_str(), self._special)
        self._blueprint = Blueprint(pipeline, self._roles | blueprint.settings, blueprint.where)
        self._size = max(vocabulary.values()) + 1
        self._gaps = tuple(sorted(set(range(self._size)) - set(vocabulary.values())))
        self._closed = self._make_reader(frozenset())
        self._readers = {frozenset[str](): self._closed}

    @classmethod
    def load(cls, folder: Path | str, *, longest_word: int = USUAL_LONGEST_WORD) -> "Tokenizer":
        """The tokenizer of a model folder; longer words than `longest_word` are unknown (vocab.txt only)."""
        return cls(read_blueprint(Path(folder).expanduser(), longest_word=longest_word))

    @classmethod
    def from_library(cls, library: Library, *, settings: Mapping[str, Any] | None = None) -> "Tokenizer":
        """A tokenizer over one made with the library; settings are those of a tokenizer_config.json."""
        return cls(Blueprint(library.to_str(), dict(settings or {})))

    def save(self, folder: Path | str) -> None:
        """Write the files that `load` here and AutoTokenizer of transformers open."""
        write_blueprint(self._blueprint, Path(folder).expanduser())

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[Blueprint]]:
        # Not the library's own pickle, which forgets that special tokens are closed.
        return Tokenizer, (self._blueprint,)

    def encode(self, text: str, *, allow_special: tuple[str, ...] = ()) -> Encoded:
        """One text between its template tokens; only special tokens named here are read out of the text."""
        _refuse_lone_surrogates(text, where="text")
        return _encoded(self._reader(allow_special).encode(text))

    def encode_pair(self, first: str, second: str, *, allow_special: tuple[str, ...] = ()) -> Encoded:
        """Two texts in the template for pairs."""
        _refuse_lone_surrogates(first, where="first text")
        _refuse_lone_surrogates(second, where="second text")
        return _encoded(self._reader(allow_special).encode(first, second))

    def encode_many(
        self, texts: Iterable[str | tuple[str, str]], *, allow_special: tuple[str, ...] = (), first: int = 0
    ) -> list[Encoded]:
        """Many texts and pairs, as one by one but on all cores; complaints number them from `first`."""
        if isinstance(texts, str):
            raise UserError("a single text was given where several are expected", remedy='write ["..."]')
        listed = list(texts)
        for number, text in enumerate(listed, start=first):
            _refuse_unless_text_or_pair(text, where=f"text {number}")
        return [_encoded(encoding) for encoding in self._reader(allow_special).encode_batch(listed)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids, without the special tokens."""
        numbers = [int(number) for number in ids]
        for number in numbers:
            self.token(number)
        return self._closed.decode(numbers)

    def token(self, number: int) -> str:
        """The token with this id."""
        token = self._closed.id_to_token(number) if 0 <= number < self._size else None
        if token is None:
            raise UserError(f"no token has id {number}", remedy=f"ids run from 0 to {self._size - 1}")
        return token

    def id(self, token: str) -> int:
        """The id of this token."""
        number = self._closed.token_to_id(token)
        if number is None:
            raise UserError(f"{token!r} is not in the vocabulary", remedy="encode it as text instead")
        return number

    def words_of(self, text: str) -> list[str]:
        """The normalised words that a text is cut into before they become pieces."""
        library = self._closed
        plain = library.normalizer.normalize_str(text) if library.normalizer else text
        parts = library.pre_tokenizer.pre_tokenize_str(plain) if library.pre_tokenizer else [(plain, (0, 0))]
        return [part for part, _ in parts]

    @property
    def closed(self) -> Library:
        """The library's tokenizer that reads no special token out of a text."""
        return self._closed

    @property
    def blueprint(self) -> Blueprint:
        """What the tokenizer is built from."""
        return self._blueprint

    @property
    def vocabulary_size(self) -> int:
        """How many rows an embedding needs: the highest id, added tokens included, plus one."""
        return self._size

    @property
    def gaps(self) -> tuple[int, ...]:
        """The ids below the highest that no token has."""
        return self._gaps

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that ordinary text never yields, and the unknown token's."""
        return frozenset(self._special.values())

    @property
    def mask_token(self) -> str:
        """The mask, as it is written where `allow_special` admits it."""
        return self._role("mask_token")

    @property
    def mask_id(self) -> int:
        """The id of the mask."""
        return self.id(self._role("mask_token"))

    @property
    def unknown_id(self) -> int:
        """The id of the unknown token."""
        return self.id(self._role("unk_token"))

    @property
    def pad_id(self) -> int:
        """The id of the padding token."""
        return self.id(self._role("pad_token"))

    @property
    def cls_id(self) -> int:
        """The id of the token before the first text."""
        return self.id(self._role("cls_token"))

    @property
    def sep_id(self) -> int:
        """The id of the token after each text."""
        return self.id(self._role("sep_token"))

    def _role(self, role: str) -> str:
        if role not in self._roles:
            remedy = f"name its {role} in tokenizer_config.json"
            raise UserError(f"this tokenizer has no {role}", where=self._blueprint.where, remedy=remedy)
        return self._roles[role]

    def _reader(self, allow_special: tuple[str, ...]) -> Library:
        allowed = frozenset((allow_special,) if isinstance(allow_special, str) else allow_special)
        if allowed not in self._readers:  # two threads may both build it: the same thing twice
            self._readers[allowed] = self._make_reader(allowed)
        return self._readers[allowed]

    def _make_reader(self, allowed: frozenset[str]) -> Library:
        """The library's tokenizer that reads the allowed special tokens out of a text, and no others."""
        if strangers := allowed - self._special.keys():
            remedy = f"its special tokens are {' '.join(self._special)}"
            raise UserError(f"{min(strangers)!r} is no special token of this tokenizer", remedy=remedy)
        closed = {literal: number for literal, number in self._special.items() if literal not in allowed}
        pipeline = _flag_special(self._blueprint.pipeline, closed)
        library = open_pipeline(Blueprint(pipeline, {}, self._blueprint.where))
        library.encode_special_tokens = True
        if not isinstance(library.model, models.Unigram):
            closed.pop(self._roles.get("unk_token", ""), None)  # text may well be unknown
        _seal(library, closed, where=self._blueprint.where)
        return library


def _lengths(encoded: Encoded, limit: int) -> tuple[int, int, int]:
    """Tokens of the first text, of the second, and the room that the template leaves for both."""
    first, second = encoded.sequence.count(0), encoded.sequence.count(1)
    return first, second, limit - (len(encoded) - first - second)


def _keep(encoded: Encoded, *, first: int, second: int) -> Encoded:
    """The template tokens and this many leading tokens of each text."""
    rows = [row for row, sequence in enumerate(encoded.sequence) if sequence < 0]
    for sequence, kept in enumerate((first, second)):
        rows += [row for row, number in enumerate(encoded.sequence) if number == sequence][:kept]
    rows.sort()
    return Encoded(
        ids=[encoded.ids[row] for row in rows],
        segments=[encoded.segments[row] for row in rows],
        offsets=[encoded.offsets[row] for row in rows],
        sequence=[encoded.sequence[row] for row in rows],
    )


def _encoded(encoding: Encoding) -> Encoded:
    sequence = [-1 if number is None else number for number in encoding.sequence_ids]
    return Encoded(encoding.ids, encoding.type_ids, encoding.offsets, sequence)


def _refuse_unless_text_or_pair(text: object, *, where: str) -> None:
    parts = text if isinstance(text, tuple) and len(text) == 2 else (text,)
    for part in parts:
        _refuse_lone_surrogates(part, where=where)


def _refuse_lone_surrogates(text: object, *, where: str) -> None:
    if not isinstance(text, str):
        what = f"is {type(text).__name__}, neither a text nor a pair"
        raise UserError(what, where=where, remedy="a text is a str, a pair a tuple of two")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"character {error.start} is half a surrogate pair ({text[error.start]!a})"
        remedy = "decode the source as UTF-8, or replace the character by U+FFFD"
        raise UserError(what, where=where, remedy=remedy) from error


# --- which tokens are special ---


def _check_ids(library: Library, vocabulary: dict[str, int], *, blueprint: Blueprint) -> None:
    numbers = set(vocabulary.values())
    added = json.loads(blueprint.pipeline).get("added_tokens") or []
    fault = ""
    if len(numbers) < len(vocabulary):
        fault = "two pieces share an id"
    elif not set(library.encode("", "").ids) <= numbers:
        fault = "the template adds an id that no piece has"
    elif any(vocabulary.get(token["content"]) != token["id"] for token in added):
        # The library quietly numbers such a token afresh, and the model would read another one's embedding.
        fault = "an added token cannot have the id it states"
    if fault:
        raise UserError(fault, where=blueprint.where, remedy=FETCH_AGAIN)


def _find_roles(settings: Settings, vocabulary: dict[str, int]) -> dict[str, str]:
    """Which token is the mask, the separator and so on: as the settings say, else by the usual names."""
    usual = {role: [name, ROBERTA_NAMES[role]] for role, name in BERT_NAMES.items()}
    candidates = usual | {role: [name] for role in ROLES if (name := token_name(settings, role))}
    present = {role: [name for name in names if name in vocabulary] for role, names in candidates.items()}
    return {role: names[0] for role, names in present.items() if names}


def _extra_special(settings: Settings) -> list[str]:
    names = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entries = settings.get(key) or []
        if not isinstance(entries, list | dict):
            raise UserError(
                f"{key} is {entries!r}", where="tokenizer_config.json", remedy="write a list of tokens"
            )
        tokens = entries.values() if isinstance(entries, dict) else entries
        names += [name for token in tokens if (name := token_name({key: token}, key))]
    return names


def _find_special(library: Library, names: list[str]) -> dict[str, int]:
    """The special tokens and their ids: declared so, added by the template, or named as such."""
    added = library.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if token.special}
    pair = library.encode("", "")
    template = [number for number, text in zip(pair.ids, pair.sequence_ids, strict=True) if text is None]
    special |= {str(library.id_to_token(number)): number for number in template}
    numbers = {name: library.token_to_id(name) for name in names}
    return special | {name: number for name, number in numbers.items() if number is not None}


def _flag_special(pipeline: str, special: Mapping[str, int]) -> str:
    """The pipeline in which exactly these tokens are special."""
    parts = json.loads(pipeline)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added: dict[str, dict[str, Any]] = {token["content"]: token for token in parts["added_tokens"]}
    for content, number in special.items():
        added.setdefault(content, {"id": number, "content": content, **plain})
    # None removed and in the order of their ids: the library numbers those outside the model afresh.
    in_order = sorted(added.values(), key=lambda token: token["id"])
    parts["added_tokens"] = [token | {"special": token["content"] in special} for token in in_order]
    return json.dumps(parts)


# --- keeping special tokens out of ordinary text ---


def _seal(library: Library, literals: Mapping[str, int], *, where: str) -> None:
    """Keep the model from spelling these special tokens out of ordinary characters.

    With encode_special_tokens the library passes the literal on as text, but a model whose own vocabulary
    holds it may still pick it: ALBERT's unigram pieces "[CLS]" and "<pad>" have the best score there is.
    """
    leaks = [literal for literal, number in literals.items() if _leaks(library, literal, number)]
    if not leaks:
        return
    # No piece crosses a cut, so a cut after the first character of each literal is enough.
    starts = "|".join(f"{re.escape(literal[0])}(?={re.escape(literal[1:])})" for literal in leaks)
    cut = pre_tokenizers.Split(Regex(starts), behavior="isolated")
    original = [library.pre_tokenizer] if library.pre_tokenizer else []
    library.pre_tokenizer = pre_tokenizers.Sequence([*original, cut])
    for literal in leaks:
        if _leaks(library, literal, literals[literal]):
            raise UserError(f"cannot keep the special token {literal!r} apart from text", where=where)


def _leaks(library: Library, literal: str, number: int) -> bool:
    # Asked of words, after normalisation: with lower-casing "<PAD>" in a text comes out as "<pad>".
    surroundings = ("{}", "a{}a", "1{}1", ".{}.", " {} ")
    words = (word for text in surroundings for word in _words(library, text.replace("{}", literal)))
    tokens = (token for word in words for token in library.model.tokenize(word))
    # The unknown id alone tells nothing, odd characters have it too; but a unigram token says its text.
    whole = isinstance(library.model, models.Unigram)
    return any(token.id == number and (not whole or token.value == literal) for token in tokens)


def _words(library: Library, text: str) -> list[str]:
    if library.pre_tokenizer is None:
        return [text]
    return [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)]
