"""Words added to a vocabulary: where they go, what stays, and what is refused."""

from pathlib import Path

import pytest

from bertsmith.core.errors import UserError
from bertsmith.text.extend_vocabulary import new_words, read_words, with_words, words_for
from bertsmith.text.fast_encoder import FastEncoder
from bertsmith.text.tokenizer import Tokenizer
from tests.tiny_runs import tiny_tokenizer
from tests.tokenizer_makers import byte_bpe, cased_wordpiece

SENTENCE = "the smith heats the iron near the forge ."


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tiny_tokenizer(tmp_path / "vocabulary", unused=2)


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(number) for number in tokenizer.encode(text).ids]


def test_an_added_word_is_one_token(tokenizer):
    assert len(tokens(tokenizer, "anvil")) > 3
    assert tokens(with_words(tokenizer, ["anvil"]), "the anvil") == ["[CLS]", "the", "anvil", "[SEP]"]


def test_unused_slots_are_filled_in_order_and_then_the_list_grows(tokenizer):
    extended = with_words(tokenizer, ["anvil", "tongs", "bellows"])
    ids = [extended.id(word) for word in ("anvil", "tongs", "bellows")]
    assert ids == [tokenizer.id("[unused0]"), tokenizer.id("[unused1]"), tokenizer.vocabulary_size]
    assert extended.vocabulary_size == tokenizer.vocabulary_size + 1
    with pytest.raises(UserError, match="not in the vocabulary"):
        extended.id("[unused0]")


def test_no_other_id_moves(tokenizer):
    extended = with_words(tokenizer, ["anvil", "tongs", "bellows"])
    for number in range(3, tokenizer.vocabulary_size):
        assert extended.token(number) == tokenizer.token(number)
    assert extended.encode(SENTENCE) == tokenizer.encode(SENTENCE)
    assert extended.special_ids == tokenizer.special_ids
    assert extended.mask_id == tokenizer.mask_id


def test_known_words_and_repeated_ones_are_not_added(tokenizer):
    assert new_words(tokenizer, ["smith", "anvil", "Anvil", "SMITH", "anvil"]) == ["anvil"]
    assert with_words(tokenizer, ["smith"]).vocabulary_size == tokenizer.vocabulary_size


def test_a_word_of_unknown_letters_is_new(tokenizer):
    assert tokens(tokenizer, "炉") == ["[CLS]", "[UNK]", "[SEP]"]
    extended = with_words(tokenizer, ["炉", "ζω"])
    assert tokens(extended, "炉 ζω") == ["[CLS]", "炉", "ζω", "[SEP]"]


def test_a_cased_vocabulary_keeps_the_case(tmp_path):
    cased = Tokenizer.load(cased_wordpiece(tmp_path))
    assert tokens(with_words(cased, ["Amboss"]), "Amboss amboss")[:2] == ["[CLS]", "Amboss"]
    assert "amboss" not in tokens(with_words(cased, ["Amboss"]), "amboss")


def test_an_extended_tokenizer_survives_saving_and_is_read_by_the_fast_encoder(tokenizer, tmp_path):
    extended = with_words(tokenizer, ["anvil", "tongs", "bellows"])
    extended.save(tmp_path / "saved")
    loaded = Tokenizer.load(tmp_path / "saved")
    text = "the smith heats the anvil , tongs and bellows"
    assert loaded.encode(text) == extended.encode(text)
    assert FastEncoder(loaded).encode(text).tolist() == loaded.encode(text).ids[1:-1]


def test_words_can_be_added_again(tokenizer):
    twice = with_words(with_words(tokenizer, ["anvil"]), ["tongs", "bellows"])
    once = with_words(tokenizer, ["anvil", "tongs", "bellows"])
    assert [twice.id(word) for word in ("anvil", "tongs", "bellows")] == [
        once.id(word) for word in ("anvil", "tongs", "bellows")
    ]


@pytest.mark.parametrize("word", ["two words", "well-known", "", "[MASK]"])
def test_what_is_not_one_word_is_rejected(tokenizer, word):
    with pytest.raises(UserError, match="words to this tokenizer"):
        with_words(tokenizer, [word])


def test_only_wordpiece_vocabularies_take_words(tmp_path):
    with pytest.raises(UserError, match="words cannot be added to a BPE vocabulary"):
        with_words(Tokenizer.load(byte_bpe(tmp_path)), ["anvil"])


def test_a_file_holds_a_word_a_line(tmp_path):
    (tmp_path / "words.txt").write_text("anvil\n\n  tongs \n", encoding="utf-8")
    assert read_words(tmp_path / "words.txt") == ["anvil", "tongs"]


def test_a_file_without_words_is_rejected(tmp_path):
    (tmp_path / "words.txt").write_text("\n \n")
    with pytest.raises(UserError, match="words.txt: contains no words"):
        read_words(tmp_path / "words.txt")


def test_the_new_words_of_several_files_are_those_to_add(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("anvil\n\nsmith\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("tongs\nAnvil\n", encoding="utf-8")
    assert words_for(tokenizer, [tmp_path / "a.txt", tmp_path / "b.txt"]) == ["anvil", "tongs"]


def test_a_line_that_is_not_one_word_is_named(tokenizer, tmp_path):
    (tmp_path / "words.txt").write_text("anvil\n\nwell-known\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"words\.txt:3: 'well-known' is 3 words to this tokenizer"):
        words_for(tokenizer, [tmp_path / "words.txt"])
