import subprocess
import sys
import unicodedata

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.corpus import word_hashes
from bertsmith.corpus.word_hashes import run_hash, run_hashes, words_of

SPACELESS = ("CJK", "HIRAGANA", "KATAKANA", "THAI")
TEXTS = st.text(
    st.sampled_from("aB1 éÉΣ_-'.,\n\t\u3000\u0301語東かกั❤\ufe0f\U00020000\U0001d400"), max_size=60
)


def reference_words(text: str) -> list[str]:
    """The same words the slow way: character by character."""
    words, open_word = [], False
    for character in text:
        small = character.lower() if len(character.lower()) == 1 else character
        if character.isspace():
            open_word = False
        elif character == "\ufe0f" or unicodedata.category(character)[0] not in "LMN":
            continue
        elif unicodedata.name(character, "").startswith(SPACELESS):
            words.append(small)
            open_word = False
        elif open_word:
            words[-1] += small
        else:
            words.append(small)
            open_word = True
    return words


def hash_of(word: str) -> int:
    (found,) = words_of(word).hashes.tolist()
    return found


@given(TEXTS)
def test_words_agree_with_a_walk_over_the_characters(text):
    words = words_of(text)
    expected = reference_words(text)
    assert words.run(0, len(words)) == " ".join(expected)
    assert words.hashes.tolist() == [hash_of(word) for word in expected]


def test_words_are_lower_case_and_without_punctuation():
    assert words_of("Don't panic — U.S. 42!").run(0, 9) == "dont panic us 42"


def test_a_character_of_a_script_without_spaces_is_a_word():
    assert words_of("Hi東京 ไทย").run(0, 9) == "hi 東 京 ไ ท ย"
    assert words_of("Hi東 ไ").characters_per_word().tolist() == [1, 2, 5]


def test_words_know_their_lines():
    assert words_of("a b\n\nc\n d").lines().tolist() == [0, 0, 2, 3]


def test_long_texts_and_long_words_hash_as_short_ones_do(monkeypatch):
    text = "some words, a " + "long" * 30 + " one and some words"
    expected = words_of(text).hashes
    monkeypatch.setattr(word_hashes, "_HASHED_AT_ONCE", 16)
    assert (words_of(text).hashes == expected).all()
    assert expected[0] == expected[-2] != expected[1]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40), st.data())
def test_hashes_of_runs_depend_on_the_words_of_the_run_alone(numbers, data):
    words = np.array(numbers, np.uint64)
    count = data.draw(st.integers(1, len(words)))
    step, starts = word_hashes._WORD_STEP, range(len(words) - count + 1)
    expected = [sum(numbers[at + k] * step**k for k in range(count)) % 2**64 for at in starts]
    assert run_hashes(words, count).tolist() == expected
    assert [int(run_hash(words[at : at + count])) for at in starts] == expected


def test_hashes_are_the_same_in_every_process():
    imported = "from bertsmith.corpus.word_hashes import words_of"
    code = f"{imported}; print(words_of('The same words.').hashes.tolist())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{words_of('The same words.').hashes.tolist()}\n"}
