"""Averages over GLUE: several definitions, each from one publication.

Results are fractions by task and metric; MNLI's mismatched set is a separate task.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bertsmith.core.errors import UserError
from bertsmith.core.files import write_text
from bertsmith.tasks.task import Task

MISMATCHED = "mnli-mismatched"

Results = Mapping[str, Mapping[str, float]]
Column = tuple[tuple[str, str], ...]
"""Pairs of task and metric that are averaged to one column of a table."""


@dataclass(frozen=True, slots=True)
class Average:
    """One definition of the average, with its value."""

    name: str
    value: float | None
    """Average as a fraction; None if a result is missing."""
    note: str
    """The averaged columns, and the split that the average was published for."""
    missing: tuple[str, ...]
    """The missing tasks (and metrics)."""


@dataclass(frozen=True, slots=True)
class _Meaning:
    name: str
    note: str
    columns: tuple[Column, ...]


def _columns(*tasks: str, metric: str = "accuracy") -> tuple[Column, ...]:
    return tuple(((task, metric),) for task in tasks)


COLA: Column = (("cola", "matthews"),)
STSB: Column = (("stsb", "spearman"),)
PLAIN = _columns("qnli", "sst2", "rte")

# Devlin et al. 2018, table 1 and section 4.1: F1 for QQP and MRPC, Spearman for STS-B, accuracy otherwise.
NINE_COLUMNS = (*_columns("mnli", MISMATCHED), *PLAIN, *_columns("qqp", "mrpc", metric="f1"), COLA, STSB)
BOTH_MNLI: Column = (("mnli", "accuracy"), (MISMATCHED, "accuracy"))
BOTH_QQP: Column = (("qqp", "accuracy"), ("qqp", "f1"))
BOTH_MRPC: Column = (("mrpc", "accuracy"), ("mrpc", "f1"))
BOTH_STSB: Column = (("stsb", "pearson"), ("stsb", "spearman"))

MEANINGS = (
    _Meaning(
        "BERT, table 1",
        "9 columns: MNLI-m, MNLI-mm, QQP and MRPC by F1, QNLI, SST-2, CoLA, STS-B by Spearman, RTE; on test",
        NINE_COLUMNS,
    ),
    _Meaning(  # Geiping & Goldstein 2022 and the card of crammed-bert
        "Cramming", "the 9 columns of BERT's table 1; on dev", NINE_COLUMNS
    ),
    _Meaning(  # glue.py of mosaicml/examples: first the mean of each task's metrics, then of the tasks
        "MosaicBERT",
        "8 tasks: MNLI over both sets, QQP and MRPC over accuracy and F1, STS-B by Spearman, no WNLI; on dev",
        (BOTH_MNLI, BOTH_QQP, BOTH_MRPC, STSB, COLA, *PLAIN),
    ),
    # Sanh et al. 2019, table 1, names no metrics; GLUE's rule, the mean of a task's two, fits its BERT row.
    _Meaning(
        "DistilBERT",
        "9 tasks with WNLI: MNLI-m, QQP and MRPC over accuracy and F1, STS-B over both correlations; on dev",
        (*_columns("mnli", "wnli"), *PLAIN, BOTH_QQP, BOTH_MRPC, BOTH_STSB, COLA),
    ),
    _Meaning(  # Lan et al. 2019, table 2: F1 and EM of each SQuAD are averaged first
        "ALBERT, five tasks",
        "SQuAD 1.1 and 2.0 over F1 and exact match, MNLI-m, SST-2, RACE; on dev (RACE: test)",
        (
            *((("squad", "f1"), ("squad", "exact")), (("squad2", "f1"), ("squad2", "exact"))),
            *_columns("mnli", "sst2", "race"),
        ),
    ),
)


def glue_averages(results: Results) -> list[Average]:
    """Return the average by every published definition, with its value or the missing results."""
    averages = []
    for meaning in MEANINGS:
        missing = {
            f"{task} ({metric})" if task in results else task: None  # a dict keeps the order of the columns
            for column in meaning.columns
            for task, metric in column
            if metric not in results.get(task, {})
        }
        value = None
        if not missing:
            value = fmean(fmean(results[task][metric] for task, metric in each) for each in meaning.columns)
        averages.append(Average(meaning.name, value, meaning.note, tuple(missing)))
    return averages


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
_IN_WORDS = ("mnli", "qnli", "rte", "diagnostic")  # the others use class numbers
_HIGHEST_SIMILARITY = 5.0  # STS-B's scale is 0 to 5


def write_submission(folder: Path, task: Task, *, split: str, predictions: Mapping[str, str | float]) -> Path:
    """Write the submission file of one task from each example's label or number, and return its path."""
    file = folder / submission_file(task, split)
    lines = [f"{key}\t{_spelled(task, prediction)}" for key, prediction in predictions.items()]
    write_text(file, "\n".join(["index\tprediction", *lines]) + "\n")
    return file


def submission_file(task: Task, split: str) -> str:
    """Return the file name that the GLUE site expects."""
    name = _FILES.get((task.name, split))
    if name is None:
        known = ", ".join(f"{known_task} ({known_split})" for known_task, known_split in _FILES)
        what = f"the GLUE site does not accept predictions for {task.title} ({split})"
        raise UserError(what, remedy=f"it takes {known}")
    return name


def _spelled(task: Task, prediction: str | float) -> str:
    if not isinstance(prediction, str):
        return f"{min(max(prediction, 0.0), _HIGHEST_SIMILARITY):.3f}"
    return prediction if task.name in _IN_WORDS else str(task.labels.index(prediction))
