"""Tokenizer pipelines and their files: tokenizer.json, or vocab.txt, or vocab.json with merges.txt."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_folder, read_json, read_text, write_json, write_text

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
ROLES = tuple(ROBERTA_NAMES)
Case = Literal["uncased", "cased"]


INSIDE = "##"  # BERT's mark of a piece that continues a word


USUAL_WORD_CHARACTERS = 100  # transformers' limit; Google's own tokenization.py says 200
FETCH_AGAIN = "fetch the tokenizer files again"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model"),
)
"""All that a save replaces: an earlier tokenizer's files would speak against this one's."""


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """What a tokenizer is built from: the text of a tokenizer.json, and its settings."""

    pipeline: str
    settings: Settings
    where: str = "tokenizer"


def read_spec(folder: Path, *, max_word_characters: int) -> TokenizerSpec:
    """The tokenizer kept in a folder, in the first of the three formats found there."""
    if not folder.is_dir():
        raise UserError("is not a folder", where=str(folder), remedy="give the folder of the tokenizer files")
    settings = _read_if_present(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # newer files say everything here; the map is a leftover then
        settings |= _read_if_present(folder / "special_tokens_map.json")
    if (file := folder / "tokenizer.json").is_file():
        return TokenizerSpec(read_text(file, remedy=FETCH_AGAIN), settings, where=str(file))
    if (file := folder / "vocab.txt").is_file():
        return _from_vocab_txt(file, settings, max_word_characters=max_word_characters)
    if (file := folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_merges(file, settings)
    remedy = "put tokenizer.json, or vocab.txt, or vocab.json with merges.txt there"
    if (folder / "spiece.model").is_file():
        remedy = "spiece.model alone is not read: put the tokenizer.json of the same model there"
    raise UserError("holds no tokenizer", where=str(folder), remedy=remedy)


def write_spec(spec: TokenizerSpec, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, for WordPiece, vocab.txt."""
    library = open_pipeline(spec)
    with atomic_folder(folder, replaces=TOKENIZER_FILES) as temporary:
        write_text(temporary / "tokenizer.json", library.to_str(pretty=True) + "\n")
        write_json(temporary / "tokenizer_config.json", _complete_settings(library, spec.settings))
        if lines := _vocab_txt_lines(library):
            write_text(temporary / "vocab.txt", "".join(f"{line}\n" for line in lines))


def open_pipeline(spec: TokenizerSpec) -> Library:
    """The library's tokenizer, without the truncation and padding that a tokenizer.json may carry."""
    try:
        library = Library.from_str(spec.pipeline)
        library.no_truncation()
        library.no_padding()
        # A fault that shows only at an unknown character should stop us now, not hours into a corpus.
        for texts in (("a \N{CUNEIFORM SIGN A}",), ("a", "\N{CUNEIFORM SIGN A}")):
            library.encode(*texts)
    except BaseException as error:  # the library raises bare Exception, and panics that are not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"is no usable tokenizer ({error})", where=spec.where, remedy=FETCH_AGAIN) from error
    return library


def bert_normalizer(case: Case) -> normalizers.Normalizer:
    """BERT's normaliser: no control characters, CJK characters apart, uncased without case and accents."""
    return normalizers.BertNormalizer(lowercase=case == "uncased", strip_accents=None)


def bert_pipeline(vocabulary: dict[str, int], *, case: Case) -> Library:
    """The pipeline of bert-base-uncased or bert-base-cased over a WordPiece vocabulary."""
    settings = BERT_NAMES | {"do_lower_case": case == "uncased"}
    return _wordpiece(vocabulary, settings, max_word_characters=USUAL_WORD_CHARACTERS)


def roberta_pipeline(vocabulary: dict[str, int], *, merges: list[tuple[str, str]]) -> Library:
    """The pipeline of roberta-base over a vocabulary of byte-level BPE."""
    # The mask takes the space before it along, as a word of RoBERTa does.
    mask = {"content": ROBERTA_NAMES["mask_token"], "lstrip": True}
    return _byte_bpe(vocabulary, merges, settings=ROBERTA_NAMES | {"mask_token": mask})


def token_name(settings: Settings, role: str) -> str | None:
    """The token that plays a role; files write it as a string or as {"content": ...}."""
    entry = settings.get(role)
    name = entry.get("content") if isinstance(entry, dict) else entry
    if name is not None and not isinstance(name, str):
        raise UserError(
            f"{role} is {name!r}", where="tokenizer_config.json", remedy="write the token as a string"
        )
    return name or None


def _read_if_present(file: Path) -> Settings:
    return read_json(file, remedy=FETCH_AGAIN) if file.is_file() else {}


# --- vocab.txt: WordPiece, as published with BERT ---


def _from_vocab_txt(file: Path, settings: Settings, *, max_word_characters: int) -> TokenizerSpec:
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(_read_lines(file), start=1):
        # White space after a piece is no part of it. A line of nothing else (published vocabularies hold
        # U+2028 and the like) can match no word but must keep its place, for ids are line numbers.
        piece = line.rstrip() or line
        if not piece or piece in vocabulary:
            fault = f"repeats the piece of line {vocabulary[piece] + 1}" if piece else "is empty"
            remedy = "restore the file; ids are line numbers"
            raise UserError(f"the line {fault}", where=f"{file}:{number}", remedy=remedy)
        vocabulary[piece] = number - 1
    settings = _name_special(settings, BERT_NAMES, vocabulary=vocabulary, file=file)
    if settings.get("do_lower_case") is None:
        # Cased if lower-casing would change any piece but special and [unused] ones: nothing else in the file
        # tells, and lower-casing for a cased vocabulary silently loses every name. str.isupper would not do:
        # the uncased vocabulary of BERT holds the letter ℝ, which has no lower case.
        ordinary = (piece for piece in vocabulary if not re.fullmatch(r"\[.+\]|<.+>", piece))
        settings["do_lower_case"] = all(piece == piece.lower() for piece in ordinary)
    if max_word_characters != USUAL_WORD_CHARACTERS:  # transformers' BertTokenizer knows only 100
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    library = _wordpiece(vocabulary, settings, max_word_characters=max_word_characters)
    return TokenizerSpec(library.to_str(), settings, where=str(file))


def _wordpiece(vocabulary: dict[str, int], settings: Settings, *, max_word_characters: int) -> Library:
    unknown, cls, sep = (str(token_name(settings, role)) for role in ("unk_token", "cls_token", "sep_token"))
    model = models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=max_word_characters)
    library = Library(model)
    library.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=_switch(settings, "tokenize_chinese_chars") is not False,
        strip_accents=_switch(settings, "strip_accents"),  # null: as lower-casing goes
        lowercase=_switch(settings, "do_lower_case") is not False,
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=INSIDE)
    library.post_processor = processors.TemplateProcessing(
        single=[f"{cls}:0", "$A:0", f"{sep}:0"],
        pair=[f"{cls}:0", "$A:0", f"{sep}:0", "$B:1", f"{sep}:1"],
        special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
    )
    _add_tokens(library, settings)
    return library


# --- vocab.json with merges.txt: byte-level BPE, as published with RoBERTa ---


def _from_merges(file: Path, settings: Settings) -> TokenizerSpec:
    vocabulary = read_json(file, remedy=FETCH_AGAIN)
    for piece, number in vocabulary.items():
        if type(number) is not int:
            raise UserError(f"the id of {piece!r} is {number!r}", where=str(file), remedy=FETCH_AGAIN)
    missing = set(range(max(len(vocabulary), 1))) - set(vocabulary.values())
    if missing:
        fault = f"no piece has id {min(missing)}, though there are {len(vocabulary)} pieces"
        raise UserError(fault, where=str(file), remedy=FETCH_AGAIN)
    settings = _name_special(settings, ROBERTA_NAMES, vocabulary=vocabulary, file=file)
    # The mask takes the space before it along, as a word of RoBERTa does ("Ġword").
    if isinstance(settings["mask_token"], str):
        settings["mask_token"] = {"content": settings["mask_token"], "lstrip": True}
    merges, merges_file = [], file.with_name("merges.txt")
    for number, line in enumerate(_read_lines(merges_file), start=1):
        if line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            fault = f"{line[:60]!r} does not join two pieces of vocab.json into a third"
            raise UserError(fault, where=f"{merges_file}:{number}", remedy=FETCH_AGAIN)
        merges.append((left, right))
    return TokenizerSpec(_byte_bpe(vocabulary, merges, settings=settings).to_str(), settings, where=str(file))


def _byte_bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], *, settings: Settings) -> Library:
    cls, sep = (str(token_name(settings, role)) for role in ("cls_token", "sep_token"))
    prefix_space = _switch(settings, "add_prefix_space") is True
    trim_offsets = _switch(settings, "trim_offsets") is not False
    library = Library(models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.RobertaProcessing(
        (sep, vocabulary[sep]),
        (cls, vocabulary[cls]),
        trim_offsets=trim_offsets,
        add_prefix_space=prefix_space,
    )
    _add_tokens(library, settings)
    return library


# --- shared by the two older formats ---


def _read_lines(file: Path) -> list[str]:
    # Cut at line feeds alone: a piece may hold a carriage return, U+2028 or any other separator.
    try:
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"is no UTF-8 text ({error})", where=str(file), remedy=FETCH_AGAIN) from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1]:  # editors leave blank lines at the end; they number nothing
        lines.pop()
    return lines


def _name_special(
    settings: Settings, usual: dict[str, str], *, vocabulary: dict[str, int], file: Path
) -> Settings:
    named = settings | {role: settings.get(role) or name for role, name in usual.items()}
    for role in ROLES:
        name = token_name(named, role)
        if name is not None and name not in vocabulary:
            remedy = f"restore the file, or name this vocabulary's {role} in tokenizer_config.json"
            raise UserError(f"has no piece {name!r}", where=str(file), remedy=remedy)
    return named


def _switch(settings: Settings, name: str) -> bool | None:
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}", where="tokenizer_config.json", remedy="write true or false")
    return value


def _add_tokens(library: Library, settings: Settings) -> None:
    """Declare the special tokens, and whatever tokenizer_config.json adds to the vocabulary."""
    entries = settings.get("added_tokens_decoder") or {}
    try:
        if not isinstance(entries, dict):
            raise TypeError
        # In the order of their ids: the library numbers those outside the model as they come.
        listed = [dict(entries[number]) for number in sorted(entries, key=int)]
    except (TypeError, ValueError, IndexError) as error:
        what = "added_tokens_decoder is malformed"
        remedy = "write it as {id: {content: ...}}, or leave it out"
        raise UserError(what, where="tokenizer_config.json", remedy=remedy) from error
    special = {name: settings[role] for role in ROLES if (name := token_name(settings, role))}
    added = {name: entry for entry in listed if (name := token_name(entry, "content"))}
    for name, entry in (special | added).items():
        flags = dict(entry) if isinstance(entry, dict) else {}
        flags["special"] = name in special or flags.get("special") is True
        known = ("special", "lstrip", "rstrip", "single_word", "normalized")
        library.add_tokens(
            [AddedToken(name, **{flag: flags[flag] is True for flag in known if flag in flags})]
        )


# --- what is written beside tokenizer.json ---


def _complete_settings(library: Library, settings: Settings) -> Settings:
    """The settings, with what AutoTokenizer of transformers needs to reopen the tokenizer."""
    names = {role: name for role in ROLES if (name := token_name(settings, role))}
    pipeline = json.loads(library.to_str())
    model = pipeline["model"]
    class_settings: Settings = {"tokenizer_class": "PreTrainedTokenizerFast"}  # opens tokenizer.json as it is
    # transformers 5 rebuilds its BertTokenizer and RobertaTokenizer from the settings and the vocabulary, and
    # passes over the rest of tokenizer.json: such a class is named only if that gives this very pipeline.
    rebuild = {"WordPiece": _rebuilt_as_bert, "BPE": _rebuilt_as_roberta}.get(model["type"])
    if rebuild and BERT_NAMES.keys() <= names.keys() and set(names.values()) <= model["vocab"].keys():
        rebuilt_settings, rebuilt = rebuild(pipeline, names)
        if _parts(library) == _parts(rebuilt):
            class_settings = rebuilt_settings
    return class_settings | settings | names


def _rebuilt_as_bert(pipeline: Settings, names: Settings) -> tuple[Settings, Library]:
    normalizer = pipeline["normalizer"] or {}
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": normalizer.get("lowercase"),
        "strip_accents": normalizer.get("strip_accents"),
        "tokenize_chinese_chars": normalizer.get("handle_chinese_chars"),
    }
    vocabulary = pipeline["model"]["vocab"]
    return settings, _wordpiece(vocabulary, settings | names, max_word_characters=USUAL_WORD_CHARACTERS)


def _rebuilt_as_roberta(pipeline: Settings, names: Settings) -> tuple[Settings, Library]:
    processor = pipeline["post_processor"] or {}
    settings = {
        "tokenizer_class": "RobertaTokenizer",
        "add_prefix_space": processor.get("add_prefix_space"),
        "trim_offsets": processor.get("trim_offsets"),
    }
    merges = [(left, right) for left, right in pipeline["model"]["merges"]]
    return settings, _byte_bpe(pipeline["model"]["vocab"], merges, settings=settings | names)


def _parts(library: Library) -> Settings:
    pipeline: Settings = json.loads(library.to_str())
    pipeline["model"] = {
        name: value or None for name, value in pipeline["model"].items()
    }  # "" is as good as null
    return {name: part for name, part in pipeline.items() if name != "added_tokens"}


def _vocab_txt_lines(library: Library) -> list[str]:
    """The pieces by id, or nothing where vocab.txt could not say the same."""
    if not isinstance(library.model, models.WordPiece):
        return []
    vocabulary = library.get_vocab(with_added_tokens=False)
    pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])
    gapless = [vocabulary[piece] for piece in pieces] == list(range(len(pieces)))
    readable = all(piece == (piece.rstrip() or piece) and not re.search("[\r\n]", piece) for piece in pieces)
    return pieces if gapless and readable and "" not in vocabulary else []
