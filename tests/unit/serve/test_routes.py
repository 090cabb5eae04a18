"""Our own routes say what the models say, in the agreed shapes."""

from pathlib import Path

import pytest

import bertsmith
from bertsmith.inference.introspection import inspect_attention, inspect_senses, inspect_tokens
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.serve.schemas import AnswerRequest, FillRequest
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.text.tokenizer import Tokenizer
from tests.toy_folder import write_toy_folder
from tests.unit.serve.serving import application_of, error_of, get, post
from tests.untrained_heads import untrained

SERVING = Path(__file__).parents[3] / "docs" / "serving.md"
SMILE = "\N{SLIGHTLY SMILING FACE}"


def test_the_models_are_listed_with_what_they_can_do(application, folders):
    listed = get(application, "/models").json()["models"]
    assert [model["name"] for model in listed] == list(folders)
    toy, mood = listed[:2]
    assert toy["abilities"] == ["fill", "next", "embed", "look"]
    assert (toy["layers"], toy["heads"], toy["width"], toy["longest"]) == (2, 4, 64, 128)
    assert toy["loaded"] is True
    assert mood["labels"] == ["cold", "warm"]
    assert "classify" in mood["abilities"]


def test_the_models_are_listed_with_their_mask_and_whether_they_take_pairs(application):
    listed = {model["name"]: model for model in get(application, "/models").json()["models"]}
    assert listed["toy"]["mask"] == "[MASK]"
    assert listed["alike"]["pairs"] is True
    assert listed["reader"]["pairs"] is False  # its note says so: a question and a passage are no two texts
    assert listed["mood"]["pairs"] is True  # no note says which
    assert [listed[name]["single"] for name in ("alike", "reader", "mood")] == [False, True, True]


def test_a_model_without_a_mask_says_so(tmp_path):
    write_toy_folder(tmp_path / "whole")
    Tokenizer.load(tmp_path / "whole").save(tmp_path / "bare")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "whole" / name).rename(tmp_path / "bare" / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = tmp_path / "bare" / name
        file.write_text(file.read_text().replace("[MASK]", "[other]").replace("mask_token", "other_token"))
    (model,) = get(application_of({"bare": tmp_path / "bare"}), "/models").json()["models"]
    assert model["mask"] is None


def test_masks_are_filled_where_they_stand(application, folders):
    text = f"{SMILE} the [MASK] sits on the [MASK] ."
    reply = post(application, "/fill", {"text": text, "top": 3}).json()
    expected = bertsmith.load(folders["toy"]).fill(text, top=3)
    assert reply["model"] == "toy"
    assert [text[mask["start"] : mask["end"]] for mask in reply["masks"]] == ["[MASK]", "[MASK]"]
    assert [[guess["token"] for guess in mask["guesses"]] for mask in reply["masks"]] == [
        [guess.token for guess in mask] for mask in expected
    ]
    found = [guess["probability"] for mask in reply["masks"] for guess in mask["guesses"]]
    assert found == pytest.approx([guess.probability for mask in expected for guess in mask], abs=1e-5)


def test_a_second_text_follows_or_not(application, folders):
    reply = post(application, "/next", {"first": "we got some time", "second": "should we get tea?"}).json()
    expected = bertsmith.load(folders["toy"]).next_sentence("we got some time", "should we get tea?")
    assert reply["follows"] == expected.follows
    assert reply["probability"] == pytest.approx(expected.probability, abs=1e-5)


def test_texts_have_classes(application, folders):
    reply = post(application, "/classify", {"texts": ["the sun", "snow and rain"]}).json()
    expected = bertsmith.load(folders["mood"]).classify(["the sun", "snow and rain"])
    assert reply["model"] == "mood"
    assert [each["label"] for each in reply["results"]] == [each.label for each in expected]
    for found, each in zip(reply["results"], expected, strict=True):
        assert set(found) == {"label", "probability", "probabilities"}
        assert found["probabilities"] == pytest.approx(each.probabilities, abs=1e-5)


def test_texts_have_several_labels_where_the_model_gives_several(application, folders):
    reply = post(application, "/classify", {"texts": ["the sun"], "model": "topics"}).json()
    (expected,) = bertsmith.load(folders["topics"]).classify(["the sun"])
    (result,) = reply["results"]
    assert set(result) == {"labels", "probabilities"}
    assert result["labels"] == list(expected.labels)


def test_pairs_have_a_number_where_the_model_gives_numbers(application, folders):
    pair = ["the sun", "the warm sun"]
    reply = post(application, "/classify", {"texts": [pair], "model": "alike"}).json()
    expected = bertsmith.load(folders["alike"]).score([tuple(pair)])
    assert [each["score"] for each in reply["results"]] == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def one_form(tmp_path):
    """Folders that were fine-tuned on single texts, or on pairs."""
    labels = ("bad", "good")
    note = TaskConfig(task="sst2", kind="classify", metrics=(), labels=labels, text=TextSection(longest=64))
    untrained(tmp_path / "single", {"classify": 2}, note=note)
    untrained(tmp_path / "pairs", {"classify": 2}, note=note.model_copy(update={"pairs": True}))
    return {name: tmp_path / name for name in ("single", "pairs")}


@pytest.mark.parametrize("order", [("single", "pairs"), ("pairs", "single")])
@pytest.mark.parametrize(("text", "expected"), [("the sun", "single"), (["the sun", "the snow"], "pairs")])
def test_texts_go_to_the_first_model_that_takes_their_form(one_form, order, text, expected):
    application = application_of({name: one_form[name] for name in order})
    reply = post(application, "/classify", {"texts": [text]})
    assert (reply.status_code, reply.json()["model"]) == (200, expected)


@pytest.mark.parametrize(
    ("there", "text", "message"),
    [
        (
            "single",
            ["the sun", "the snow"],
            "no model of this server classifies pairs of texts; bertsmith finetune mrpc",
        ),
        (
            "pairs",
            "the sun",
            "no model of this server classifies single texts; bertsmith finetune sst2 makes one",
        ),
    ],
)
def test_a_form_that_no_model_takes_is_reported(one_form, there, text, message):
    reply = post(application_of({there: one_form[there]}), "/classify", {"texts": [text]})
    assert reply.status_code == 422
    assert message in error_of(reply)


def test_a_model_that_is_named_answers_for_itself(one_form):
    body = {"texts": [["the sun", "the snow"]], "model": "single"}
    reply = post(application_of(one_form), "/classify", body)
    assert error_of(reply) == "texts[0]: the model single supports only single texts; send one string"


def test_words_are_tagged_and_make_up_entities(application, folders):
    text = f"{SMILE} my dog runs in London"
    (result,) = post(application, "/tag", {"texts": [text]}).json()["results"]
    bert = bertsmith.load(folders["names"])
    (words,) = bert.tag([text])
    assert [(word["text"], word["tag"]) for word in result["words"]] == [
        (word.word, word.tag) for word in words
    ]
    assert all(text[word["start"] : word["end"]] == word["text"] for word in result["words"])
    expected = bert.entities(text)
    assert [(each["label"], each["text"], each["start"]) for each in result["entities"]] == [
        (each.type, each.text, each.start) for each in expected
    ]
    assert [each["probability"] for each in result["entities"]] == pytest.approx(
        [each.probability for each in expected], abs=1e-5
    )


def test_a_passage_answers(application, folders):
    question, passage = "where is the cat?", f"{SMILE} the cat sits under the tree and the dog sleeps. " * 12
    reply = post(application, "/answer", {"question": question, "passage": passage, "best": 4}).json()
    expected = bertsmith.load(folders["reader"]).answer(question, passage, best=4)
    assert [(each["text"], each["start"], each["end"]) for each in reply["answers"]] == [
        (each.text, each.start, each.end) for each in expected
    ]
    for each in reply["answers"]:
        assert each["text"] == passage[each["start"] : each["end"]] or each["start"] == -1
    assert reply["no_answer"] == (reply["answers"][0]["text"] == "")
    assert 0 <= reply["no_answer_probability"] <= 1
    assert reply["decided_by_threshold"] is False  # a threshold of 0 is the greater probability


def test_the_option_that_fits_best_is_chosen(application, folders):
    context, options = "the cat sits", ["under the tree", f"{SMILE} it is cold", "the dog sleeps"]
    reply = post(application, "/choose", {"context": context, "options": options}).json()
    expected = bertsmith.load(folders["chooser"]).choose([(context, option) for option in options])
    assert (reply["model"], reply["index"], reply["option"]) == (
        "chooser",
        expected.index,
        options[expected.index],
    )
    assert reply["probabilities"] == pytest.approx(expected.probabilities, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"context": "a", "options": ["b"]}, 422, "options: expected a list of 2 or more strings"),
        ({"context": "a", "options": ["b"] * 257}, 413, "257 texts"),
        ({"context": "a " * 30_000, "options": ["b"] * 2}, 413, "context: has 60000 characters"),
    ],
)
def test_a_choice_is_held_to_the_limits(application, body, status, message):
    reply = post(application, "/choose", body)
    assert (reply.status_code, message in error_of(reply)) == (status, True), error_of(reply)


@pytest.mark.parametrize(("ask", "field"), [(FillRequest, "top"), (AnswerRequest, "best")])
def test_the_page_on_serving_tells_how_many_may_be_asked_for(ask, field):
    bounds = ask.model_json_schema()["properties"][field]
    assert f"`{field}` from {bounds['minimum']} to {bounds['maximum']}" in SERVING.read_text("utf-8")


def test_a_model_without_a_threshold_gives_no_answer_no_probability(tmp_path):
    untrained(tmp_path / "sure", {"span": 2})
    body = {"question": "who runs?", "passage": "the dog runs"}
    reply = post(application_of({"sure": tmp_path / "sure"}), "/answer", body).json()
    assert (reply["no_answer"], reply["no_answer_probability"]) == (False, None)


def test_texts_are_compared_each_with_each(application, folders):
    texts = ["the sun", "the warm sun", "a dog"]
    reply = post(application, "/compare", {"texts": texts}).json()
    vectors = bertsmith.load(folders["toy"]).embed(texts).double()
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    assert sum(reply["similarity"], []) == pytest.approx((unit @ unit.T).flatten().tolist(), abs=1e-5)


def test_tokens_are_shown_with_a_masking(application, folders):
    body = {"first": "the cat sits on the mat", "second": "it sleeps", "seed": 5}
    reply = post(application, "/look/tokens", body).json()
    expected = inspect_tokens(bertsmith.load(folders["toy"]), (body["first"], body["second"]), seed=5)
    assert [(each["text"], each["segment"], each["masking"], each["shown"]) for each in reply["tokens"]] == [
        (each.text, each.segment, each.masking, each.shown) for each in expected.tokens
    ]
    assert set(reply["tokens"][0]) == {
        "text", "id", "segment", "position", "start", "end", "masking", "shown",
    }  # fmt: skip


def test_attention_is_shown_for_every_layer_and_head(application, folders):
    reply = post(application, "/look/attention", {"first": "the cat sits"}).json()
    expected = inspect_attention(bertsmith.load(folders["toy"]), "the cat sits")
    assert (reply["layers"], reply["heads"], len(reply["tokens"])) == (2, 4, 5)
    assert reply["weights"][1][2][0] == pytest.approx(expected.weights[1, 2, 0].tolist(), abs=1e-4)


def test_attention_of_a_long_text_is_rejected(application):
    assert "too many for this view" in error_of(post(application, "/look/attention", {"first": "cat " * 80}))


def test_a_word_has_its_senses(application, folders):
    sentences = ["an apple and a cat", "the dog eats an apple"]
    reply = post(application, "/look/senses", {"word": "apple", "sentences": sentences}).json()
    expected = inspect_senses(bertsmith.load(folders["toy"]), "apple", sentences)
    assert [(each["sentence"], each["start"], each["end"]) for each in reply["points"]] == [
        (each.sentence, each.start, each.end) for each in expected.points
    ]
    assert reply["similarity"][0][1] == pytest.approx(float(expected.similarity[0, 1]), abs=1e-5)


@pytest.mark.parametrize(
    ("word", "sentences", "message"),
    [
        (" ", ["a cat"], "word: is empty"),
        ("dog", ["a cat"], "none of the sentences contains 'dog'"),
        ("a", ["a " * 40, "a " * 40], "occurs 80 times"),
        ("a" * 101, ["a cat"], "word: has 101 characters; at most 100 are supported"),
        ("cat", ["a cat " * 40] * 60, "4920 tokens are too many for this view; it supports 4096"),
    ],
)
def test_a_word_without_senses_is_reported(word, sentences, message, application):
    reply = post(application, "/look/senses", {"word": word, "sentences": sentences})
    assert reply.status_code == 422
    assert message in error_of(reply)
