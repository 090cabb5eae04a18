"""Which weights are kept: those that did best, whether more or less of the deciding metric is better."""

from dataclasses import replace

import pytest

from bertsmith.finetuning.finetune import finetune
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.kinds.registry import KINDS, metric_named
from bertsmith.tasks.task_recipe import finetuning_recipe
from tests.tiny_runs import metrics_of
from tests.tuning import QUICK, Notebook, toy_assignment

WILD = ("optim.peak_lr=2e-2", "optim.schedule=constant", "run.keep=best", "run.evaluations=6", "run.epochs=1")


@pytest.mark.parametrize("metric", ["mean_absolute_error", "spearman"])
def test_the_checkpoint_that_did_best_is_kept_in_either_direction(metric, model, tmp_path):
    plain = toy_assignment("stsb", model, tmp_path)
    table = tmp_path / "own.tsv"
    rows = (plain.data / "train.tsv").read_text().splitlines()[1:]
    cells = [row.split("\t") for row in rows]
    table.write_text("text\tscore\n" + "".join(f"{cell[8]}\t{cell[9]}\n" for cell in cells))
    task = replace(custom_task(CustomSpec("text", "score", kind="regress")), metrics=(metric,))
    recipe = finetuning_recipe(task, [*QUICK, *WILD])
    result = finetune(replace(plain, task=task, recipe=recipe, data=table), Notebook())
    values = [line[metric] for line in metrics_of(result.folder, "held-out")]
    best = min(values) if metric == "mean_absolute_error" else max(values)
    assert best != values[-1], "the last weights must not be the best, or nothing is seen"
    assert result.metrics["dev"][metric] == pytest.approx(best, rel=1e-4)


def test_errors_of_numbers_are_better_where_they_are_smaller_and_nothing_else_is():
    metrics = [metric for kind in KINDS.values() for metric in kind.metrics]
    smaller = {metric.name for metric in metrics if not metric.larger_is_better}
    assert smaller == {"mean_absolute_error", "root_mean_squared_error"}


def test_a_value_is_better_only_if_it_is_really_better():
    error, accuracy = metric_named("mean_absolute_error"), metric_named("accuracy")
    assert error.is_better(1.0, than=2.0) and accuracy.is_better(2.0, than=1.0)
    assert not error.is_better(1.0, than=1.0) and not accuracy.is_better(1.0, than=1.0)
