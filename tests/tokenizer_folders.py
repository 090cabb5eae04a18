"""Folders with the files of a tokenizer, written and changed by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertsmith.text.tokenizer import Tokenizer
from tests.tokenizer_makers import (
    MAKERS,
    PARAGRAPH,
)

Maker = Callable[[Path], Path]
every_kind = pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
LITERALS = "iron [MASK] is <mask>hot [CLS]<pad> </s>   [unused0]"
TEXT = PARAGRAPH + LITERALS


def write_vocab(folder: Path, pieces: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_bytes("".join(f"{piece}\n" for piece in pieces).encode())
    return folder


def write_settings(folder: Path, **settings: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(file.read_text(encoding="utf-8"))
    change(value)
    file.write_text(json.dumps(value), encoding="utf-8")


def opened(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids with every special token read out of the text, as transformers does."""
    special = tuple(tokenizer.token(number) for number in tokenizer.special_ids)
    return tokenizer.encode(text, allow_special=special).ids


def add_tokens_in_a_file(folder: Path, *tokens: str, first: int, **more: Any) -> None:
    """What transformers wrote until 2023: added_tokens.json and special_tokens_map.json."""
    ids = {token: first + number for number, token in enumerate(tokens)}
    (folder / "added_tokens.json").write_text(json.dumps(ids), encoding="utf-8")
    map_file = folder / "special_tokens_map.json"
    special = json.loads(map_file.read_text(encoding="utf-8")) if map_file.is_file() else {}
    map_file.write_text(json.dumps(special | more), encoding="utf-8")
