"""Texts, pairs and choices as sequences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.example_types import ChoiceExample
from bertsmith.tasks.text_encoding import both_ends, windowed
from bertsmith.text.tokenizer import Encoded, Tokenizer, truncate_longest_first
from tests.tokenizer_makers import gpt_bpe
from tests.unit.tasks.encoding_tools import DROPPED, encode_split, kinds, rows_of, spaces, text_example, words

any_text = st.lists(words.map(" ".join) | spaces | st.sampled_from(DROPPED), max_size=4).map("".join)


def check_truncated(encoded, plain: list[Encoded], longest: int) -> None:
    cut = [truncate_longest_first(each, longest) for each in plain]
    assert rows_of(encoded) == [each.ids for each in cut]
    assert encoded.segments_T.tolist() == [segment for each in cut for segment in each.segments]


@given(kind=kinds, texts=st.lists(any_text, max_size=5), longest=st.integers(8, 60))
def test_single_texts_are_encoded_and_cut_as_the_tokenizer_does(kind, tokenizers, texts, longest) -> None:
    tokenizer = tokenizers[kind]
    encoded = encode_split(
        "classify", [text_example(text) for text in texts], (), tokenizer, section(longest)
    )
    check_truncated(encoded, [tokenizer.encode(text) for text in texts], longest)


@given(kind=kinds, pairs=st.lists(st.tuples(any_text, any_text), max_size=5), longest=st.integers(8, 60))
def test_pairs_lose_the_end_of_the_longer_text(kind, tokenizers, pairs, longest) -> None:
    tokenizer = tokenizers[kind]
    encoded = encode_split(
        "classify", [text_example(pair) for pair in pairs], (), tokenizer, section(longest)
    )
    check_truncated(encoded, [tokenizer.encode_pair(*pair) for pair in pairs], longest)


@pytest.mark.parametrize("count", [3, 300])
def test_a_text_without_pieces_is_its_end_where_nothing_stands_around_texts(tmp_path, count) -> None:
    tokenizer = Tokenizer.load(gpt_bpe(tmp_path))
    texts = ["", *(f"iron {number}" for number in range(count))]
    encoded = encode_split("classify", [text_example(text) for text in texts], (), tokenizer, section(16))
    assert rows_of(encoded) == [[tokenizer.sep_id], *(tokenizer.encode(text).ids for text in texts[1:])]


def section(longest: int, **changes) -> TextSection:
    return TextSection(longest=longest, **changes)


def test_many_sequences_are_laid_as_few(uncased) -> None:
    texts = [f"the iron {'is hot ' * (number % 7)} {number % 1500}" for number in range(9000)]
    encoded = encode_split("classify", [text_example(text) for text in texts], (), uncased, section(16))
    expected = {text: truncate_longest_first(uncased.encode(text), 16).ids for text in dict.fromkeys(texts)}
    assert rows_of(encoded) == [expected[text] for text in texts]
    assert encoded.items_M1.tolist() == list(range(9001))


def test_of_510_tokens_128_are_from_the_front() -> None:
    stretches = both_ends(np.array([[1000]]), np.array([[700]]), 510)
    assert stretches.starts_SK2.tolist() == [[[1000, 1700 - 382]]]
    assert stretches.lengths_SK2.tolist() == [[[128, 382]]]


def test_head_and_tail_of_a_long_text_are_shown(uncased) -> None:
    text = " ".join(["the", "iron", "is", "hot", "then", "it", "is", "a", "horseshoe", "again"])
    encoded = encode_split("classify", [text_example(text)], (), uncased, section(8, long_texts="head-tail"))
    shown = [uncased.token(number) for number in encoded.tokens_T]
    assert shown == ["[CLS]", "the", "iron", "is", "a", "horseshoe", "again", "[SEP]"]


def test_head_and_tail_leave_a_text_that_fits_as_it_is(uncased) -> None:
    examples = [text_example(("the iron is hot", "it is")), text_example(("it", "is"))]
    whole = encode_split("classify", examples, (), uncased, section(16))
    ends = encode_split("classify", examples, (), uncased, section(16, long_texts="head-tail"))
    assert rows_of(whole) == rows_of(ends)


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=5), step=st.integers(1, 20))
def test_windows_of_a_text_show_all_of_it(lengths: list[int], step: int) -> None:
    starts_MK = np.cumsum([0, *lengths])[:-1, None]
    stretches, counts = windowed(starts_MK, np.array(lengths)[:, None], 10, step=step)
    begins, sizes = stretches.starts_SK2[:, 0, 0], stretches.lengths_SK2[:, 0, 0]
    shown = {token for begin, size in zip(begins, sizes, strict=True) for token in range(begin, begin + size)}
    assert shown == set(range(sum(lengths)))
    assert counts.sum() == len(begins) and (counts >= 1).all() and sizes.max() <= 10


@given(
    pairs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=5),
    step=st.integers(1, 20),
)
def test_windows_of_a_pair_show_the_shorter_text_each_time(pairs, step: int) -> None:
    lengths_MK = np.array(pairs)
    starts_MK = (np.cumsum(lengths_MK.ravel()) - lengths_MK.ravel()).reshape(-1, 2)
    stretches, counts = windowed(starts_MK, lengths_MK, 12, step=step)
    sizes = stretches.lengths_SK2.sum(-1)
    assert sizes.sum(-1).max() <= 12
    first = 0
    for pair, count in zip(pairs, counts.tolist(), strict=True):
        short = 0 if pair[0] <= pair[1] else 1
        assert set(sizes[first : first + count, short].tolist()) == {min(pair[short], 6)}
        assert (count > 1) == (sum(pair) > 12)
        first += count


def test_windows_of_one_text_are_one_item(uncased) -> None:
    examples = [text_example("the iron is hot " * 5), text_example("it is")]
    encoded = encode_split("classify", examples, (), uncased, section(12, long_texts="windows", step=5))
    assert encoded.items_M1.tolist() == [0, 3, 4]
    assert encoded.lengths_M().sum() == len(encoded.tokens_T)


def test_classes_are_numbered_in_their_order_and_none_is_minus_one(uncased) -> None:
    examples = [text_example("a", label) for label in ("no", "yes", None)]
    assert encode_split("classify", examples, ("yes", "no"), uncased, section(8)).targets.tolist() == [
        1,
        0,
        -1,
    ]


def test_several_classes_are_a_row_of_zeros_and_ones(uncased) -> None:
    examples = [text_example("a", label) for label in (("x", "z"), (), None)]
    encoded = encode_split("multilabel", examples, ("x", "y", "z"), uncased, section(8))
    assert encoded.targets.tolist() == [[1, 0, 1], [0, 0, 0], [-1, -1, -1]]


def test_numbers_are_float32_and_none_is_nan(uncased) -> None:
    examples = [text_example("a", label) for label in (2.5, "3", None)]
    targets = encode_split("regress", examples, (), uncased, section(8)).targets
    assert targets.dtype == np.float32
    assert targets[:2].tolist() == [2.5, 3.0] and np.isnan(targets[2])


def test_classes_that_training_has_not_are_each_a_number_below_minus_one(uncased) -> None:
    examples = [text_example("a", label) for label in ("maybe", "no", "never", None, "maybe")]
    targets = encode_split("classify", examples, ("yes", "no"), uncased, section(8)).targets
    assert targets.tolist() == [-2, 1, -3, -1, -2]


def test_several_classes_that_training_has_not_stand_behind_the_others(uncased) -> None:
    examples = [text_example("a", label) for label in (("y", "?"), ("x",), ("!", "?"), None)]
    targets = encode_split("multilabel", examples, ("x", "y"), uncased, section(8)).targets
    assert targets.tolist() == [[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 1, 1], [-1, -1, -1, -1]]


def test_what_is_no_number_is_named_with_its_place(uncased) -> None:
    with pytest.raises(UserError) as caught:
        encode_split("regress", [text_example("a", "much")], (), uncased, section(8))
    assert str(caught.value) == "here:1: 'much' is not a number; write it as 2.5"


def test_texts_among_pairs_are_rejected(uncased) -> None:
    with pytest.raises(UserError, match=r"here:2: has 1 texts, but the first example has 2"):
        examples = [text_example(("a", "b")), text_example("a", where="here:2")]
        encode_split("classify", examples, (), uncased, section(8))


def test_half_a_surrogate_pair_is_named_with_its_place(uncased) -> None:
    examples = [text_example(("a", "b")), text_example(("a", "b\ud83d"), where="here:2")]
    with pytest.raises(UserError, match=r"here:2: character 1 is a lone surrogate"):
        encode_split("classify", examples, (), uncased, section(8))


def test_all_options_of_a_choice_are_one_item(uncased) -> None:
    examples = [
        ChoiceExample("1", (("the", "iron"), ("the", "café")), 1, "here:1"),
        ChoiceExample("2", (("it", "is"), ("it", "hot"), ("it", "")), None, "here:2"),
    ]
    encoded = encode_split("choice", examples, (), uncased, section(16))
    options = [option for example in examples for option in example.options]
    assert rows_of(encoded) == [uncased.encode_pair(*option).ids for option in options]
    assert encoded.items_M1.tolist() == [0, 2, 5]
    assert encoded.targets.tolist() == [1, -1]


def test_an_option_that_is_not_there_is_rejected(uncased) -> None:
    with pytest.raises(UserError, match=r"here:1: option 2 is right, but there are 2"):
        examples = [ChoiceExample("1", (("a", "b"), ("a", "c")), 2, "here:1")]
        encode_split("choice", examples, (), uncased, section(16))


def test_choices_are_not_shown_in_windows(uncased) -> None:
    with pytest.raises(UserError, match="windows"):
        encode_split("choice", [], (), uncased, section(16, long_texts="windows", step=4))
