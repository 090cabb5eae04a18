"""GLUE and the related SNLI and SICK, in their original files and as Parquet from the hub.

Labels have the hub's names and order, so that a number in one layout means the word of the other.
"""

from collections.abc import Mapping
from dataclasses import replace

from bertsmith.tasks.example_types import Reader
from bertsmith.tasks.kinds.classify import CLASSIFY
from bertsmith.tasks.kinds.regress import REGRESS
from bertsmith.tasks.label_rules import number, one_of
from bertsmith.tasks.tables import (
    LabelColumn,
    TextColumns,
    all_but_every_tenth,
    every_tenth,
    text_reader,
)
from bertsmith.tasks.task import Split, Task

NLI_LABELS = ("entailment", "neutral", "contradiction")
_ENTAILS_OR_NOT = ("entailment", "not_entailment")
Texts = tuple[str] | tuple[str, str]
_HUB_UNLABELLED = ("", "-1", "-1.0")  # the hub's labels in test sets
# README of run_glue.py (transformers): 2e-5 and 3 epochs of 32; 5 epochs for MRPC and WNLI, which are tiny.
_PUBLISHED: Mapping[str, object] = {"optim.peak_lr": 2e-5}
_PUBLISHED_TINY: Mapping[str, object] = {"optim.peak_lr": 2e-5, "run.epochs": 5.0}


def _test_reader(columns: TextColumns) -> Reader:
    """Return a reader of a test set, with labels optional."""
    label = replace(columns.label, wanted="if given", unlabelled=_HUB_UNLABELLED)
    return text_reader(replace(columns, label=label))


def _splits(original: TextColumns, hub: TextColumns) -> dict[str, Split]:
    return {
        "train": Split({"train.tsv": text_reader(original), "train*.parquet": text_reader(hub)}),
        "dev": Split({"dev.tsv": text_reader(original), "validation*.parquet": text_reader(hub)}),
        "test": Split({"test.tsv": _test_reader(original), "test*.parquet": _test_reader(hub)}),
    }


def _hub(texts: Texts, original: TextColumns) -> TextColumns:
    return TextColumns(texts, replace(original.label, name="label"), key="idx")


def _plain(
    title: str,
    texts: Texts,
    labels: tuple[str, ...] = (),
    *,
    label: str = "label",
    metrics: tuple[str, ...] = ("accuracy",),
    headless: tuple[str, ...] = (),
    settings: Mapping[str, object] = _PUBLISHED,
) -> Task:
    """Return a GLUE task with files that have the columns of the hub; without labels it predicts a number."""
    kind, rule = (CLASSIFY, one_of(labels)) if labels else (REGRESS, number)
    tsv = TextColumns(texts, LabelColumn(label, rule), key="index", headless=headless)
    name = title.lower().replace("-", "")
    return Task(name, title, kind, metrics, _splits(tsv, _hub(texts, tsv)), labels, (title, name), settings)


def _mrpc() -> Task:
    labels = ("not_equivalent", "equivalent")
    texts = ("#1 String", "#2 String")
    tsv = TextColumns(texts, LabelColumn("Quality", one_of(labels)), key="index")
    splits = _splits(tsv, _hub(("sentence1", "sentence2"), tsv))
    # Microsoft's own files lack a development set: use every tenth line of the training set.
    whole, test = "msr_paraphrase_train.txt", "msr_paraphrase_test.txt"
    splits["train"] = Split({**splits["train"].files, whole: all_but_every_tenth(text_reader(tsv))})
    splits["dev"] = Split({**splits["dev"].files, whole: every_tenth(text_reader(tsv))})
    splits["test"] = Split({**splits["test"].files, test: _test_reader(tsv)})
    folders, metrics = ("MRPC", "mrpc"), ("f1", "accuracy")
    return Task("mrpc", "MRPC", CLASSIFY, metrics, splits, labels, folders, _PUBLISHED_TINY)


def _qqp() -> Task:
    labels = ("not_duplicate", "duplicate")
    texts = ("question1", "question2")
    headless = ("id", "qid1", "qid2", *texts, "is_duplicate")
    tsv = TextColumns(texts, LabelColumn("is_duplicate", one_of(labels)), key="id", headless=headless)
    splits = _splits(tsv, _hub(texts, tsv))
    # A sample without a development set: use every tenth line.
    sample = "train_part.tsv"
    splits["train"] = Split({**splits["train"].files, sample: all_but_every_tenth(text_reader(tsv))})
    splits["dev"] = Split({**splits["dev"].files, sample: every_tenth(text_reader(tsv))})
    folders, metrics = ("QQP", "qqp"), ("f1", "accuracy")
    return Task("qqp", "QQP", CLASSIFY, metrics, splits, labels, folders, _PUBLISHED)


def _mnli() -> Task:
    label = LabelColumn("gold_label", one_of(NLI_LABELS), undecided=("-",))
    # By name: the original has up to 16 columns, other copies 4.
    tsv = TextColumns(("sentence1", "sentence2"), label, key="index")
    hub = _hub(("premise", "hypothesis"), tsv)
    splits = {"train": Split({"train.tsv": text_reader(tsv), "train*.parquet": text_reader(hub)})}
    for suffix, which in (("", "matched"), ("-mismatched", "mismatched")):
        dev = {f"dev_{which}.tsv": text_reader(tsv), f"validation_{which}*.parquet": text_reader(hub)}
        test = {f"test_{which}.tsv": _test_reader(tsv), f"test_{which}*.parquet": _test_reader(hub)}
        splits |= {f"dev{suffix}": Split(dev), f"test{suffix}": Split(test)}
    folders, metrics = ("MNLI", "mnli"), ("accuracy",)
    return Task("mnli", "MNLI", CLASSIFY, metrics, splits, NLI_LABELS, folders, _PUBLISHED)


def _diagnostic() -> Task:
    """GLUE's hand-made pairs, for a model trained on MNLI; only the full file has the labels."""
    label = LabelColumn("label", one_of(NLI_LABELS))
    tsv = TextColumns(("sentence1", "sentence2"), label, key="index")
    full = TextColumns(("Premise", "Hypothesis"), replace(label, name="Label"))
    test = {
        "diagnostic.tsv": _test_reader(tsv),
        "test*.parquet": _test_reader(_hub(("premise", "hypothesis"), tsv)),
    }
    splits = {"dev": Split({"diagnostic-full.tsv": text_reader(full)}), "test": Split(test)}
    folders, metrics = ("diagnostic", "AX", "ax"), ("matthews", "accuracy")
    return Task("diagnostic", "Diagnostic", CLASSIFY, metrics, splits, NLI_LABELS, folders)


def _snli() -> Task:
    label = LabelColumn("label", one_of(NLI_LABELS), undecided=("-", "-1"))
    plain = TextColumns(("premise", "hypothesis"), label)
    stanford = TextColumns(("sentence1", "sentence2"), replace(label, name="gold_label"))
    names = {"train": ("train",), "dev": ("dev", "validation"), "test": ("test",)}
    splits = {}
    for split, stems in names.items():
        files = {
            f"{stem}.tsv": _test_reader(plain) if split == "test" else text_reader(plain) for stem in stems
        }
        files |= {f"snli_1.0_{split}.{kind}": text_reader(stanford) for kind in ("txt", "jsonl")}
        files |= {f"{stems[-1]}*.parquet": text_reader(plain)}
        splits[split] = Split(files)
    folders, metrics = ("SNLI", "snli", "snli_1.0", "plain_text", "nli"), ("accuracy",)
    return Task("snli", "SNLI", CLASSIFY, metrics, splits, NLI_LABELS, folders)


def _sick(judged: LabelColumn, together: LabelColumn, hub: LabelColumn) -> dict[str, Split]:
    """Return the splits of SemEval's files, of the later release's single file, and of the hub's files."""
    texts = ("sentence_A", "sentence_B")
    names = {"train": ("train", "TRAIN"), "dev": ("trial", "TRIAL"), "test": ("test_annotated", "TEST")}
    splits = {}
    for split, (stem, part) in names.items():
        pattern = f"{'validation' if split == 'dev' else split}*.parquet"
        files = {
            f"SICK_{stem}.txt": text_reader(TextColumns(texts, judged, key="pair_ID")),
            "SICK.txt": text_reader(TextColumns(texts, together, key="pair_ID", part=("SemEval_set", part))),
            pattern: text_reader(TextColumns(texts, hub)),
        }
        splits[split] = Split(files)
    return splits


_PAIR = ("sentence1", "sentence2")
_SICK_LABELS = tuple(
    LabelColumn(name, one_of(NLI_LABELS)) for name in ("entailment_judgment", "entailment_label", "label")
)
_SICK_NUMBERS = (LabelColumn("relatedness_score", number),) * 3
_SICK_FOLDERS = ("SICK", "sick")

TASKS: tuple[Task, ...] = (
    _plain(
        "CoLA",
        ("sentence",),
        ("unacceptable", "acceptable"),
        metrics=("matthews",),
        headless=("source", "label", "mark", "sentence"),
    ),
    _plain("SST-2", ("sentence",), ("negative", "positive")),
    _mrpc(),
    _plain("STS-B", _PAIR, label="score", metrics=("spearman", "pearson")),
    _qqp(),
    _mnli(),
    _plain("QNLI", ("question", "sentence"), _ENTAILS_OR_NOT),
    _plain("RTE", _PAIR, _ENTAILS_OR_NOT),
    _plain("WNLI", _PAIR, _ENTAILS_OR_NOT[::-1], settings=_PUBLISHED_TINY),  # indeed in the opposite order
    _diagnostic(),
    _snli(),
    Task("sick-e", "SICK-E", CLASSIFY, ("accuracy",), _sick(*_SICK_LABELS), NLI_LABELS, _SICK_FOLDERS),
    Task("sick-r", "SICK-R", REGRESS, ("pearson", "spearman"), _sick(*_SICK_NUMBERS), folders=_SICK_FOLDERS),
)
