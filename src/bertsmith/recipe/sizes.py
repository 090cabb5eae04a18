"""How many weights an architecture has, by arithmetic alone: nothing is built and torch is not needed."""

from bertsmith.recipe.schema import ModelSection

PUBLISHED_VOCABULARY = {
    "bert": 30_522,  # uncased English WordPiece
    "roberta": 50_265,  # byte-level BPE, with its special tokens
    "albert": 30_000,  # SentencePiece
    "distilbert": 30_522,  # BERT's
    "ernie": 18_000,  # Chinese, ERNIE 1.0
}
"""Entries of the published vocabularies: a recipe leaves the vocabulary to the store it is run on."""


def encoder_parameters(model: ModelSection, vocabulary: int) -> int:
    """The weights of the encoder and its pooler, as sizes are published; pre-training heads not counted."""
    width = model.width
    embedding_width = width if model.embedding_width == "width" else model.embedding_width
    # RoBERTa's position table starts behind its padding id, which is 1.
    positions = model.positions + (2 if model.type == "roberta" else 0)
    rows = vocabulary + positions + model.segments + model.task_types
    embeddings = rows * embedding_width + _norm(embedding_width)
    if model.type == "albert":  # one block for all layers, and a layer that widens the embeddings
        embeddings += _dense(embedding_width, width)
    blocks = 1 if model.type == "albert" else model.layers
    pooler = 0 if model.type == "distilbert" else _dense(width, width)
    return embeddings + blocks * _block(model) + pooler


def _block(model: ModelSection) -> int:
    attention = 4 * _dense(model.width, model.width)
    feed_forward = _dense(model.width, model.inner) + _dense(model.inner, model.width)
    return attention + feed_forward + 2 * _norm(model.width)


def _dense(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _norm(width: int) -> int:
    return 2 * width
