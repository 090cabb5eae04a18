"""Tokenizer pipelines and their files: tokenizer.json, vocab.txt, vocab.json, SentencePiece models."""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bertsmith.core import files
from bertsmith.core.errors import UserError
from bertsmith.text.pipeline_checks import check_pipeline
from bertsmith.text.tokenizer_settings import (
    ADDED_TOKEN_PARTS,
    BERT_CLASSES,
    BERT_NAMES,
    FETCH_AGAIN,
    GPT_NAMES,
    ROBERTA_NAMES,
    ROLES,
    Settings,
    add_roles,
    add_tokens,
    max_length,
    name_special,
    read_settings,
    switch,
    token_name,
)
from bertsmith.text.unigram_pipeline import SENTENCEPIECE_FILES, read_sentencepiece

Case = Literal["uncased", "cased"]


INSIDE = "##"  # BERT's prefix of a piece that continues a word


log = logging.getLogger("bertsmith")

USUAL_WORD_CHARACTERS = 100  # the limit of transformers; that of Google's own tokenization.py is 200
BYTE_ORDER_MARK = "\ufeff"
SHOWN_LINES = 3
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", *SENTENCEPIECE_FILES),
)
"""All files that may affect the tokens of a text."""
NORMALIZER_SETTINGS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
"""A key of tokenizer_config.json -> the attribute of the BERT normaliser that it sets."""


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """Source of a tokenizer: the text of a tokenizer.json, and its settings."""

    pipeline: str
    settings: Settings
    where: str = "tokenizer"


def read_spec(folder: Path, *, max_word_characters: int) -> TokenizerSpec:
    """Read the tokenizer in a folder, from the first of the formats found there."""
    if not folder.is_dir():
        raise UserError("is not a folder", where=str(folder), remedy="give the folder of the tokenizer files")
    for name in TOKENIZER_FILES:
        files.check_regular(folder / name, remedy=FETCH_AGAIN)
    settings = read_settings(folder)
    if (file := folder / "tokenizer.json").is_file():
        pipeline = files.read_text(file, remedy=FETCH_AGAIN)
        check_pipeline(pipeline, where=str(file))
        return TokenizerSpec(pipeline, settings, where=str(file))
    if (file := folder / "vocab.txt").is_file():
        return _from_vocab_txt(file, settings, max_word_characters=max_word_characters)
    if (file := folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_merges(file, settings)
    for name in SENTENCEPIECE_FILES:
        if (file := folder / name).is_file():
            library, settings = read_sentencepiece(file, settings)
            return TokenizerSpec(library.to_str(), settings, where=str(file))
    remedy = "add tokenizer.json, vocab.txt, vocab.json with merges.txt, or spiece.model"
    raise UserError("does not contain a tokenizer", where=str(folder), remedy=remedy)


def write_spec(spec: TokenizerSpec, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; for WordPiece also vocab.txt and added_tokens.json.

    Other files in the folder are unchanged. Files of an earlier tokenizer are ignored: every reader prefers
    tokenizer.json, and takes added tokens and roles from tokenizer_config.json.
    """
    library = open_pipeline(spec)
    with files.atomic_folder(folder) as temporary:
        files.write_text(temporary / "tokenizer.json", library.to_str(pretty=True) + "\n")
        files.write_json(temporary / "tokenizer_config.json", _complete_settings(library, spec.settings))
        if lines := _vocab_txt_lines(library):
            files.write_text(temporary / "vocab.txt", "".join(f"{line}\n" for line in lines))
            known = library.get_vocab(with_added_tokens=False)
            added = {token: number for token, number in library.get_vocab().items() if token not in known}
            if added:
                in_order = sorted(added, key=lambda token: added[token])
                files.write_json(temporary / "added_tokens.json", {token: added[token] for token in in_order})


def open_pipeline(spec: TokenizerSpec) -> Library:
    """Return the library's tokenizer with the settings applied, without truncation and padding."""
    try:
        library = Library.from_str(spec.pipeline)
        _follow_settings(library, spec)
        library.no_truncation()
        library.no_padding()
        # An error that occurs only at an unknown character should be raised now, not hours into a corpus.
        for texts in (("a \N{CUNEIFORM SIGN A}",), ("a", "\N{CUNEIFORM SIGN A}")):
            library.encode(*texts)
    except BaseException as error:  # The library raises a bare Exception, or panics with a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"is not a usable tokenizer ({error})", where=spec.where, remedy=FETCH_AGAIN
        ) from error
    return library


def bert_normalizer(case: Case) -> normalizers.Normalizer:
    """Build BERT's normaliser: drop control characters, isolate CJK, uncased: drop case and accents."""
    return normalizers.BertNormalizer(lowercase=case == "uncased", strip_accents=None)


def bert_pipeline(vocabulary: dict[str, int], *, case: Case) -> Library:
    """Build the pipeline of bert-base-uncased or bert-base-cased over a WordPiece vocabulary."""
    settings = BERT_NAMES | {"do_lower_case": case == "uncased"}
    return _wordpiece(vocabulary, settings, max_word_characters=USUAL_WORD_CHARACTERS)


def roberta_pipeline(vocabulary: dict[str, int], *, merges: list[tuple[str, str]]) -> Library:
    """Build the pipeline of roberta-base over a vocabulary of byte-level BPE."""
    # The mask includes the space before it, like a word of RoBERTa.
    mask = {"content": ROBERTA_NAMES["mask_token"], "lstrip": True}
    return _byte_bpe(vocabulary, merges, settings=ROBERTA_NAMES | {"mask_token": mask})


# --- tokenizer.json: complete, but tokenizer_config.json may add to it or contradict it ---


def _follow_settings(library: Library, spec: TokenizerSpec) -> None:
    """Change a pipeline as transformers 5 does, which rebuilds its BertTokenizer from the settings."""
    settings, normalizer = spec.settings, library.normalizer
    name = str(settings.get("tokenizer_class") or BERT_CLASSES[0]).removesuffix("Fast")
    if name in BERT_CLASSES and isinstance(normalizer, normalizers.BertNormalizer):
        for key, attribute in NORMALIZER_SETTINGS.items():
            # Only the keys that the settings have: for others, the pipeline's value is intended.
            said, made = switch(settings, key), getattr(normalizer, attribute)
            made = normalizer.lowercase if made is None else made  # null: accents follow case
            if said is not None and said != made:
                what = f"tokenizer_config.json has {key} {said} and tokenizer.json {made}"
                log.warning("%s: %s: the former is used, as in transformers 5", spec.where, what)
                setattr(normalizer, attribute, said)
        library.normalizer = normalizer
    cut, longest = (library.truncation or {}).get("max_length"), max_length(settings)
    if cut and longest and cut != longest:
        what = f"tokenizer_config.json takes texts of {longest} tokens and tokenizer.json cuts them at {cut}"
        log.warning("%s: %s: the former is used, as in transformers 5", spec.where, what)
    add_tokens(library, settings, where=spec.where)


# --- vocab.txt: WordPiece, as published with BERT ---


def _from_vocab_txt(file: Path, settings: Settings, *, max_word_characters: int) -> TokenizerSpec:
    vocabulary = _numbered_lines(file)
    settings = name_special(settings, BERT_NAMES, vocabulary=vocabulary, file=file)
    if settings.get("do_lower_case") is None:
        # Cased if lower-casing would change any piece except special and [unused] ones. The file has no other
        # clue, and lower-casing for a cased vocabulary silently loses every name. str.isupper would not do:
        # BERT's uncased vocabulary has the letter ℝ, which has no lower-case form.
        ordinary = (piece for piece in vocabulary if not re.fullmatch(r"\[.+\]|<.+>", piece))
        settings["do_lower_case"] = all(piece == piece.lower() for piece in ordinary)
    if max_word_characters != USUAL_WORD_CHARACTERS:  # transformers' BertTokenizer supports only 100
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    library = _wordpiece(
        vocabulary, settings, max_word_characters=max_word_characters, where=str(file.parent)
    )
    return TokenizerSpec(library.to_str(), settings, where=str(file))


def _numbered_lines(file: Path) -> dict[str, int]:
    """Return the pieces with the numbers of their lines, which are their ids."""
    vocabulary: dict[str, int] = {}
    odd = []
    for number, line in enumerate(_read_lines(file)):
        # White space after a piece is not part of it. A line of only white space (published vocabularies have
        # U+2028 and the like) can match no word but must keep its id.
        piece = line.rstrip() or line
        if not piece:  # such a U+2028, lost in a conversion
            odd.append(f"line {number + 1} is empty")
            piece = f"[empty line {number + 1}]"
        elif piece in vocabulary:
            # The last of equal lines gets the piece, as in Google's loader and transformers. Placeholders for
            # the others leave no gaps in the ids, because the library numbers added tokens after them. Like
            # [unused0], they never match text.
            first = vocabulary.pop(piece)
            odd.append(f"line {number + 1} repeats line {first + 1}")
            vocabulary[f"[repeated line {first + 1}]"] = first
        vocabulary[piece] = number
    if odd:
        shown = "; ".join(odd[:SHOWN_LINES]) + ("; ..." if len(odd) > SHOWN_LINES else "")
        log.warning("%s: %s: read anyway, with line numbers as ids", file, shown)
    return vocabulary


def _wordpiece(
    vocabulary: dict[str, int], settings: Settings, *, max_word_characters: int, where: str = ""
) -> Library:
    unknown, cls, sep = (str(token_name(settings, role)) for role in ("unk_token", "cls_token", "sep_token"))
    model = models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=max_word_characters)
    library = Library(model)
    library.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=switch(settings, "tokenize_chinese_chars") is not False,
        strip_accents=switch(settings, "strip_accents"),  # null: the same as lowercase
        lowercase=switch(settings, "do_lower_case") is not False,
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=INSIDE)
    add_tokens(library, settings, where=where)
    add_roles(library, settings)
    library.post_processor = processors.TemplateProcessing(
        single=[f"{cls}:0", "$A:0", f"{sep}:0"],
        pair=[f"{cls}:0", "$A:0", f"{sep}:0", "$B:1", f"{sep}:1"],
        special_tokens=[(cls, library.token_to_id(cls)), (sep, library.token_to_id(sep))],
    )
    return library


# --- vocab.json with merges.txt: byte-level BPE, as published with GPT-2 and RoBERTa ---


def _from_merges(file: Path, settings: Settings) -> TokenizerSpec:
    vocabulary = files.read_json(file, remedy=FETCH_AGAIN)
    for piece, number in vocabulary.items():
        if type(number) is not int:
            raise UserError(f"the id of {piece!r} is {number!r}", where=str(file), remedy=FETCH_AGAIN)
    missing = set(range(max(len(vocabulary), 1))) - set(vocabulary.values())
    if missing:
        fault = f"no piece has id {min(missing)}, though there are {len(vocabulary)} pieces"
        raise UserError(fault, where=str(file), remedy=FETCH_AGAIN)
    is_gpt = GPT_NAMES["eos_token"] in vocabulary and ROBERTA_NAMES["eos_token"] not in vocabulary
    usual = GPT_NAMES if is_gpt else ROBERTA_NAMES
    settings = name_special(settings, usual, vocabulary=vocabulary, file=file)
    # The mask includes the space before it, like a word of RoBERTa ("Ġword").
    if isinstance(settings.get("mask_token"), str):
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
    library = _byte_bpe(vocabulary, merges, settings=settings, where=str(file.parent))
    return TokenizerSpec(library.to_str(), settings, where=str(file))


def _byte_bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], *, settings: Settings, where: str = ""
) -> Library:
    cls, sep = (token_name(settings, role) for role in ("cls_token", "sep_token"))
    prefix_space = switch(settings, "add_prefix_space") is True
    trim_offsets = switch(settings, "trim_offsets") is not False
    library = Library(models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    library.decoder = decoders.ByteLevel()
    add_tokens(library, settings, where=where)
    add_roles(library, settings)
    ids = library.get_vocab()
    if cls is None or sep is None:  # GPT-2: one text has no template tokens
        library.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
        return library
    library.post_processor = processors.RobertaProcessing(
        (sep, ids[sep]),
        (cls, ids[cls]),
        trim_offsets=trim_offsets,
        add_prefix_space=prefix_space,
    )
    return library


# --- shared by the two older formats ---


def _read_lines(file: Path) -> list[str]:
    # Split at line feeds only: a piece may contain a carriage return, U+2028 or another separator.
    try:
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"is not UTF-8 text ({error})", where=str(file), remedy=FETCH_AGAIN) from error
    if text.startswith(BYTE_ORDER_MARK):
        log.warning("%s: begins with a byte order mark, which is not read as part of the first piece", file)
        text = text.removeprefix(BYTE_ORDER_MARK)
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1]:  # editors leave blank lines at the end, which are not pieces
        lines.pop()
    return lines


# --- the files written in addition to tokenizer.json ---


def _complete_settings(library: Library, settings: Settings) -> Settings:
    """Complete the settings, so that AutoTokenizer of transformers can reopen the tokenizer."""
    names = {role: name for role in ROLES if (name := token_name(settings, role))}
    pipeline = json.loads(library.to_str())
    model = pipeline["model"]
    class_settings: Settings = {"tokenizer_class": "PreTrainedTokenizerFast"}  # opens any tokenizer.json
    # transformers 5 rebuilds its BertTokenizer and RobertaTokenizer from the settings and the vocabulary, and
    # ignores the rest of tokenizer.json. So name such a class only if that gives exactly this pipeline.
    rebuild = {"WordPiece": _rebuilt_as_bert, "BPE": _rebuilt_as_roberta}.get(model["type"])
    if rebuild and BERT_NAMES.keys() <= names.keys() and set(names.values()) <= model["vocab"].keys():
        rebuilt_settings, rebuilt = rebuild(pipeline, names)
        if _parts(library) == _parts(rebuilt):
            class_settings = rebuilt_settings
    # With these, readers ignore added_tokens.json and special_tokens_map.json.
    added = {
        str(number): {flag: getattr(token, flag) for flag in ADDED_TOKEN_PARTS}
        for number, token in sorted(library.get_added_tokens_decoder().items())
    }
    return class_settings | settings | names | {"added_tokens_decoder": added}


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
    }  # "" means the same as null
    return {name: part for name, part in pipeline.items() if name != "added_tokens"}


def _vocab_txt_lines(library: Library) -> list[str]:
    """Return the pieces by id, or nothing if vocab.txt could not express this vocabulary."""
    if not isinstance(library.model, models.WordPiece):
        return []
    vocabulary = library.get_vocab(with_added_tokens=False)
    pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])
    gapless = [vocabulary[piece] for piece in pieces] == list(range(len(pieces)))
    readable = all(piece == (piece.rstrip() or piece) and not re.search("[\r\n]", piece) for piece in pieces)
    return pieces if gapless and readable and "" not in vocabulary else []
