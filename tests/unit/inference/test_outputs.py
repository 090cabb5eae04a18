"""What a model says, as JSON, beside what the tests of the command line and the server see of it."""

import pytest

from bertsmith.inference.fill_mask import mask_offsets
from bertsmith.inference.outputs import Classification, classification_to_json, is_decided_by_threshold
from bertsmith.tasks.answers import Candidate, QuestionAnswer
from bertsmith.text.tokenizer import Tokenizer
from tests.tokenizer_makers import albert_unigram, byte_bpe, uncased_wordpiece


@pytest.mark.parametrize(
    ("make", "mask"), [(uncased_wordpiece, "[MASK]"), (byte_bpe, "<mask>"), (albert_unigram, "[MASK]")]
)
def test_a_mask_stands_where_it_is_written_without_the_space_before_it(make, mask, tmp_path):
    tokenizer = Tokenizer.load(make(tmp_path))
    text = f"{mask} \N{FIRE} one  {mask}, two{mask}"
    places = mask_offsets(text, tokenizer)
    assert [text[start:end] for start, end in places] == [mask] * 3
    assert [start for start, _ in places] == [0, text.index(mask, 1), text.rindex(mask)]


def test_a_text_of_any_number_of_classes_has_no_single_one():
    found = Classification("a", 0.4, {"a": 0.4, "b": 0.1}, (), is_several=True)
    assert classification_to_json(found) == {"labels": [], "probabilities": {"a": 0.4, "b": 0.1}}


@pytest.mark.parametrize(("of_none", "of_span", "decided"), [(0.2, 0.8, True), (0.5, 0.5, False)])
def test_a_threshold_decides_only_against_what_is_more_probable(of_none, of_span, decided):
    nbest = (Candidate("paris", 3, of_span, 1.0, 1.0), Candidate("", -1, of_none, 1.0, 1.0))
    answer = QuestionAnswer("0", "", -1, -1, 2.0, of_none, 0.0, nbest)
    assert is_decided_by_threshold(answer) is decided
