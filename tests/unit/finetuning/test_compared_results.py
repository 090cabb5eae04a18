"""A result beside what the constant answer gets, its classes, and thresholds that are tuned and stored."""

import json
import shutil
from dataclasses import replace

import pytest

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.finetuning.finetune import finetune
from bertsmith.finetuning.predict import predict, predict_labelled
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.task_config import read_task_config
from bertsmith.tasks.task_recipe import finetuning_recipe
from tests.tuning import QUICK, Notebook, toy_assignment, tune


def test_a_run_says_what_the_constant_answer_gets_and_how_each_class_is_found(model, tmp_path):
    result = tune("sst2", model, tmp_path, "run.epochs=0.1")
    written = json.loads((result.folder / "result.json").read_text())
    constant = written["baselines"]["dev"]["accuracy"]
    counts = {label: scores["support"] for label, scores in written["classes"]["dev"].items()}
    assert constant == max(counts.values()) / sum(counts.values())
    assert (result.baselines, result.classes["dev"]["positive"].support) == (
        written["baselines"],
        counts["positive"],
    )
    assert f"| {100 * constant:.2f} |" in (result.folder / "card.md").read_text()


def test_a_result_counts_the_steps_and_the_tokens_that_were_shown(model, tmp_path):
    result = tune("sst2", model, tmp_path, "run.epochs=1")
    written = json.loads((result.folder / "result.json").read_text())
    assert (written["ending"], written["steps"]) == ("finished", result.steps) == ("finished", 10)
    # Each text has its words, at least one, with [CLS] and [SEP].
    assert 3 * result.examples < written["tokens"] < 64 * result.examples


def test_a_model_that_does_not_beat_the_constant_answer_is_named_so(model, tmp_path):
    result = tune("sst2", model, tmp_path, "run.epochs=0.1", "optim.peak_lr=1e-9", "run.seed=1")
    assert result.metrics["dev"]["accuracy"] <= result.baselines["dev"]["accuracy"]
    card = (result.folder / "card.md").read_text()
    assert "dev: the model does not beat the constant answer (accuracy " in card


def test_a_model_that_learned_is_not(model, tmp_path):
    assert "does not beat" not in (tune("sst2", model, tmp_path).folder / "card.md").read_text()


@pytest.fixture(scope="module")
def tuned(model, tmp_path_factory):
    """A run whose rare label has a threshold of its own, on topics that are hard to tell."""
    place = tmp_path_factory.mktemp("tuned")
    table = place / "topics.csv"
    rows = [
        f"the {'sun' if n % 3 else 'snow'} {n},{'warm' if n % 3 else ''};{'odd' if n % 7 == 0 else ''}"
        for n in range(200)
    ]
    table.write_text("text,topics\n" + "\n".join(rows) + "\n")
    task = custom_task(CustomSpec("text", "topics", kind="multilabel", separator=";", dev_fraction=0.3))
    recipe = finetuning_recipe(task, [*QUICK, "run.epochs=2", "answers.label_thresholds=tuned"])
    plain = toy_assignment("sst2", model, place)
    return finetune(replace(plain, task=task, recipe=recipe, data=table), Notebook()), table


def test_tuned_thresholds_are_stored_and_decide_what_is_predicted(tuned):
    result, table = tuned
    config = read_task_config(result.folder / "model" / "task.json")
    thresholds = config.answers.label_thresholds
    assert config.labels == ("odd", "warm") and thresholds[0] < 0.4, "the rare label is rarely probable"
    # How a set is cut decides its rounding, and a text may lie next to a threshold.
    again = predict_labelled([result.folder], table, device="cpu").metrics()
    assert again == pytest.approx(result.metrics["dev"], abs=0.05)
    file = predict([result.folder], table)
    given = config.kind.predicted_targets(file.encoded, file.predictions)
    assert (given == (file.predictions.scores >= thresholds)).all()
    assert given[:, 0].any(), "one half would never give it"


def test_tuned_thresholds_decide_in_classify(tuned):
    result, _ = tuned
    thresholds = read_task_config(result.folder / "model" / "task.json").answers.label_thresholds
    for found in bertsmith.load(result.folder).classify(["the sun 7", "the snow 3", "the sun 14"]):
        given = {label: each for label, each in found.probabilities.items() if label in found.labels}
        bars = dict(zip(("odd", "warm"), thresholds, strict=True))
        assert set(given) == {label for label, each in found.probabilities.items() if each >= bars[label]}


def test_the_threshold_of_two_classes_is_tuned_by_the_deciding_metric(model, tmp_path):
    result = tune("sst2", model, tmp_path, "run.epochs=0.5", "answers.label_thresholds=tuned")
    (threshold,) = read_task_config(result.folder / "model" / "task.json").answers.label_thresholds
    bert = bertsmith.load(result.folder)
    for found in bert.classify(["the warm sun", "the cold snow", "a cat"]):
        assert (found.label == "positive") == (found.probabilities["positive"] >= threshold)
    plain = tune("sst2", model, tmp_path / "plain", "run.epochs=0.5")
    assert result.metrics["dev"]["accuracy"] >= plain.metrics["dev"]["accuracy"]


@pytest.mark.parametrize(
    ("task", "thresholds", "said"),
    [
        ("wnut17", "tuned", r"a tag task with \d+ labels does not use thresholds"),
        ("stsb", "tuned", "a regress task with 0 labels does not use thresholds"),
        ("sst2", "[0.2,0.3]", "a classify task with 2 labels needs 1 threshold, not 2"),
    ],
)
def test_thresholds_that_do_not_fit_the_labels_are_rejected_before_the_first_step(
    model, tmp_path, task, thresholds, said
):
    with pytest.raises(UserError, match=said):
        tune(task, model, tmp_path, f"answers.label_thresholds={thresholds}")
    assert not (tmp_path / "runs" / task / "metrics.jsonl").exists()


def test_a_member_without_thresholds_counts_as_one_half_in_any_order(tuned, tmp_path):
    result, table = tuned
    plain = tmp_path / "plain"
    shutil.copytree(result.folder / "model", plain)
    config = json.loads((plain / "task.json").read_text())
    tuned_by = config["answers"]["label_thresholds"]
    config["answers"]["label_thresholds"] = "off"
    (plain / "task.json").write_text(json.dumps(config))
    for folders in ([result.folder, plain], [plain, result.folder]):
        thresholds = predict(folders, table).predictions.thresholds
        assert thresholds == pytest.approx([(each + 0.5) / 2 for each in tuned_by])


def test_thresholds_in_a_folder_that_do_not_fit_its_labels_are_named(tuned, tmp_path):
    result, table = tuned
    plain = tmp_path / "plain"
    shutil.copytree(result.folder / "model", plain)
    config = json.loads((plain / "task.json").read_text())
    config["answers"]["label_thresholds"].append(0.5)
    (plain / "task.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"task\.json: answers\.label_thresholds: .* needs \d thresholds?, not"
    ):
        predict([plain], table)
