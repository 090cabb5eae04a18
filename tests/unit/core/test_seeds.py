"""Draws are what they always were, look random, and depend on nothing but what they are for."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.seeds import bits, key_of, stream, sub_keys, uniforms

WORD = 2**64
words = st.integers(0, WORD - 1)
COUNTERS = np.arange(100_000, dtype=np.uint64)


# ---- nobody changes them by accident: every run that was ever started would show other data

KNOWN_KEYS = [11243728523470438572, 10409756785604414247, 13433631019720600555]
KNOWN_BITS = [
    [12035550249420947055, 5095610196844313600, 17160774760686499100],
    [6484640522897555876, 6315386041490549132, 5203864201044302839],
]
KNOWN_SUB_KEYS = [18425371366692491303, 15289926248853332259, 15922747487057236755]
KNOWN_UNIFORMS = [0.017446521186203934, 0.7408650991724528, 0.12450655982223424]
KNOWN_PERMUTATION = [4, 6, 2, 5, 1, 7, 0, 3]


def test_the_keys_are_the_known_ones():
    assert key_of(0) == KNOWN_KEYS[0]
    assert key_of(0, "masking") == KNOWN_KEYS[1]
    assert key_of(1234, "epoch", 3, "order") == KNOWN_KEYS[2]


def test_the_bits_are_the_known_ones():
    assert bits(np.uint64(0), np.arange(3, dtype=np.uint64)).tolist() == KNOWN_BITS[0]
    assert bits(np.uint64(key_of(0, "masking")), np.arange(3, dtype=np.uint64)).tolist() == KNOWN_BITS[1]


def test_the_sub_keys_and_uniforms_are_the_known_ones():
    keys = sub_keys(key_of(0, "masking"), np.arange(3))
    assert keys.tolist() == KNOWN_SUB_KEYS
    assert uniforms(keys, np.uint64(5)).tolist() == KNOWN_UNIFORMS


def test_a_stream_is_the_known_one():
    assert stream(7, "shuffle", 0).permutation(8).tolist() == KNOWN_PERMUTATION


# ---- a plain reference


def mixed(word: int) -> int:
    """The output of splitmix64 for a state, with whole numbers that never overflow."""
    word = (word + 0x9E3779B97F4A7C15) % WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


@given(key=words, counter=words)
def test_bits_agree_with_the_formula_in_whole_numbers(key, counter):
    plain = mixed((mixed(counter * 0x9E3779B97F4A7C15 % WORD) + key) % WORD)
    assert int(bits(np.uint64(key), np.uint64(counter))) == plain
    assert float(uniforms(np.uint64(key), np.uint64(counter))) == (plain >> 11) / 2**53


# ---- uniform, over counters and over keys alike


def draws_over_counters() -> np.ndarray:
    return uniforms(np.uint64(key_of(3, "a")), COUNTERS)


def draws_over_sub_keys() -> np.ndarray:
    return uniforms(sub_keys(key_of(3, "a"), COUNTERS), np.uint64(0))


def draws_over_neighbouring_keys() -> np.ndarray:
    return uniforms(COUNTERS, np.uint64(0))


ways = pytest.mark.parametrize(
    "draws",
    [draws_over_counters, draws_over_sub_keys, draws_over_neighbouring_keys],
    ids=lambda way: way.__name__,
)


@ways
def test_draws_fill_the_unit_interval_evenly(draws):
    drawn = draws()
    assert drawn.min() >= 0 and drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=100, range=(0, 1))
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert 45 < chi_square < 175  # 99 degrees of freedom: outside this with probability below 1e-5


@ways
def test_neighbouring_draws_are_not_correlated(draws):
    drawn = draws()
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 4.5 / len(drawn) ** 0.5


def test_every_bit_is_set_half_of_the_time():
    drawn = bits(np.uint64(key_of(3, "a")), COUNTERS)
    shares = ((drawn[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean(axis=0)
    assert np.abs(shares - 0.5).max() < 4.5 * 0.5 / len(drawn) ** 0.5


def test_draws_of_two_purposes_are_not_correlated():
    one, other = (uniforms(np.uint64(key_of(3, purpose)), COUNTERS) for purpose in ("masking", "order"))
    assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / len(one) ** 0.5


def test_draws_of_neighbouring_documents_are_not_correlated():
    one, other = (uniforms(key, COUNTERS) for key in sub_keys(key_of(3, "a"), np.array([7, 8])))
    assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / len(one) ** 0.5


# ---- order does not matter


def test_a_draw_alone_is_the_draw_among_many():
    key = np.uint64(key_of(1, "a"))
    together = uniforms(key, COUNTERS[:1000])
    assert all(uniforms(key, COUNTERS[number]) == together[number] for number in (0, 1, 500, 999))


def test_draws_in_another_order_are_the_same_draws():
    order = np.random.default_rng(0).permutation(1000)
    key = np.uint64(key_of(1, "a"))
    assert (bits(key, COUNTERS[order]) == bits(key, COUNTERS[:1000])[order]).all()


def test_keys_and_counters_are_broadcast_against_each_other():
    keys = sub_keys(key_of(1), np.arange(5))
    table = bits(keys[:, None], COUNTERS[None, :7])
    assert table.shape == (5, 7)
    assert (table[3] == bits(keys[3], COUNTERS[:7])).all()


def test_sub_keys_do_not_depend_on_the_type_of_the_numbers():
    numbers = [0, 1, 60_000]
    kinds = (np.uint16, np.int32, np.int64, np.uint64)
    assert len({tuple(sub_keys(9, np.array(numbers, dtype=kind)).tolist()) for kind in kinds}) == 1


def test_a_stream_does_not_depend_on_other_streams_or_on_global_state():
    first = stream(1, "a").random(4)
    np.random.seed(99)
    stream(1, "b").random(1000)
    assert (stream(1, "a").random(4) == first).all()


# ---- no two purposes share a key


def test_no_two_purposes_share_a_key():
    names = ("masking", "order", "plan", "dropout", "epoch", "1", "12", "")
    purposes = [
        (seed, *parts)
        for seed in range(20)
        for length in range(4)
        for parts in itertools.product((*names, 0, 1, 2, 12), repeat=length)
    ]
    assert len({key_of(*purpose) for purpose in purposes}) == len(purposes)


def test_a_number_and_the_same_number_in_letters_are_two_purposes():
    assert len({key_of(1, "2"), key_of(1, 2), key_of(12), key_of(1, 2, "")}) == 4


def test_sub_keys_of_many_documents_are_all_different():
    keys = np.concatenate([sub_keys(key_of(0, "plan", epoch), COUNTERS) for epoch in range(3)])
    assert len(np.unique(keys)) == len(keys)


def test_draws_under_many_keys_are_all_different():
    table = bits(sub_keys(key_of(0), np.arange(300))[:, None], COUNTERS[:300])
    assert len(np.unique(table)) == table.size


def test_streams_of_different_purposes_differ():
    drawn = {tuple(stream(0, *parts).integers(0, 2**32, 4)) for parts in [(), ("a",), ("a", 0), (0,), ("b",)]}
    assert len(drawn) == 5


def test_a_number_from_an_array_gives_the_key_of_the_plain_number():
    assert key_of(np.int64(0), "epoch", np.int32(3)) == key_of(0, "epoch", 3)
