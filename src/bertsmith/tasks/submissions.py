"""Predictions as the GLUE site takes them: a TSV for each task, put into one zip by the user."""

from collections.abc import Mapping
from pathlib import Path

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import write_text
from bertsmith.tasks.task import Task

_FILES = {
    ("cola", "test"): "CoLA.tsv",
    ("sst2", "test"): "SST-2.tsv",
    ("mrpc", "test"): "MRPC.tsv",
    ("stsb", "test"): "STS-B.tsv",
    ("qqp", "test"): "QQP.tsv",
    ("mnli", "test"): "MNLI-m.tsv",
    ("mnli", "test-mismatched"): "MNLI-mm.tsv",
    ("qnli", "test"): "QNLI.tsv",
    ("rte", "test"): "RTE.tsv",
    ("wnli", "test"): "WNLI.tsv",
    ("diagnostic", "test"): "AX.tsv",
}
_IN_WORDS = ("mnli", "qnli", "rte", "diagnostic")  # the others give a class's number
_HIGHEST_SIMILARITY = 5.0  # STS-B goes from 0 to 5


def write_submission(folder: Path, task: Task, *, split: str, predictions: Mapping[str, str | float]) -> Path:
    """Write the file of one task from the label or number of each example; its path."""
    file = folder / submission_file(task, split)
    lines = [f"{key}\t{_spelled(task, prediction)}" for key, prediction in predictions.items()]
    write_text(file, "\n".join(["index\tprediction", *lines]) + "\n")
    return file


def submission_file(task: Task, split: str) -> str:
    """The name of the file that the site expects."""
    name = _FILES.get((task.name, split))
    if name is None:
        known = ", ".join(f"{known_task} ({known_split})" for known_task, known_split in _FILES)
        what = f"the GLUE site takes no predictions for {task.title} ({split})"
        raise UserError(what, remedy=f"it takes {known}")
    return name


def _spelled(task: Task, prediction: str | float) -> str:
    if not isinstance(prediction, str):
        return f"{min(max(prediction, 0.0), _HIGHEST_SIMILARITY):.3f}"
    return prediction if task.name in _IN_WORDS else str(task.labels.index(prediction))
