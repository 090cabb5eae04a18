"""Small token stores, and recipes that fit them."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Library
from tokenizers import models
from torch import Tensor

from bertsmith.corpus.token_store import TokenisedDocuments, TokenStore, writing_store
from bertsmith.data.collate import PretrainingBatch
from bertsmith.data.data_loader import StepBatches
from bertsmith.data.epoch_index import StageSource
from bertsmith.data.example_index import Sentences
from bertsmith.data.masking import Vocabulary, read_vocabulary
from bertsmith.recipe.data_sections import MaskingSection
from bertsmith.recipe.schema import Recipe
from bertsmith.text.tokenizer import Tokenizer, read_templates
from tests.tokenizer_makers import BERT_SPECIAL

WORDS = 60
PIECES = 30


def wordpiece(folder: Path, *, words: list[str] | None = None) -> Tokenizer:
    """A tokenizer of made-up words and continuing pieces, or of these."""
    made_up = [*(f"w{number}" for number in range(WORDS)), *(f"##p{number}" for number in range(PIECES))]
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [*BERT_SPECIAL, *(words or made_up)]
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return Tokenizer.load(folder)


def two_pieces() -> Vocabulary:
    """What masking knows of a vocabulary with one word, number 5, and one piece, number 6, that goes on."""
    pieces = {piece: number for number, piece in enumerate([*BERT_SPECIAL, "w", "##w"])}
    tokenizer = Tokenizer.from_library(Library(models.WordPiece(pieces, unk_token="[UNK]")))
    return read_vocabulary(tokenizer, MaskingSection())


def random_store(
    folder: Path,
    *,
    documents: int = 40,
    sentences: tuple[int, int] = (1, 12),
    words: tuple[int, int] = (1, 14),
    seed: int = 0,
) -> TokenStore:
    """A store of documents with random numbers of sentences and tokens, both ends included."""
    tokenizer = wordpiece(folder / "vocabulary")
    chance = np.random.default_rng(seed)
    in_document = chance.integers(*sentences, documents, endpoint=True)
    in_sentence = chance.integers(*words, in_document.sum(), endpoint=True)
    tokens = chance.integers(len(BERT_SPECIAL), tokenizer.vocabulary_size, in_sentence.sum())
    with writing_store(folder / "store", tokenizer) as writer:
        writer.add(TokenisedDocuments(tokens, in_sentence, in_document))
        writer.finish(settings={}, summary={})
    return TokenStore.open(folder / "store")


def small_recipe(**sections) -> Recipe:
    """A recipe with steps of 8 sequences of at most 32 tokens, then of 48."""
    stages = [
        {"fraction": 0.5, "length": 32, "predictions": 5},
        {"fraction": 0.5, "length": 48, "predictions": 7},
    ]
    defaults = {"examples": {"stages": stages, "held_out_fraction": 0.2}, "batch": {"sequences": 8}}
    merged = {
        name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults.keys() | sections.keys()
    }
    return Recipe.model_validate(merged)


def source_of(store: TokenStore, recipe: Recipe, **choices) -> StageSource:
    """What the examples of a stage are made of."""
    return StageSource(store, recipe, read_templates(store.tokenizer()), **choices)


def sentences_of(lengths: list[list[int]], documents: list[int] | None = None) -> Sentences:
    """Where sentences of these lengths lie, by document; all documents, or these, are the split."""
    counts = [len(document) for document in lengths]
    flat = [length for document in lengths for length in document]
    numbers = range(len(lengths)) if documents is None else documents
    return Sentences(starts(flat), starts(counts), np.array(numbers, np.int64))


def starts(lengths: list[int]) -> NDArray[np.int64]:
    """Running sums from 0 on."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def indexed_documents(lengths: list[list[int]]) -> list[list[list[int]]]:
    """Documents of these sentence lengths whose tokens are their own indices in the store."""
    index, documents = 0, []
    for document in lengths:
        documents.append([])
        for length in document:
            documents[-1].append(list(range(index, index + length)))
            index += length
    return documents


RECIPES = {
    "bert": {},
    "tokens": {"batch": {"by": "tokens", "tokens": 200}},
    "static": {"masking": {"masks": "static", "copies": 2}},
    "albert": {"examples": {"pairs": "sop"}, "masking": {"unit": "ngram"}},
    "roberta": {"examples": {"pairs": "full-sentences"}, "masking": {"count": "stochastic"}},
    "within": {"examples": {"pairs": "doc-sentences"}, "masking": {"unit": "word"}},
    "gpt": {"examples": {"pairs": "none", "objective": "left-to-right"}},
}


def recipe_named(name: str) -> Recipe:
    """One of these recipes."""
    sections = {key: dict(value) for key, value in RECIPES[name].items()}
    if "examples" in sections:
        sections["examples"] |= {"held_out_fraction": 0.2, "stages": small_recipe().examples.stages}
    return small_recipe(**sections)


def with_fields(micro: PretrainingBatch, **changed: Tensor) -> PretrainingBatch:
    """The batch with other values of these fields."""
    assert changed.keys() <= micro.fields.keys()
    return replace(micro, fields={**micro.fields, **changed})


def digest(step: StepBatches) -> str:
    """A fingerprint of every tensor of a step."""
    tensors = [
        tensor
        for micro in step.micros
        for tensor in (
            *(micro.inputs.tokens_T, micro.inputs.segments_T, micro.inputs.positions_T),
            *(micro.inputs.layout.starts_S1, micro["masked_rows_P"], micro["masked_ids_P"]),
            *(micro["masked_weights_P"], micro["pair_labels_S"], micro["pair_weights_S"]),
        )
    ]
    kinds = str([(tensor.dtype, tensor.shape) for tensor in tensors])
    return sha256(kinds.encode() + b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
