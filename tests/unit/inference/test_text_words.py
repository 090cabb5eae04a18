"""Texts without some of their words, beside tokens that were taken out by hand."""

import pytest

from bertsmith.inference.text_reader import TokenizedText
from bertsmith.inference.text_words import TextWords
from bertsmith.text.tokenizer import Tokenizer
from tests.tokenizer_makers import wordpiece_pieces


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    words = ["the", "dog", "sleeps", ".", "a", "cat", "'"]
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in wordpiece_pieces(words)))
    return Tokenizer.load(folder)


def read(tokenizer, text):
    (encoded,) = tokenizer.encode_many([text])
    return TextWords.of(TokenizedText(text, encoded))


def pieces(tokenizer, tokenized):
    return [tokenizer.token(number) for number in tokenized.encoded.ids]


def test_a_word_goes_with_all_of_its_pieces_and_marks_are_words(tokenizer):
    found = read(tokenizer, "The dogs  sleep.")
    assert [(part, word.text, word.start) for part, word in found.words] == [
        (0, "The", 0),
        (0, "dogs", 4),
        (0, "sleep", 10),
        (0, ".", 15),
    ]
    whole = pieces(tokenizer, found.tokenized)
    assert whole == ["[CLS]", "the", "dog", "##s", "s", "##l", "##e", "##e", "##p", ".", "[SEP]"]
    assert pieces(tokenizer, found.without({1})) == ["[CLS]", "the", *whole[4:]]
    assert pieces(tokenizer, found.without({0, 2, 3})) == ["[CLS]", "dog", "##s", "[SEP]"]
    assert found.without(set()) == found.tokenized


def test_words_of_a_pair_go_from_their_own_text(tokenizer):
    found = read(tokenizer, ("a dog", "the dog"))
    assert [(part, word.text) for part, word in found.words] == [
        (0, "a"),
        (0, "dog"),
        (1, "the"),
        (1, "dog"),
    ]
    rest = found.without({1})
    assert pieces(tokenizer, rest) == ["[CLS]", "a", "[SEP]", "the", "dog", "[SEP]"]
    assert rest.encoded.segments == [0, 0, 0, 1, 1, 1]
    assert rest.encoded.offsets[3:5] == [(0, 3), (4, 7)]


def test_a_word_that_is_all_of_its_text_is_not_left_out_alone(tokenizer):
    assert [number for number, _ in read(tokenizer, ("dog", "the dog")).each_left_out()] == [1, 2]
    assert list(read(tokenizer, "dog").each_left_out()) == []
