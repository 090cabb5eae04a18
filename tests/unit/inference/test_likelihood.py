"""The likelihood of texts, by masked and by one-sided models."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.core.measures import bits, perplexity
from bertsmith.inference import engine as engine_room
from bertsmith.inference.likelihood import token_log_probabilities
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.network import new_network
from bertsmith.text.tokenizer import Tokenizer
from tests.tiny import tiny_encoder_config
from tests.tokenizer_makers import albert_unigram, byte_bpe
from tests.toy_folder import write_toy_folder

TEXTS = [
    "the cat sits on the mat.",
    "tea",
    "it rains in paris, and the zebra sleeps!",
    "a dog drinks cold tea",
]
DIRECTIONS = ("both", "left-to-right", "right-to-left")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each direction, with weights that are far from uniform."""
    found = {}
    for direction in DIRECTIONS:
        found[direction] = tmp_path_factory.mktemp(direction)
        write_toy_folder(found[direction])
        config = replace(read_model(found[direction]).network.config, direction=direction, initial_std=0.3)
        network = new_network(config, {"pooler": 0, "mlm": 0}, torch.Generator().manual_seed(1))
        write_model(found[direction], Model(network))
    return found


def test_the_pseudo_log_likelihood_is_that_of_a_loop_over_transformers(folders):
    theirs = transformers.BertForMaskedLM.from_pretrained(folders["both"]).eval()
    tokenizer = transformers.BertTokenizer.from_pretrained(folders["both"])
    for text, ours in zip(TEXTS, bertsmith.load(folders["both"]).likelihood(TEXTS), strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
        expected = 0.0
        for place in range(1, len(ids) - 1):  # not [CLS] and [SEP]
            masked = ids.clone()
            masked[place] = tokenizer.mask_token_id
            with torch.no_grad():
                scores = theirs(masked[None]).logits[0, place]
            expected += float(scores.log_softmax(-1)[ids[place]])
        assert ours.is_pseudo and ours.tokens == len(ids) - 2
        assert ours.log_likelihood == pytest.approx(expected, rel=1e-5)


def test_the_likelihood_of_a_left_to_right_model_is_that_of_a_loop_over_transformers(folders):
    theirs = transformers.BertLMHeadModel.from_pretrained(folders["left-to-right"]).eval()
    tokenizer = transformers.BertTokenizer.from_pretrained(folders["left-to-right"])
    found = bertsmith.load(folders["left-to-right"]).likelihood(TEXTS)
    for text, ours in zip(TEXTS, found, strict=True):
        ids = tokenizer(text)["input_ids"]
        expected = 0.0
        for place in range(1, len(ids) - 1):
            with torch.no_grad():
                scores = theirs(torch.tensor([ids[:place]])).logits[0, -1]  # only what is before it
            expected += float(scores.log_softmax(-1)[ids[place]])
        assert not ours.is_pseudo
        assert ours.log_likelihood == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_word_is_as_probable_as_fill_says_of_a_mask_in_its_place(folders, direction):
    bert = bertsmith.load(folders[direction])
    (found,) = bert.likelihood(["the cat sits"])
    for number, word in enumerate(found.words):
        masked = ["the", "cat", "sits"]
        masked[number] = "[MASK]"
        guesses = {each.token: each.probability for each in bert.fill(" ".join(masked), top=500)[0]}
        assert word.log_probability == pytest.approx(math.log(guesses[word.word]), abs=1e-4)


def test_words_have_the_sum_of_their_pieces_and_offsets_in_the_text(folders):
    bert, text = bertsmith.load(folders["both"]), "The z\u00e8bra sits,  \U0001f600 Tea"
    (found,) = bert.likelihood([text])
    words = ["The", "z\u00e8bra", "sits", ",", "\U0001f600", "Tea"]
    assert [each.word for each in found.words] == words
    assert [text[each.start : each.end] for each in found.words] == words
    (scores,) = token_log_probabilities(bert.engine, [bert.tokenizer.encode(text)])
    assert math.isnan(scores[0]) and math.isnan(scores[-1])
    assert found.words[1].log_probability == pytest.approx(float(scores[2:7].sum()), rel=1e-9)
    total = sum(each.log_probability for each in found.words)
    assert found.log_likelihood == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize(("make", "model_type"), [(byte_bpe, "roberta"), (albert_unigram, "albert")])
def test_words_of_other_tokenizers_add_up_too(tmp_path, make, model_type):
    tokenizer = Tokenizer.load(make(tmp_path))
    size = tokenizer.vocabulary_size
    config = tiny_encoder_config(model_type, vocabulary=size, initial_std=0.3)
    network = new_network(config, {"mlm": 0}, torch.Generator().manual_seed(1))
    for text in ("A cat  sleeps, \u4e2d here", " tea"):
        (found,) = bertsmith.Bert(Model(network), tokenizer).likelihood([text])
        total = sum(each.log_probability for each in found.words)
        assert found.log_likelihood == pytest.approx(total, rel=1e-9) and total < 0
        assert all(text[each.start : each.end] == each.word for each in found.words)


def test_perplexity_and_bits_are_those_of_pre_training(folders):
    (found,) = bertsmith.load(folders["both"]).likelihood(["the cat sits\ton  the mat"])
    mean = -found.log_likelihood / found.tokens
    assert (found.tokens, found.characters) == (6, 18)  # white space is not counted
    assert found.perplexity == perplexity(mean) == pytest.approx(math.exp(mean))
    assert found.bits_per_character == pytest.approx(bits(mean) * found.tokens / found.characters)
    assert perplexity(1e6) < math.inf


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_small_batches_give_the_same_and_hold_few_copies(folders, direction, monkeypatch):
    bert, texts = bertsmith.load(folders[direction]), [*TEXTS, " ".join(["snow"] * 40)] * 2
    whole = bert.likelihood(texts)
    sizes = []
    bert.engine.network.encoder.register_forward_pre_hook(
        lambda _, given: sizes.append((len(given[0].tokens_T), given[0].layout.sequences))
    )
    monkeypatch.setitem(engine_room.BATCH_TOKENS, "cpu", 100)
    ended = []
    encoded = [bert.tokenizer.encode(each) for each in texts]
    found = [float(np.nansum(each)) for each in token_log_probabilities(bert.engine, encoded, ended.append)]
    assert found == pytest.approx([each.log_likelihood for each in whole], rel=1e-5)
    assert sum(ended) == len(texts) and max(tokens for tokens, _ in sizes) <= 100
    passes = sum(len(each) - 2 for each in encoded) if direction == "both" else len(texts)
    assert sum(sequences for _, sequences in sizes) == passes


def test_a_long_text_is_refused_or_cut(folders):
    bert, long = bertsmith.load(folders["both"]), " ".join(["snow"] * 200)
    with pytest.raises(UserError, match="text 1: has 202 tokens, but the model takes 128"):
        bert.likelihood(["tea", long])
    (found,) = bert.likelihood([long], truncate=True)
    assert found.tokens == len(found.words) == 126
    assert found.characters == 126 * len("snow")
    (whole,) = bert.likelihood([" ".join(["snow"] * 126)])
    assert found.log_likelihood == pytest.approx(whole.log_likelihood, rel=1e-6)


def test_only_texts_have_a_likelihood(folders):
    bert = bertsmith.load(folders["both"])
    assert bert.likelihood([]) == []
    with pytest.raises(UserError, match="text 1: is tuple, not a text"):
        bert.likelihood(["tea", ("a", "pair")])
    with pytest.raises(UserError, match="text 0: is empty"):
        bert.likelihood([" "])


def test_a_model_without_a_head_for_words_says_so(folders):
    model = read_model(folders["both"])
    del model.network.heads["mlm"]
    with pytest.raises(UserError, match="mlm head, which is required to give texts a likelihood"):
        bertsmith.Bert(model, bertsmith.load(folders["both"]).tokenizer).likelihood(["tea"])
