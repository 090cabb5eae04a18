"""From tags to spans, well-formed or not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.tasks.tag_spans import LETTERS, TagSpan, scheme_of, spans_of

WRITTEN = {
    "iob1": "I-PER I-PER O I-LOC B-LOC I-LOC I-ORG O",
    "iob2": "B-PER I-PER O B-LOC B-LOC I-LOC B-ORG O",
    "bioes": "B-PER E-PER O S-LOC B-LOC E-LOC S-ORG O",
}
SPANS = [TagSpan("PER", 0, 2), TagSpan("LOC", 3, 4), TagSpan("LOC", 4, 6), TagSpan("ORG", 6, 7)]
every_scheme = pytest.mark.parametrize("scheme", LETTERS)

pieces = st.lists(st.tuples(st.sampled_from(["", "PER", "LOC-A"]), st.integers(1, 3)), max_size=8)
"""Types and lengths of stretches of words; without a type they are no spans."""


def letters(scheme, length, *, follows_its_like):
    """How a span of so many words is written."""
    if scheme == "bioes":
        return "S" if length == 1 else "B" + (length - 2) * "I" + "E"
    first = "B" if scheme == "iob2" or follows_its_like else "I"
    return first + (length - 1) * "I"


def written(pieces, scheme):
    """The tags of such a sentence, and its spans."""
    tags, spans, before = [], [], ""
    for type_, length in pieces:
        if type_:
            spans.append(TagSpan(type_, len(tags), len(tags) + length))
            tags += [f"{each}-{type_}" for each in letters(scheme, length, follows_its_like=before == type_)]
        else:
            tags += ["O"] * length
        before = type_
    return tags, spans


@every_scheme
def test_every_scheme_writes_the_same_spans(scheme):
    assert spans_of(WRITTEN[scheme].split(), scheme) == SPANS


@every_scheme
def test_the_scheme_of_a_file_is_seen(scheme):
    assert scheme_of([["O"], WRITTEN[scheme].split()]) == scheme


def test_one_slip_does_not_change_the_scheme_of_a_file():
    assert scheme_of([["B-PER", "I-PER"], ["B-LOC"], ["O", "I-LOC"]]) == "iob2"
    assert scheme_of([["I-PER", "I-PER"], ["I-LOC"], ["O", "B-LOC"]]) == "iob1"


def test_a_file_without_spans_passes_for_iob2():
    assert scheme_of([["NOUN", "VERB"], []]) == "iob2"


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("O I-PER I-PER", [("PER", 1, 3)]),  # nothing leads to the first I-
        ("B-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),  # another type
        ("E-PER E-PER", [("PER", 0, 1), ("PER", 1, 2)]),
        ("B-PER E-PER I-PER", [("PER", 0, 2), ("PER", 2, 3)]),  # what ended does not go on
        ("S-PER I-PER E-PER", [("PER", 0, 1), ("PER", 1, 3)]),
        ("B-PER S-PER", [("PER", 0, 1), ("PER", 1, 2)]),
        ("I-PER NOUN I-PER", [("PER", 0, 1), ("PER", 2, 3)]),
    ],
)
def test_ill_formed_tags_are_read_as_conlleval_does(tags, spans):
    assert spans_of(tags.split(), "bioes") == [TagSpan(*span) for span in spans]


@every_scheme
@pytest.mark.parametrize("tags", [[], ["NOUN", "X", "-LRB-"], ["O", "_"], ["Bi-x", "BI-x", ""]])
def test_tags_without_a_prefix_are_no_spans(scheme, tags):
    assert spans_of(tags, scheme) == []


def test_a_type_may_hold_dashes():
    assert spans_of(["B-creative-work", "I-creative-work"], "iob2") == [TagSpan("creative-work", 0, 2)]


def test_bare_letters_are_spans_without_a_type():
    assert spans_of(["B", "I", "O", "B"], "iob2") == [TagSpan("", 0, 2), TagSpan("", 3, 4)]


def test_a_bare_letter_of_another_scheme_is_a_tag_like_any_other():
    assert spans_of(["S", "E"], "iob2") == []


@every_scheme
@given(pieces=pieces)
def test_what_is_written_reads_back_and_is_known_by_its_scheme(scheme, pieces):
    tags, spans = written(pieces, scheme)
    assert spans_of(tags, scheme) == spans
    if spans:
        assert scheme_of([tags]) == scheme
