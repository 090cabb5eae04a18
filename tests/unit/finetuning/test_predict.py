"""Finished models asked about files: one or several together, and what is written of it."""

import json

import numpy as np
import pytest

from bertsmith.core.errors import UserError
from bertsmith.finetuning.predict import predict, predict_labelled, write_official, write_predictions
from bertsmith.tasks.answers import squad_scores
from tests.toy_folder import write_toy_folder
from tests.toy_tasks import write_rows
from tests.tuning import SHORT, stop_at, tune

TASKS = ("sst2", "stsb", "wnut17", "squad", "swag", "rte")


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """Two short runs of each kind, with different seeds, and where their data are."""
    place = tmp_path_factory.mktemp("runs")
    return {
        name: (
            [tune(name, model, place / str(seed), *SHORT, f"run.seed={seed}").folder for seed in (0, 1)],
            place / "0" / "data" / name,
        )
        for name in TASKS
    }


def scores(folders, data):
    return predict_labelled(folders, data, device="cpu").predictions.scores


@pytest.mark.parametrize("name", TASKS)
def test_an_ensemble_gives_the_mean_of_its_members_scores(runs, name):
    folders, data = runs[name]
    one, other = (scores([folder], data) for folder in folders)
    assert not np.allclose(one, other)
    np.testing.assert_allclose(scores(folders, data), (one + other) / 2, rtol=1e-5, atol=1e-6)


def test_an_ensemble_of_one_model_three_times_is_that_model(runs):
    folders, data = runs["squad"]
    once, thrice = (
        predict_labelled(folders[:1], data, device="cpu"),
        predict_labelled([folders[0]] * 3, data, device="cpu"),
    )
    assert [each.text for each in once.predictions.answers] == [
        each.text for each in thrice.predictions.answers
    ]


def test_strangers_are_rejected_in_an_ensemble(runs):
    with pytest.raises(UserError, match="was not fine-tuned for the same task and labels"):
        predict_labelled([runs["sst2"][0][0], runs["rte"][0][0]], runs["sst2"][1], device="cpu")


def test_taggers_that_cut_texts_otherwise_are_rejected(runs, model, tmp_path):
    folders, data = runs["wnut17"]
    other = tune("wnut17", model, tmp_path, *SHORT, "text.longest=32", "text.step=16").folder
    with pytest.raises(UserError, match="cuts texts differently"):
        predict_labelled([folders[0], other], data, device="cpu")


def test_classifiers_may_cut_texts_as_they_were_trained(runs, model, tmp_path):
    folders, data = runs["sst2"]
    other = tune("sst2", model, tmp_path, *SHORT, "text.longest=32", "text.step=16").folder
    assert len(predict_labelled([folders[0], other], data, device="cpu").examples) == 40


def rows(path):
    return [line.split("\t") for line in path.read_text().splitlines()]


def test_texts_become_a_table_with_the_probability_of_each_class(runs, tmp_path):
    folders, data = runs["sst2"]
    predicted = predict_labelled(folders[:1], data, device="cpu")
    assert write_predictions(tmp_path / "out.tsv", predicted) == [tmp_path / "out.tsv"]
    header, *lines = rows(tmp_path / "out.tsv")
    assert header == ["id", "prediction", "negative", "positive"]
    assert len(lines) == 40
    for _, prediction, *shares in lines:
        assert sum(map(float, shares)) == pytest.approx(1, abs=1e-5)
        assert prediction == header[2:][int(np.argmax(list(map(float, shares))))]


def test_numbers_become_a_table_without_classes(runs, tmp_path):
    folders, data = runs["stsb"]
    predicted = predict_labelled(folders[:1], data, device="cpu")
    write_predictions(tmp_path / "out.tsv", predicted)
    header, *lines = rows(tmp_path / "out.tsv")
    assert header == ["id", "prediction"]
    assert [float(line[1]) for line in lines] == pytest.approx(predicted.predictions.scores.tolist())


def test_tagged_words_become_columns_for_conlleval(runs, tmp_path):
    folders, data = runs["wnut17"]
    predicted = predict_labelled(folders[:1], data, device="cpu")
    write_predictions(tmp_path / "out.txt", predicted)
    sentences = (tmp_path / "out.txt").read_text().strip().split("\n\n")
    assert len(sentences) == 40
    words = [line.split(" ") for line in sentences[0].splitlines()]
    assert [word[0] for word in words] == list(predicted.examples[0].words)
    assert [word[1] for word in words] == list(predicted.examples[0].tags)


def test_questions_become_the_three_files_of_the_official_script(runs, tmp_path):
    folders, data = runs["squad"]
    predicted = predict_labelled(folders[:1], data, device="cpu")
    written = write_predictions(tmp_path / "out", predicted)
    names = ["predictions.json", "nbest_predictions.json", "null_odds.json"]
    assert [path.name for path in written] == names
    answers, nbest, odds = (json.loads(path.read_text()) for path in written)
    assert set(answers) == set(nbest) == set(odds) == {example.key for example in predicted.examples}
    official = squad_scores(predicted.examples, answers, null_odds=None, threshold=None)
    assert official["f1"] / 100 == pytest.approx(predicted.metrics()["f1"])


def test_choices_become_the_number_of_the_option(runs, tmp_path):
    folders, data = runs["swag"]
    write_predictions(tmp_path / "out.tsv", predict_labelled(folders[:1], data, device="cpu"))
    header, *lines = rows(tmp_path / "out.tsv")
    assert (header, len(lines)) == (["id", "prediction", *"0123"], 40)
    for _, prediction, *shares in lines:
        assert sum(map(float, shares)) == pytest.approx(1, abs=1e-5)
        assert int(prediction) == np.argmax(list(map(float, shares)))


@pytest.fixture
def glue_tests(tmp_path):
    """Test files without labels, as the site has them."""
    write_rows(tmp_path / "sst2.tsv", [["index", "sentence"], [0, "the sun"], [1, "the snow"]])
    pairs = [["index", "sentence1", "sentence2"], [0, "the cat", "the sun"], [1, "the cat", "the snow"]]
    write_rows(tmp_path / "rte.tsv", pairs)
    write_rows(tmp_path / "stsb.tsv", pairs)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file", "spelling"),
    [
        ("sst2", "SST-2.tsv", {"0", "1"}),
        ("rte", "RTE.tsv", {"entailment", "not_entailment"}),
        ("stsb", "STS-B.tsv", None),
    ],
)
def test_the_official_file_has_the_name_and_the_spelling_of_the_site(runs, glue_tests, name, file, spelling):
    predicted = predict(runs[name][0][:1], glue_tests / f"{name}.tsv", device="cpu")
    path = write_official(glue_tests / "site", predicted)
    header, *lines = rows(path)
    assert (path.name, header) == (file, ["index", "prediction"])
    assert [line[0] for line in lines] == ["0", "1"]
    if spelling:
        assert {line[1] for line in lines} <= spelling
    else:
        assert all(0 <= float(line[1]) <= 5 for line in lines)


@pytest.mark.parametrize("name", ["swag", "wnut17", "squad"])
def test_other_tasks_have_no_official_file(runs, tmp_path, name):
    predicted = predict_labelled(runs[name][0][:1], runs[name][1], device="cpu")
    with pytest.raises(UserError, match="the GLUE site does not accept predictions for"):
        write_official(tmp_path, predicted)
    assert not list(tmp_path.iterdir())


def test_a_file_without_labels_cannot_be_evaluated(runs, glue_tests):
    with pytest.raises(UserError, match="lack a label to compare with"):
        predict_labelled(runs["sst2"][0][:1], glue_tests / "sst2.tsv", device="cpu")


def test_a_model_that_was_not_fine_tuned_is_rejected(tmp_path):
    write_toy_folder(tmp_path / "plain")
    with pytest.raises(UserError, match="was not fine-tuned by bertsmith: it lacks task.json"):
        predict_labelled([tmp_path / "plain"], tmp_path, device="cpu")


@pytest.fixture(scope="module")
def mnli(model, tmp_path_factory):
    """A model for MNLI, and a folder with GLUE's diagnostic and MNLI's test files."""
    place = tmp_path_factory.mktemp("mnli")
    data = place / "data" / "mnli"
    labels = ("entailment", "neutral", "contradiction")
    lines = [[n, f"the cat {n}", f"the dog {n}", labels[n % 3]] for n in range(32)]
    for name in ("train", "dev_matched", "dev_mismatched"):
        write_rows(data / f"{name}.tsv", [["index", "sentence1", "sentence2", "gold_label"], *lines])
    for name in ("test_matched", "test_mismatched"):
        write_rows(data / f"{name}.tsv", [["index", "sentence1", "sentence2"], *(each[:3] for each in lines)])
    write_rows(data / "AX" / "diagnostic.tsv", [["index", "sentence1", "sentence2"], [0, "a cat", "a dog"]])
    header = ["Lexical Semantics", "Premise", "Hypothesis", "Label"]
    write_rows(data / "AX" / "diagnostic-full.tsv", [header, ["", "a cat", "a dog", "neutral"]])
    return tune("mnli", model, place, *SHORT), data


def test_mnli_is_evaluated_on_both_development_sets(mnli):
    assert list(mnli[0].metrics) == ["dev", "dev-mismatched"]


@pytest.mark.parametrize(
    ("file", "official"),
    [
        ("test_matched.tsv", "MNLI-m.tsv"),
        ("test_mismatched.tsv", "MNLI-mm.tsv"),
        ("AX/diagnostic.tsv", "AX.tsv"),
    ],
)
def test_a_files_name_says_which_part_of_the_submission_it_is(mnli, tmp_path, file, official):
    result, data = mnli
    assert write_official(tmp_path, predict([result.folder], data / file, device="cpu")).name == official


@pytest.mark.parametrize("place", ["AX/diagnostic-full.tsv", "AX"])
def test_the_diagnostic_is_evaluated_by_its_own_metric(mnli, place):
    result, data = mnli
    predicted = predict_labelled([result.folder], data / place, device="cpu")
    assert (predicted.task.name, list(predicted.metrics())) == ("diagnostic", ["matthews", "accuracy"])


def test_a_run_that_is_not_finished_says_so(model, tmp_path):
    with stop_at(1):
        result = tune("sst2", model, tmp_path, *SHORT)
    with pytest.raises(UserError, match="this run is not finished: .*run its `bertsmith finetune` command"):
        predict_labelled([result.folder], tmp_path / "data" / "sst2", device="cpu")


def test_a_folder_of_several_runs_names_them(runs):
    (folder, *_), data = runs["sst2"]
    with pytest.raises(UserError, match="contains several runs; name one of .*sst2"):
        predict_labelled([folder.parent], data, device="cpu")
