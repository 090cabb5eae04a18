"""How many examples are cut is told to the token."""

import pytest

from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.example_types import ChoiceExample, TaggedExample, TextExample
from bertsmith.tasks.text_encoding import MAX_TEXTS_CHECKED, cut_fraction
from bertsmith.text.tokenizer import Tokenizer
from tests.toy_folder import write_toy_folder
from tests.unit.tasks.encoding_tools import encode_split

LONGEST = 12


@pytest.fixture(scope="module", name="tokenizer")
def toy_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    write_toy_folder(folder)
    return Tokenizer.load(folder)


@pytest.fixture(name="share")
def share_of_cut_examples(tokenizer):
    def share(examples, kind="classify", **settings):
        text = TextSection(longest=LONGEST, **settings)
        encoded = encode_split(kind, examples, ("0", "1"), tokenizer, text)
        return cut_fraction(examples, encoded, tokenizer, text)

    return share


def texts(*lengths):
    """Texts of so many words, each of which is one token."""
    return [TextExample(str(n), " ".join(["cat"] * count), "0", f"f:{n}") for n, count in enumerate(lengths)]


def pairs(*lengths):
    return [
        TextExample(str(n), (" ".join(["cat"] * one), " ".join(["dog"] * two)), "0", f"f:{n}")
        for n, (one, two) in enumerate(lengths)
    ]


def test_a_text_that_just_fits_is_not_cut_and_one_token_more_is(share):
    assert share(texts(3, 10)) == 0
    assert share(texts(3, 10, 11, 30)) == 0.5


def test_a_pair_is_cut_where_both_together_are_too_long(share):
    assert share(pairs((4, 5), (9, 1))) == pytest.approx(0.5)


def test_both_ends_of_a_long_text_are_not_all_of_it_and_windows_are(share):
    assert share(texts(3, 30), long_texts="head-tail") == 0.5
    assert share(texts(3, 30), long_texts="windows", step=5) == 0


def test_an_example_is_cut_with_any_of_its_options(share):
    options = [(("cat", "dog"), ("cat", "dog " * 20)), (("cat", "dog"), ("cat", "cat"))]
    assert share([ChoiceExample(str(n), each, 0, "f") for n, each in enumerate(options)], "choice") == 0.5


def test_tagged_words_are_never_cut(share):
    assert share([TaggedExample("0", ("cat",) * 40, ("0",) * 40, 0, "f")], "tag") == 0


def test_many_long_texts_are_evaluated_by_some_of_them(share):
    assert share(texts(*[11] * MAX_TEXTS_CHECKED, *[10] * MAX_TEXTS_CHECKED)) == pytest.approx(0.5, abs=0.01)
