"""The routes that look inside of models give what the introspection gives, and refuse what is too much."""

import pytest
import torch

import bertsmith
from bertsmith.inference.head_introspection import inspect_head, inspect_heads
from bertsmith.insight.deciding_words import deciding_words
from tests.unit.serve.serving import error_of, post


def test_all_heads_come_in_small_with_their_kinds(application, folders):
    reply = post(application, "/look/heads", {"first": "the cat sits", "model": "toy"}).json()
    expected = inspect_heads(bertsmith.load(folders["toy"]), "the cat sits")
    assert reply["tokens"] == list(expected.tokens)
    assert reply["special"] == [True, False, False, False, True]
    assert [[each["kind"] for each in row] for row in reply["kinds"]] == [
        [each.kind for each in row] for row in expected.summaries
    ]
    assert torch.allclose(torch.tensor(reply["maps"]), expected.maps, atol=0.0051)


@pytest.mark.parametrize("head", [1, None])
def test_one_head_comes_whole_also_of_a_text_that_is_too_long_for_all(application, folders, head):
    text = "cat " * 80
    body = {"first": text, "layer": 1, "head": head, "model": "toy"}
    weights = torch.tensor(post(application, "/look/head", body).json()["weights"])
    assert torch.allclose(weights, inspect_head(bertsmith.load(folders["toy"]), text, 1, head), atol=1e-4)


def test_without_each_word_an_outcome_has_what_the_classifier_says_without_it(application):
    text = "the cat sits on my mat"
    reply = post(application, "/look/words", {"first": text, "model": "mood"}).json()
    whole = post(application, "/classify", {"texts": [text], "model": "mood"}).json()["results"][0]
    assert (reply["outcome"], reply["value"]) == (whole["label"], pytest.approx(whole["probability"]))
    assert [text[word["start"] : word["end"]] for word in reply["words"]] == text.split()
    less = post(application, "/classify", {"texts": ["the sits on my mat"], "model": "mood"}).json()
    left = less["results"][0]["probabilities"][reply["outcome"]]
    assert reply["words"][1]["change"] == pytest.approx(reply["value"] - left, abs=1e-6)


def test_words_are_left_out_as_the_command_leaves_them_out(application, folders):
    text = "the cat, zap! sits"
    reply = post(application, "/look/words", {"first": text, "model": "mood"}).json()
    (found,) = deciding_words(bertsmith.load(folders["mood"]), [text], seed=0)
    assert reply["outcome"] == found.label
    assert [(word["start"], word["end"]) for word in reply["words"]] == [
        (word.start, word.end) for _, word in found.words
    ]
    changes = [word["change"] for word in reply["words"]]
    assert changes == pytest.approx(found.scores["leave-one-out"], abs=1e-5)


def test_without_each_word_an_answer_loses_what_it_rests_on(application):
    body = {"first": "who sits?", "second": "the cat sits", "model": "reader"}
    reply = post(application, "/look/words", body).json()
    assert [word["part"] for word in reply["words"]] == [0, 0, 0, 1, 1, 1]  # "?" is a word, too
    assert 0 < reply["value"] <= 1
    assert all(word["change"] <= reply["value"] + 1e-9 for word in reply["words"])


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/look/head", {"first": "a cat", "layer": 9}, "layer 9"),
        ("/look/head-steps", {"first": "a cat", "layer": 0, "head": 0, "token": 50}, "token 50"),
        ("/look/embedding", {"first": "a cat", "token": 50}, "token 50"),
        ("/look/guesses", {"text": "no mask"}, "lacks a [MASK]"),
        ("/look/guesses", {"text": "[MASK] cat " * 70}, "takes 128"),
        ("/look/similarity", {"texts": ["cat " * 100] * 50}, "supports 4096"),
        ("/look/similarity", {"texts": ["c" * 40_000] * 2}, "80000 characters are too many"),
        ("/look/senses", {"word": "c", "sentences": ["c" * 40_000] * 2}, "80000 characters are too many"),
        ("/look/words", {"first": "cat " * 200, "model": "mood"}, "200 words are too many"),
        ("/look/words", {"first": "c" * 5000, "model": "mood"}, "5000 characters are too many"),
        ("/look/words", {"first": "a cat", "model": "toy"}, "toy"),
    ],
)
def test_what_is_too_much_or_not_there_is_refused(application, route, body, message):
    reply = post(application, route, {"model": "toy", **body})
    assert reply.status_code == 422
    assert message in error_of(reply)
