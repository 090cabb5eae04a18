import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.seeds import stream
from bertsmith.corpus import duplicates as module
from bertsmith.corpus.duplicates import BANDS, DuplicateFilter, exact_fingerprint, near_signature

WORDS = np.array([f"{first}{second}" for first in "bcdfghklmn" for second in ("a", "ei", "ou", "en", "ist")])


def prose(number: int, words: int = 300) -> list[str]:
    return stream(0, "prose", number).choice(WORDS, words).tolist()


def with_changed_words(text: list[str], changes: int) -> list[str]:
    changed = list(text)
    for index in np.linspace(0, len(text) - 1, changes).astype(int).tolist():
        changed[index] = "other"
    return changed


def similarity(one: list[str], other: list[str]) -> float:
    """The true fraction of common runs of five words."""
    runs = [{tuple(text[at : at + 5]) for at in range(len(text) - 4)} for text in (one, other)]
    return len(runs[0] & runs[1]) / len(runs[0] | runs[1])


def duplicates(kind, *texts: str) -> list[bool]:
    seen = DuplicateFilter(kind)
    return [seen.is_duplicate(exact_fingerprint(text), near_signature(text)) for text in texts]


def test_case_and_white_space_do_not_make_a_text_another():
    assert exact_fingerprint("A  text.\nMore.") == exact_fingerprint("a text. more.")
    assert exact_fingerprint("A text.") != exact_fingerprint("A text")
    assert len(exact_fingerprint("")) == 16


def test_exact_duplicates_are_found_and_near_ones_left():
    text = " ".join(prose(1))
    assert duplicates("exact", text, text + " end", text.upper()) == [False, False, True]


def test_without_a_filter_nothing_is_a_duplicate():
    assert duplicates("none", "Text.", "Text.") == [False, False]


def test_exact_duplicates_need_no_signature_and_near_ones_do():
    assert not DuplicateFilter("exact").is_duplicate(exact_fingerprint("Text."))
    with pytest.raises(ValueError, match="signature"):
        DuplicateFilter("near").is_duplicate(exact_fingerprint("Text."))


def test_near_duplicates_are_found_and_unlike_texts_are_kept():
    texts = [prose(number) for number in range(30)]
    near = [with_changed_words(text, 3) for text in texts]
    far = [with_changed_words(text, 40) for text in texts]
    assert min(similarity(*pair) for pair in zip(texts, near, strict=True)) > 0.9
    assert max(similarity(*pair) for pair in zip(texts, far, strict=True)) < 0.5
    found = duplicates("near", *map(" ".join, texts + near + far))
    assert found == [False] * 30 + [True] * 30 + [False] * 30


def test_a_text_that_was_dropped_does_not_drop_others():
    first = prose(1)
    second = [*first[:-25], *prose(2, words=25)]
    third = [*prose(3, words=25), *second[25:]]
    assert similarity(first, third) < 0.72 < 0.83 < similarity(second, third)
    texts = [" ".join(text) for text in (first, second, third)]
    assert duplicates("near", *texts) == [False, True, False]
    assert duplicates("near", *texts[1:]) == [False, True]


def test_text_without_spaces_is_compared_by_its_characters():
    text = "東京都は日本の首都であり世界でも有数の大都市として知られている。" * 3
    other = "小麦粉と水と塩だけで作られるこのパンは毎朝近所の店で売られています。" * 3
    assert duplicates("near", text, text.replace("。", "！") + "終", other) == [False, True, False]


@pytest.mark.parametrize("pair", [("...", "!!!"), ("One.", "Two."), ("a b c", "a b d"), ("", "?")])
def test_short_texts_are_duplicates_only_of_themselves(pair):
    assert duplicates("near", *pair, *pair) == [False, False, True, True]


def test_the_signature_estimates_the_fraction_of_common_runs():
    estimates, truth = [], []
    for number in range(40):
        one = prose(number, words=200)
        other = with_changed_words(one, number // 2 + 1)
        sketches = [near_signature(" ".join(text))[BANDS:].view(np.uint8) for text in (one, other)]
        estimates.append((sketches[0] == sketches[1]).mean())
        truth.append(similarity(one, other))
    errors = np.array(estimates) - truth
    assert abs(errors.mean()) < 0.02  # 40 estimates, each with a standard error of 0.04
    assert abs(errors).max() < 0.15


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=1100))
def test_minima_agree_with_one_hash_after_the_other(numbers):
    runs = np.array(numbers, np.uint32)
    factors, offsets = module._permutations()
    expected = [
        min((factor * run + offset) % 2**32 for run in set(numbers))
        for factor, offset in zip(factors[:4, 0].tolist(), offsets[:4, 0].tolist(), strict=True)
    ]
    assert module._minima(runs)[:4].tolist() == expected


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2**32 - 1)), max_size=3000))
def test_the_table_of_keys_agrees_with_a_dictionary(pairs):
    table, expected = module._FirstSeen(), {}
    for low, number in pairs:
        key = low << 58 | low  # many share their first slot
        assert table.get(key) == expected.get(key)
        table.add(key, number)
        expected.setdefault(key, number)


def test_the_table_of_keys_grows_and_forgets_nothing():
    table = module._FirstSeen()
    keys = list(set(stream(0, "keys").integers(1, 2**64, 20_000, dtype=np.uint64).tolist()))
    for number, key in enumerate(keys):
        table.add(key, number)
    assert [table.get(key) for key in keys] == list(range(len(keys)))
    assert table.get(keys[0] + 1) is None
