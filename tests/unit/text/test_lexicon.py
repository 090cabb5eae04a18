"""Units: which entries of a lexicon are found in tokens, and how the tokens are marked."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.text.fast_encoder import FastEncoder
from bertsmith.text.lexicon import Lexicon, UnitFinder, count_units
from bertsmith.text.tokenizer import Tokenizer
from tests.tokenizer_makers import albert_unigram, byte_bpe, cased_wordpiece, wordpiece_pieces

CITIES = ["new", "york", "city", "harbin", "the", "is", "in", "old", "哈", "尔", "滨", "市", "人", ",", "."]
KINDS = {2: "<", 4: "["}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Uncased WordPiece: whole words of a few, every letter of theirs for the rest."""
    folder: Path = tmp_path_factory.mktemp("vocabulary")
    pieces = "".join(f"{piece}\n" for piece in wordpiece_pieces(CITIES))
    (folder / "vocab.txt").write_text(pieces, encoding="utf-8")
    return Tokenizer.load(folder)


def marked(tokenizer: Tokenizer, sentences: list[str], **kinds: str) -> str:
    """The tokens with a space before a word, < before a phrase, [ before an entity, _ inside either."""
    lexicon = Lexicon({text.replace("_", " "): kind for text, kind in kinds.items()})
    encoded = FastEncoder(tokenizer).encode_many(sentences)
    codes = UnitFinder(lexicon, tokenizer).codes(encoded.ids, encoded.lengths)
    signs = {0: " ", 1: "", 2: " <", 3: "_", 4: " [", 5: "_"}
    parts = [
        signs[code] + tokenizer.token(number)
        for number, code in zip(encoded.ids.tolist(), codes.tolist(), strict=True)
    ]
    return "".join(parts).strip()


def test_words_are_units_of_the_basic_kind(tokenizer) -> None:
    assert marked(tokenizer, ["the rock is old"]) == "the r##o##c##k is old"


def test_an_entry_matches_whatever_the_tokenizer_makes_equal(tokenizer) -> None:
    assert marked(tokenizer, ["in NEW York."], new_york="entity") == "in [new_york ."


def test_an_entry_is_found_in_text_without_spaces(tokenizer) -> None:
    assert marked(tokenizer, ["人in哈尔滨市"], 哈尔滨="entity") == "人 in [哈_尔_滨 市"


def test_phrases_and_entities_are_distinguished(tokenizer) -> None:
    text = marked(tokenizer, ["new york is in the old city"], new_york="entity", the_old="phrase")
    assert text == "[new_york is in <the_old city"


def test_the_longest_entry_wins(tokenizer) -> None:
    entries = {"new": "entity", "new_york": "entity", "new_york_city": "phrase", "york_city": "entity"}
    assert (
        marked(tokenizer, ["new york city, new york. new"], **entries) == "<new_york_city , [new_york . [new"
    )


def test_the_longest_of_entries_that_begin_alike_wins(tokenizer) -> None:
    entries = {"the_new_york_city": "entity", "the_new_york": "entity", "the_new_york_city_is_old": "phrase"}
    assert marked(tokenizer, ["the new york city is in"], **entries) == "[the_new_york_city is in"
    assert marked(tokenizer, ["the new york city is old"], **entries) == "<the_new_york_city_is_old"


def test_of_overlapping_entries_the_left_one_wins(tokenizer) -> None:
    assert marked(tokenizer, ["old new york"], old_new="phrase", new_york="entity") == "<old_new york"


def test_a_match_begins_and_ends_with_a_word(tokenizer) -> None:
    assert marked(tokenizer, ["news isnew new"], new="entity") == "new##s is##n##e##w [new"


def test_an_entry_of_one_word_of_several_pieces_is_a_unit(tokenizer) -> None:
    assert marked(tokenizer, ["the rock"], rock="entity") == "the [r_##o_##c_##k"


def test_no_match_reaches_over_the_end_of_a_sentence(tokenizer) -> None:
    assert (
        marked(tokenizer, ["in new", "york is", "new york"], new_york="entity") == "in new york is [new_york"
    )


def test_an_entry_with_an_unknown_piece_matches_nothing(tokenizer) -> None:
    assert marked(tokenizer, ["the жар"], жук="entity") == "the [UNK]"


def test_an_empty_lexicon_leaves_words(tokenizer) -> None:
    assert marked(tokenizer, ["new york"]) == "new york"


@pytest.mark.parametrize("maker", [byte_bpe, cased_wordpiece, albert_unigram])
def test_every_kind_of_vocabulary_finds_an_entry_at_the_start_in_the_middle_and_before_a_mark(
    maker, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    sentences = ["the iron is hot", " heats the iron, and", "(and the iron)", "bathe irons the ironic"]
    encoded = FastEncoder(tokenizer).encode_many(sentences)
    codes = UnitFinder(Lexicon({"the iron": "entity"}), tokenizer).codes(encoded.ids, encoded.lengths)
    rows = np.split(codes, np.cumsum(encoded.lengths))[:-1]
    assert [row.tolist().count(4) for row in rows] == [1, 1, 1, 0]


def test_a_byte_level_vocabulary_knows_chinese_characters_for_words(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_bpe(tmp_path))
    encoded = FastEncoder(tokenizer).encode_many(["打铁火花，火。"])
    codes = UnitFinder(Lexicon({"火花": "entity"}), tokenizer).codes(encoded.ids, encoded.lengths)
    found = encoded.ids[np.flatnonzero(codes >= 4)]
    assert tokenizer.decode(found) == "火花"


# --- agreement with a plain search ---

some_words = st.lists(st.sampled_from([*CITIES, "rock", "news"]), min_size=1, max_size=8)
some_texts = st.lists(some_words.map(" ".join), min_size=1, max_size=4)


def plain_codes(tokenizer: Tokenizer, sentences: list[str], entries: dict[str, str]) -> list[int]:
    """At each word the longest entry that ends with a word, tried one by one."""
    spell = {
        tuple(FastEncoder(tokenizer).encode(text).tolist()): kind for text, kind in reversed(entries.items())
    }
    codes: list[int] = []
    for ids in [FastEncoder(tokenizer).encode(sentence).tolist() for sentence in sentences]:
        inside = [tokenizer.token(number).startswith("##") for number in ids] + [False]
        place = 0
        while place < len(ids):
            ends = [
                end
                for end in range(len(ids), place, -1)
                if tuple(ids[place:end]) in spell and not inside[end]
            ]
            end = ends[0] if ends and not inside[place] else place + 1
            code = (
                {"phrase": 2, "entity": 4}[spell[tuple(ids[place:end])]]
                if ends and not inside[place]
                else int(inside[place])
            )
            codes += [code] + [code + 1] * (end - place - 1)
            place = end
    return codes


@given(
    some_texts, st.dictionaries(some_words.map(" ".join), st.sampled_from(["phrase", "entity"]), max_size=8)
)
def test_units_are_those_of_a_plain_search(tokenizer, sentences: list[str], entries: dict[str, str]) -> None:
    encoded = FastEncoder(tokenizer).encode_many(sentences)
    codes = UnitFinder(Lexicon(entries), tokenizer).codes(encoded.ids, encoded.lengths)
    assert codes.tolist() == plain_codes(tokenizer, sentences, entries)


# --- files ---


def test_a_line_is_an_entry_and_may_name_its_kind(tmp_path: Path) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("New York\n\nof course\tphrase\r\n Harbin \tentity\n", encoding="utf-8")
    second.write_text("New York\tphrase\n哈尔滨\n", encoding="utf-8")
    assert Lexicon.read([first, second]).kinds == {
        "New York": "entity",
        "of course": "phrase",
        "Harbin": "entity",
        "哈尔滨": "entity",
    }


def test_another_kind_is_rejected_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "lexicon.txt"
    file.write_text("Harbin\nNew York\tcity\n", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"lexicon.txt:2: 'city' is not a kind of unit; write phrase or entity"
    ):
        Lexicon.read([file])


def test_a_lexicon_that_is_no_text_is_rejected_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "lexicon.txt"
    file.write_bytes(b"Harbin\nZ\xfcrich\n")
    with pytest.raises(UserError, match=r"lexicon.txt:2: is not UTF-8 text"):
        Lexicon.read([file])


def test_a_lexicon_without_entries_is_rejected(tmp_path) -> None:
    (tmp_path / "full.txt").write_text("harbin\n")
    (tmp_path / "empty.txt").write_text("\n\tphrase\n")
    with pytest.raises(
        UserError, match=r"empty\.txt: contains no entries; write one phrase or entity per line"
    ):
        Lexicon.read([tmp_path / "full.txt", tmp_path / "empty.txt"])


def test_units_are_counted_where_they_begin() -> None:
    codes = np.array([0, 2, 3, 3, 2, 4, 5, 1, 4, 4], np.uint8)
    assert count_units(codes) == {"phrase": 2, "entity": 3}
