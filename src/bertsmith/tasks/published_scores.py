"""Published results for a task, for comparison with one's own.

All are in percent, as printed. GLUE's published rows are for the test sets, which the site scores.
Development sets give similar but different scores (QQP by F1: 71 on test, 87 on dev).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedScore:
    """One result from a paper."""

    system: str
    metric: str
    value: float
    """Result in percent."""
    split: str
    source: str


BERT = "Devlin et al. 2018"
_GLUE_TABLE = f"{BERT}, table 1"
_GLUE_METRICS = {"qqp": "f1", "mrpc": "f1", "cola": "matthews", "stsb": "spearman"}
_HUMANS = "Nangia & Bowman 2019, table 1"
_HUMAN_ROW = {
    "mnli": 92.0,
    "mnli-mismatched": 92.8,
    "qqp": 59.5,
    "qnli": 91.2,
    "sst2": 97.8,
    "cola": 66.4,
    "stsb": 92.6,
    "mrpc": 86.3,
    "rte": 93.6,
    "wnli": 95.9,
}
_GLUE_COLUMNS = ("mnli", "mnli-mismatched", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")
_GLUE_ROWS = {
    "BERT Large": (86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1),
    "BERT Base": (84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4),
    "OpenAI GPT": (82.1, 81.4, 70.3, 87.4, 91.3, 45.4, 80.0, 82.3, 56.0),
    "BiLSTM+ELMo+Attn": (76.4, 76.1, 64.8, 79.8, 90.4, 36.0, 73.3, 84.9, 56.8),
}


def _glue() -> dict[str, tuple[PublishedScore, ...]]:
    found = {}
    for task, human in _HUMAN_ROW.items():
        metric = _GLUE_METRICS.get(task, "accuracy")
        scores = [PublishedScore("human", metric, human, "test", _HUMANS)]
        if task in _GLUE_COLUMNS:  # BERT's table omits WNLI
            column = _GLUE_COLUMNS.index(task)
            rows = _GLUE_ROWS.items()
            scores += [PublishedScore(name, metric, row[column], "test", _GLUE_TABLE) for name, row in rows]
        found[task] = tuple(scores)
    return found


def _squad(system: str, exact: float, f1: float, split: str, source: str) -> tuple[PublishedScore, ...]:
    metrics = (("f1", f1), ("exact", exact))
    return tuple(PublishedScore(system, metric, value, split, source) for metric, value in metrics)


_BABYLM = "BabyLM evaluation"
_BLIMP = (
    ("human", 88.6, "forced choice; Warstadt et al. 2020"),
    ("RoBERTa-large", 86.5, "pseudo-log-likelihood; awslabs/mlm-scoring"),
    ("BERT-Base", 84.2, "pseudo-log-likelihood; Salazar et al. 2020, cited at second hand"),
    ("GPT-2 345M", 82.6, "log-likelihood; awslabs/mlm-scoring"),
    ("GPT-BERT 119M, 100 M words", 86.1, "BabyLM winner 2024; arXiv 2410.24159, cited at second hand"),
    ("GPT-BERT causal, 100 M words, 10 passes", 79.3, f"causal scoring; {_BABYLM} 2025"),
    ("GPT-BERT mixed, 100 M words, 10 passes", 78.4, f"causal scoring; {_BABYLM} 2025"),
    ("GPT-BERT masked, 100 M words, 10 passes", 74.6, f"causal scoring; {_BABYLM} 2025"),
    ("OPT-125M, 100 M words", 75.3, f"mean of 12 groups; {_BABYLM} 2023"),
    ("RoBERTa-base, 100 M words", 75.1, f"mean of 12 groups; {_BABYLM} 2023"),
    ("GPT-2 small, 100 M words, 10 passes", 75.1, f"{_BABYLM} 2025"),
    ("BabyLlama, 100 M words", 73.1, f"{_BABYLM} 2024"),
    ("LTG-BERT, 100 M words, about 20 passes", 69.2, f"{_BABYLM} 2024"),
)
_BLIMP_HUMANS = {
    "anaphor_agreement": 97.5,
    "argument_structure": 90.0,
    "binding": 87.3,
    "control_raising": 83.9,
    "determiner_noun_agreement": 92.2,
    "ellipsis": 85.0,
    "filler_gap_dependency": 86.9,
    "irregular_forms": 97.0,
    "island_effects": 84.9,
    "npi_licensing": 88.1,
    "quantifiers": 86.6,
    "subject_verb_agreement": 90.9,
}
"""Means over sets of the summary in alexwarstadt/blimp, raw_results/summary/human_validation_summary.csv."""

PUBLISHED_SCORES: Mapping[str, tuple[PublishedScore, ...]] = {
    **_glue(),
    "squad": (
        *_squad("human", 82.3, 91.2, "test", f"{BERT}, table 2"),
        *_squad("BERT Large", 84.1, 90.9, "dev", f"{BERT}, table 2"),
        *_squad("BERT Base", 80.8, 88.5, "dev", f"{BERT}, table 2"),
        PublishedScore("BiDAF+ELMo", "f1", 85.6, "dev", f"{BERT}, table 2"),
    ),
    "squad2": (
        *_squad("human", 86.9, 89.5, "test", f"{BERT}, table 3"),
        *_squad("BERT Large", 78.7, 81.9, "dev", f"{BERT}, table 3"),
    ),
    "swag": tuple(
        PublishedScore(system, "accuracy", value, split, f"{BERT}, table 4")
        for system, value, split in (
            ("human expert", 85.0, "test"),
            ("BERT Large", 86.6, "dev"),
            ("BERT Base", 81.6, "dev"),
            ("OpenAI GPT", 78.0, "test"),
            ("ESIM+ELMo", 59.1, "dev"),
        )
    ),
    "ner": tuple(
        PublishedScore(system, "span_f1", value, split, f"{BERT}, table 7")
        for system, value, split in (
            ("BERT Large", 96.6, "dev"),
            ("BERT Base", 96.4, "dev"),
            ("BERT Large", 92.8, "test"),
            ("BERT Base", 92.4, "test"),
            ("ELMo", 92.22, "test"),
        )
    ),
    "race": tuple(
        PublishedScore(system, "accuracy", value, "dev", "Lan et al. 2019, table 2")
        for system, value in (("BERT Large", 73.9), ("BERT Base", 68.2))
    ),
    "blimp": tuple(PublishedScore(system, "accuracy", value, "all", how) for system, value, how in _BLIMP),
    **{
        f"blimp-{name}": (PublishedScore("human", "accuracy", value, "all", _BLIMP[0][2]),)
        for name, value in _BLIMP_HUMANS.items()
    },
}
"""Results by task name; MNLI's second set is mnli-mismatched, a phenomenon of BLiMP blimp-binding."""


def published_lines(task: str, split: str = "dev") -> list[str]:
    """Return the published results for a task as lines for people, one for each metric and source."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for score in published_scores(task, split):
        group = groups.setdefault((score.metric, score.split, score.source), [])
        group.append(f"{score.system} {score.value:g}")
    return [
        f"published {metric.replace('_', ' ')} on {where} ({source}): {', '.join(each)}"
        for (metric, where, source), each in groups.items()
    ]


def published_scores(task: str, split: str = "dev") -> tuple[PublishedScore, ...]:
    """Return the published results for a task and split, if any."""
    part = split.removeprefix("dev").removeprefix("test").removeprefix("-")
    return PUBLISHED_SCORES.get(f"{task}-{part}" if part else task, ())
