"""The averages as they are printed in the papers, from the rows that are printed beside them."""

import pytest

from bertsmith.tasks.glue_leaderboard import MISMATCHED, Average, glue_averages

ACCURACIES = ("mnli", MISMATCHED, "qnli", "sst2", "rte", "wnli", "race")


def results_of(**scores: float) -> dict[str, dict[str, float]]:
    """Percentages by task; a task with two metrics gets the same value for both."""
    metrics = {"cola": ("matthews",), "stsb": ("pearson", "spearman"), "squad": ("exact", "f1")}
    names = {task.replace("_", "-"): value / 100 for task, value in scores.items()}
    return {
        task: dict.fromkeys(
            metrics.get(task, ("accuracy",) if task in ACCURACIES else ("accuracy", "f1")), value
        )
        for task, value in names.items()
    }


def average(name: str, results: dict[str, dict[str, float]]) -> Average:
    [found] = [each for each in glue_averages(results) if each.name.startswith(name)]
    return found


BERT_BASE = results_of(
    mnli=84.6, mnli_mismatched=83.4, qqp=71.2, qnli=90.5, sst2=93.5, cola=52.1, stsb=85.8, mrpc=88.9, rte=66.4
)
DISTILBERT = results_of(
    cola=51.3, mnli=82.2, mrpc=87.5, qnli=89.2, qqp=88.5, rte=59.9, sst2=91.3, stsb=86.9, wnli=56.3
)


def test_bert_base_has_the_average_of_its_table_1():
    assert round(100 * average("BERT", BERT_BASE).value, 1) == 79.6


def test_cramming_takes_the_same_columns():
    assert average("Cramming", BERT_BASE).value == average("BERT", BERT_BASE).value


def test_distilbert_has_the_average_of_its_table_1():
    assert round(100 * average("DistilBERT", DISTILBERT).value, 1) == 77.0


@pytest.mark.parametrize(
    ("squad", "squad2", "others", "printed"),
    [
        ((89.3, 82.3), (80.0, 77.1), (81.6, 90.3, 64.0), 80.1),  # ALBERT base
        ((94.1, 88.3), (88.1, 85.1), (88.0, 95.2, 82.3), 88.7),  # ALBERT xxlarge
        ((90.4, 83.2), (80.4, 77.6), (84.5, 92.8, 68.2), 82.3),  # BERT base
    ],
)
def test_albert_averages_f1_and_exact_match_first(squad, squad2, others, printed):
    results = results_of(mnli=others[0], sst2=others[1], race=others[2])
    for task, (f1, exact) in {"squad": squad, "squad2": squad2}.items():
        results[task] = {"f1": f1 / 100, "exact": exact / 100}
    assert 100 * average("ALBERT", results).value == pytest.approx(printed, abs=0.06)  # the rows are rounded


def test_mosaic_takes_mnli_once_and_the_mean_of_two_metrics():
    results = results_of(mnli=80, mnli_mismatched=90, qnli=50, sst2=50, rte=50, cola=50)
    results |= {"stsb": {"pearson": 0.9, "spearman": 0.5}}
    results |= {task: {"accuracy": 0.8, "f1": 0.6} for task in ("qqp", "mrpc")}
    assert average("Mosaic", results).value == pytest.approx((0.85 + 2 * 0.7 + 5 * 0.5) / 8)


def test_four_meanings_and_alberts_are_given_each_with_a_note():
    averages = glue_averages({})
    assert [each.name.split()[0].strip(",") for each in averages] == [
        *("BERT", "Cramming", "MosaicBERT", "DistilBERT", "ALBERT")
    ]
    assert all(each.note and each.missing and each.value is None for each in averages)


def test_a_lacking_task_is_named_in_place_of_a_value():
    assert average("DistilBERT", {**DISTILBERT, "mnli": {}}).missing == ("mnli (accuracy)",)
    without = {task: scores for task, scores in BERT_BASE.items() if task not in ("rte", MISMATCHED)}
    assert average("BERT", without).missing == (MISMATCHED, "rte")
    assert average("BERT", without).value is None


def test_a_task_without_its_metric_is_named_with_it():
    lacking = average("DistilBERT", {**DISTILBERT, "qqp": {"accuracy": 0.9}})
    assert (lacking.value, lacking.missing) == (None, ("qqp (f1)",))
