"""Small tokenizers of every kind, made once for the room."""

import pytest

from bertsmith.text.tokenizer import Tokenizer
from tests.unit.tasks.encoding_tools import load_every


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return load_every(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="session")
def uncased(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["uncased_wordpiece"]
