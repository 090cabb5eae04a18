"""What a model that was trained on one side only fills in: the neighbour that it learned to predict."""

import math
from dataclasses import replace

import pytest
import torch

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.network import new_network
from bertsmith.packed import pack
from tests.toy_folder import WORDS, write_toy_folder


@pytest.fixture(params=["left-to-right", "right-to-left"])
def one_sided(request, tmp_path):
    write_toy_folder(tmp_path)
    config = replace(read_model(tmp_path).network.config, direction=request.param, initial_std=0.3)
    write_model(tmp_path, Model(new_network(config, {"mlm": 0}, torch.Generator().manual_seed(1))))
    return bertsmith.load(tmp_path)


def best(bert, text):
    return [(each.token, round(each.probability, 5)) for each in bert.fill(text, top=4)[0]]


def test_fill_reads_one_side_of_the_mask_and_nothing_else(one_sided):
    left = one_sided.engine.network.config.direction == "left-to-right"
    first = best(one_sided, "the dog [MASK] under the tree")
    assert (first == best(one_sided, "the dog [MASK] at a cold river")) == left
    assert (first == best(one_sided, "a cat [MASK] under the tree")) == (not left)


def test_the_neighbour_of_a_mask_predicts_it(one_sided):
    network, tokenizer = one_sided.engine.network, one_sided.engine.tokenizer
    left = network.config.direction == "left-to-right"
    ids = tokenizer.encode("the dog [MASK] a cat", allow_special=("[MASK]",)).ids
    index = ids.index(tokenizer.mask_id)
    with torch.no_grad():
        batch = pack([ids])
        row = network(batch)[[index - 1 if left else index + 1]]
        expected = network.scores_of_words(row)[0].softmax(-1).topk(4)
    found = one_sided.fill("the dog [MASK] a cat", top=4)[0]
    assert [each.token for each in found] == [tokenizer.token(number) for number in expected.indices.tolist()]
    assert [each.probability for each in found] == pytest.approx(expected.values.tolist(), rel=1e-4)


def test_several_masks_are_rejected_where_one_would_be_read_as_a_word(one_sided):
    left = one_sided.engine.network.config.direction == "left-to-right"
    with pytest.raises(UserError, match=r"text 1: has 2 \[MASK\], but this model was trained .*one \[MASK\]"):
        one_sided.fill_each(["a [MASK]", "the [MASK] sits [MASK]"])
    if left:  # filled from the left, each mask has words before it
        fillings = one_sided.fill_jointly("the [MASK] sits [MASK]", top=40, beam=40)
        filling = next(each for each in fillings if each.tokens[0] in WORDS.split())
        first = {each.token: each for each in one_sided.fill("the [MASK]", top=200)[0]}
        text = f"the {filling.tokens[0]} sits [MASK]"
        second = {each.token: each for each in one_sided.fill(text, top=200)[0]}
        joint = first[filling.tokens[0]].probability * second[filling.tokens[1]].probability
        assert filling.log_probability == pytest.approx(math.log(joint), rel=1e-4)
    else:
        with pytest.raises(UserError, match=r"has 2 \[MASK\]"):
            one_sided.fill_jointly("the [MASK] sits [MASK]", top=1)


def test_only_a_model_that_reads_from_left_to_right_says_what_comes_next(one_sided):
    if one_sided.engine.network.config.direction == "left-to-right":
        extension, *_ = one_sided.extend("the dog", count=1)
        likely = [each.token for each in one_sided.fill("the dog [MASK]", top=20)[0]]
        assert extension.token in likely
    else:
        with pytest.raises(UserError, match="trained from right to left"):
            list(one_sided.extend("the dog", count=1))


def test_a_first_token_that_sees_nothing_is_no_embedding(one_sided):
    texts = ["the dog", "the cat sits"]
    if one_sided.engine.network.config.direction == "left-to-right":
        with pytest.raises(UserError, match=r"sees nothing of the text; choose another pooling"):
            one_sided.embed(texts, pooling="cls")
    else:
        one, other = one_sided.embed(texts, pooling="cls")
        assert not torch.allclose(one, other)
