"""From raw text to documents of token ids: the part of making a store that any number of workers share.

A block of text is prepared without knowledge of any other, so that the store does not depend on the workers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.corpus.clean import Cleaning, clean_document
from bertsmith.corpus.decontaminate import TaskTexts
from bertsmith.corpus.documents import EncodingErrors
from bertsmith.corpus.duplicates import DuplicateKind, Signature, exact_fingerprint, near_signature
from bertsmith.corpus.readers import Block, Document, TextFormat, documents_of
from bertsmith.corpus.store_writer import TokenisedDocuments
from bertsmith.text.fast_encoder import FastEncoder
from bertsmith.text.sentences import spaced_sentences
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.units import Lexicon, UnitFinder

SentenceRule = Literal["split", "line"]


@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """All that decides, with the text and the tokenizer, what a store holds."""

    format: TextFormat = "auto"
    field: str = "text"
    encoding_errors: EncodingErrors = "strict"
    sentences: SentenceRule = "split"
    language: str = "en"
    cleaning: Cleaning = Cleaning()
    duplicates: DuplicateKind = "none"
    exclude: tuple[Path, ...] = ()
    lexicons: tuple[Path, ...] = ()
    add_words: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Materials:
    """What tools are made from; it travels to other processes and other machines."""

    tokenizer: Tokenizer
    settings: CorpusSettings
    task_texts: TaskTexts | None
    lexicon: Lexicon | None


def gather_materials(tokenizer: Tokenizer, settings: CorpusSettings) -> Materials:
    """The materials, with all files read that the settings name."""
    return Materials(
        tokenizer=tokenizer,
        settings=settings,
        task_texts=TaskTexts.read(settings.exclude) if settings.exclude else None,
        lexicon=Lexicon.read(settings.lexicons) if settings.lexicons else None,
    )


class Tools:
    """What one worker prepares blocks with."""

    def __init__(self, materials: Materials) -> None:
        self.settings, self.task_texts = materials.settings, materials.task_texts
        self.encoder = FastEncoder(materials.tokenizer)
        self.units = UnitFinder(materials.lexicon, materials.tokenizer) if materials.lexicon else None


@dataclass(frozen=True, slots=True)
class PreparedBlock:
    """The documents of a block that were kept, and what became of the others."""

    documents: TokenisedDocuments
    words: NDArray[np.int64]  # of each document, as the tokenizer cuts them
    fingerprints: Sequence[bytes]
    signatures: Sequence[Signature | None]
    dropped: Mapping[str, int]  # documents by reason
    text_bytes: int
    file_bytes: int  # read from disk for this block


def prepare_block(block: Block, tools: Tools) -> PreparedBlock:
    """The documents of a block as tokens, without those that are dropped for their own sake."""
    dropped: Counter[str] = Counter()
    kept: list[Document] = []
    for document in documents_of(block):
        judged = _judge(document, tools)
        if isinstance(judged, str):
            dropped[judged] += 1
        else:
            kept.append(judged)
    tokenised, words = _tokenise(kept, tools)
    if not words.all():
        dropped["empty"] += int(np.count_nonzero(words == 0))
        kept = [document for document, is_full in zip(kept, words > 0, strict=True) if is_full]
    kind = tools.settings.duplicates
    return PreparedBlock(
        documents=tokenised,
        words=words[words > 0],
        fingerprints=[exact_fingerprint(document.text) if kind != "none" else b"" for document in kept],
        signatures=[near_signature(document.text) if kind == "near" else None for document in kept],
        dropped=dropped,
        text_bytes=len(block.content),
        file_bytes=block.file_bytes,
    )


def _judge(document: Document, tools: Tools) -> Document | str:
    """The cleaned document, or why it is dropped."""
    cleaned = clean_document(document, tools.settings.cleaning)
    if isinstance(cleaned, str) or tools.task_texts is None:
        return cleaned
    task = tools.task_texts.match(cleaned.text)
    return f"contaminated: {task}" if task else cleaned


def _tokenise(documents: Sequence[Document], tools: Tools) -> tuple[TokenisedDocuments, NDArray[np.int64]]:
    """The documents as tokens, but for those without any, and how many words each document has."""
    sentences = [_sentences(document.text, tools.settings) for document in documents]
    encoded = tools.encoder.encode_many([sentence for group in sentences for sentence in group])
    document_of = np.repeat(np.arange(len(documents)), [len(group) for group in sentences])
    is_full = encoded.lengths > 0
    lengths = np.bincount(document_of[is_full], minlength=len(documents))
    sentence_lengths = encoded.lengths[is_full]
    units = tools.units.codes(encoded.ids, sentence_lengths) if tools.units else None
    tokenised = TokenisedDocuments(encoded.ids, sentence_lengths, lengths[lengths > 0], units)
    words = np.bincount(document_of, encoded.words, minlength=len(documents)).astype(np.int64)
    return tokenised, np.where(lengths > 0, words, 0)


def _sentences(text: str, settings: CorpusSettings) -> list[str]:
    lines = text.split("\n")
    if settings.sentences == "line":
        return lines
    return [sentence for line in lines for sentence in spaced_sentences(line, language=settings.language)]
