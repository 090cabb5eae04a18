"""Questions and passages as windows, and the way back to characters."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.recipe.finetuning_schema import TextSection
from tests.unit.tasks.encoding_tools import DROPPED, encode_split, kinds, question, rows_of, spaces, words
from tests.unit.tasks.test_windows import plain_best, plain_windows

passages = st.lists(words.map(" ".join) | spaces | st.sampled_from(DROPPED), max_size=4).map("".join)


def section(longest: int = 24, step: int = 6, longest_question: int = 8) -> TextSection:
    return TextSection(longest=longest, step=step, longest_question=longest_question)


@given(kind=kinds, texts=st.lists(passages, min_size=1, max_size=3))
def test_windows_are_cut_as_by_the_plain_loop(kind, tokenizers, texts: list[str]) -> None:
    tokenizer = tokenizers[kind]
    encoded = encode_split("span", [question(text, []) for text in texts], (), tokenizer, section())
    specials = tokenizer.encode_pair("", "").ids
    asked = [number for number in tokenizer.encode("is it hot").ids if number not in specials][:8]
    room = 24 - len(specials) - len(asked)
    expected, owners = [], []
    for number, text in enumerate(texts):
        pieces = tokenizer.closed.encode(text, add_special_tokens=False).ids
        for first, shown in plain_windows(len(pieces), room, 6):
            lead, tail = specials[:1], specials[-1:]
            expected.append([*lead, *asked, *specials[1:-1], *pieces[first : first + shown], *tail])
            owners.append(number)
    assert rows_of(encoded) == expected
    assert encoded.windows.questions_N.tolist() == owners


def test_a_short_passage_is_a_pair_of_the_tokenizer(tokenizers) -> None:
    for tokenizer in tokenizers.values():
        encoded = encode_split("span", [question("The iron is hot.", [])], (), tokenizer, section(60, 9, 30))
        plain = tokenizer.encode_pair("is it hot", "The iron is hot.")
        assert rows_of(encoded) == [plain.ids]
        assert encoded.segments_T.tolist() == plain.segments
        first, end = encoded.passages_N2[0].tolist()
        assert [row for row, text in enumerate(plain.sequence) if text == 1] == list(range(first, end))


@given(kind=kinds, passage=passages)
def test_every_character_that_a_tokenizer_reads_belongs_to_a_token(kind, tokenizers, passage: str) -> None:
    encoded = encode_split("span", [question(passage, [])], (), tokenizers[kind], section())
    offsets = encoded.windows.offsets_T2[encoded.windows.best_T]
    covered = {place for start, end in offsets.tolist() for place in range(start, end)}
    read = {place for place, sign in enumerate(passage) if unicodedata.category(sign)[0] not in "CZM"}
    assert read - covered <= {place for place, sign in enumerate(passage) if sign == "\ufffd"}


@given(kind=kinds, passage=passages)
def test_no_token_begins_or_ends_with_white_space(kind, tokenizers, passage: str) -> None:
    encoded = encode_split("span", [question(passage, [])], (), tokenizers[kind], section())
    for start, end in encoded.windows.offsets_T2.tolist():
        assert passage[start:end] == passage[start:end].strip()


@given(kind=kinds, passage=passages)
def test_every_token_of_the_passage_has_one_best_window(kind, tokenizers, passage: str) -> None:
    encoded = encode_split("span", [question(passage, [])], (), tokenizers[kind], section())
    pieces = len(tokenizers[kind].closed.encode(passage, add_special_tokens=False).ids)
    lengths = np.diff(encoded.passages_N2, axis=1)[:, 0].tolist()
    firsts = [number * min(6, lengths[0]) for number in range(len(lengths))]
    windows = list(zip(firsts, lengths, strict=True))
    assert encoded.windows.best_T.sum() == pieces
    for number, (first, shown) in enumerate(windows):
        begin = encoded.starts_N1[number] + encoded.passages_N2[number, 0]
        best = encoded.windows.best_T[begin : begin + shown].tolist()
        assert best == [plain_best(windows, token) == number for token in range(first, first + shown)]


@given(kind=kinds, words=words, gaps=st.lists(spaces, min_size=30, max_size=30), data=st.data())
def test_the_target_covers_exactly_the_gold(kind, tokenizers, words, gaps, data) -> None:
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first, len(words) - 1))
    passage, starts = "", []
    for word, gap in zip(words, gaps, strict=False):
        starts.append(len(passage))
        passage += word + gap
    right = passage[starts[first] : starts[last] + len(words[last])]
    asked = question(passage, [(right, starts[first]), ("another", 0)])
    encoded = encode_split("span", [asked], (), tokenizers[kind], section(4000))
    begin, end = encoded.targets[0].tolist()
    offsets = encoded.windows.offsets_T2
    assert passage[offsets[begin, 0] : offsets[end, 1]] == right
    assert offsets[begin, 0] == starts[first]


@given(place=st.integers(0, 39))
def test_windows_that_do_not_hold_all_of_the_answer_point_to_the_first_row(uncased, place: int) -> None:
    passage = " ".join(["iron", "hot"] * 20)
    start = len(" ".join(passage.split()[:place])) + (place > 0)
    answer = " ".join(passage.split()[place : place + 3])
    encoded = encode_split("span", [question(passage, [(answer, start)])], (), uncased, section())
    room = 24 - 3 - 3
    last = min(place + 3, 40) - 1
    expected = [
        [5 + place - first, 5 + last - first] if first <= place and last < first + shown else [0, 0]
        for first, shown in plain_windows(40, room, 6)
    ]
    assert encoded.targets.tolist() == expected


def test_an_answer_inside_a_token_takes_the_token(uncased) -> None:
    encoded = encode_split("span", [question("the horseshoe", [("shoe", 9)])], (), uncased, section())
    (begin, end) = encoded.targets[0].tolist()
    assert [uncased.token(number) for number in encoded.tokens_T[begin : end + 1]] == ["horseshoe"]


def test_a_mark_that_the_tokenizer_drops_belongs_to_its_letter(uncased) -> None:
    encoded = encode_split("span", [question("the cafe\u0301 is", [])], (), uncased, section())
    first, _ = encoded.passages_N2[0].tolist()
    assert encoded.windows.offsets_T2[first : first + 3].tolist() == [[0, 3], [4, 9], [10, 12]]


def test_questions_without_an_answer_point_to_the_first_row_and_unknown_ones_nowhere(uncased) -> None:
    questions = [question("the iron", []), question("the iron", [], labelled=False)]
    encoded = encode_split("span", questions, (), uncased, section())
    assert encoded.targets.tolist() == [[0, 0], [-1, -1]]


def test_an_answer_of_characters_that_no_token_has_is_in_no_window(uncased) -> None:
    encoded = encode_split("span", [question("iron \u200b hot", [("\u200b", 5)])], (), uncased, section())
    assert encoded.targets.tolist() == [[0, 0]]


def test_a_passage_without_any_token_still_has_a_window(uncased) -> None:
    encoded = encode_split("span", [question(" \u200b", [])], (), uncased, section())
    assert rows_of(encoded) == [uncased.encode_pair("is it hot", "").ids]
    assert not encoded.windows.best_T.any()


def test_a_long_question_is_cut(uncased) -> None:
    encoded = encode_split("span", [question("hot", [], asked="the iron " * 9)], (), uncased, section())
    assert rows_of(encoded) == [uncased.encode_pair("the iron " * 4, "hot").ids]


def test_a_question_that_leaves_no_room_is_rejected_with_its_place(uncased) -> None:
    with pytest.raises(UserError, match=r"here:1: the question leaves no room .* raise text\.longest"):
        asked = question("hot", [], asked="the iron " * 9)
        encode_split("span", [asked], (), uncased, section(longest=11))


def test_many_questions_about_one_passage_find_each_its_own_answer(uncased) -> None:
    passage = "the iron is hot, hammers it"
    texts = ["the", "iron is", "hot", ","]
    questions = [question("a café", [("café", 2)])]
    questions += [question(passage, [(right, passage.index(right))]) for right in texts]
    encoded = encode_split("span", questions, (), uncased, section())
    for number, asked in enumerate(questions):
        begin, end = (encoded.starts_N1[number] + encoded.targets[number]).tolist()
        offsets = encoded.windows.offsets_T2
        assert asked.passage[offsets[begin, 0] : offsets[end, 1]] == asked.answers[0].text
