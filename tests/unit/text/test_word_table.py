"""The table of words agrees with asking for each word by itself."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.text.word_table import MARGIN, MAX_KEY_BYTES, Entry, Found, WordTable

any_word = st.binary(min_size=1, max_size=40) | st.sampled_from([b"a", b"a\0", b"\0", b"a" * 23, b"a" * 24])


def spell(word: bytes) -> list[int]:
    """Stands for a tokenizer: as many ids as the word has bytes, less one now and then."""
    return [byte + len(word) for byte in word[word[0] % 2 :]]


def entry(word: bytes) -> Entry:
    return Entry(spell(word), words=len(word) % 3)


def find(table: WordTable, words: list[bytes]) -> Found:
    text = np.frombuffer(b" ".join(words) + bytes(MARGIN), np.uint8)
    lengths = np.array([len(word) for word in words], np.int64)
    starts = np.cumsum(lengths + 1) - (lengths + 1)
    return table.find(text, starts, lengths=lengths)


def look_up(table: WordTable, words: list[bytes]) -> list[list[int]]:
    found = find(table, words)
    return [row.tolist() for row in np.split(found.ids, np.cumsum(found.counts))[:-1]]


@pytest.fixture
def asked() -> list[bytes]:
    return []


@pytest.fixture
def counting(asked: list[bytes]) -> Callable[[bytes], Entry]:
    def encode(word: bytes) -> Entry:
        asked.append(word)
        return entry(word)

    return encode


@given(st.lists(st.lists(any_word, min_size=1, max_size=30), min_size=1, max_size=5))
def test_every_word_gets_its_own_ids_however_often_it_comes(rounds: list[list[bytes]]) -> None:
    table = WordTable(entry, id_type="uint16", capacity=20)
    for words in rounds:
        assert look_up(table, words) == [spell(word) for word in words]


def test_the_words_inside_are_counted_for_each() -> None:
    words = [b"iron", b"hot", b"iron", b"a" * 40]
    assert find(WordTable(entry, id_type="uint16"), words).words.tolist() == [1, 0, 1, 1]


def test_a_word_is_encoded_once(counting, asked) -> None:
    table = WordTable(counting, id_type="uint16")
    long = b"a" * (MAX_KEY_BYTES + 1)
    for words in ([b"iron", b"hot", b"iron"], [b"hot", long, long], [long, b"iron"]):
        look_up(table, words)
    assert asked == [b"iron", b"hot", long]


def test_words_that_differ_in_trailing_zeros_are_different_words() -> None:
    assert look_up(WordTable(entry, id_type="uint16"), [b"d", b"d\0", b"d\0\0"]) == [
        spell(word) for word in (b"d", b"d\0", b"d\0\0")
    ]


def test_thirty_thousand_words_find_their_slots() -> None:
    table = WordTable(entry, id_type="uint32")
    words = [str(number).encode() for number in range(30_000)]
    assert look_up(table, words) == look_up(table, words) == [spell(word) for word in words]


def test_a_full_table_starts_again(counting, asked) -> None:
    table = WordTable(counting, id_type="uint16", capacity=2)
    look_up(table, [b"one", b"two", b"three"])
    look_up(table, [b"one"])
    assert asked == [b"one", b"two", b"three", b"one"]


def test_a_table_that_long_words_have_filled_starts_again(counting, asked) -> None:
    table = WordTable(counting, id_type="uint16", capacity=10)
    long = [b"a" * 200, b"b" * 200]
    look_up(table, [b"one", *long])
    look_up(table, [b"one", long[0]])
    assert asked == [b"one", *long, b"one", long[0]]
