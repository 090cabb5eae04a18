"""What a run says before its first step."""

from dataclasses import replace

import pytest

from bertsmith.finetuning.finetune import finetune
from bertsmith.finetuning.run_warnings import describe_micro_tokens
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.training.journal import read_metrics
from tests.tuning import SHORT, Notebook, toy_assignment

JUDGED = "the model is not evaluated"


def notes_of(assignment):
    notebook = Notebook()
    finetune(assignment, notebook)
    return notebook.notes


def test_a_run_without_a_development_set_says_what_it_looked_for(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path, *SHORT)
    (assignment.data / "dev.tsv").rename(assignment.data / "valid.tsv")
    (told,) = [note for note in notes_of(assignment) if JUDGED in note]
    assert told.startswith("no development set (looked for dev.tsv, ")
    assert told in (assignment.out / "card.md").read_text()


def test_a_single_file_of_a_task_has_no_development_set(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path, *SHORT)
    told = notes_of(replace(assignment, data=assignment.data / "train.tsv"))
    assert f"no development set (one file was given, not the folder with both): {JUDGED}" in told


def test_a_tiny_table_of_ones_own_has_no_development_set(model, tmp_path):
    table = tmp_path / "my.csv"
    table.write_text("text,label\nthe sun,1\nthe snow,0\nthe rain,0\n")
    task = custom_task(CustomSpec("text", "label"))
    told = notes_of(replace(toy_assignment("sst2", model, tmp_path, *SHORT), task=task, data=table))
    assert f"no development set (fewer than 10 rows): {JUDGED}" in told


def test_a_table_whose_classes_can_spare_no_row_has_no_development_set(model, tmp_path):
    table = tmp_path / "my.csv"
    table.write_text("text,label\n" + "".join(f"the sun,{number}\n" for number in range(10)))
    task = custom_task(CustomSpec("text", "label"))
    told = notes_of(replace(toy_assignment("sst2", model, tmp_path, *SHORT), task=task, data=table))
    assert f"no development set (none of the labels can spare a row): {JUDGED}" in told


def test_a_run_with_a_development_set_says_nothing_of_it(model, tmp_path):
    assert not [note for note in notes_of(toy_assignment("sst2", model, tmp_path, *SHORT)) if JUDGED in note]


@pytest.mark.parametrize(("patience", "is_vain"), [(1, False), (2, True)])
def test_a_patience_that_no_evaluation_can_exhaust_is_named(model, tmp_path, patience, is_vain):
    settings = (f"run.patience={patience}", "run.keep=best", "run.evaluations=3", "run.epochs=0.5")
    told = notes_of(toy_assignment("sst2", model, tmp_path, *settings))
    line = f"it has 2 evaluations before its end, and run.patience is {patience}; see run.evaluations"
    assert any(line in note for note in told) == is_vain


def own_run(model, place, labels, **changes):
    table = place / "my.csv"
    table.write_text("text,label\n" + "".join(f"the sun {n},{label}\n" for n, label in enumerate(labels)))
    task = custom_task(CustomSpec("text", "label", **changes))
    return replace(toy_assignment("sst2", model, place, "run.epochs=0.1"), task=task, data=table)


def test_a_small_development_set_is_named_so(model, tmp_path):
    told = notes_of(own_run(model, tmp_path, ["a", "b"] * 100))
    assert [note for note in told if note.startswith("dev has only 20 examples, so its figures may be")]


def test_a_class_that_the_development_set_has_not_is_named(model, tmp_path):
    told = notes_of(own_run(model, tmp_path, ["a", "b"] * 300 + ["once"]))
    assert [note for note in told if note.startswith("dev lacks examples of 'once': the model")]
    assert not [note for note in told if "examples, so its figures" in note]


def test_the_finished_model_is_tested_on_the_part_for_it(model, tmp_path):
    assignment = own_run(model, tmp_path, ["a", "b"] * 50, test_fraction=0.3)
    result = finetune(assignment, Notebook())
    assert list(result.metrics) == ["dev", "test-part"]
    assert {line["kind"] for line in read_metrics(assignment.out)} == {"train", "held-out"}


def test_texts_that_are_cut_are_counted(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path, *SHORT, "text.longest=16")
    with (assignment.data / "train.tsv").open("a") as file:
        file.write(f"{'cat ' * 20}\t1\n" * 40)
    told = (
        "20.0% of the training texts are longer than text.longest (16 tokens) and are cut; see text.longest"
    )
    assert f"{told} and text.long_texts" in notes_of(assignment)


def test_where_every_text_fits_nothing_is_said_of_cuts(model, tmp_path):
    assert not [note for note in notes_of(toy_assignment("sst2", model, tmp_path, *SHORT)) if "cut" in note]


@pytest.mark.parametrize(
    ("setting", "told"), [("run.examples=400", "only one step"), ("run.examples=16", "only 5 steps")]
)
def test_a_very_short_run_is_named_so(model, tmp_path, setting, told):
    notes = notes_of(toy_assignment("sst2", model, tmp_path, *SHORT, setting))
    assert f"the run has {told}, too few to learn much; see `run.epochs` and `run.examples`" in notes


def test_a_longer_run_is_not(model, tmp_path):
    notes = notes_of(toy_assignment("sst2", model, tmp_path, "run.epochs=1"))
    assert not [note for note in notes if "steps" in note]


@pytest.mark.parametrize("setting", ["run.examples=400", "run.examples=16"])
def test_the_first_step_of_a_short_run_learns(model, tmp_path, setting):
    assignment = toy_assignment("sst2", model, tmp_path, *SHORT, setting)
    finetune(assignment, Notebook())
    rates = [line["learning_rate"] for line in read_metrics(assignment.out) if line["kind"] == "train"]
    assert rates[0] == assignment.recipe.optim.peak_lr


@pytest.mark.parametrize(
    ("asked", "device", "told"),
    [
        (
            "auto",
            "cuda",
            ["a forward pass has up to 65,536 tokens, by the GPU's free memory (run.micro_tokens)"],
        ),
        ("auto", "cpu", []),
        ("4096", "cuda", []),
    ],
)
def test_a_gpu_tells_how_many_tokens_its_passes_have_where_nobody_asked(model, tmp_path, asked, device, told):
    recipe = toy_assignment("sst2", model, tmp_path, f"run.micro_tokens={asked}").recipe
    assert [*describe_micro_tokens(recipe, 65_536, device)] == told
