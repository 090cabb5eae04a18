"""What goes on inside a model: tokens with their masking, attention, the senses of a word."""

import time

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.inference.introspection import (
    _found,
    inspect_attention,
    inspect_senses,
    inspect_tokens,
)
from bertsmith.text.tokenizer import Tokenizer
from tests.tokenizer_makers import uncased_wordpiece

FIRST, SECOND = "The dog plays in the snow, zap!", "My cat sits under a tree."


# ---- tokens


def test_each_token_comes_with_what_its_embeddings_are_looked_up_by(bert):
    tokens = inspect_tokens(bert, (FIRST, SECOND), seed=1).tokens
    encoded = bert.tokenizer.encode_pair(FIRST, SECOND)
    assert [each.id for each in tokens] == encoded.ids
    assert [each.text for each in tokens] == [bert.tokenizer.token(number) for number in encoded.ids]
    assert [each.segment for each in tokens] == encoded.segments
    assert [each.position for each in tokens] == list(range(len(tokens)))
    for each in tokens:
        if each.text in ("[CLS]", "[SEP]"):
            assert (each.start, each.end, each.masking) == (-1, -1, "")
        else:
            written = (FIRST, SECOND)[each.segment][each.start : each.end]
            assert written.lower() == each.text.removeprefix("##")


def test_masking_is_as_published_over_many_seeds(bert):
    seen = [inspect_tokens(bert, (FIRST, SECOND), seed=seed).tokens for seed in range(300)]
    masked = [each for tokens in seen for each in tokens if each.masking]
    assert {sum(bool(each.masking) for each in tokens) for tokens in seen} == {round(0.15 * len(seen[0]))}
    shares = {kind: sum(each.masking == kind for each in masked) / len(masked) for kind in ("mask", "random")}
    assert shares["mask"] == pytest.approx(0.8, abs=0.04)
    assert shares["random"] == pytest.approx(0.1, abs=0.03)


@given(seed=st.integers(0, 2**63))
def test_what_is_shown_is_what_masking_says(bert, seed):
    tokens = inspect_tokens(bert, FIRST, seed=seed).tokens
    assert tokens == inspect_tokens(bert, FIRST, seed=seed).tokens
    for each in tokens:
        assert (each.shown == "[MASK]") == (each.masking == "mask")
        assert (each.shown == each.text) == (each.masking in ("", "kept"))


# ---- attention


def test_attention_is_what_transformers_says_it_is(folder, bert):
    found = inspect_attention(bert, (FIRST, SECOND))
    encoded = bert.tokenizer.encode_pair(FIRST, SECOND)
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        inputs = {"token_type_ids": torch.tensor([encoded.segments]), "output_attentions": True}
        expected = torch.cat(model(torch.tensor([encoded.ids]), **inputs).attentions)
    assert found.tokens[0] == "[CLS]" and len(found.tokens) == len(encoded)
    assert torch.allclose(found.weights, expected, atol=1e-5)


# ---- senses


def test_every_occurrence_of_the_word_is_found_and_nothing_else(bert):
    sentences = ["The cat, the CAT's mat.", "A catty city.", "cat"]
    points = inspect_senses(bert, " cat ", sentences).points
    assert [(each.sentence, each.start, each.end) for each in points] == [(0, 4, 7), (0, 13, 16), (2, 0, 3)]


def test_a_word_stands_anywhere_in_a_script_without_spaces(tmp_path):
    tokenizer = Tokenizer.load(uncased_wordpiece(tmp_path))
    shape = bertsmith.load().model  # any network with enough rows
    bert = bertsmith.Bert(shape, tokenizer, device="cpu")
    points = inspect_senses(bert, "打铁", ["铁匠在炉火旁打铁，火花飞溅。"]).points
    assert [(each.start, each.end) for each in points] == [(6, 8)]


@pytest.mark.parametrize(
    ("word", "sentence", "spans"),
    [
        ("ss", "stra\u00dfe \u00df SS", [(7, 8), (9, 11)]),  # \u00df folds to ss, and half of it is no word
        ("s", "\u00df s", [(2, 3)]),
        ("cat cat", "cat cat cat cat", [(0, 7), (8, 15)]),
        ("cat_", "a cat_ cat_b", [(2, 6)]),
    ],
)
def test_words_are_found_whatever_their_case_folds_to(word, sentence, spans):
    assert list(_found(word, sentence)) == spans


def test_a_long_word_is_looked_for_in_one_pass():
    begin = time.process_time()
    assert not list(_found("a" * 100_000 + "b", "a" * 400_000))  # word times text steps take a minute
    assert time.process_time() - begin < 1


def test_cosines_are_those_of_the_mean_of_the_pieces(bert):
    sentences = ["my zap is hot", "the cold zap", "a zap and a zap"]
    found = inspect_senses(bert, "zap", sentences)
    places = [(1 + 1, 3), (1 + 2, 3), (1 + 1, 3), (1 + 1 + 3 + 2, 3)]  # behind [CLS]; zap is three pieces
    states = [each[-1] for each in bert.hidden_states(sentences)]
    which = [each.sentence for each in found.points]
    assert which == [0, 1, 2, 2]
    vectors = torch.stack(
        [states[at][row : row + count].mean(0) for at, (row, count) in zip(which, places, strict=True)]
    )
    expected = torch.nn.functional.normalize(vectors) @ torch.nn.functional.normalize(vectors).T
    assert torch.allclose(found.similarity, expected, atol=1e-5)


def test_three_senses_keep_their_distances_on_the_map(bert):
    sentences = ["my cat is hot", "the cold cat sleeps in the rain", "cat"]
    points = inspect_senses(bert, "cat", sentences).points
    states = [each[-1] for each in bert.hidden_states(sentences)]
    vectors = torch.stack([states[0][2], states[1][3], states[2][1]]).double()
    plane = torch.tensor([[each.x, each.y] for each in points], dtype=torch.float64)
    assert torch.allclose(torch.cdist(plane, plane), torch.cdist(vectors, vectors), atol=1e-4)
    assert torch.allclose(plane.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-6)
    assert plane[:, 0].abs().max() == plane[:, 0].max() >= plane[:, 1].max() > 0


def test_a_single_occurrence_stands_in_the_middle(bert):
    found = inspect_senses(bert, "dog", ["the dog runs"])
    assert [(each.x, each.y) for each in found.points] == [(0.0, 0.0)]
    assert found.similarity.shape == (1, 1)


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (lambda b: inspect_senses(b, "tea", ["the cat"]), "none of the sentences contains 'tea'"),
        (lambda b: inspect_senses(b, " ", ["the cat"]), "the word is missing"),
        (lambda b: inspect_senses(b, "tea", "the tea"), "expected a list of texts"),
        (lambda b: inspect_senses(b, "tea", ["tea", ""]), "text 1: is empty"),
        (
            lambda b: inspect_senses(b, "\u200b", ["a \u200b b"]),
            "the model cannot read any token of the word",
        ),
        (lambda b: inspect_attention(b, "snow " * 200), "text 0: has 202 tokens"),
        (lambda b: inspect_tokens(b, "", seed=1), "text 0: is empty"),
    ],
)
def test_bad_input_gets_one_clear_line(bert, look, said):
    with pytest.raises(UserError) as caught:
        look(bert)
    assert said in str(caught.value) and "\n" not in str(caught.value)
