"""What is called a "GLUE average": several means, each as one publication took it.

Results are fractions by task and measure; the mismatched set of MNLI stands as a task of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

MISMATCHED = "mnli-mismatched"

Results = Mapping[str, Mapping[str, float]]
Column = tuple[tuple[str, str], ...]
"""Pairs of task and measure whose mean is one column of a table."""


@dataclass(frozen=True, slots=True)
class Average:
    """One meaning of the average."""

    name: str
    value: float | None
    """A fraction; None where something is missing."""
    note: str
    """What is averaged, and on which split it was published."""
    missing: tuple[str, ...]
    """The tasks (and measures) that it lacks."""


@dataclass(frozen=True, slots=True)
class _Meaning:
    name: str
    note: str
    columns: tuple[Column, ...]


def _columns(*tasks: str, measure: str = "accuracy") -> tuple[Column, ...]:
    return tuple(((task, measure),) for task in tasks)


COLA: Column = (("cola", "matthews"),)
STSB: Column = (("stsb", "spearman"),)
PLAIN = _columns("qnli", "sst2", "rte")

# Devlin et al. 2018, table 1 and section 4.1: F1 for QQP and MRPC, Spearman for STS-B, accuracy otherwise.
NINE_COLUMNS = (*_columns("mnli", MISMATCHED), *PLAIN, *_columns("qqp", "mrpc", measure="f1"), COLA, STSB)
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
    _Meaning(  # glue.py of mosaicml/examples: first the mean of each task's measures, then of the tasks
        "MosaicBERT",
        "8 tasks: MNLI over both sets, QQP and MRPC over accuracy and F1, STS-B by Spearman, no WNLI; on dev",
        (BOTH_MNLI, BOTH_QQP, BOTH_MRPC, STSB, COLA, *PLAIN),
    ),
    # Sanh et al. 2019, table 1, names no measures; GLUE's rule, the mean of a task's two, fits its BERT row.
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
    """Every published meaning of the average, each with its value or with what it lacks."""
    return [_average(meaning, results) for meaning in MEANINGS]


def _average(meaning: _Meaning, results: Results) -> Average:
    missing = _missing(meaning.columns, results)
    value = None if missing else fmean(_mean_of(column, results) for column in meaning.columns)
    return Average(meaning.name, value, meaning.note, missing)


def _mean_of(column: Column, results: Results) -> float:
    return fmean(results[task][measure] for task, measure in column)


def _missing(columns: tuple[Column, ...], results: Results) -> tuple[str, ...]:
    lacking = {
        f"{task} ({measure})" if task in results else task: None  # a dict keeps the order of the columns
        for column in columns
        for task, measure in column
        if measure not in results.get(task, {})
    }
    return tuple(lacking)
