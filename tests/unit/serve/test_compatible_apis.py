"""Clients of OpenAI and of text-embeddings-inference work as they are."""

import base64
import math

import httpx
import numpy as np
import pytest

import bertsmith
from bertsmith.packed import pack
from tests.lazily import Lazily
from tests.unit.serve.serving import application_of, error_of, get, post

openai = Lazily("openai")
TEXTS = ["the warm sun", "my dog runs in the rain", "tea"]


@pytest.fixture(scope="module")
def toy(folders):
    return bertsmith.load(folders["toy"])


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        yield client


def unit(vectors):
    rows = np.asarray(vectors, dtype=np.float64)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


# ---- OpenAI


def test_the_openai_client_embeds(client, toy):
    reply = client.embeddings.create(model="toy", input=TEXTS)  # asks for base64 by itself
    assert [each.index for each in reply.data] == [0, 1, 2]
    found = np.array([each.embedding for each in reply.data])
    assert np.allclose(found, unit(toy.embed(TEXTS)), atol=1e-5)
    assert reply.model == "toy"
    assert reply.usage.prompt_tokens == sum(len(toy.tokenizer.encode(text)) for text in TEXTS)


def test_the_openai_client_takes_numbers_and_fewer_of_them(client, toy):
    reply = client.embeddings.create(model="toy", input="tea", encoding_format="float", dimensions=8)
    assert np.allclose(reply.data[0].embedding, unit(toy.embed(["tea"])[:, :8])[0], atol=1e-5)


def test_the_openai_client_may_send_tokens(client, toy):
    ids = [toy.tokenizer.encode(text).ids[1:-1] for text in TEXTS]
    several = client.embeddings.create(model="toy", input=ids)
    one = client.embeddings.create(model="toy", input=ids[1])
    expected = unit(toy.embed(TEXTS))
    assert np.allclose([each.embedding for each in several.data], expected, atol=1e-5)
    assert np.allclose(one.data[0].embedding, expected[1], atol=1e-5)


def ids_that_no_text_has(tokenizer):
    """Token ids that another tokenization of the text that they spell would replace."""
    ids = [tokenizer.id(token) for token in ("c", "##a", "##t", "[UNK]", "##s", "[MASK]", "t", "##e", "##a")]
    assert tokenizer.encode(tokenizer.decode(ids)).ids[1:-1] != ids
    return ids


def vector_of(bert, ids):
    """Return the centred vector of these ids, of length 1."""

    def mean(of):
        return bert.engine.network(pack([of], [[0] * len(of)])).detach().double().numpy().mean(0)

    empty = unit(mean([bert.tokenizer.cls_id, bert.tokenizer.sep_id]))
    return unit(mean(ids) - (mean(ids) @ empty) * empty)


@pytest.mark.parametrize("truncates", [False, True])
def test_token_ids_are_embedded_as_they_are(folders, toy, truncates):
    application = application_of({"toy": folders["toy"]}, truncates=truncates)
    ids = ids_that_no_text_has(toy.tokenizer)
    (found,) = post(application, "/v1/embeddings", {"input": [ids]}).json()["data"]
    whole = [toy.tokenizer.cls_id, *ids, toy.tokenizer.sep_id]
    assert np.allclose(found["embedding"], vector_of(toy, whole), atol=1e-5)


def test_special_tokens_around_token_ids_are_not_repeated(application, toy):
    ids = toy.tokenizer.encode(TEXTS[0]).ids
    found = post(application, "/v1/embeddings", {"input": [ids, ids[1:-1]]}).json()
    first, second = (each["embedding"] for each in found["data"])
    assert first == pytest.approx(second, abs=1e-6)
    assert found["usage"]["prompt_tokens"] == 2 * len(ids)


def test_special_tokens_without_any_other_are_no_text(application, toy):
    ids = toy.tokenizer.encode("").ids
    reply = post(application, "/v1/embeddings", {"input": [[5], ids]})
    assert (reply.status_code, error_of(reply)[:18]) == (422, "input[1]: is empty")


def test_more_token_ids_than_the_model_takes_are_rejected(client):
    with pytest.raises(openai.UnprocessableEntityError, match="input: has 5000 tokens"):
        client.embeddings.create(model="toy", input=[5] * 5000)


def test_the_openai_client_lists_models(client, folders):
    assert [model.id for model in client.models.list()] == list(folders)


def test_the_openai_client_is_shown_a_model(client, folders):
    listed = {model.id: model for model in client.models.list()}
    assert client.models.retrieve("mood") == listed["mood"]
    with pytest.raises(openai.NotFoundError, match="this server does not have a model 'gpt'"):
        client.models.retrieve("gpt")


def test_a_model_is_shown_whose_name_holds_a_slash(folders):
    shown = get(application_of({"a/toy": folders["toy"]}), "/v1/models/a/toy")
    assert (shown.status_code, shown.json()["id"]) == (200, "a/toy")


def test_the_names_that_are_asked_for_are_one_route_in_the_counts(application):
    get(application, "/v1/models/whatever")
    counts = get(application, "/metrics").text
    assert 'route="/v1/models/{name}"' in counts and "whatever" not in counts


def test_the_openai_client_understands_our_failures(client):
    with pytest.raises(openai.NotFoundError, match="this server does not have a model 'gpt'"):
        client.embeddings.create(model="gpt", input="tea")
    with pytest.raises(openai.UnprocessableEntityError, match="input: is empty"):
        client.embeddings.create(model="toy", input=" ")
    with pytest.raises(openai.UnprocessableEntityError, match="no token has id 999999"):
        client.embeddings.create(model="toy", input=[999999])
    with pytest.raises(openai.UnprocessableEntityError, match="vectors have 64, not 65"):
        client.embeddings.create(model="toy", input="tea", dimensions=65)


def test_base64_is_of_little_endian_floats(application, toy):
    body = {"input": "tea", "encoding_format": "base64", "user": "me", "unknown": 1}
    (each,) = post(application, "/v1/embeddings", body).json()["data"]
    found = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
    assert np.allclose(found, unit(toy.embed(["tea"]))[0], atol=1e-6)


# ---- text-embeddings-inference


class TeiClient:
    """What people write who talk to text-embeddings-inference."""

    def __init__(self, address):
        self.http = httpx.Client(base_url=address)

    def __call__(self, path, **body):
        reply = self.http.post(path, json=body, headers={"Content-Type": "application/json"})
        reply.raise_for_status()
        return reply.json()


@pytest.fixture(scope="module")
def tei(address):
    client = TeiClient(address)
    with client.http:
        yield client


def test_embed_takes_one_text_or_several(tei, toy):
    expected = unit(toy.embed(TEXTS))
    assert np.allclose(tei("/embed", inputs=TEXTS), expected, atol=1e-5)
    assert np.allclose(tei("/embed", inputs=TEXTS[0]), expected[:1], atol=1e-5)
    plain = tei("/embed", inputs=TEXTS, normalize=False, truncate=True)
    assert np.allclose(plain, toy.embed(TEXTS, normalize=False).numpy(), atol=1e-5)


def test_embed_cuts_long_texts_only_where_that_is_asked_for(tei, toy, application):
    long = "cat " * 500
    found = tei("/embed", inputs=long, truncate=True)
    assert np.allclose(found, unit(toy.embed([long], truncate=True)), atol=1e-5)
    told = error_of(post(application, "/embed", {"inputs": ["tea", long]}))
    assert "inputs[1]: has 502 tokens, but the model toy takes 128" in told


def test_embed_rejects_a_prompt_that_the_model_has_not(application):
    reply = post(application, "/embed", {"inputs": "tea", "prompt_name": "query"})
    assert reply.status_code == 422
    assert "prompt_name: the model toy does not have this prompt; it has none" in error_of(reply)


def test_predict_gives_every_class_the_best_first(tei, folders):
    bert = bertsmith.load(folders["mood"])
    (one,), (two,) = bert.classify(["the sun"]), bert.classify([("snow", "rain")])
    found = tei("/predict", inputs="the sun")
    assert [each["label"] for each in found] == sorted(
        one.probabilities, key=lambda label: -one.probabilities[label]
    )
    assert {each["label"]: each["score"] for each in found} == pytest.approx(one.probabilities, abs=1e-5)
    pair = tei("/predict", inputs=["snow", "rain"])
    assert {each["label"]: each["score"] for each in pair} == pytest.approx(two.probabilities, abs=1e-5)
    batch = tei("/predict", inputs=[["the sun"], ["tea"]])
    assert [each["label"] for each in batch[0]] == [each["label"] for each in found]
    assert len(batch) == 2


def test_raw_scores_lead_to_the_probabilities(tei, folders):
    raw = {each["label"]: each["score"] for each in tei("/predict", inputs="the sun", raw_scores=True)}
    total = sum(math.exp(score) for score in raw.values())
    (expected,) = bertsmith.load(folders["mood"]).classify(["the sun"])
    assert {label: math.exp(score) / total for label, score in raw.items()} == pytest.approx(
        expected.probabilities, abs=1e-5
    )
    raw = {
        each["label"]: each["score"]
        for each in tei("/predict", inputs="tea", raw_scores=True, model="topics")
    }
    (expected,) = bertsmith.load(folders["topics"]).classify(["tea"])
    assert {label: 1 / (1 + math.exp(-score)) for label, score in raw.items()} == pytest.approx(
        expected.probabilities, abs=1e-5
    )
    (number,) = tei("/predict", inputs=["sun", "tea"], raw_scores=True, model="alike")
    assert number["score"] == pytest.approx(
        bertsmith.load(folders["alike"]).score([("sun", "tea")])[0], abs=1e-5
    )


def test_rerank_asks_a_model_that_gives_pairs_a_number(tei, folders):
    expected = bertsmith.load(folders["alike"]).score([("the sun", text) for text in TEXTS])
    found = tei("/rerank", query="the sun", texts=TEXTS, raw_scores=True)
    assert [each["score"] for each in found] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
    assert [each["index"] for each in found] == sorted(range(3), key=lambda number: -expected[number])
    assert set(found[0]) == {"index", "score"}
    shares = tei("/rerank", query="the sun", texts=TEXTS, return_text=True)
    assert [each["text"] for each in shares] == [TEXTS[each["index"]] for each in shares]
    assert [each["score"] for each in shares] == pytest.approx(
        [1 / (1 + math.exp(-each["score"])) for each in found], abs=1e-5
    )


def test_rerank_goes_by_the_cosine_where_no_model_scores_pairs(folders, toy):
    application = application_of({"toy": folders["toy"]})
    found = post(application, "/rerank", {"query": "the sun", "texts": TEXTS}).json()
    query, *rows = unit(toy.embed(["the sun", *TEXTS]))
    expected = [float(query @ row) for row in rows]
    assert [each["score"] for each in found] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
