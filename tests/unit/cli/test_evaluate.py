"""`bertsmith evaluate` as people use it."""

import json
from dataclasses import replace

import pytest

from bertsmith.finetuning.finetune import finetune
from bertsmith.tasks.custom import CustomSpec, custom_task
from tests.command_line import bertsmith, mistake
from tests.toy_folder import write_toy_folder
from tests.tuning import SHORT, Notebook, quickly, toy_assignment, toy_model, tune

__all__ = ["quickly", "toy_model"]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    return tune("sst2", model, place, *SHORT), place / "data" / "sst2"


def test_a_labelled_file_is_evaluated_as_the_run_was(capsys, run):
    result, data = run
    told = bertsmith(capsys, "evaluate", "--model", result.folder, "--data", data / "dev.tsv")
    assert told.code == 0, told
    accuracy = 100 * result.metrics["dev"]["accuracy"]
    first, second, constant, *_ = told.out.splitlines()
    assert (first, second) == ("SST-2, 40 examples", f"  accuracy: {accuracy:.2f}")
    assert constant == f"  constant answer: accuracy {100 * result.baselines['dev']['accuracy']:.2f}"
    assert (
        "  published accuracy on test (Devlin et al. 2018, table 1): BERT Large 94.9, BERT Base 93.5"
        in told.out
    )
    assert "  'positive': precision " in told.out and "  'negative': precision " in told.out


@pytest.mark.parametrize("words", [(), ("--split", "dev")])
def test_a_folder_is_evaluated_by_its_development_set(capsys, run, words):
    result, data = run
    told = bertsmith(capsys, "evaluate", "--model", result.folder / "model", "--data", data, *words, "--json")
    found = json.loads(told.out)
    classes = found.pop("classes")
    assert found == {
        "examples": 40,
        "skipped": 0,
        "measures": pytest.approx(result.metrics["dev"], abs=1e-4),
        "baseline": result.baselines["dev"],
    }
    assert {label: scores["support"] for label, scores in classes.items()} == {
        label: scores.support for label, scores in result.classes["dev"].items()
    }


def test_a_folder_that_is_not_there_is_told_with_the_file_that_was_looked_for(capsys, run, tmp_path):
    told = mistake(capsys, "evaluate", "--model", run[0].folder, "--data", tmp_path / "none")
    assert "does not exist; name a folder with dev.tsv" in told


def test_another_split_can_be_chosen(capsys, run):
    told = bertsmith(capsys, "evaluate", "--model", run[0].folder, "--data", run[1], "--split", "train")
    assert told.out.startswith("SST-2, 160 examples")


def test_a_file_of_any_name_is_evaluated(capsys, run, tmp_path):
    (tmp_path / "mine.tsv").write_text((run[1] / "dev.tsv").read_text())
    told = bertsmith(capsys, "evaluate", "--model", run[0].folder, "--data", tmp_path / "mine.tsv")
    assert told.out.startswith("SST-2, 40 examples")


def test_bad_lines_stop_it_or_are_counted(capsys, run, tmp_path):
    file = tmp_path / "dev.tsv"
    file.write_text((run[1] / "dev.tsv").read_text() + "the cat\tlukewarm\n")
    assert "dev.tsv:42: has the unknown label" in mistake(
        capsys, "evaluate", "--model", run[0].folder, "--data", file
    )
    told = bertsmith(capsys, "evaluate", "--model", run[0].folder, "--data", file, "--skip-bad")
    assert told.out.startswith("SST-2, 40 examples (1 bad lines skipped)")


def test_examples_without_a_label_stop_it_or_are_counted(capsys, own, tmp_path):
    file = tmp_path / "new.csv"
    file.write_text("text,label\nthe sun,hot\nthe snow,\nthe snow,icy\nthe tea,\n")
    words = ("evaluate", "--model", own[0].folder, "--data", file)
    line = mistake(capsys, *words)
    assert "new.csv:3: 2 of 4 examples lack a label to compare with" in line and "--skip-bad" in line
    told = bertsmith(capsys, *words, "--skip-bad")
    assert told.out.startswith("Custom, 2 examples (2 bad lines skipped)")
    file.write_text("text,label\nthe snow,\n")
    assert "1 of 1 examples lack a label" in mistake(capsys, *words, "--skip-bad")
    file.write_text("text,warmth\nthe snow,icy\n")
    assert mistake(capsys, *words).endswith("add the labels, in the column 'label'")


def test_the_precision_can_be_chosen_and_is_that_of_classify(capsys, own, tmp_path, monkeypatch):
    monkeypatch.setattr("bertsmith.inference.precision.has_bf16_products", lambda: True)
    file = tmp_path / "new.csv"
    file.write_text("text,label\nthe sun,hot\nthe snow,icy\n")
    found = {}
    for precision in ("fp32", "bf16"):
        words = (own[0].folder, "--input", file, "--precision", precision)
        bertsmith(capsys, "predict", "--model", *words, "--out", tmp_path / f"{precision}.jsonl")
        rows = map(json.loads, (tmp_path / f"{precision}.jsonl").read_text().splitlines())
        told = bertsmith(capsys, "classify", "--model", *words, "--text", "text", "--json")
        classified = [json.loads(line)["probabilities"] for line in told.out.splitlines()]
        found[precision] = [{label: row[label] for label in ("hot", "icy")} for row in rows]
        for one, other in zip(found[precision], classified, strict=True):
            assert one == pytest.approx(other, abs=1e-6)
    assert found["fp32"] != found["bf16"]
    words = ("evaluate", "--model", own[0].folder, "--data", file, "--precision", "fp8")
    assert "unknown precision 'fp8'" in mistake(capsys, *words)


def test_mistakes_are_one_line(capsys, run, tmp_path):
    folder, data = run[0].folder, run[1]
    (tmp_path / "new.tsv").write_text("sentence\nthe sun\n")
    write_toy_folder(tmp_path / "plain")
    for words, said in (
        ((folder, "--data", tmp_path / "new.tsv"), "lack a label to compare with"),
        ((folder, "--data", tmp_path / "gone.tsv"), "gone.tsv: does not exist"),
        ((folder, "--data", data, "--split", "exam"), "SST-2 does not have a split 'exam'"),
        ((tmp_path / "gone", "--data", data), "this folder does not exist"),
        ((tmp_path / "plain", "--data", data), "was not fine-tuned by bertsmith"),
    ):
        assert said in mistake(capsys, "evaluate", "--model", *words)


@pytest.fixture(scope="module")
def own(model, tmp_path_factory):
    """A run on 60 rows of one's own, and their file."""
    place = tmp_path_factory.mktemp("own")
    rows = [f"the {'sun' if n % 2 else 'snow'} {n},{'hot' if n % 2 else 'icy'}" for n in range(60)]
    (place / "my.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    spec = custom_task(CustomSpec("text", "label", dev_fraction=0.2))
    plain = toy_assignment("sst2", model, place, *SHORT)
    return finetune(replace(plain, task=spec, data=place / "my.csv"), Notebook()), place / "my.csv"


@pytest.mark.parametrize("folder", ["", "model"])
def test_of_the_file_it_was_trained_from_the_part_held_back_is_evaluated(capsys, own, folder):
    result, file = own
    told = bertsmith(capsys, "evaluate", "--model", result.folder / folder, "--data", file, "--json")
    summary = json.loads(told.out)
    assert summary["measures"] == pytest.approx(result.metrics["dev"], abs=1e-4)
    assert summary["examples"] == 60 - result.examples
    assert f"{file}: the model was trained from this file: only the held-back part" in told.err


def test_a_copy_of_that_file_or_a_split_that_is_named_is_evaluated_whole(capsys, own, tmp_path):
    result, file = own
    (tmp_path / "copy.csv").write_text(file.read_text())
    told = bertsmith(capsys, "evaluate", "--model", result.folder, "--data", tmp_path / "copy.csv")
    assert (told.out.splitlines()[0], told.err) == ("Custom, 60 examples", "")
    told = bertsmith(capsys, "evaluate", "--model", result.folder, "--data", file, "--split", "test")
    assert told.out.startswith("Custom, 60 examples")


def test_the_very_file_of_a_published_task_is_warned_of(capsys, model, tmp_path):
    plain = toy_assignment("sst2", model, tmp_path, *SHORT)
    result = finetune(replace(plain, data=plain.data / "train.tsv"), Notebook())
    told = bertsmith(capsys, "evaluate", "--model", result.folder, "--data", plain.data / "train.tsv")
    assert told.out.startswith("SST-2, 160 examples")
    assert "was trained on these very examples" in told.err


def test_labels_that_training_has_not_count_as_wrong_or_are_skipped(capsys, own, tmp_path):
    file = tmp_path / "new.csv"
    file.write_text("text,label\nthe sun,hot\nthe snow,icy\nthe tea,lukewarm\n")
    told = bertsmith(capsys, "evaluate", "--model", own[0].folder, "--data", file, "--json")
    assert json.loads(told.out)["examples"] == 3
    assert json.loads(told.out)["measures"]["accuracy"] <= 2 / 3
    assert "1 examples have labels that do not occur in training and count as wrong" in told.err
    told = bertsmith(capsys, "evaluate", "--model", own[0].folder, "--data", file, "--skip-bad")
    assert told.out.startswith("Custom, 2 examples (1 bad lines skipped)")


def test_a_file_of_strange_labels_alone_cannot_be_evaluated_without_them(capsys, own, tmp_path):
    (tmp_path / "new.csv").write_text("text,label\nthe tea,lukewarm\n")
    words = ("evaluate", "--model", own[0].folder, "--data", tmp_path / "new.csv", "--skip-bad")
    assert "new.csv: does not have a label of this model" in mistake(capsys, *words)


def test_a_file_without_tags_cannot_be_evaluated(capsys, model, tmp_path):
    result = tune("wnut17", model, tmp_path, *SHORT)
    (tmp_path / "new.txt").write_text("london\nis\ncold\n")
    said = mistake(capsys, "evaluate", "--model", result.folder, "--data", tmp_path / "new.txt")
    assert "new.txt:1: 1 of 1 examples lack a label to compare with" in said
    told = bertsmith(capsys, "evaluate", "--model", result.folder, "--data", tmp_path / "data" / "wnut17")
    assert "  span f1 location: " in told.out


def own_run(model, place, rows, spec):
    """A short run on one's own rows, and their file."""
    (place / "my.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    plain = toy_assignment("sst2", model, place, *SHORT)
    return finetune(replace(plain, task=custom_task(spec), data=place / "my.csv"), Notebook())


def test_rows_without_any_label_are_evaluated_where_there_may_be_several(capsys, model, tmp_path):
    rows = [f"the {('sun', 'snow', 'cat')[n % 3]} {n},{('hot', 'icy', '')[n % 3]}" for n in range(30)]
    result = own_run(model, tmp_path, rows, CustomSpec("text", "label", kind="multilabel"))
    (tmp_path / "new.csv").write_text("text,label\nthe sun,hot\nthe cat,\n")
    told = bertsmith(capsys, "evaluate", "--model", result.folder, "--data", tmp_path / "new.csv")
    assert told.out.startswith("Custom, 2 examples\n  micro f1: "), told


def test_errors_of_numbers_are_reported_in_their_own_unit(capsys, model, tmp_path):
    rows = [f"the {'sun' if n % 2 else 'snow'} {n},{90_000 + 1000 * (n % 2)}" for n in range(60)]
    result = own_run(model, tmp_path, rows, CustomSpec("text", "label", kind="regress", dev_fraction=0.2))
    told = bertsmith(capsys, "evaluate", "--model", result.folder, "--data", tmp_path / "my.csv")
    names = ["spearman", "pearson", "mean absolute error", "root mean squared error"]
    lines = told.out.splitlines()[1:-1]  # the last one is of the constant answer
    values = dict(line.strip().split(": ") for line in lines)
    assert list(values) == names
    expected = result.metrics["dev"]["mean_absolute_error"]
    assert float(values["mean absolute error"]) == pytest.approx(expected, rel=1e-4)
