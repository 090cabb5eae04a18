"""A model folder of a published shape with random weights: speed does not ask what they learned."""

import argparse
from pathlib import Path

import torch
import transformers

from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.network import new_network
from bertsmith.model.transformer.transformer_config import TransformerConfig

SHAPES = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "minilm": (6, 384, 12),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
"""Layers, width and heads."""


def shape_config(shape: str, vocabulary: int = 30_522, positions: int = 512) -> TransformerConfig:
    """A BERT of that shape."""
    layers, width, heads = SHAPES[shape]
    return TransformerConfig(
        model_type="bert",
        vocabulary=vocabulary,
        width=width,
        layers=layers,
        heads=heads,
        inner=4 * width,
        embedding_width=width,
        positions=positions,
    )


def random_folder(folder: Path, shape: str, vocab: Path) -> Path:
    """A BERT of that shape with the tokenizer of another folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(vocab)
    config = shape_config(shape, len(tokenizer))
    write_model(folder, Model(new_network(config, {"pooler": 0}, torch.Generator().manual_seed(0))))
    tokenizer.save_pretrained(folder)
    return folder


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that say which model is measured."""
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--shape", choices=list(SHAPES), default="base", help="random, without --model")
    parser.add_argument("--vocab", type=Path, help="a folder with a tokenizer, for --shape")


def folder_of(options: argparse.Namespace, scratch: Path) -> Path:
    """The folder that was named, or a random one in a folder for it."""
    if options.model is not None:
        return options.model
    if options.vocab is None:
        raise SystemExit("--shape needs --vocab, a folder with a tokenizer; or give --model")
    return random_folder(scratch / options.shape, options.shape, options.vocab)
