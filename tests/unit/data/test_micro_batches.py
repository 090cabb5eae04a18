"""How a step is cut into micro-batches."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.data.collate import MicroShape, Multiples, micro_sizes


def cut(lengths: list[int], sizes: list[int]) -> list[int]:
    """The tokens of each micro-batch."""
    ends = np.cumsum([0, *lengths])
    return np.diff(ends[np.cumsum([0, *sizes])]).tolist()


def test_micro_batches_of_a_step_have_about_as_many_tokens_each():
    lengths = [128] * 230
    assert cut(lengths, micro_sizes([np.array(lengths)], 0, capacity=8191)) == [7296, 7424, 7296, 7424]


def test_a_step_that_fits_is_one_micro_batch():
    assert micro_sizes([np.array([100, 20, 7])], 0, capacity=127) == [3]


def test_where_no_even_cut_fits_the_micro_batches_are_filled_one_after_the_other():
    lengths = [10, 90, 90, 10]
    assert cut(lengths, micro_sizes([np.array(lengths)], 0, capacity=100)) == [100, 100]


def test_an_even_cut_may_fill_a_micro_batch_to_the_last_token_and_no_further():
    assert micro_sizes([np.array([10, 10, 20, 20])], 0, capacity=40) == [2, 2]
    assert micro_sizes([np.array([10, 10, 20, 21])], 0, capacity=40) == [3, 1]


def test_no_micro_batch_stays_empty_while_there_are_examples():
    ranks = [np.array([50, 50, 50]), np.array([1, 50, 1])]
    assert micro_sizes(ranks, 1, capacity=60) == [1, 1, 1]


def test_a_rank_without_examples_takes_empty_micro_batches():
    assert micro_sizes([np.array([5, 5]), np.array([], np.int64)], 1, capacity=5) == [0, 0]


@given(
    st.lists(st.lists(st.integers(1, 60), max_size=40), min_size=1, max_size=3).filter(any),
    st.integers(60, 200),
)
def test_all_ranks_have_as_many_and_none_is_too_large(lengths_by_rank, capacity):
    numbers = [np.array(lengths, np.int64) for lengths in lengths_by_rank]
    sizes = [micro_sizes(numbers, rank, capacity=capacity) for rank in range(len(numbers))]
    assert len({len(each) for each in sizes}) == 1
    for lengths, own in zip(lengths_by_rank, sizes, strict=True):
        assert sum(own) == len(lengths)
        assert all(tokens <= capacity for tokens in cut(lengths, own))


def test_stages_share_one_longest_sequence_but_for_short_ones_before_longer_ones():
    def longest(length: int, recipe_length: int) -> int:
        return MicroShape(4096, Multiples(), length, pad_id=0, recipe_length=recipe_length).longest

    assert [longest(length, 100) for length in (70, 100)] == [100, 100]
    assert [longest(length, 512) for length in (64, 128, 256, 512)] == [128, 128, 512, 512]
    assert longest(16, 16) == Multiples().tokens  # filler is longer
