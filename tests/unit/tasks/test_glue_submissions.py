"""Files for the GLUE site."""

import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.glue_leaderboard import write_submission


@pytest.mark.parametrize(
    ("task", "split", "predictions", "name", "lines"),
    [
        ("cola", "test", {"0": "acceptable", "1": "unacceptable"}, "CoLA.tsv", ["0\t1", "1\t0"]),
        ("sst2", "test", {"0": "negative"}, "SST-2.tsv", ["0\t0"]),
        ("wnli", "test", {"0": "entailment"}, "WNLI.tsv", ["0\t1"]),
        ("rte", "test", {"0": "not_entailment"}, "RTE.tsv", ["0\tnot_entailment"]),
        ("mnli", "test", {"7": "neutral"}, "MNLI-m.tsv", ["7\tneutral"]),
        ("mnli", "test-mismatched", {"7": "neutral"}, "MNLI-mm.tsv", ["7\tneutral"]),
        ("diagnostic", "test", {"0": "contradiction"}, "AX.tsv", ["0\tcontradiction"]),
        ("stsb", "test", {"0": 5.31, "1": -0.2, "2": 2.0}, "STS-B.tsv", ["0\t5.000", "1\t0.000", "2\t2.000"]),
    ],
)
def test_each_task_has_the_name_and_the_spelling_of_the_site(
    tmp_path, task, split, predictions, name, lines
) -> None:
    path = write_submission(tmp_path, task_named(task), split=split, predictions=predictions)
    assert path == tmp_path / name
    assert path.read_text().splitlines() == ["index\tprediction", *lines]


@pytest.mark.parametrize(("task", "split"), [("snli", "test"), ("sst2", "dev"), ("mnli", "dev")])
def test_what_the_site_does_not_evaluate_is_rejected(tmp_path, task, split) -> None:
    with pytest.raises(UserError, match="the GLUE site does not accept predictions"):
        write_submission(tmp_path, task_named(task), split=split, predictions={})
    assert not list(tmp_path.iterdir())
