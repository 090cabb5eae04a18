"""Tasks of choosing a text: SWAG, RACE, and argument reasoning (ARCT) with its adversarial set."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.core.files import open_text_bytes, read_json
from bertsmith.tasks.example_types import BadLabel, BadLine, ChoiceExample
from bertsmith.tasks.kinds.choice import CHOICE
from bertsmith.tasks.tables import Columns, Row, rows_of
from bertsmith.tasks.task import Split, Task

_MEND = "mend it"
_UNLABELLED = ("", "-1")  # written instead of a withheld label; -1 on the hub
_LETTERS = "ABCD"
_MAX_BLANKS = 100  # each is filled with a whole option, so an unlimited number could exhaust the memory
_ENDINGS = ("ending0", "ending1", "ending2", "ending3")
_WARRANTS = ("warrant0", "warrant1")
_ARGUMENT = ("reason", "claim", *_WARRANTS)
_PASSAGE = ("article", "questions", "options")


def read_swag(path: Path) -> Iterator[ChoiceExample | BadLine]:
    """Read the questions of a SWAG table; an option is the second sentence's beginning with an ending."""
    for index, row in enumerate(rows_of(path, Columns(("sent1", "sent2", *_ENDINGS)))):
        if isinstance(row, BadLine):
            yield row
            continue
        endings = [f"{row.values['sent2'] or ''} {row.values[ending]}".strip() for ending in _ENDINGS]
        options = [(row.values["sent1"], ending) for ending in endings]
        yield _example(str(index), options, label=row.values.get("label"), where=row.where)


def read_arct(path: Path) -> Iterator[ChoiceExample | BadLine]:
    """Read the arguments of an ARCT table; an option is the claim with its reason, and a warrant."""
    return _arguments(rows_of(path, Columns(_ARGUMENT)))


def read_adversarial_arct(path: Path) -> Iterator[ChoiceExample | BadLine]:
    """Read the arguments of Niven & Kao's tables, which are named .csv but have quoted cells between tabs."""
    return _arguments(_quoted_tab_rows(path))


def read_race(path: Path) -> Iterator[ChoiceExample | BadLine]:
    """Read the questions of a file with a passage of RACE on each line."""
    for row in rows_of(path, Columns(_PASSAGE)):
        yield from [row] if isinstance(row, BadLine) else _questions(row)


def read_race_passage(path: Path) -> Iterator[ChoiceExample | BadLine]:
    """Read the questions of one of RACE's own files, which has a single passage."""
    return _questions(Row(read_json(path, remedy="download it again"), str(path)))


def _arguments(rows: Iterator[Row | BadLine]) -> Iterator[ChoiceExample | BadLine]:
    for index, row in enumerate(rows):
        if isinstance(row, BadLine):
            yield row
            continue
        # Joined as in Niven & Kao 2019: [CLS] claim. reason. [SEP] warrant [SEP].
        argument = f"{_ended(row.values['claim'])} {_ended(row.values['reason'])}"
        options = [(argument, row.values[warrant]) for warrant in _WARRANTS]
        key = row.values.get("#id") or str(index)
        yield _example(key, options, label=row.values.get("correctLabelW0orW1"), where=row.where)


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith(".") else f"{sentence}."


def _quoted_tab_rows(path: Path) -> Iterator[Row | BadLine]:
    with io.TextIOWrapper(open_text_bytes(path), encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter="\t", strict=True)
        try:
            lines = [(f"{path}:{reader.line_num}", cells) for cells in reader]
        except (csv.Error, UnicodeDecodeError) as error:
            where = f"{path}:{reader.line_num + 1}"
            raise UserError(f"is not UTF-8 CSV ({error})", where=where, remedy="download it again") from error
    names = lines[0][1] if lines else []
    if lacking := [name for name in _ARGUMENT if name not in names]:
        remedy = f"its columns are {', '.join(names)}"
        raise UserError(f"lacks the column {lacking[0]!r}", where=str(path), remedy=remedy)
    for where, cells in lines[1:]:
        if len(cells) == len(names):
            yield Row(dict(zip(names, cells, strict=True)), where)
        else:
            yield BadLine(f"has {len(cells)} columns instead of {len(names)}", where, _MEND)


def _questions(row: Row) -> Iterator[ChoiceExample | BadLine]:
    article, questions, options = (row.values.get(field) for field in _PASSAGE)
    answers = row.values.get("answers")
    if answers is None and isinstance(questions, list):
        answers = [None] * len(questions)  # a test set with withheld answers
    lists = [each for each in (questions, options, answers) if isinstance(each, list)]
    if not isinstance(article, str) or len(lists) < 3 or len({len(each) for each in lists}) > 1:
        what = "needs an article, and an equal number of questions, lists of options and answers"
        yield BadLine(what, row.where, _MEND)
        return
    passage = row.values.get("id", row.where)
    for number, (question, choices, answer) in enumerate(zip(*lists, strict=True), start=1):
        listed = choices if isinstance(choices, list) else []
        pairs = [(article, _filled(question, choice)) for choice in listed]
        where = f"{row.where} question {number}"
        yield _example(f"{passage}-{number}", pairs, label=answer, where=where)


def _filled(question: Any, option: Any) -> str | None:
    if not (isinstance(question, str) and isinstance(option, str)) or question.count("_") > _MAX_BLANKS:
        return None
    # As in RoBERTa's preprocess_RACE.py, which fills every blank of a question with the whole option.
    return question.replace("_", option) if "_" in question else f"{question} {option}"


def _example(
    key: str, options: Sequence[tuple[Any, Any]], *, label: Any, where: str
) -> ChoiceExample | BadLine:
    if len(options) < 2 or not all(isinstance(text, str) for pair in options for text in pair):
        what = f"needs at least two options, all of them texts, and at most {_MAX_BLANKS} blanks"
        return BadLine(what, where, _MEND)
    example = ChoiceExample(key, tuple(options), None, where)
    try:
        return replace(example, label=_label(label, len(options)))
    except ValueError as error:
        return BadLabel(str(error), where, _MEND, example)


def _label(cell: Any, options: int) -> int | None:
    """Return the index of the right option, given its number from 0 or its letter."""
    spelling = "" if cell is None else str(cell).strip()
    if spelling in _UNLABELLED:
        return None
    indices = {str(index): index for index in range(options)}
    indices |= {letter: index for index, letter in enumerate(_LETTERS[:options])}
    if spelling not in indices:
        raise ValueError(f"has the label {cell!r}; the {options} options are {', '.join(indices)}")
    return indices[spelling]


def _race_splits() -> dict[str, Split]:
    """Return the splits of both schools together, and of each alone for evaluation, as in the papers."""
    readers = {name: {f"*{name}.jsonl": read_race, f"{name}/*/*.txt": read_race_passage} for name in _SPLITS}
    for name in _SPLITS[1:]:
        for school in ("middle", "high"):
            files = {f"{school}-{name}.jsonl": read_race, f"{name}/{school}/*.txt": read_race_passage}
            readers[f"{name}-{school}"] = files
    return {name: Split(files) for name, files in readers.items()}


_SPLITS = ("train", "dev", "test")
_ADVERSARIAL_SPLITS = {
    # The paper's set: the training arguments also with swapped warrants, the others also with negated claims.
    # (According to its repository, negated claims in training would add new cues.)
    "train": Split(
        {"train-adv-swapped.csv": read_adversarial_arct, "train-swapped.csv": read_adversarial_arct}
    ),
    "dev": Split({"dev-adv-negated.csv": read_adversarial_arct}),
    "test": Split({"test-adv-negated.csv": read_adversarial_arct}),
}
# The best of Niven & Kao's grid for BERT-Base; like them, select the epoch on the development set.
_NIVEN_KAO = {
    "text.longest": 80,
    "optim.peak_lr": 8e-5,
    "run.epochs": 30.0,
    "run.examples": 8,
    "run.evaluations": 30,
    "run.keep": "best",
}

TASKS: tuple[Task, ...] = (
    Task(
        "swag",
        "SWAG",
        CHOICE,
        metrics=("accuracy",),
        splits={
            "train": Split({"train.csv": read_swag, "train-*.parquet": read_swag}),
            "dev": Split({"val.csv": read_swag, "dev.csv": read_swag, "validation-*.parquet": read_swag}),
            "test": Split({"test.csv": read_swag, "test-*.parquet": read_swag}),
        },
        folders=("swag", "SWAG", "swagaf"),
        # Devlin et al. 2018, 4.4.
        settings={"optim.peak_lr": 2e-5, "run.epochs": 3.0, "run.examples": 16},
    ),
    Task(
        "race",
        "RACE",
        CHOICE,
        metrics=("accuracy",),
        splits=_race_splits(),
        folders=("race", "RACE"),
        # Liu et al. 2019, table 10.
        settings={
            "text.longest": 512,
            "optim.peak_lr": 1e-5,
            "optim.weight_decay": 0.1,
            "optim.warmup_fraction": 0.06,
            "run.epochs": 4.0,
            "run.examples": 16,
        },
    ),
    Task(
        "arct",
        "ARCT",
        CHOICE,
        metrics=("accuracy",),
        splits={
            "train": Split({"train.tsv": read_arct, "train-full.txt": read_arct}),
            "dev": Split({"dev.tsv": read_arct, "dev-full.txt": read_arct}),
            "test": Split({"test.tsv": read_arct, "test-full.txt": read_arct}),
            "dev-adversarial": _ADVERSARIAL_SPLITS["dev"],
            "test-adversarial": _ADVERSARIAL_SPLITS["test"],
        },
        folders=("arct", "ARCT"),
        settings=_NIVEN_KAO,
    ),
    Task(
        "arct-adversarial",
        "ARCT adversarial",
        CHOICE,
        metrics=("accuracy",),
        splits=_ADVERSARIAL_SPLITS,
        folders=("arct", "ARCT", "adversarial_dataset"),
        settings=_NIVEN_KAO,
    ),
)
