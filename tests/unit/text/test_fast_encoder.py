"""The fast encoder: where it may cut, where it must not, and that it is fast."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from bertsmith.core.errors import UserError
from bertsmith.text.fast_encoder import FastEncoder, smallest_id_type
from bertsmith.text.tokenizer import Tokenizer
from tests.tokenizer_makers import MAKERS, PARAGRAPH, byte_bpe, uncased_wordpiece, wordpiece_pieces

Rows = list[list[int]]


def encode_plainly(tokenizer: Tokenizer, texts: Iterable[str]) -> Rows:
    """What the fast encoder must give: the ids between those of the template, one text after the other."""
    encoded = tokenizer.encode_many(texts)
    return [
        [number for number, sequence in zip(it.ids, it.sequence, strict=True) if sequence == 0]
        for it in encoded
    ]


def count_words(tokenizer: Tokenizer, text: str) -> int:
    """The words that the library finds in a text."""
    return len(set(tokenizer.closed.encode(text, add_special_tokens=False).word_ids))


def encode_fast(tokenizer: Tokenizer, texts: list[str]) -> Rows:
    encoded = FastEncoder(tokenizer).encode_many(texts)
    return [row.tolist() for row in np.split(encoded.ids, np.cumsum(encoded.lengths))[:-1]]


def wordpiece(**added: AddedToken) -> Tokenizer:
    """An uncased WordPiece tokenizer with these ordinary or special tokens beside its vocabulary."""
    vocabulary = {piece: number for number, piece in enumerate(wordpiece_pieces(["iron", "hot", "is"]))}
    library = Library(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.add_tokens(list(added.values()))
    return Tokenizer.from_library(library)


@pytest.mark.parametrize("maker", MAKERS)
def test_the_ids_are_those_of_the_tokenizer(maker: Callable[[Path], Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    texts = ["", " ", *PARAGRAPH.split("\n"), PARAGRAPH, " iron", "iron ", "a  b", "[MASK] <mask> hot"]
    assert encode_fast(tokenizer, texts) == encode_plainly(tokenizer, texts)


@pytest.mark.parametrize("maker", MAKERS)
def test_words_are_counted_as_the_tokenizer_cuts_them(maker: Callable[[Path], Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    texts = ["", " ", *PARAGRAPH.split("\n"), " iron", "a  b", "don't", "is\u3000hot"]
    words = FastEncoder(tokenizer).encode_many(texts).words.tolist()
    assert words == [count_words(tokenizer, text) for text in texts]
    assert words[2] > 15


@pytest.mark.parametrize(
    "added",
    [
        AddedToken("hot iron"),
        AddedToken("iron", lstrip=True),
        AddedToken("iron", rstrip=True),
        AddedToken("iron", single_word=True),
        AddedToken("is-hot"),
        AddedToken("铁iron", normalized=True),
        AddedToken(" iron", normalized=False),
    ],
    ids=lambda token: repr(token.content),
)
def test_added_tokens_are_found_across_spaces_and_punctuation(added: AddedToken) -> None:
    tokenizer = wordpiece(added=added)
    texts = ["hot iron is-hot, hot  iron.", " iron iron irons ", "铁iron 铁 iron", "hot\niron"]
    assert encode_fast(tokenizer, texts) == encode_plainly(tokenizer, texts)


@pytest.mark.parametrize("normalized", [False, True])
def test_a_special_token_with_a_space_hides_an_ordinary_one(normalized: bool) -> None:
    hiding = AddedToken("hot iron", special=True, normalized=normalized)
    tokenizer = wordpiece(hiding=hiding, hidden=AddedToken("iron!", normalized=normalized))
    texts = ["hot iron!", "iron!", "hot", "hot iron"]
    assert encode_fast(tokenizer, texts) == encode_plainly(tokenizer, texts)


def test_a_line_feed_inside_a_text_ends_no_text(tmp_path: Path) -> None:
    for maker in (uncased_wordpiece, byte_bpe):
        tokenizer = Tokenizer.load(maker(tmp_path / maker.__name__))
        texts = ["the iron\nis hot", "\n", "hot\n\n", "iron"]
        assert encode_fast(tokenizer, texts) == encode_plainly(tokenizer, texts)


def byte_level(*added: AddedToken, prefix_space: bool = False) -> Tokenizer:
    """A byte-level tokenizer that knows a few words and endings, with these tokens beside its vocabulary."""
    merges = [
        ("'", "s"),
        ("'", "t"),
        ("l", "l"),
        ("'", "ll"),
        ("Ġ", "i"),
        ("h", "o"),
        ("ho", "t"),
        ("Ġ", "hot"),
    ]
    merges += [("s", ")"), ("'", "'"), ("Ġ", "("), (",", "a"), ("1", "s"), ("Ġ", "Ġ")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    library = Library(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    library.add_tokens(list(added))
    return Tokenizer.from_library(library)


@pytest.mark.parametrize("prefix_space", [False, True])
def test_words_with_apostrophes_are_cut_as_the_regular_expression_cuts_them(prefix_space: bool) -> None:
    tokenizer = byte_level(prefix_space=prefix_space)
    texts = [
        "the iron's hot",
        "it'll,and('s 's)",
        "''s rock'n'roll",
        "x'S'd1s 1's a-b_c (hot)",
        "'t ",
        "a \nb",
    ]
    assert encode_fast(tokenizer, texts) == encode_plainly(tokenizer, texts)


@pytest.mark.parametrize(
    "added",
    [
        AddedToken("hot iron"),
        AddedToken("hot", lstrip=True),
        AddedToken("hot", rstrip=True),
        AddedToken("hot", single_word=True),
        AddedToken("a-hot"),
        AddedToken(" "),
        AddedToken("  "),
    ],
    ids=lambda token: repr(token.content),
)
def test_added_tokens_are_found_across_spaces_in_byte_level_text(added: AddedToken) -> None:
    texts = ["a hot iron, hots hot. a-hot", "hot  iron   hot", " hot "]
    tokenizer = byte_level(added)
    assert encode_fast(tokenizer, texts) == encode_plainly(tokenizer, texts)


def test_many_texts_are_taken_in_several_rounds(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(uncased_wordpiece(tmp_path))
    texts = ["the iron is hot . " * 50_000, "iron", "hot " * 300_000]
    encoded = FastEncoder(tokenizer).encode_many(texts)
    assert encoded.lengths.tolist() == [250_000, 1, 300_000]
    assert np.bincount(encoded.ids)[tokenizer.id("iron")] == 50_001


def test_no_texts_give_no_ids(tmp_path: Path) -> None:
    encoded = FastEncoder(Tokenizer.load(uncased_wordpiece(tmp_path))).encode_many([])
    assert (len(encoded.ids), len(encoded.lengths)) == (0, 0)


@pytest.mark.parametrize("maker", MAKERS)
def test_half_a_surrogate_pair_is_rejected(maker: Callable[[Path], Path], tmp_path: Path) -> None:
    encoder = FastEncoder(Tokenizer.load(maker(tmp_path)))
    with pytest.raises(UserError, match="text 1: character 5 is a lone surrogate"):
        encoder.encode_many(["hot", "iron \ud800"])


def test_ids_take_two_bytes_as_long_as_they_fit(tmp_path: Path) -> None:
    assert (smallest_id_type(1 << 16), smallest_id_type((1 << 16) + 1)) == ("uint16", "uint32")
    assert FastEncoder(Tokenizer.load(uncased_wordpiece(tmp_path))).encode("iron").dtype == np.uint16


@pytest.mark.parametrize("maker", [uncased_wordpiece, byte_bpe])
def test_text_that_repeats_its_words_takes_less_than_half_the_time_of_the_library(
    maker: Callable[[Path], Path], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    texts = [line.strip() for line in PARAGRAPH.split("\n")[:1]] * 400

    def fastest(encode: Callable[[Tokenizer, list[str]], Rows]) -> float:
        times = []
        for _ in range(3):
            begin = time.process_time()
            encode(tokenizer, texts)
            times.append(time.process_time() - begin)
        return min(times)

    assert fastest(encode_fast) < 0.5 * fastest(encode_plainly)
