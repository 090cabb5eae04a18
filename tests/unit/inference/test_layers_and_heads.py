"""Layers and heads looked into, each number checked by plain loops over transformers' eager model."""

import math

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from bertsmith.core.errors import UserError
from bertsmith.inference.head_introspection import (
    MAP_CELLS,
    inspect_head,
    inspect_head_steps,
    inspect_heads,
)
from bertsmith.inference.introspection import inspect_senses
from bertsmith.inference.layer_introspection import inspect_embedding, inspect_guesses, inspect_similarity

TEXT = "The dog plays in the snow because it likes it."


@pytest.fixture(scope="module")
def published(folder):
    """The same weights in transformers, with its attention written out."""
    return transformers.BertForPreTraining.from_pretrained(folder, attn_implementation="eager").eval()


def states_of(published, bert, text):
    """What transformers says of a text: (attentions, hidden states, ids)."""
    encoded = bert.tokenizer.encode(text, allow_special=(bert.tokenizer.mask_token,))
    inputs = {"input_ids": torch.tensor([encoded.ids]), "token_type_ids": torch.tensor([encoded.segments])}
    with torch.no_grad():
        found = published.bert(**inputs, output_attentions=True, output_hidden_states=True)
    return found.attentions, found.hidden_states, encoded.ids


def cosine(one, other):
    return float(sum(a * b for a, b in zip(one, other, strict=True)) / (one.norm() * other.norm()))


# ---- heads


def test_the_weights_of_a_head_and_their_mean_are_those_of_the_published_model(bert, published):
    attentions, _, _ = states_of(published, bert, TEXT)
    assert torch.allclose(inspect_head(bert, TEXT, 1, 2), attentions[1][0, 2], atol=1e-5)
    mean = sum(attentions[0][0, head] for head in range(4)) / 4
    assert torch.allclose(inspect_head(bert, TEXT, 0, None), mean, atol=1e-5)


def test_heads_are_named_by_where_most_of_their_attention_goes(bert, published):
    attentions, _, ids = states_of(published, bert, TEXT)
    found = inspect_heads(bert, TEXT)
    own = range(1, len(ids) - 1)
    for layer, of_layer in enumerate(found.summaries):
        for head, summary in enumerate(of_layer):
            weights = attentions[layer][0, head]
            shares = {
                "previous": sum(float(weights[row, row - 1]) for row in own) / len(own),
                "next": sum(float(weights[row, row + 1]) for row in own) / len(own),
                "itself": sum(float(weights[row, row]) for row in own) / len(own),
                "first": sum(float(weights[row, 0]) for row in own) / len(own),
                "separator": sum(float(weights[row, len(ids) - 1]) for row in own) / len(own),
            }
            entropy = -sum(float(p) * math.log(p) for row in own for p in weights[row]) / len(own)
            best = max(shares, key=shares.__getitem__)
            assert summary.share == pytest.approx(shares[best], abs=1e-5)
            otherwise = "broad" if entropy / math.log(len(ids)) >= 0.75 else "mixed"
            assert summary.kind == (best if shares[best] >= 0.4 else otherwise)


def test_a_head_that_only_reads_the_token_before_is_called_so(bert, monkeypatch):
    count = len(bert.tokenizer.encode(TEXT).ids)
    previous = torch.eye(count).roll(-1, 1)
    monkeypatch.setattr(
        "bertsmith.model.attention.watched.attention_probabilities",
        lambda *_: previous.expand(1, 4, -1, -1),
    )
    found = inspect_heads(bert, TEXT)
    assert {each.kind for layer in found.summaries for each in layer} == {"previous"}


def test_the_opening_moment_is_the_largest_weight_from_a_pronoun_to_a_word_before_it(bert, published):
    attentions, _, ids = states_of(published, bert, TEXT)
    words = [bert.tokenizer.token(number) for number in ids]
    pronouns = [place for place, word in enumerate(words) if word == "it"]
    targets = [place for place, word in enumerate(words) if word in ("dog", "plays", "snow", "likes")]
    weights = [
        (float(attentions[layer][0, head, token, target]), layer, head, token, target)
        for layer in range(2)
        for head in range(4)
        for token in pronouns
        for target in targets
        if token - target >= 2
    ]
    moment = inspect_heads(bert, TEXT).moment
    assert (moment.layer, moment.head, moment.token, moment.target) == max(weights)[1:]
    assert moment.weight == pytest.approx(max(weights)[0], abs=1e-5)


def test_a_long_text_is_pooled_and_a_short_one_is_not(bert):
    short, long = inspect_heads(bert, TEXT), inspect_heads(bert, "dog snow tree " * 30)
    assert torch.equal(short.maps[1, 2], inspect_head(bert, TEXT, 1, 2))
    assert long.maps.shape[-2:] == (MAP_CELLS, MAP_CELLS)
    whole = inspect_head(bert, "dog snow tree " * 30, 0, 1)
    assert float(long.maps[0, 1].max()) == float(whole.max())


def test_a_text_of_one_strange_sign_has_no_moment(bert):
    assert inspect_heads(bert, "!").moment is None


def test_the_steps_of_a_head_lead_to_what_it_reads_and_takes_along(bert, published):
    attentions, hidden, ids = states_of(published, bert, TEXT)
    layer, head, token = 1, 3, 4
    found = inspect_head_steps(bert, TEXT, layer, head, token)
    attention = published.bert.encoder.layer[layer].attention.self
    before = hidden[layer][0]
    with torch.no_grad():
        query, key, value = (
            each(before).unflatten(-1, (4, -1))[:, head]
            for each in (attention.query, attention.key, attention.value)
        )
    assert torch.allclose(found.query, query[token], atol=1e-5)
    scores = [float((query[token] * key[place]).sum()) / math.sqrt(16) for place in range(len(ids))]
    assert found.scores.tolist() == pytest.approx(scores, abs=1e-4)
    assert torch.allclose(found.weights, attentions[layer][0, head, token], atol=1e-5)
    order = sorted(range(len(ids)), key=lambda place: -float(found.weights[place]))
    assert list(found.most_read) == order[:6]
    assert torch.allclose(found.keys, key[order[:6]], atol=1e-5)
    output = sum(float(found.weights[place]) * value[place] for place in range(len(ids)))
    assert torch.allclose(found.output, output, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "head", "token", "named"), [(2, 0, 0, "layer 2"), (0, 4, 0, "head 4"), (0, 0, 99, "token 99")]
)
def test_a_head_that_is_not_there_is_named(bert, layer, head, token, named):
    with pytest.raises(UserError, match=f"{named} does not exist"):
        inspect_head_steps(bert, TEXT, layer, head, token)


# ---- layers


def test_texts_are_compared_after_each_layer_with_and_without_their_mean(bert, published):
    texts = ["The dog plays.", "My cat sits under a tree.", "Snow!"]
    found = inspect_similarity(bert, texts)
    of_texts = [states_of(published, bert, text) for text in texts]
    words = published.bert.embeddings.word_embeddings.weight.detach()
    for layer in range(3):
        states = [hidden[layer][0] if layer else words[ids] for _, hidden, ids in of_texts]
        mean = torch.cat(states).mean(0)
        for i, one in enumerate(states):
            for j, other in enumerate(states):
                plain = cosine(one.mean(0), other.mean(0))
                centred = cosine(one.mean(0) - mean, other.mean(0) - mean)
                assert float(found[layer].plain[i, j]) == pytest.approx(plain, abs=1e-4)
                assert float(found[layer].centred[i, j]) == pytest.approx(centred, abs=1e-4)


class LargestTensor(TorchDispatchMode):
    """Remembers how many numbers the largest result of an operation has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return found


def test_to_compare_many_texts_takes_no_more_numbers_than_their_vectors_and_cosines(bert):
    texts = [f"The dog plays {number}." for number in range(80)]
    _ = bert.engine  # packs the weights
    with LargestTensor() as largest:
        inspect_similarity(bert, texts)
    width, rows = bert.engine.network.config.width, bert.engine.network.config.vocabulary
    assert largest.numbers <= max(80 * 80, 80 * width, rows * width)


def test_a_word_is_one_point_before_it_is_read_in_context(bert):
    found = inspect_senses(bert, "dog", ["The dog plays.", "A tree, a dog, snow."])
    first, last = found.layers[0], found.layers[-1]
    assert first.plane.abs().max() < 1e-9
    assert torch.allclose(first.similarity.plain, torch.ones(2, 2))
    assert torch.equal(last.similarity.plain, found.similarity)
    assert last.similarity.plain[0, 1] < 1


def test_the_planes_of_layers_are_turned_and_not_stretched(bert):
    sentences = ["The dog plays.", "A tree, a dog, snow.", "My dog sits under a tree."]
    for layer in inspect_senses(bert, "dog", sentences).layers[1:]:
        flat = torch.cdist(layer.plane, layer.plane)
        assert flat.max() > 0
        assert torch.allclose(layer.plane.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-9)


def test_guesses_after_each_layer_are_what_the_published_head_makes_of_it(bert, published):
    text = "The [MASK] plays in the snow."
    (found,) = inspect_guesses(bert, text, top=3)
    _, hidden, ids = states_of(published, bert, text)
    place = ids.index(bert.tokenizer.mask_id)
    assert text[found.start : found.end] == "[MASK]"
    assert len(found.layers) == 3
    for layer, guesses in enumerate(found.layers):
        with torch.no_grad():
            chances = published.cls.predictions(hidden[layer])[0, place].softmax(-1)
        best = chances.topk(3)
        assert [each.token for each in guesses.guesses] == [
            bert.tokenizer.token(number) for number in best.indices.tolist()
        ]
        assert [each.probability for each in guesses.guesses] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert found.layers[-1].final == pytest.approx(found.layers[-1].guesses[0].probability)


def test_the_vectors_of_a_token_add_up_to_what_enters_the_first_layer(bert, published):
    _, hidden, ids = states_of(published, bert, TEXT)
    parts = {part.name: part.values for part in inspect_embedding(bert, TEXT, 3)}
    assert list(parts) == ["token", "position", "segment", "sum", "normalised"]
    assert torch.equal(parts["token"], published.bert.embeddings.word_embeddings.weight[ids[3]])
    assert torch.allclose(parts["sum"], parts["token"] + parts["position"] + parts["segment"], atol=1e-6)
    assert torch.allclose(parts["normalised"], hidden[0][0, 3], atol=1e-5)
