"""Whose folder it is: other runs, unknown files and second processes are rejected and leave nothing."""

import subprocess
import sys
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, write_json
from bertsmith.finetuning.assignment import hashes_of
from bertsmith.finetuning.finetune import finetune
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.example_types import TextExample
from tests.toy_folder import write_toy_folder
from tests.toy_tasks import sst2
from tests.tuning import SHORT, Notebook, stop_at, toy_assignment, tune

HOLDER = """
import fcntl, sys
handle = open(sys.argv[1], "w")
fcntl.lockf(handle, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("finished")
    tune("sst2", model, place, "run.epochs=0.1")
    return place


def complaint(assignment):
    line = refusal_of(assignment)
    assert str(assignment.out) in line
    return line


def refusal_of(assignment):
    with pytest.raises(UserError) as caught:
        finetune(assignment, Notebook())
    return str(caught.value)


def test_another_recipe_is_rejected_with_the_keys_that_differ(finished, model):
    line = complaint(toy_assignment("sst2", model, finished, "run.epochs=0.2", "run.seed=3"))
    assert "contains another run: run.epochs: 0.1 there, 0.2 now; run.seed: 0 there, 3 now;" in line
    assert line.endswith("give `out` a new folder, or undo the change")


def test_who_wants_more_epochs_of_a_finished_run_is_told_how(finished, model):
    assignment = toy_assignment("sst2", model, finished, "run.epochs=0.3")
    line = complaint(assignment)
    assert "contains another run: run.epochs: 0.1 there, 0.3 now; " in line
    assert line.endswith(f"start from its model: `model={assignment.out}` `out=NEW` `run.epochs=MORE`")
    further = replace(assignment, model=assignment.out, out=finished / "runs" / "further")
    assert finetune(further, Notebook()).finished


def test_a_run_keeps_the_passes_that_it_began_with(model, tmp_path, monkeypatch):
    settings = ("run.epochs=0.2", "run.examples=8")
    with stop_at(1):
        assert not tune("sst2", model, tmp_path, *settings).finished
    out = toy_assignment("sst2", model, tmp_path, *settings).out
    begun = read_json(out / "assignment.json", remedy="")
    assert begun["recipe"]["run.micro_tokens"] == 16_384  # a number, as older versions wrote it
    write_json(out / "assignment.json", {**begun, "recipe": {**begun["recipe"], "run.micro_tokens": 100}})
    monkeypatch.setattr("bertsmith.finetuning.finetuning_setup.MICRO_TOKENS", 50)  # of another machine
    assert tune("sst2", model, tmp_path, *settings).finished
    assert read_json(out / "assignment.json", remedy="")["recipe"]["run.micro_tokens"] == 100
    assert "micro_tokens = 100\n" in (out / "recipe.toml").read_text()
    line = complaint(toy_assignment("sst2", model, tmp_path, *settings, "run.micro_tokens=60"))
    assert "contains another run: run.micro_tokens: 100 there, 60 now" in line


def test_many_differences_are_counted(finished, model):
    changes = [f"optim.{key}={value}" for key, value in (("beta1", 0.8), ("beta2", 0.8), ("eps", 1e-3))]
    changes += ["run.seed=3", "run.examples=8", "run.epochs=1", "text.longest=32", "text.step=16"]
    assert "; and 2 more; " in complaint(toy_assignment("sst2", model, finished, *changes))


def test_another_model_is_rejected(finished, tmp_path):
    write_toy_folder(tmp_path / "other")
    line = complaint(toy_assignment("sst2", tmp_path / "other", finished, "run.epochs=0.1"))
    assert f'model: "{finished}' not in line
    assert f'"{tmp_path / "other"}" now' in line


def test_other_data_are_rejected(finished, model, tmp_path):
    assignment = toy_assignment("sst2", model, finished, "run.epochs=0.1")
    other = sst2(tmp_path / "other")
    assert f'data: "{assignment.data}" there, "{other}" now' in complaint(replace(assignment, data=other))


def test_the_same_data_by_another_name_are_the_same_run(finished, model, monkeypatch):
    assignment = toy_assignment("sst2", model, finished, "run.epochs=0.1")
    monkeypatch.chdir(finished)
    near = replace(assignment, data=assignment.data.relative_to(finished))
    assert finetune(near, Notebook()).finished


def append(file, line):
    with file.open("a") as table:
        table.write(line)


@pytest.mark.parametrize("split", ["train", "dev"])
def test_examples_that_came_since_a_run_was_finished_are_noticed(model, tmp_path, split):
    assignment = toy_assignment("sst2", model, tmp_path, "run.epochs=0.1")
    finetune(assignment, Notebook())
    append(assignment.data / f"{split}.tsv", "the warm sun\t1\n")
    line = complaint(assignment)
    assert f"{split} of the examples has changed since" in line
    assert line.endswith("give `out` a new folder, or undo the change")


def test_an_interrupted_run_does_not_go_on_with_other_examples(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path, *SHORT)
    with stop_at(1):
        assert not finetune(assignment, Notebook()).finished
    original = (assignment.data / "train.tsv").read_text()
    append(assignment.data / "train.tsv", "the warm sun\t1\n")
    assert "train of the examples has changed since" in complaint(assignment)
    (assignment.data / "train.tsv").write_text(original)
    assert finetune(assignment, Notebook()).finished


def test_a_development_set_that_came_later_is_noticed(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path, "run.epochs=0.1")
    dev = (assignment.data / "dev.tsv").rename(tmp_path / "later.tsv")
    finetune(assignment, Notebook())
    dev.rename(assignment.data / "dev.tsv")
    assert "dev of the examples has changed since" in complaint(assignment)


def test_examples_are_known_by_what_they_say_not_by_where_they_stand():
    one, moved, other = (
        [TextExample("7", "the cat", label, where)]
        for label, where in (("0", "a.csv:2"), ("0", "b.csv:9"), ("1", "a.csv:2"))
    )
    assert hashes_of({"train": one}) == hashes_of({"train": moved}) != hashes_of({"train": other})


def test_skipping_bad_lines_where_there_are_none_is_the_same_run(finished, model):
    assignment = toy_assignment("sst2", model, finished, "run.epochs=0.1")
    notebook = Notebook()
    assert finetune(replace(assignment, skip_bad=True), notebook).finished
    assert "is already finished" in notebook.notes[-1]


@pytest.mark.parametrize("named", ["model", "run"])
def test_other_weights_under_the_same_name_are_rejected(tmp_path, named):
    folder = tmp_path / "start" / "model"
    write_toy_folder(folder)
    start = folder if named == "model" else folder.parent
    assignment = toy_assignment("sst2", start, tmp_path, "run.epochs=0.1")
    finetune(assignment, Notebook())
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "model.safetensors")
    line = complaint(assignment)
    assert "contains another run: model.safetensors of the model has changed since; give `out`" in line


def test_other_columns_of_ones_own_table_are_rejected(model, tmp_path):
    table = tmp_path / "my.csv"
    table.write_text("title,review,stars\n" + "".join(f"a,the cat {n},{n % 2}\n" for n in range(40)))
    plain = toy_assignment("sst2", model, tmp_path, "run.epochs=0.1")
    own = replace(plain, task=custom_task(CustomSpec("review", "stars")), data=table)
    finetune(own, Notebook())
    other = replace(own, task=custom_task(CustomSpec("title", "stars")))
    assert 'custom.text: "review" there, "title" now' in complaint(other)


def test_labels_that_were_learned_from_already_are_not_judged_anew(model, tmp_path, monkeypatch):
    table = tmp_path / "my.csv"
    table.write_text("review,stars\n" + "".join(f"the cat {n},{n}.5\n" for n in range(40)))
    plain = toy_assignment("sst2", model, tmp_path, *SHORT)
    own = replace(plain, task=custom_task(CustomSpec("review", "stars")), data=table)
    assert "all of them numbers; add `kind=regress`" in refusal_of(own)
    with monkeypatch.context() as older, stop_at(0):  # as a version that did not look at labels
        older.setattr("bertsmith.finetuning.splits.check_classes", lambda *_: None)
        assert not finetune(own, Notebook()).finished
    assert finetune(own, Notebook()).finished


def test_a_folder_with_strangers_files_is_rejected_and_left_alone(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path)
    assignment.out.mkdir(parents=True)
    (assignment.out / "thesis.tex").write_text("")
    assert "contains files, but not a run" in complaint(assignment)
    assert [file.name for file in assignment.out.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_rejected(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path)
    assignment.out.parent.mkdir(parents=True)
    assignment.out.write_text("")
    assert "contains files, but not a run" in complaint(assignment)


def test_what_a_start_left_that_was_killed_while_it_wrote_is_no_stranger(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path, "run.epochs=0.1")
    assignment.out.mkdir(parents=True)
    for name in (".lock", ".assignment.json.abcd1234.partial"):
        (assignment.out / name).write_text("")
    assert finetune(assignment, Notebook()).finished
    assert not list(assignment.out.glob("*.partial"))


def test_a_folder_in_which_another_run_works_is_rejected(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path, "run.epochs=0.1")
    assignment.out.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDER, assignment.out / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        assert "another run is using this folder; wait for it or stop it" in complaint(assignment)
        other.communicate("\n")
    assert finetune(assignment, Notebook()).finished


def test_a_run_that_was_rejected_leaves_nothing_and_the_mended_command_runs(model, tmp_path):
    wrong = toy_assignment("sst2", model, tmp_path, "run.epochs=0.1")
    mended = wrong.data
    with pytest.raises(UserError, match="does not exist"):
        finetune(replace(wrong, data=tmp_path / "nowhere"), Notebook())
    with pytest.raises(UserError, match="text.longest=128"):
        tune("sst2", model, tmp_path, "text.longest=500")
    assert not wrong.out.parent.exists()
    assert finetune(replace(wrong, data=mended), Notebook()).finished


def test_an_empty_folder_is_welcome_and_stays_where_the_run_is_rejected(model, tmp_path):
    out = tmp_path / "runs" / "sst2"
    out.mkdir(parents=True)
    with pytest.raises(UserError):
        tune("sst2", model, tmp_path, "text.longest=500")
    assert list(out.iterdir()) == []
    assert tune("sst2", model, tmp_path, *SHORT).finished


def test_examples_have_the_hash_that_folders_of_earlier_versions_hold():
    examples = [TextExample("1", ("a", "b"), "x", "f:1"), TextExample("2", "c", 0.5, "f:2")]
    known = "a234bae30976f4d7bfbea13157b741a45565175561b42dfa295672551f97fc3a"
    assert hashes_of({"train": examples}) == {"train": known}
