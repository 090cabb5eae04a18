"""Folders of sentence-transformers behind every route of vectors, and servers that cut long texts."""

import shutil

import numpy as np
import pytest

import bertsmith
from tests.sentence_folders import write_modules
from tests.unit.serve.serving import application_of, error_of, post

TEXTS = ["the warm sun", "my dog runs in the rain", "tea"]
LONG = "cat " * 500


@pytest.fixture(scope="module")
def embedder(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder") / "embedder"
    shutil.copytree(folders["toy"], folder)
    prompts = {"query": "the cat ", "passage": "it is "}
    write_modules(folder, "cls", normalize=False, prompts=prompts, default="query", longest=16)
    return folder


@pytest.fixture(scope="module")
def served(embedder):
    return application_of({"embedder": embedder})


def raw(embedder, texts, prompt):
    """The first states of texts, as the folder of the model alone has them."""
    return (
        bertsmith.load(embedder).embed(texts, pooling="cls", normalize=False, prompt=prompt).double().numpy()
    )


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def test_every_route_of_vectors_follows_the_folder(served, embedder):
    rows = raw(embedder, TEXTS, "the cat ")
    assert np.allclose(bertsmith.load(embedder).embed(TEXTS), rows, atol=1e-6)
    body = {"inputs": TEXTS, "normalize": False}
    assert np.allclose(post(served, "/embed", body).json(), rows, atol=1e-5)
    assert np.allclose(post(served, "/embed", {"inputs": TEXTS}).json(), unit(rows), atol=1e-5)
    openai = post(served, "/v1/embeddings", {"input": TEXTS}).json()["data"]
    assert np.allclose([each["embedding"] for each in openai], unit(rows), atol=1e-5)
    cosines = post(served, "/compare", {"texts": TEXTS}).json()["similarity"]
    assert np.allclose(cosines, unit(rows) @ unit(rows).T, atol=1e-5)
    ranked = post(served, "/rerank", {"query": TEXTS[0], "texts": TEXTS[1:]}).json()
    scores = {each["index"]: each["score"] for each in ranked}
    assert np.allclose([scores[0], scores[1]], (unit(rows) @ unit(rows).T)[0, 1:], atol=1e-5)


def test_a_model_that_was_not_trained_for_similarity_is_named_in_the_log_once(folders, embedder, caplog):
    served = application_of({"embedder": embedder, "plain": folders["toy"]})
    ask = {"query": TEXTS[0], "texts": TEXTS[1:]}
    for model in ("embedder", "plain", "plain"):
        assert post(served, "/rerank", ask | {"model": model}).status_code == 200
        assert post(served, "/embed", {"inputs": TEXTS, "model": model}).status_code == 200
    (told,) = [each.getMessage() for each in caplog.records if "trained for similarity" in each.getMessage()]
    assert told.startswith(f"{folders['toy']}: ")


def test_token_ids_stand_behind_the_prompt_of_the_folder(served, embedder):
    tokenizer = bertsmith.load(embedder).tokenizer
    ids = [tokenizer.encode(text).ids[1:-1] for text in TEXTS]
    found = post(served, "/v1/embeddings", {"input": ids}).json()["data"]
    rows = unit(raw(embedder, TEXTS, "the cat "))
    assert np.allclose([each["embedding"] for each in found], rows, atol=1e-5)


def test_a_prompt_is_chosen_by_its_name(served, embedder):
    body = {"inputs": TEXTS, "normalize": False, "prompt_name": "passage"}
    assert np.allclose(post(served, "/embed", body).json(), raw(embedder, TEXTS, "it is "), atol=1e-5)
    reply = post(served, "/embed", {**body, "prompt_name": "other"})
    said = "prompt_name: the model embedder does not have this prompt; it has query, passage"
    assert (reply.status_code, error_of(reply)) == (422, said)


def test_the_folder_says_how_long_a_text_may_be(served):
    told = error_of(post(served, "/embed", {"inputs": "cat " * 20}))
    assert "inputs: has 24 tokens, but the model embedder takes 16" in told


def test_an_empty_text_is_one_with_a_prompt_too(served, embedder):
    assert "inputs[1]: is empty" in error_of(post(served, "/embed", {"inputs": ["tea", " "]}))
    specials = bertsmith.load(embedder).tokenizer.encode("").ids
    assert "input[1]: is empty" in error_of(post(served, "/v1/embeddings", {"input": [[5], specials]}))


# ---- serve --truncate


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/fill", {"text": f"the [MASK] {LONG}", "model": "toy"}),
        ("/next", {"first": "the cat", "second": LONG, "model": "toy"}),
        ("/compare", {"texts": ["the cat", LONG], "model": "toy"}),
        ("/embed", {"inputs": LONG, "model": "toy"}),
        ("/v1/embeddings", {"input": LONG, "model": "toy"}),
        ("/v1/embeddings", {"input": [7] * 500, "model": "toy"}),
        ("/classify", {"texts": [LONG], "model": "mood"}),
        ("/look/tokens", {"first": LONG, "model": "toy"}),
    ],
)
def test_a_server_cuts_long_texts_for_clients_that_cannot_ask_for_it(path, body, folders):
    chosen = {name: folders[name] for name in ("toy", "mood")}
    told = post(application_of(chosen), path, body)
    assert told.status_code == 422 and "tokens, but the model" in error_of(told)
    cut = post(application_of(chosen, truncates=True), path, body)
    assert cut.status_code == 200


def test_what_is_cut_is_what_the_client_itself_could_have_asked_for(folders):
    toy = {"toy": folders["toy"]}
    asked = post(application_of(toy), "/embed", {"inputs": LONG, "truncate": True})
    assert post(application_of(toy, truncates=True), "/embed", {"inputs": LONG}).json() == asked.json()


def test_a_fine_tuned_folder_keeps_its_own_rule_for_long_texts(folders):
    alike = {"alike": folders["alike"]}
    body = {"texts": [["the cat", LONG]]}
    own = post(application_of(alike), "/classify", body).json()
    assert post(application_of(alike, truncates=True), "/classify", body).json() == own
