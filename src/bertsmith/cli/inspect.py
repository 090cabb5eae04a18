"""`bertsmith inspect`: check a data set before training on it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json
from bertsmith.core.errors import UserError, shown
from bertsmith.tasks.table_format import TableFormat

if TYPE_CHECKING:
    from rich.table import Table

    from bertsmith.tasks.custom import CustomSpec
    from bertsmith.tasks.inspection import Inspection, Overlap, SplitSummary
    from bertsmith.tasks.task import Task

SPLITS = ("train", "dev", "test")
SHOWN_LABELS = 12
SHOWN_CHARACTERS = 100
QUANTILES = {
    "words: median": "median",
    "words: 95 % at most": "of_95_percent",
    "words: 99 % at most": "of_99_percent",
    "words: longest": "largest",
}


def inspect(
    *,
    file: Annotated[
        Path | None, Argument(metavar="[FILE]", help="Your table: CSV, TSV, JSONL or Parquet; or a folder.")
    ] = None,
    text: Annotated[str, Option(metavar="COLUMN", help="The column of the texts.")] = "",
    second: Annotated[
        str, Option("--text2", metavar="COLUMN", help="Column of the second texts, for pairs.")
    ] = "",
    label: Annotated[
        str, Option(metavar="COLUMN", help="The column of the labels or numbers; optional for a test file.")
    ] = "",
    kind: Annotated[
        str, Option(help="One label for each text (classify), several (multilabel), or a number (regress).")
    ] = "classify",
    separator: Annotated[str, Option(help="Separator of the labels in a cell (multilabel).")] = ",",
    key: Annotated[str, Option("--id", metavar="COLUMN", help="The column of the ids.")] = "",
    dev: Annotated[Path | None, Option(metavar="FILE", help="The development file, if there is one.")] = None,
    dev_share: Annotated[
        float, Option(min=0, max=0.9, help="Else this fraction of FILE, chosen by the ids, as finetune does.")
    ] = 0.1,
    test: Annotated[Path | None, Option(metavar="FILE", help="A test file, with or without labels.")] = None,
    table: options.Table,
    task: Annotated[str, Option(metavar="TASK", help="A task of the papers instead, such as wnli.")] = "",
    data: Annotated[
        Path | None, Option(metavar="PATH", help="The same as FILE; for a task its folder.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Inspect a data set before training on it.

    Prints the balance of the labels, lengths in words, copies, and the scores of a constant answer. Compares
    the other splits with the training set, and counts their texts that are also in the training set, with the
    same or another label. Warns if labels shift between the splits, or if a split is adversarial. Lines that
    cannot be read are counted. A test set needs no labels. For tags, the words are counted; for questions,
    those without an answer; for choices, the right option.

    Example: bertsmith inspect my.csv --text review --label stars

    Example: bertsmith inspect new.csv --text review

    Example: bertsmith inspect --task wnli --data glue/WNLI

    Example: bertsmith inspect --task squad2 --data squad/
    """
    from bertsmith.tasks.custom import CustomSpec
    from bertsmith.tasks.inspection import inspect_files

    if file is not None and data is not None:
        raise UserError("give exactly one data set", where="FILE and `data`", remedy="remove one of them")
    if task:
        task_and_files = _published(task, data or file)
    else:
        spec = CustomSpec(text, label, second=second, kind=kind, separator=separator, key=key)
        files = {"train": file or data, "dev": dev, "test": test}
        task_and_files = _own(replace(spec, dev_fraction=dev_share), table.form, files)
    found = inspect_files(*task_and_files)
    if as_json:
        print_json(asdict(found))
    else:
        show(found)


def _published(name: str, data: Path | None) -> tuple["Task", dict[str, Path]]:
    from bertsmith.tasks.catalogue import task_named
    from bertsmith.tasks.task import names_file

    task = task_named(name)
    if data is None:
        raise UserError("missing data", remedy=f"give the folder of {task.title}: `data=FOLDER`")
    splits = [split for split in SPLITS if split in task.splits]
    if data.is_file():
        # A file's name gives its split; a file with any other name is to be predicted, labelled or not.
        named = [split for split in splits if names_file(task, split, data)]
        splits = named or [splits[-1]]
    return task, dict.fromkeys(splits, data)


def _own(
    spec: "CustomSpec", form: TableFormat, files: Mapping[str, Path | None]
) -> tuple["Task", dict[str, Path]]:
    from bertsmith.tasks.custom import custom_task, has_own_dev

    places = {split: file for split, file in files.items() if file is not None}
    if "train" not in places or not spec.text:
        remedy = "give FILE `text=COLUMN` `label=COLUMN`, or `task=TASK` `data=FOLDER`"
        raise UserError("missing data set", remedy=remedy)
    main = places["train"]
    if not spec.label:
        if len(places) > 1 or main.is_dir():
            remedy = "add `label=COLUMN`, or give one file"
            raise UserError("a training set needs a label column", key="text", remedy=remedy)
        return custom_task(spec, form), {"test": main}
    if "dev" in places or has_own_dev(main):
        spec = replace(spec, dev_fraction=0.0)
        places = {"dev": main, **places}
    elif spec.dev_fraction:  # one file for both: the task splits its examples by their ids
        places = {"dev": main, **places}
    places = {**({"test": main} if main.is_dir() else {}), **places}
    return custom_task(spec, form), {split: places[split] for split in SPLITS if split in places}


def show(found: "Inspection") -> None:
    """Print the findings as tables for people."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_splits_table(found.splits))
    console.print(_findings_table(found))
    for warning in found.warnings:
        console.print(f"\n{warning}", soft_wrap=True)
    for overlap in found.overlaps:
        for shared in overlap.shown:
            console.print(f"\n{_short(shared.text)}", soft_wrap=True)
            console.print(f"  train {_short(shared.train_label)}  {shared.train_where}", soft_wrap=True)
            console.print(f"  {overlap.split:5} {_short(shared.label)}  {shared.where}", soft_wrap=True)


def _short(text: str) -> str:
    return shown(text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "...")


def _table(*headings: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(headings))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index and any(headings) else "left", overflow="fold")
    return table


def _splits_table(splits: Sequence["SplitSummary"]) -> "Table":
    table = _table("split", *(split.name for split in splits))
    for count in ("examples", "unlabelled", "skipped", "copies", "contradictions"):
        table.add_row(count, *(f"{getattr(split, count):,}" for split in splits))
    for words, quantile in QUANTILES.items():
        table.add_row(words, *(f"{getattr(split.words, quantile):,}" for split in splits))
    numbers = [split.numbers for split in splits]
    for spread in ("smallest", "mean", "largest", "deviation") if any(numbers) else ():
        values = (f"{getattr(each, spread):.3g}" if each else "" for each in numbers)
        table.add_row(f"{spread} number", *values)
    counts = [{each.label: f"{each.count:,} ({each.share:.1%})" for each in split.labels} for split in splits]
    labels = list(dict.fromkeys(label for each in counts for label in each))
    for label in labels[:SHOWN_LABELS]:
        table.add_row(f"label {_short(label)}", *(each.get(label, "0" if each else "") for each in counts))
    if len(labels) > SHOWN_LABELS:
        table.add_row(f"... and {len(labels) - SHOWN_LABELS:,} more labels")
    return table


def _findings_table(found: "Inspection") -> "Table":
    from bertsmith.tasks.kinds.registry import kind_named, metric_named

    numeric = kind_named(found.kind).numeric
    table = _table("", "")
    table.add_row("", "")
    for split in found.splits:
        if split.first_skipped:
            table.add_row(f"first skipped in {split.name}", split.first_skipped)
    if (baseline := found.baseline) is not None:
        scores = {"train": baseline.train} | ({"dev": baseline.dev} if baseline.dev else {})
        for name_of_split, of_split in scores.items():
            listed = ", ".join(
                f"{name.replace('_', ' ')} {metric_named(name).text(value)}"
                for name, value in of_split.items()
            )
            table.add_row(f"constant answer on {name_of_split}", f"{baseline.says!r}: {listed}")
    for shift in found.shifts:
        unit = "standard deviations" if numeric else "of the labels"
        labels = "" if shift.labels is None else f"shift {shift.labels:.3f} {unit}, "
        table.add_row(
            f"train to {shift.split}",
            f"{labels}median {shift.median_words:+} words, "
            f"{shift.unknown_words:.1%} of {shift.split}'s words are not in train",
        )
    for overlap in found.overlaps:
        table.add_row(f"{overlap.split} {overlap.text} text in train", _overlap_line(overlap))
    return table


def _overlap_line(overlap: "Overlap") -> str:
    if not overlap.examples:
        return "none"
    shared = f"{overlap.examples:,} examples ({overlap.share:.1%})"
    if not overlap.labelled:
        return shared
    return (
        f"{shared}, {overlap.only_other_label:,} of them "
        f"with another label only; pairs: {overlap.pairs_same_label:,} same label, "
        f"{overlap.pairs_other_label:,} another; copying the label is right in {overlap.copying_accuracy:.1%}"
    )
