"""What is kept on disk is found again only by a tokenizer that cuts texts the same way."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.encoding_cache import encoding_key
from bertsmith.tasks.example_types import Question, QuestionTokens
from bertsmith.tasks.kinds.classify import CLASSIFY
from bertsmith.tasks.kinds.span import SPAN
from bertsmith.text.tokenizer import Tokenizer
from tests.toy_folder import toy_vocabulary
from tests.unit.tasks.encoding_tools import text_example


def key(folder, words, *, lower_case):
    """The key of one text under a WordPiece tokenizer; its unknown word is always [UNK]."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(folder)
    return encoding_key(CLASSIFY, [text_example("The sun", "hot")], ("hot",), tokenizer, TextSection())


@pytest.fixture
def first(tmp_path):
    return key(tmp_path / "first", toy_vocabulary(), lower_case=True)


def test_the_same_words_and_rules_have_the_same_key(first, tmp_path):
    assert key(tmp_path / "same", toy_vocabulary(), lower_case=True) == first


def test_other_words_have_another_key(first, tmp_path):
    assert key(tmp_path / "longer", [*toy_vocabulary(), "moon"], lower_case=True) != first
    swapped = toy_vocabulary()
    swapped[-1], swapped[-2] = swapped[-2], swapped[-1]
    assert key(tmp_path / "swapped", swapped, lower_case=True) != first


def test_another_rule_has_another_key(first, tmp_path):
    assert key(tmp_path / "cased", toy_vocabulary(), lower_case=False) != first


def test_tokens_that_are_kept_at_hand_leave_the_key_as_it_is(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(toy_vocabulary()) + "\n")
    tokenizer = Tokenizer.load(tmp_path)
    plain = Question("1", "who sits?", "the cat sits", (), labelled=False, article="", where="")
    tokens = QuestionTokens(np.array([7], np.int32), np.array([8], np.int32), np.array([[0, 3]]))
    keys = {
        encoding_key(SPAN, [each], (), tokenizer, TextSection())
        for each in (plain, replace(plain, tokens=tokens))
    }
    assert len(keys) == 1
