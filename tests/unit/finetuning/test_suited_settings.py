"""Settings for a user's own data follow from the model and the data, and what the user gives wins."""

import pytest

from bertsmith.core.errors import UserError
from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import finetune
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.finetuning.suited_settings import DEFAULTS_FILE, suited_recipe
from bertsmith.inference.embedded_models import default_model
from bertsmith.studies.sweep import over_search
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.task_recipe import finetuning_recipe
from tests.toy_folder import write_toy_folder
from tests.tuning import QUICK, SHORT, Notebook, tune

TASK = custom_task(CustomSpec("text", "label"))


def table(place, rows, text="the sun is warm today"):
    place.mkdir(exist_ok=True)
    file = place / f"{rows}.csv"
    lines = [f"{text} {number},{'yes' if number % 2 else 'no'}" for number in range(rows)]
    file.write_text("\n".join(["text,label", *lines, ""]))
    return file


@pytest.fixture
def folder(tmp_path):
    write_toy_folder(tmp_path / "model")
    return tmp_path / "model"


def recipe_for(file, model, *overrides, task=TASK):
    return suited_recipe(task, file, model, overrides, options=())


@pytest.mark.parametrize(("rows", "passes", "batch"), [(60, 20, 16), (1000, 9, 32), (8000, 3, 32)])
def test_fewer_rows_are_seen_more_often(rows, passes, batch, folder, tmp_path):
    recipe, reason = recipe_for(table(tmp_path, rows), folder)
    assert (recipe.run.epochs, recipe.run.examples) == (passes, batch)
    assert f"{passes} passes of" in reason


def test_a_long_run_ends_by_patience(folder, tmp_path):
    file = table(tmp_path, 13_000)
    recipe, reason = recipe_for(file, folder)
    assert (recipe.run.evaluations, recipe.run.patience, recipe.run.keep) == (10, 3, "best")
    assert "(1,098 steps), fewer if 3 of 10 evaluations gain nothing" in reason
    for given in ("run.patience=off", "run.keep=last", "run.evaluations=2", "run.epochs=1"):
        assert recipe_for(file, folder, given)[0].run.patience == "off"
    assert recipe_for(table(tmp_path, 1000), folder)[0].run.patience == "off"


def test_a_folder_says_its_own_rates(folder, tmp_path):
    (folder / DEFAULTS_FILE).write_text('lr = 7e-4\nlora_lr = 9e-3\npooling = "first"\n')
    file = table(tmp_path, 60)
    tuned, reason = recipe_for(file, folder)
    assert (tuned.optim.peak_lr, tuned.head.pooling) == (7e-4, "first")
    assert "rate 0.0007 (task_defaults.toml of model)" in reason
    assert recipe_for(file, folder, "head.encoder=lora")[0].optim.peak_lr == 9e-3
    recipe, reason = recipe_for(file, folder, "head.encoder=lora")
    assert recipe.lora.targets == ("query", "key", "value", "output", "feed-forward")
    assert "adapters on query, key, value, output, feed-forward" in reason
    assert recipe_for(file, folder, "head.encoder=lora", 'lora.targets=["key"]')[0].lora.targets == ("key",)


def test_what_was_tuned_from_a_folder_says_them_too(folder, tmp_path):
    (folder / DEFAULTS_FILE).write_text("lr = 7e-4\nlora_lr = 9e-3\n")
    tuned = tune("sst2", folder, tmp_path, *SHORT).folder / "model"
    assert "rate 0.0007 (task_defaults.toml of model)" in recipe_for(table(tmp_path, 60), tuned)[1]


def test_a_broken_file_is_named(folder, tmp_path):
    (folder / DEFAULTS_FILE).write_text("lr = fast\n")
    with pytest.raises(UserError, match=r"task_defaults\.toml: is not valid"):
        recipe_for(table(tmp_path, 60), folder)


def test_a_larger_model_has_a_smaller_rate(folder, tmp_path):
    file = table(tmp_path, 60)
    small, large = (recipe_for(file, each)[0].optim.peak_lr for each in (folder, default_model()))
    assert small <= 3e-4
    assert large == 3e-4  # its folder says so


def test_what_the_user_gives_wins(folder, tmp_path):
    recipe, reason = recipe_for(
        table(tmp_path, 60), folder, "optim.peak_lr=1e-5", "head.weights=fresh", "run.epochs=2"
    )
    assert (recipe.optim.peak_lr, recipe.head.weights, recipe.run.epochs) == (1e-5, "fresh", 2)
    assert reason.startswith("rate 1e-05 (given), 2 passes of 54 examples (8 steps)")


def test_a_batch_that_is_given_is_counted_with(folder, tmp_path):
    recipe, _ = recipe_for(table(tmp_path, 400), folder, "run.examples=64")
    assert (recipe.run.examples, recipe.run.epochs) == (64, 20)


def test_documents_keep_the_length_that_was_asked_for(folder, tmp_path):
    data = tmp_path / "tags"
    data.mkdir()
    (data / "train.txt").write_text("the\tO\nsun\tB-X\n\n" * 40)
    recipe, _ = recipe_for(data, folder, "text.context=document", task=task_named("tags"))
    assert recipe.text.longest == 128


def test_a_trained_head_that_fits_keeps_what_it_reads(folder, tmp_path):
    from bertsmith.finetuning.finetune import finetune as run

    file, quick = table(tmp_path, 60), [each for each in QUICK if "lr" not in each]
    recipe, _ = recipe_for(file, folder, *quick, "head.pooling=first", "head.cls=pooled")
    run(Assignment(TASK, recipe, folder, file, tmp_path / "run"), Notebook())
    (tmp_path / "run" / "model" / "task.json").unlink()  # as a folder of another tool
    again, _ = recipe_for(file, tmp_path / "run" / "model")
    assert (again.head.pooling, again.head.cls) == ("model", "pooled")


def test_long_texts_get_the_room_that_the_model_has(tmp_path):
    file = table(tmp_path, 60, text="sun " * 180)
    assert recipe_for(file, default_model())[0].text.longest == 192
    assert recipe_for(table(tmp_path, 40), default_model())[0].text.longest == 128


def test_a_paper_s_task_keeps_its_published_settings(folder, tmp_path):
    task = task_named("sst2")
    recipe, reason = recipe_for(tmp_path, folder, task=task)
    assert (recipe, reason) == (finetuning_recipe(task), "")


def test_a_run_tells_what_was_chosen_and_what_simpler_models_get(folder, tmp_path):
    file, quick = table(tmp_path, 60), [each for each in QUICK if "lr" not in each]
    recipe, reason = recipe_for(file, folder, *quick)
    notebook = Notebook()
    result = finetune(Assignment(TASK, recipe, folder, file, tmp_path / "run", reason=reason), notebook)
    assert reason in notebook.notes
    assert set(result.references) == {"linear probe", "TF-IDF + logistic regression"}
    card = (tmp_path / "run" / "card.md").read_text()
    assert "| constant answer | linear probe | TF-IDF + logistic regression |" in card


def test_a_model_that_goes_on_keeps_its_way_to_read_a_text(folder, tmp_path):
    file, quick = table(tmp_path, 60), [each for each in QUICK if "lr" not in each]
    recipe, reason = recipe_for(file, folder, *quick, "head.pooling=first")
    finetune(Assignment(TASK, recipe, folder, file, tmp_path / "run", reason=reason), Notebook())
    again, _ = recipe_for(file, tmp_path / "run" / "model")
    assert (again.head.pooling, again.head.cls) == ("first", "raw")


def test_a_search_of_one_s_own_data_begins_with_the_settings_that_suit_it(folder, tmp_path):
    file = table(tmp_path, 60)
    recipe, reason = recipe_for(file, folder)
    trials = over_search(Assignment(TASK, recipe, folder, file, tmp_path / "runs", reason=reason), 20)
    rates = [each.assignment.recipe.optim.peak_lr for each in trials]
    suited = recipe.optim.peak_lr
    assert suited / 3.01 < min(rates) < suited < max(rates) < suited * 3.01
    assert {each.assignment.recipe.run.epochs for each in trials} == {10.0, 20.0, 40.0}


def test_tagged_spans_of_one_s_own_are_decided_and_evaluated_by_their_f1(folder, tmp_path):
    tags = task_named("tags")
    assert tags.metrics_for(("B-PER", "I-PER", "O")) == ("span_f1", "accuracy")
    assert tags.metrics_for(("NOUN", "O", "VERB")) == ("accuracy", "macro_f1")
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.txt", "dev.txt"):
        (data / name).write_text("the\tO\nsun\tB-X\n\n" * 20)
    recipe = finetuning_recipe(tags, [*QUICK, "head.encoder=frozen-linear"])
    finetune(Assignment(tags, recipe, folder, data, tmp_path / "run"), Notebook())
    found = predict_labelled([tmp_path / "run"], data / "dev.txt").metrics()
    assert next(iter(found)) == "span_f1"
