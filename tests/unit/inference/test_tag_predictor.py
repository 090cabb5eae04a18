"""Tags and entities of fine-tuned folders, and the words that texts are cut into for them."""

from dataclasses import replace

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

import bertsmith
from bertsmith.inference.text_reader import Reader
from bertsmith.inference.text_words import words_of_texts
from tests.tokenizer_makers import MAKERS
from tests.untrained_heads import numbered_labels, strangers, untrained

ODD = "The boy sits in Pari\u0301s, \N{SLIGHTLY SMILING FACE}\ufe0f  LONDON."


def test_words_are_tagged_with_their_places_in_the_text(tagger):
    (words,) = tagger.tag([ODD])
    assert [word.word for word in words] == [ODD[word.start : word.end] for word in words]
    assert [word.word for word in words][-5:] == [
        "Pari\u0301s",
        ",",
        "\N{SLIGHTLY SMILING FACE}\ufe0f",
        "LONDON",
        ".",
    ]
    assert [word.word for word in words if word.tag == "B-location"] == ["Pari\u0301s", "LONDON"]
    assert all(0.3 < word.probability <= 1 for word in words)
    assert tagger.tag([]) == []


def test_a_sentence_in_words_keeps_them(tagger):
    words = ["the", "cat", "of", "london", "!?", "\x00"]
    (found,) = tagger.tag([words])
    assert [each.word for each in found] == words
    assert [" ".join(words)[each.start : each.end] for each in found] == words
    assert found[3].tag == "B-location"
    written, apart = tagger.tag(["the cat of london", words[:4]])
    assert written == apart


def test_a_sentence_of_any_length_is_tagged_to_its_end(tagger):
    (words,) = tagger.tag(["the boy walks and " * 100 + "sits in london"])
    assert len(words) == 403
    assert [number for number, word in enumerate(words) if word.tag != "O"] == [402]


def test_entities_are_cut_from_the_text_to_the_letter(tagger):
    found = tagger.entities(ODD)
    assert [(each.type, each.text) for each in found] == [("location", "Pari\u0301s"), ("location", "LONDON")]
    assert all(ODD[each.start : each.end] == each.text for each in found)
    assert tagger.entities("the boy sits") == []


def test_entities_of_many_texts_are_those_of_each(tagger):
    texts = [ODD, "the boy sits", "in london and paris"]
    found = tagger.entities_each(texts)
    for several, alone in zip(found, map(tagger.entities, texts), strict=True):
        for one, other in zip(several, alone, strict=True):  # batches of other shapes round differently
            assert replace(one, probability=other.probability) == other
            assert one.probability == pytest.approx(other.probability, abs=1e-6)
    assert [len(each) for each in found] == [2, 0, 2]
    words = tagger.tag(texts)
    assert [tagger.entities_of(*each) for each in zip(texts, words, strict=True)] == found
    assert tagger.entities_each([]) == []


def test_an_entity_is_as_probable_as_its_words_on_average(tmp_path):
    bert = untrained(tmp_path, {"tag": 2}, **numbered_labels("B-X", "I-X"))
    text = "my dog runs, the cat sleeps and the sun is warm"
    (words,) = bert.tag([text])
    entities = bert.entities(text)
    assert max(len(each.text.split()) for each in entities) > 1
    for each in entities:
        inside = [word.probability for word in words if each.start <= word.start < each.end]
        assert each.probability == pytest.approx(np.mean(inside))


def test_tags_that_go_on_are_one_entity(tmp_path):
    bert = strangers(tmp_path, "ForTokenClassification", **numbered_labels("B-X", "I-X"))
    text = "my dog runs, the cat sleeps"
    (words,) = bert.tag([text])
    begins = [word.start for word in words if word.tag == "B-X"]
    entities = bert.entities(text)
    assert {each.start for each in entities} == {*begins, 0}
    assert [each.end for each in entities][-1] == len(text)


def test_the_folder_of_someone_else_tags_as_their_pipeline(tmp_path):
    bert = strangers(tmp_path, "ForTokenClassification", **numbered_labels("O", "B-X", "I-X", "B-Y"))
    pipe = transformers.pipeline("token-classification", model=str(tmp_path), ignore_labels=[])
    text = "Zebras, my Dog; and London's university?"
    theirs = {each["start"]: each for each in pipe(text)}
    (words,) = bert.tag([text])
    assert len(words) < len(theirs)
    for word in words:
        assert word.tag == theirs[word.start]["entity"]
        assert word.probability == pytest.approx(float(theirs[word.start]["score"]), abs=1e-5)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_no_tokenizer_cuts_a_word_at_an_accent(make, tmp_path):
    tokenizer = bertsmith.Tokenizer.load(make(tmp_path))
    text = "In Zu\u0308rich  und \N{FIRE}\ufe0f Mu\u0308nchen"
    (words,) = words_of_texts(Reader(tokenizer, 512).tokenize([text]))
    found = [word.text for word in words]
    assert found == ["In", "Zu\u0308rich", "und", "\N{FIRE}\ufe0f", "Mu\u0308nchen"]


@given(text=st.text(st.sampled_from("ab Z\u0308\u0301é,.\U0001f525\ufe0f\u200d\n铁\ufb01…한"), max_size=20))
def test_words_stand_in_order_and_are_the_characters_of_the_text(text, tokenizers):
    for tokenizer in tokenizers:
        (words,) = words_of_texts(Reader(tokenizer, 512).tokenize([text]))
        assert all(word.text == text[word.start : word.end] and word.text.strip() for word in words)
        ends = [0, *(word.end for word in words)]
        assert all(end <= word.start < word.end for end, word in zip(ends, words, strict=False))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return [bertsmith.Tokenizer.load(make(tmp_path_factory.mktemp(make.__name__))) for make in MAKERS]
