"""Small token stores written from token ids."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bertsmith.corpus.token_store import SHARD_TOKENS, TokenisedDocuments, writing_store
from bertsmith.text.tokenizer import Tokenizer


def write_store(
    folder: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    tokenizer: Tokenizer,
    *,
    units: Sequence[Sequence[Sequence[int]]] | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write a small store from token ids: documents of sentences of ids, and their unit codes if any."""
    sentences = [sentence for document in documents for sentence in document]
    codes = None if units is None else [code for document in units for line in document for code in line]
    tokenised = TokenisedDocuments(
        tokens=np.array([token for sentence in sentences for token in sentence], np.int64),
        sentence_lengths=np.array([len(sentence) for sentence in sentences], np.int64),
        document_lengths=np.array([len(document) for document in documents], np.int64),
        units=None if codes is None else np.array(codes, np.uint8),
    )
    with_units = units is not None
    with writing_store(folder, tokenizer, with_units=with_units, shard_tokens=shard_tokens) as writer:
        writer.add(tokenised)
        writer.finish(settings={}, summary={})
