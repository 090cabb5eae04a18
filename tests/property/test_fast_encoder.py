"""Any texts at all: the fast encoder gives the ids and the number of words of the tokenizer."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.text.fast_encoder import FastEncoder
from bertsmith.text.tokenizer import Tokenizer
from tests.property.test_tokenizer_parity import any_text
from tests.tokenizer_makers import MAKERS
from tests.unit.text.test_fast_encoder import count_words, encode_plainly

KINDS = [maker.__name__ for maker in MAKERS]
SURROGATES = range(0xD800, 0xE000)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, FastEncoder]]:
    folder: Path = tmp_path_factory.mktemp("tokenizers")
    loaded = {maker.__name__: Tokenizer.load(maker(folder / maker.__name__)) for maker in MAKERS}
    return {name: (tokenizer, FastEncoder(tokenizer)) for name, tokenizer in loaded.items()}


def check(tokenizer: Tokenizer, encoder: FastEncoder, texts: list[str]) -> None:
    encoded = encoder.encode_many(texts)
    rows = np.split(encoded.ids, np.cumsum(encoded.lengths))[:-1]
    assert [row.tolist() for row in rows] == encode_plainly(tokenizer, texts)
    assert encoded.words.tolist() == [count_words(tokenizer, text) for text in texts]


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(any_text | st.lists(any_text, max_size=5).map(" ".join), max_size=5))
def test_the_fast_encoder_is_the_tokenizer(kind, tokenizers, texts: list[str]) -> None:
    check(*tokenizers[kind], texts)


@pytest.mark.parametrize("kind", ["uncased_wordpiece", "cased_wordpiece", "byte_bpe", "modern_bpe"])
def test_every_character_beside_words_spaces_and_marks(kind, tokenizers, full: bool) -> None:
    # The quick tier takes the marks and spaces, the last Chinese characters, and a few of the rest.
    some = {*range(0x180), *range(0x300, 0x308), *range(0x2000, 0x2070), *range(0x9F70, 0xA000)}
    numbers = sorted((some | set(range(0, 0x110000, 1 if full else 997))) - set(SURROGATES))
    texts = [f"iron{sign}is {sign}the{sign} {sign} hot,{sign}铁{sign}" for sign in map(chr, numbers)]
    check(*tokenizers[kind], texts)
