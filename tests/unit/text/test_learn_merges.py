"""The order in which pairs are joined: the fast learner is the plain one, for every rule."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.text.learn_merges import (
    MergeRule,
    frequency_gain,
    learn_merges,
    likelihood_gain,
    split_characters,
)

PlainGain = Callable[[int, int, int, int], float]
Pair = tuple[str, str]

WORDPIECE = MergeRule(likelihood_gain, inside="##", min_count=2)
BY_FREQUENCY = replace(WORDPIECE, gain=frequency_gain)
BYTE_BPE = replace(BY_FREQUENCY, inside="")


def plain_likelihood(pair: int, left: int, right: int, total: int) -> float:
    return pair * round(log2(pair * total / (left * right)) * 2**20)


def plain_frequency(pair: int, left: int, right: int, total: int) -> float:
    return pair


def plain_merges(words: dict[str, int], gain: PlainGain, *, inside: str, min_count: int) -> Iterator[Pair]:
    cut = {word: [word[0], *(inside + character for character in word[1:])] for word in words}
    while True:
        seen, pairs = Counter[str](), Counter[Pair]()
        for word, count in words.items():
            seen.update({piece: n * count for piece, n in Counter(cut[word]).items()})
            pairs.update({pair: n * count for pair, n in Counter(pairwise(cut[word])).items()})
        gains = {
            (a, b): gain(n, seen[a], seen[b], seen.total()) for (a, b), n in pairs.items() if n >= min_count
        }
        if not gains:
            return
        best = min(gains, key=lambda pair: (-gains[pair], pair))
        yield best
        cut = {word: plain_join(pieces, best, inside=inside) for word, pieces in cut.items()}


def plain_join(pieces: list[str], pair: Pair, *, inside: str) -> list[str]:
    joined: list[str] = []
    rest = list(pieces)
    while rest:
        width = 2 if tuple(rest[:2]) == pair else 1
        joined.append(rest[0] + "".join(piece.removeprefix(inside) for piece in rest[1:width]))
        rest = rest[width:]
    return joined


def fast_merges(words: dict[str, int], joining: MergeRule) -> Iterator[Pair]:
    spelled = split_characters(words, characters=100, inside=joining.inside)
    return ((merge.left, merge.right) for merge in learn_merges(spelled, joining))


# Few letters and small counts: pairs that overlap, gains that tie, and pieces that are made in two ways.
some_words = st.dictionaries(st.text("abc", min_size=1, max_size=9), st.integers(1, 6), max_size=12)


@pytest.mark.parametrize(
    ("joining", "plain_gain"),
    [(WORDPIECE, plain_likelihood), (BY_FREQUENCY, plain_frequency), (BYTE_BPE, plain_frequency)],
    ids=["wordpiece", "wordpiece-frequency", "byte-bpe"],
)
@given(words=some_words, min_count=st.integers(1, 4), shortlist=st.integers(1, 6))
def test_pairs_are_joined_in_the_order_of_a_plain_learner(
    joining: MergeRule, plain_gain: PlainGain, words: dict[str, int], min_count: int, shortlist: int
) -> None:
    fast = fast_merges(words, replace(joining, min_count=min_count, shortlist=shortlist))
    assert list(fast) == list(plain_merges(words, plain_gain, inside=joining.inside, min_count=min_count))


@given(words=st.dictionaries(st.text("ab", min_size=1, max_size=30), st.integers(1, 10**6), max_size=6))
def test_long_words_and_large_counts_are_joined_in_the_same_order_too(words: dict[str, int]) -> None:
    plain = plain_merges(words, plain_likelihood, inside="##", min_count=2)
    assert list(fast_merges(words, replace(WORDPIECE, shortlist=3))) == list(plain)


def test_hundreds_of_words_of_many_letters_are_joined_in_the_same_order() -> None:
    stream = np.random.Generator(np.random.Philox(key=7))
    letters = np.array(list("abcdefghij"))
    drawn = ("".join(letters[(stream.random(6) ** 2 * 10).astype(int)]) for _ in range(400))
    words = dict(Counter(drawn))
    fast = fast_merges(words, replace(WORDPIECE, shortlist=16))
    plain = plain_merges(words, plain_likelihood, inside="##", min_count=2)
    assert list(islice(fast, 80)) == list(islice(plain, 80))


def test_the_order_of_the_words_does_not_matter() -> None:
    words = {"banana": 3, "bandana": 2, "anna": 3, "nab": 1, "abba": 2}
    backwards = dict(reversed(words.items()))
    assert list(fast_merges(words, WORDPIECE)) == list(fast_merges(backwards, WORDPIECE))


def test_likelihood_joins_letters_that_only_occur_together_before_a_more_frequent_pair() -> None:
    words = {"ba": 300, "be": 300, "ca": 300, "ce": 300, "qu": 200}
    assert next(fast_merges(words, WORDPIECE)) == ("q", "##u")
    assert next(fast_merges(words, BY_FREQUENCY)) == ("b", "##a")


def test_a_word_with_a_character_past_the_limit_is_skipped() -> None:
    spelled = split_characters({"ab": 5, "ba": 5, "az": 1}, characters=2, inside="##")
    assert spelled.texts == ["", "a", "b", "##a", "##b"]
    assert spelled.word_count_P.tolist() == [0, 5, 5, 0, 5, 5, 0]


def test_among_equally_frequent_characters_the_lower_code_point_is_kept() -> None:
    assert split_characters({"b": 2, "a": 2, "c": 2}, characters=2, inside="##").texts == ["", "a", "b"]
