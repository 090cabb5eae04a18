"""Fine-tuned folders in people's hands: classes, numbers, answers, choices."""

import math
import re
from dataclasses import astuple

import numpy as np
import pytest
import torch
import transformers

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.finetuning.predict import Reading, predict_labelled
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task_config import TaskConfig, write_task_config
from tests.tuning import tune
from tests.untrained_heads import numbered_labels, strangers, untrained

BARELY = ("run.epochs=1", "run.examples=32")
TEXTS = ["the sun is warm", "My dog runs.", "cold!"]


@pytest.fixture(scope="module")
def sst2(lesson):
    return bertsmith.load(lesson("sst2"))


@pytest.fixture(scope="module")
def reader(lesson):
    return bertsmith.load(lesson("squad2"))


# ---- classes and numbers


def test_a_fine_tuned_folder_classifies_by_its_labels(sst2):
    warm, cold = sst2.classify(["the boy sits under the warm sun", "the cat and the cold snow"])
    assert (warm.label, cold.label) == ("positive", "negative")
    assert warm.labels == ("positive",)
    assert warm.probability == warm.probabilities["positive"] > 0.5
    assert math.isclose(sum(warm.probabilities.values()), 1, rel_tol=1e-5)
    assert sst2.classify([]) == []
    assert sst2.classify(text for text in TEXTS) == sst2.classify(TEXTS)


def test_a_long_text_follows_the_rule_of_the_fine_tuned_folder(sst2):
    words = ["sun", "snow"] * 200  # the folder was trained with at most 64 tokens, of which two are special
    long, cut = sst2.classify([" ".join(words), " ".join(words[:62])])
    assert long.probability == pytest.approx(cut.probability, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sst2", ("head.cls=raw",)),
        ("rte", ("head.encoder=frozen-features",)),
        ("sst2", ("text.long_texts=windows",)),
    ],
)
def test_every_head_says_what_prediction_from_files_says(name, settings, folder, tmp_path):
    run = tune(name, folder, tmp_path, *BARELY, *settings).folder
    said = predict_labelled([run], tmp_path / "data" / name, reading=Reading(split="dev"), device="cpu")
    bert = bertsmith.load(run)
    found = bert.classify([example.texts for example in said.examples])
    assert np.ptp(said.predictions.scores[:, 0]) > 1e-4
    assert np.allclose(
        [list(each.probabilities.values()) for each in found], said.predictions.scores, atol=1e-6
    )
    bert.save(tmp_path / "copy")
    again = bertsmith.load(tmp_path / "copy").classify([example.texts for example in said.examples])
    assert again == found


def test_a_raw_run_is_opened_without_a_word_of_the_pooler_that_it_passes_by(folder, tmp_path, caplog):
    run = tune("sst2", folder, tmp_path, *BARELY, "head.cls=raw").folder
    caplog.clear()
    assert bertsmith.load(run).classify(TEXTS)
    assert "pooler" not in caplog.text
    (run / "model" / "task.json").unlink()
    bertsmith.load(run)
    assert "freshly initialised, so train before use: pooler" in caplog.text


def test_the_folder_of_someone_else_classifies_as_their_pipeline(tmp_path):
    bert = strangers(tmp_path, "ForSequenceClassification", **numbered_labels("bad", "fair", "good"))
    pipe = transformers.pipeline("text-classification", model=str(tmp_path), top_k=None)
    for text, ours in zip(TEXTS, bert.classify(TEXTS), strict=True):
        theirs = {each["label"]: each["score"] for each in pipe([text])[0]}
        assert ours.probabilities == pytest.approx(theirs, abs=1e-5)
        assert ours.label == max(theirs, key=lambda label: theirs[label])
    pair = ("A boy plays.", "A boy is outside.")
    (theirs,) = pipe([{"text": pair[0], "text_pair": pair[1]}])
    assert bert.classify([pair])[0].probability == pytest.approx(theirs[0]["score"], abs=1e-5)


def test_several_labels_are_those_above_one_half(tmp_path):
    kind = "multi_label_classification"
    bert = untrained(tmp_path, {"classify": 6}, problem_type=kind, **numbered_labels(*"abcdef"))
    pipe = transformers.pipeline("text-classification", model=str(tmp_path), top_k=None)
    for text, found in zip(TEXTS, bert.classify(TEXTS), strict=True):
        theirs = {each["label"]: each["score"] for each in pipe([text])[0]}
        assert found.probabilities == pytest.approx(theirs, abs=1e-5)
        assert set(found.labels) == {label for label, share in theirs.items() if share > 0.5}
    assert {len(found.labels) for found in bert.classify(TEXTS)} - {0, 1, 6}


def test_a_model_for_numbers_scores_pairs(tmp_path):
    note = TaskConfig(task="stsb", kind="regress", metrics=(), pairs=True, text=TextSection(longest=32))
    bert = untrained(tmp_path, {"classify": 1}, note=note)
    pair = ("the sun", "the snow is cold")
    found, _ = bert.score([pair, ("a", "b")])
    encoded = bert.tokenizer.encode_pair(*pair)
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = model(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.segments])).logits
    assert found == pytest.approx(float(expected), abs=1e-5)
    with pytest.raises(UserError, match="gives a text a number, not a class; call score"):
        bert.classify([pair])
    wrong_form = "text 1: is one text, but this model was fine-tuned on pairs; pass a tuple of two texts$"
    with pytest.raises(UserError, match=wrong_form):
        bert.score([pair, "the sun"])


def test_a_single_output_without_a_task_file_is_a_number(tmp_path):
    bert = untrained(tmp_path, {"classify": 1})
    assert all(isinstance(number, float) for number in bert.score(["a text", "another"]))
    assert bert.score([]) == []


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_another_precision_is_close(lesson, sst2, monkeypatch, precision):
    monkeypatch.setattr("bertsmith.inference.precision.has_bf16_products", lambda: precision == "bf16")
    half = bertsmith.load(lesson("sst2"), device="cpu", precision=precision)
    for rough, exact in zip(half.classify(TEXTS), sst2.classify(TEXTS), strict=True):
        assert rough.probabilities == pytest.approx(exact.probabilities, abs=0.05)


# ---- answers and choices


def test_an_answer_is_cut_from_the_passage_to_the_letter(reader):
    passage = "the \N{SLIGHTLY SMILING FACE} boy and the cat sits under Lo\u0301ndon, and plays"
    found = max(reader.answer("where is the cat?", passage, best=2), key=lambda each: len(each.text))
    assert found.text == passage[found.start : found.end] == "Lo\u0301ndon"


def test_no_answer_is_said_by_the_stored_threshold(reader, tmp_path):
    found = reader.answer("where is the cat?", "the boy and the dog walks")
    assert (found.text, found.start, found.end) == ("", -1, -1)
    assert found.null_odds > reader.finetuned.config.answers.null_threshold
    reader.save(tmp_path)
    (tmp_path / "task.json").unlink()
    always = bertsmith.load(tmp_path).answer("where is the cat?", "the boy and the dog walks")
    assert always.text != ""


def test_an_answer_is_found_at_the_end_of_a_long_passage(reader):
    passage = "the boy and the dog walks. " * 30 + "my cat sits in paris"
    assert passage.rindex("paris") in [each.start for each in reader.answer("where?", passage, best=2)]


def test_the_best_answers_begin_with_the_answer_and_repeat_no_text(reader):
    passage = "my cat sits in paris and the dog in london"
    one = reader.answer("where is the cat?", passage)
    several = reader.answer("where is the cat?", passage, best=4)
    assert several[0] == one and len({each.text for each in several}) == len(several) == 4
    scores = [each.score for each in several[1:]]
    assert scores == sorted(scores, reverse=True)
    assert all(each.start == -1 or passage[each.start : each.end] == each.text for each in several)


def test_many_questions_are_answered_as_one_by_one(reader):
    asked = [
        ("where is the cat?", "my cat sits in paris and the dog in london"),
        ("where is the cat?", "the boy and the dog walks"),
        ("where?", "the boy and the dog walks. " * 30 + "my cat sits in paris"),
    ]
    found = reader.answers_each(asked, best=3)
    for pair, several in zip(asked, found, strict=True):
        alone = reader.answer(*pair, best=3)
        assert [(each.text, each.start) for each in several] == [(each.text, each.start) for each in alone]
        assert several[0].probability == pytest.approx(alone[0].probability, abs=1e-5)
    assert reader.answers_each([]) == []


def test_a_choice_is_a_softmax_over_the_options(tmp_path):
    note = TaskConfig(task="swag", kind="choice", metrics=(), text=TextSection(longest=16))
    bert = untrained(tmp_path, {"choice": 1}, note=note)
    options = [("the boy", "sits"), ("the boy", "is cold and walks"), ("the boy " * 30, "eats")]
    found = bert.choose(options)
    model = transformers.BertForMultipleChoice.from_pretrained(tmp_path).eval()
    logits = []
    for pair in options[:2]:
        encoded = bert.tokenizer.encode_pair(*pair)
        inputs = torch.tensor([[encoded.ids]]), None, torch.tensor([[encoded.segments]])
        with torch.no_grad():
            logits.append(float(model(*inputs).logits))
    assert math.log(found.probabilities[0] / found.probabilities[1]) == pytest.approx(
        logits[0] - logits[1], abs=1e-4
    )
    assert found.index == found.probabilities.index(max(found.probabilities))
    assert math.isclose(sum(found.probabilities), 1, rel_tol=1e-5)


# ---- what can be asked


@pytest.mark.parametrize(
    ("heads", "extras", "able"),
    [
        ({}, {}, ()),
        ({"mlm": 0, "nsp": 2}, {}, ("fill", "next")),
        ({"classify": 2}, {}, ("classify",)),
        ({"classify": 1}, {}, ("score",)),
        ({"classify": 2}, {"problem_type": "regression"}, ()),
        ({"tag": 2}, {}, ("tag",)),
        ({"span": 2}, {}, ("answer",)),
        ({"choice": 1}, {}, ("choose",)),
    ],
)
def test_a_folder_tells_its_abilities(heads, extras, able, tmp_path):
    assert untrained(tmp_path, heads, **extras).abilities == (*able, "embed", "look")


def test_a_fine_tuned_folder_tells_its_abilities(sst2, tagger, reader, tmp_path):
    assert [each.abilities[0] for each in (sst2, tagger, reader)] == ["classify", "tag", "answer"]
    note = TaskConfig(task="stsb", kind="regress", metrics=(), pairs=True, text=TextSection(longest=32))
    assert untrained(tmp_path, {"classify": 1}, note=note).abilities[0] == "score"


def test_a_mix_of_layers_is_an_ability_too(folder, tmp_path):
    run = tune("rte", folder, tmp_path, *BARELY, "head.encoder=frozen-features").folder
    assert "classify" in bertsmith.load(run).abilities


# ---- what is refused, and what is kept


@pytest.mark.parametrize(
    ("ask_it", "said"),
    [
        (lambda b: b.classify(["a"]), "classify head, which is required to classify texts"),
        (lambda b: b.score(["a"]), "classify head, which is required to give texts a number"),
        (lambda b: b.tag(["a"]), "tag head, which is required to tag words"),
        (lambda b: b.entities("a"), "tag head, which is required to tag words"),
        (lambda b: b.answer("a", "b"), "span head, which is required to answer questions"),
        (lambda b: b.choose([("a", "b")]), "choice head, which is required to choose among texts"),
    ],
)
def test_a_folder_without_the_head_is_rejected_with_those_that_are_there(bert, ask_it, said):
    with pytest.raises(UserError) as caught:
        ask_it(bert)
    assert said in str(caught.value) and "heads here: pooler, mlm, nsp" in str(caught.value)


@pytest.mark.parametrize(
    ("ask_it", "head"),
    [
        (lambda b: b.classify(["a"]), "classify"),
        (lambda b: b.tag(["a"]), "tag"),
        (lambda b: b.answer("a", "b"), "span"),
        (lambda b: b.choose([("a", "b")]), "choice"),
    ],
)
def test_a_folder_without_the_head_names_the_command_that_makes_one(bert, ask_it, head):
    with pytest.raises(UserError) as caught:
        ask_it(bert)
    task = re.search(r"; make one with bertsmith finetune (\w+)", str(caught.value))[1]
    assert task_named(task).kind.name == head


@pytest.mark.parametrize(
    ("ask_it", "said"),
    [
        (lambda b: b.classify("a text"), "expected a list of texts, not str"),
        (lambda b: b.classify(["a", " "]), "text 1: is empty"),
        (lambda b: b.classify([3]), "text 0: is int, not a text or a pair"),
        (lambda b: b.classify(["\ud800"]), "text 0: character 0 is a lone surrogate"),
        (lambda b: b.classify(["snow " * 90]), "text 0: has 92 tokens, but the model takes 64"),
        (lambda b: b.classify(["a", ("a", "b")]), "text 1: has 2 texts, but the first example has 1"),
        (lambda b: b.score(["a"]), "gives a text a class, not a number; call classify"),
        (lambda b: b.tag("a sentence"), "expected a list of texts, not str"),
        (lambda b: b.tag(["fine", ""]), "text 1: is empty"),
        (lambda b: b.tag(["fine", []]), "text 1: is empty"),
        (lambda b: b.tag([["a", " "]]), "text 0: word 1 is empty"),
        (lambda b: b.tag([["a", 3]]), "text 0: word 1 is int"),
        (lambda b: b.tag([3]), "text 0: is int, not a sentence or its words"),
        (lambda b: b.tag(["a \ud800"]), "text 0: character 2 is a lone surrogate"),
        (lambda b: b.entities("a"), "mark no stretches of words (they are NOUN, VERB ...); call tag"),
        (lambda b: b.answer("", "a passage"), "question 0: is empty"),
        (lambda b: b.answer("a question", " "), "passage 0: is empty"),
        (lambda b: b.answer("a question", 3), "text 0: is int, not a text or a pair"),
        (lambda b: b.answer("a", "b", best=0), "best is 0"),
        (lambda b: b.answers_each(["a question"]), "text 0: is one text, not a pair"),
        (
            lambda b: b.answers_each([("a", "b"), ("a", "b", "c")]),
            "text 1: is tuple, not a text or a pair",
        ),
        (lambda b: b.entities_each("a text"), "mark no stretches of words"),
    ],
)
def test_bad_input_gets_one_clear_line(several_heads, ask_it, said):
    head = {"classify": "classify", "score": "classify", "tag": "tag", "entities": "tag", "answer": "span"}
    head |= {"answers_each": "span", "entities_each": "tag"}
    with pytest.raises(UserError) as caught:
        ask_it(several_heads[head[ask_it.__code__.co_names[0]]])
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def several_heads(tmp_path_factory):
    names = numbered_labels("NOUN", "VERB")
    place = tmp_path_factory.mktemp("heads")
    return {head: untrained(place / head, {head: 2}, **names) for head in ("classify", "tag", "span")}


def test_a_choice_takes_pairs_and_at_least_two(tmp_path):
    bert = untrained(tmp_path, {"choice": 1})
    long = [("snow " * 90, "a"), ("b", "c")]
    for options, said in (
        ([("a", "b")], "cannot choose among 1 pairs"),
        (["a", "b"], "text 0: is one text, not a pair"),
        ([("a", "b"), ["c", "d"]], "text 1: is list, not a text or a pair"),
        (long, "text 0: has 94 tokens, but the model takes 64"),
    ):
        with pytest.raises(UserError, match=said):
            bert.choose(options)
    assert len(bert.choose(long, truncate=True).probabilities) == 2


def test_someone_elses_long_text_is_cut_only_when_asked(several_heads):
    (found,) = several_heads["classify"].classify(["snow " * 90], truncate=True)
    (cut,) = several_heads["classify"].classify(["snow " * 62])
    assert found.probabilities == pytest.approx(cut.probabilities, abs=1e-6)


def test_a_changed_task_file_is_rejected(sst2, tmp_path):
    for changes, said in (
        ({"labels": ("a", "b", "c")}, "task.json: names 3 outputs, but the head has 2"),
        ({"text": TextSection(longest=512)}, "text.longest = 512, but the model takes 128 tokens"),
    ):
        sst2.save(tmp_path)
        write_task_config(tmp_path / "task.json", sst2.finetuned.config.model_copy(update=changes))
        with pytest.raises(UserError, match=said):
            bertsmith.load(tmp_path).classify(["a text"])


def test_a_missing_mix_is_named(sst2, tmp_path):
    sst2.save(tmp_path)
    note = sst2.finetuned.config
    head = note.head.model_copy(update={"encoder": "frozen-features"})
    write_task_config(tmp_path / "task.json", note.model_copy(update={"head": head}))
    with pytest.raises(UserError, match=r"mix.safetensors: is missing, but task.json requires it"):
        bertsmith.load(tmp_path)


def test_saving_keeps_how_a_model_is_asked_and_nothing_of_another(sst2, bert, tmp_path):
    sst2.save(tmp_path)
    again = bertsmith.load(tmp_path)
    assert again.finetuned.config == sst2.finetuned.config
    assert [astuple(each) for each in again.classify(TEXTS)] == [
        astuple(each) for each in sst2.classify(TEXTS)
    ]
    bert.save(tmp_path)
    assert bertsmith.load(tmp_path).finetuned is None


def test_a_folder_with_its_own_model_is_not_taken_for_a_run(bert, sst2, tmp_path):
    bert.save(tmp_path)
    sst2.save(tmp_path / "model")
    assert bertsmith.load(tmp_path).heads == ("pooler", "mlm", "nsp")
    (tmp_path / "config.json").unlink()
    assert bertsmith.load(tmp_path).heads == ("pooler", "classify")
