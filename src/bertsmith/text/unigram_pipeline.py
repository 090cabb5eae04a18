"""Unigram pipelines as published with ALBERT, XLM-RoBERTa, CamemBERT and DeBERTa-v3."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json
from bertsmith.text.sentencepiece_model import (
    CONTROL,
    USER_DEFINED,
    SentencePieceModel,
    read_sentencepiece_model,
)
from bertsmith.text.tokenizer_settings import (
    BERT_NAMES,
    FETCH_AGAIN,
    ROBERTA_NAMES,
    Settings,
    add_roles,
    add_tokens,
    name_special,
    switch,
    token_name,
)

ALBERT_NAMES = BERT_NAMES | {
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "bos_token": "[CLS]",
    "eos_token": "[SEP]",
}
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
UNLIKELY = -100.0
"""Score, or penalty, that keeps a piece from being used."""
Scores = list[tuple[str, float]]
Normalizers = list[normalizers.Normalizer]


@dataclass(frozen=True, slots=True)
class _Family:
    """The differences between architectures that use a SentencePiece model."""

    names: dict[str, str]
    scores: Callable[[SentencePieceModel], Scores]
    unknown_id: Callable[[SentencePieceModel], int]
    normalizer: Callable[[Normalizers, Settings], normalizers.Normalizer]
    """Builds the normaliser from the model's table of characters, if it has one, and the settings."""
    segments: bool
    """True if the second text of a pair is another segment, as in BERT; else two separators divide them."""
    wide_mask: bool = True
    """True if the mask includes the space before it, like a word."""


# ---- the vocabularies


def _albert_scores(model: SentencePieceModel) -> Scores:
    # ALBERT splits the comma off "9,": its published tokenizer.json practically excludes such pieces.
    ends = {each.text for each in model.pieces if each.text.endswith(",") and each.text[-2:-1].isdigit()}
    return [(each.text, each.score + (UNLIKELY if each.text in ends else 0)) for each in model.pieces]


def _xlm_roberta_scores(model: SentencePieceModel) -> Scores:
    # fairseq's first four tokens replace SentencePiece's <unk>, <s> and </s>; its mask is at the end.
    first = ("<s>", "<pad>", "</s>", "<unk>")
    pieces = [each.pair for each in model.pieces[3:]]
    return [*((piece, 0.0) for piece in first), *pieces, ("<mask>", 0.0)]


def _camembert_scores(model: SentencePieceModel) -> Scores:
    first = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>")
    pieces = [each.pair for each in model.pieces[1:]]
    return [*((piece, 0.0) for piece in first), ("<unk>NOTUSED", UNLIKELY), *pieces, ("<mask>", 0.0)]


def _own_scores(model: SentencePieceModel) -> Scores:
    return [each.pair for each in model.pieces]


# ---- the normalisers


def albert_normalizer(table: Normalizers, settings: Settings) -> normalizers.Normalizer:
    """Return Google's rules for quotes, accents and case, then the model's table of characters, if any."""
    steps: Normalizers = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if switch(settings, "keep_accents") is not True:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if switch(settings, "do_lower_case") is not False:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence([*steps, *table])


def _plain_normalizer(table: Normalizers, _settings: Settings) -> normalizers.Normalizer:
    return normalizers.Sequence(table)


def _deberta_normalizer(table: Normalizers, settings: Settings) -> normalizers.Normalizer:
    lower = [normalizers.Lowercase()] if switch(settings, "do_lower_case") is True else []
    return normalizers.Sequence([*lower, *table])


def _table(characters: bytes, file: Path) -> Normalizers:
    try:
        return [normalizers.Precompiled(characters)] if characters else []
    except Exception as error:  # the library raises no specific exception
        what = f"its table of characters is damaged ({error})"
        raise UserError(what, where=str(file), remedy=FETCH_AGAIN) from error


_ALBERT = _Family(ALBERT_NAMES, _albert_scores, lambda model: model.unknown_id, albert_normalizer, True)
_XLM_ROBERTA = _Family(ROBERTA_NAMES, _xlm_roberta_scores, lambda _: 3, _plain_normalizer, False)
_CAMEMBERT = _Family(ROBERTA_NAMES, _camembert_scores, lambda _: 3, _plain_normalizer, False)
_DEBERTA = _Family(
    BERT_NAMES,
    _own_scores,
    lambda model: model.unknown_id,
    _deberta_normalizer,
    segments=True,
    wide_mask=False,
)
SENTENCEPIECE_FILES = {
    "spiece.model": _ALBERT,
    "30k-clean.model": _ALBERT,  # Google's name, next to TensorFlow checkpoints
    "sentencepiece.bpe.model": _XLM_ROBERTA,
    "spm.model": _DEBERTA,
}
"""Published file names of the four families; the third is also CamemBERT's."""


def read_sentencepiece(file: Path, settings: Settings) -> tuple[Library, Settings]:
    """Build the pipeline of a SentencePiece model as its architecture uses it, with complete settings."""
    family = SENTENCEPIECE_FILES[file.name]
    if family is _XLM_ROBERTA and _is_camembert(file.parent, settings):
        family = _CAMEMBERT
    model = read_sentencepiece_model(file)
    scores = family.scores(model)
    pieces = {piece for piece, _ in scores}
    usual = dict(family.names)
    if family is _DEBERTA and usual["mask_token"] not in pieces and not settings.get("added_tokens_decoder"):
        # Published without a mask in the file; transformers adds it at the end.
        added = {"content": usual["mask_token"], "special": True, "normalized": False}
        settings = settings | {"added_tokens_decoder": {str(len(scores)): added}}
    settings = name_special(settings, usual, vocabulary=pieces, file=file)
    if family.wide_mask and isinstance(settings.get("mask_token"), str):
        settings["mask_token"] = {"content": settings["mask_token"], "lstrip": True}
    declared = [each for each in model.pieces if each.type in (CONTROL, USER_DEFINED) and each.text in pieces]
    normalizer = family.normalizer(_table(model.characters, file), settings)
    library = unigram_library(scores, family.unknown_id(model), normalizer)
    for each in declared:
        library.add_tokens([AddedToken(each.text, normalized=False, special=each.type == CONTROL)])
    add_tokens(library, settings, where=str(file.parent))
    add_roles(library, settings)
    add_template(library, settings, segments=family.segments)
    return library, settings


def unigram_library(scores: Scores, unknown_id: int, normalizer: normalizers.Normalizer) -> Library:
    """Build a unigram model over words that begin with a mark for the space before them."""
    library = Library(models.Unigram(scores, unk_id=unknown_id, byte_fallback=False))
    library.normalizer = normalizer
    library.pre_tokenizer = unigram_words()
    library.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    return library


def unigram_words() -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer that cuts texts at white space and puts a mark before each word."""
    marked = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    return pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marked])


def albert_pipeline(scores: Scores, *, cased: bool) -> Library:
    """Build ALBERT's pipeline over a new vocabulary; its second piece is the unknown token."""
    library = unigram_library(scores, 1, new_albert_normalizer(cased=cased))
    # The mask includes the space before it, like a word.
    settings = ALBERT_NAMES | {"mask_token": {"content": ALBERT_NAMES["mask_token"], "lstrip": True}}
    add_roles(library, settings)
    add_template(library, settings, segments=True)
    return library


def new_albert_normalizer(*, cased: bool) -> normalizers.Normalizer:
    """Return ALBERT's normaliser for a new vocabulary: without case and accents, or with both."""
    return albert_normalizer([], {"do_lower_case": not cased, "keep_accents": cased})


def add_template(library: Library, settings: Settings, *, segments: bool) -> None:
    """Put special tokens around texts: as in BERT with segments, else as in RoBERTa."""
    cls, sep = (str(token_name(settings, role)) for role in ("cls_token", "sep_token"))
    second = [f"{sep}:0", "$B:1", f"{sep}:1"] if segments else [f"{sep}:0", f"{sep}:0", "$B:0", f"{sep}:0"]
    library.post_processor = processors.TemplateProcessing(
        single=[f"{cls}:0", "$A:0", f"{sep}:0"],
        pair=[f"{cls}:0", "$A:0", *second],
        special_tokens=[(cls, library.token_to_id(cls)), (sep, library.token_to_id(sep))],
    )


def _is_camembert(folder: Path, settings: Settings) -> bool:
    """True if tokenizer_config.json, or else config.json, names CamemBERT; the file name is ambiguous."""
    if name := settings.get("tokenizer_class"):
        return str(name).startswith("Camembert")
    config = folder / "config.json"
    types = ("model_type", "base_model_type")  # the second in pruned models
    found = read_json(config, remedy=FETCH_AGAIN) if config.is_file() else {}
    return "camembert" in (found.get(key) for key in types)
