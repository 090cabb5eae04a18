"""Tokenizer settings: roles of special tokens, added tokens, switches of the normaliser."""

import logging
from collections.abc import Container
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json

Settings = dict[str, Any]  # the contents of a tokenizer_config.json

BERT_NAMES = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
ROBERTA_NAMES = {
    "unk_token": "<unk>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
    "bos_token": "<s>",
    "eos_token": "</s>",
}
GPT_NAMES = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
"""GPT-2's only special token, between documents. GPT-2 lacks a template, a mask and padding."""
ROLES = tuple(ROBERTA_NAMES)
DISPENSABLE_ROLES = ("pad_token", "mask_token")
"""Roles needed only for training and for filling masks."""
FETCH_AGAIN = "download the tokenizer files again"
GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "ErnieTokenizer")
SENTENCEPIECE_CLASSES = ("AlbertTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer", "DebertaV2Tokenizer")
KNOWN_CLASSES = (*GENERIC_CLASSES, *BERT_CLASSES, "RobertaTokenizer", "GPT2Tokenizer", *SENTENCEPIECE_CLASSES)
ADDED_TOKEN_PARTS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
NO_LIMIT = 10**9
"""Limit above which a length is ignored: files write a number of 30 digits for "no limit"."""

log = logging.getLogger("bertsmith")


def read_settings(folder: Path) -> Settings:
    """Read tokenizer_config.json, or the three files that newer versions merged into it."""
    settings = _read_if_present(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # newer files have everything here; the others are leftovers
        settings |= _read_if_present(folder / "special_tokens_map.json")
        if added := _read_if_present(file := folder / "added_tokens.json"):
            settings["added_tokens_decoder"] = _as_decoder(added, settings, file=file)
    name = settings.get("tokenizer_class")
    if isinstance(name, str) and name.removesuffix("Fast") not in KNOWN_CLASSES:
        log.warning(
            "%s: bertsmith does not support the tokenizer_class %s: the vocabulary is read unchanged,"
            " and texts may get other tokens than in the model's training",
            folder / "tokenizer_config.json",
            name,
        )
    return settings


def _read_if_present(file: Path) -> Settings:
    return read_json(file, remedy=FETCH_AGAIN) if file.is_file() else {}


def token_name(settings: Settings, role: str) -> str | None:
    """Return the token of a role, which files write as a string or as {"content": ...}, or None."""
    entry = settings.get(role)
    name = entry.get("content") if isinstance(entry, dict) else entry
    if name is not None and not isinstance(name, str):
        raise UserError(
            f"{role} is {name!r}", where="tokenizer_config.json", remedy="write the token as a string"
        )
    return name or None


def max_length(settings: Settings) -> int | None:
    """Return the longest text in tokens that the settings name, or None."""
    length = settings.get("model_max_length")
    if isinstance(length, bool) or not isinstance(length, int | float):
        return None
    return int(length) if 0 < length < NO_LIMIT else None


def extra_special(settings: Settings) -> list[str]:
    """Return the special tokens without a role; the second key is transformers 5's."""
    names: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entries = settings.get(key) or []
        if not isinstance(entries, list | dict):
            what, remedy = f"{key} is {entries!r}", "write a list of tokens"
            raise UserError(what, where="tokenizer_config.json", remedy=remedy)
        tokens = entries.values() if isinstance(entries, dict) else entries
        names += [name for token in tokens if (name := token_name({key: token}, key))]
    return names


def switch(settings: Settings, name: str) -> bool | None:
    """Return the value of a boolean key, or None if it is missing."""
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}", where="tokenizer_config.json", remedy="write true or false")
    return value


def _as_decoder(added: Settings, settings: Settings, *, file: Path) -> Settings:
    """Convert an added_tokens.json to an added_tokens_decoder."""
    special = {name for role in ROLES if (name := token_name(settings, role))} | set(extra_special(settings))
    decoder: Settings = {}
    for token, number in added.items():
        if type(number) is not int or number < 0 or str(number) in decoder:
            what = f"the id of {token!r} is {number!r}"
            raise UserError(what, where=str(file), remedy="give each token a different id")
        # As transformers reads the file: ordinary tokens are matched in the normalised text.
        flags = {"special": token in special, "normalized": token not in special}
        decoder[str(number)] = {"content": token, **flags}
    return decoder


def name_special(
    settings: Settings, usual: dict[str, str], *, vocabulary: Container[str], file: Path
) -> Settings:
    """Fill in the usual special tokens for roles that the settings omit; the vocabulary must have them."""
    named = settings | {role: settings.get(role) or name for role, name in usual.items()}
    added = {token_name(entry, "content") for entry in _added_tokens(settings).values()}
    for role in ROLES:
        name = token_name(named, role)
        if name is None or name in vocabulary or name in added:
            continue
        if role in DISPENSABLE_ROLES and name == usual.get(role):
            del named[role]
        else:
            remedy = f"restore the file, or name this vocabulary's {role} in tokenizer_config.json"
            raise UserError(f"lacks the piece {name!r}", where=str(file), remedy=remedy)
    return named


def add_roles(library: Library, settings: Settings) -> None:
    """Declare the tokens that have a role as special."""
    declared = {token.content for token in library.get_added_tokens_decoder().values()}
    for role in ROLES:
        if (name := token_name(settings, role)) and name not in declared:
            entry = settings[role] if isinstance(settings[role], dict) else {}
            library.add_tokens([_added_token(name, entry | {"special": True})])


def add_tokens(library: Library, settings: Settings, *, where: str) -> None:
    """Add the tokens that the settings list but the pipeline lacks, each with its id in the settings."""
    declared = {token.content for token in library.get_added_tokens_decoder().values()}
    roles = {token_name(settings, role) for role in ROLES}
    for number, entry in _added_tokens(settings).items():
        name = token_name(entry, "content")
        if name is None or name in declared:
            continue
        is_special = name in roles or entry.get("special") is True
        library.add_tokens([_added_token(name, entry | {"special": is_special})])
        if (found := library.token_to_id(name)) != number:
            what = f"the added token {name!r} would get id {found}, not {number}"
            remedy = "number added tokens from the end of the vocabulary on, or correct its lines"
            raise UserError(what, where=where, remedy=remedy)


def _added_tokens(settings: Settings) -> dict[int, Settings]:
    """Return the added tokens of the settings, sorted by id: the library numbers them in this order."""
    entries = settings.get("added_tokens_decoder") or {}
    try:
        if not isinstance(entries, dict):
            raise TypeError
        return {int(number): dict(entries[number]) for number in sorted(entries, key=int)}
    except (TypeError, ValueError, IndexError) as error:
        what = "added_tokens_decoder is malformed"
        remedy = "write it as {id: {content: ...}}, or remove it"
        raise UserError(what, where="tokenizer_config.json", remedy=remedy) from error


def _added_token(name: str, flags: Settings) -> AddedToken:
    known = (flag for flag in ADDED_TOKEN_PARTS[1:] if flag in flags)
    return AddedToken(name, **{flag: flags[flag] is True for flag in known})
