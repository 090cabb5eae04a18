"""A toy model folder: real in every part, random in its weights."""

import re
from pathlib import Path

import torch

from bertsmith.core.files import write_json, write_text
from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.network import new_network
from bertsmith.model.transformer.transformer_config import TransformerConfig

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = """
a and apple at boy cat city cold coffee cute day dog drinks eats for from get got hot in is it london located
mat morning my of on outside paris park plays rain river runs she should sits sleeps snow some still stood sun
tea the time to town tree under university walks warm was we were with year
"""


def write_toy_folder(folder: Path) -> None:
    """Write a model folder with a small WordPiece vocabulary and freshly initialised weights."""
    vocabulary = toy_vocabulary()
    config = TransformerConfig(
        model_type="bert",
        vocabulary=len(vocabulary),
        width=64,
        layers=2,
        heads=4,
        inner=256,
        embedding_width=64,
        positions=128,
    )
    network = new_network(config, {"pooler": 0, "mlm": 0, "nsp": 2}, torch.Generator().manual_seed(0))
    write_model(folder, Model(network))
    write_text(folder / "vocab.txt", "\n".join(vocabulary) + "\n")
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": True})


def toy_vocabulary() -> list[str]:
    """Special tokens, every letter at a word's start and inside it, punctuation, and some whole words."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [*letters, *(f"##{letter}" for letter in letters), *"0123456789.,!?'-"]
    whole = [word for word in re.split(r"\s+", WORDS.strip()) if word not in pieces]
    return [*SPECIALS, *pieces, *whole]
