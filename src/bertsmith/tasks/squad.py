"""Questions about passages: SQuAD 1.1 and 2.0, TriviaQA in SQuAD's form, and a user's own tables."""

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from bertsmith.core.errors import UserError
from bertsmith.core.files import open_text_bytes
from bertsmith.tasks.example_types import Answer, BadLine, Question, Reader
from bertsmith.tasks.kinds.span import SPAN
from bertsmith.tasks.tables import Columns, rows_of
from bertsmith.tasks.task import Split, Task

Unanswered = Literal["unknown", "impossible"]
"""Meaning of an empty list of answers: unknown (SQuAD 1.1), or no answer in the passage (SQuAD 2.0)."""
_SHAPE = 'SQuAD\'s form is {"data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [...]}]}]}'
_MEND = "mend it"


def squad_reader(unanswered: Unanswered) -> Reader:
    """Return a reader of SQuAD's JSON."""

    def read(path: Path) -> Iterator[Question | BadLine]:
        for entry, where in _entries(path):
            yield _question(entry, where=where, unanswered=unanswered)

    return read


def question_table_reader(unanswered: Unanswered) -> Reader:
    """Return a reader of tables with the columns id, question, passage (or context), answer and start.

    Only question and passage are required. An answer without a start is searched for. The column `answers` of
    the hub's Parquet files replaces answer and start.
    """

    def read(path: Path) -> Iterator[Question | BadLine]:
        for index, row in enumerate(rows_of(path, Columns(("question",)))):
            if isinstance(row, BadLine):
                yield row
                continue
            if index == 0 and "passage" not in row.values and "context" not in row.values:
                remedy = f"its columns are {', '.join(map(repr, row.values))}"
                raise UserError("lacks a column 'passage' (or 'context')", where=row.where, remedy=remedy)
            entry = _entry_of_row(row.values, str(index))
            yield _question(entry, where=row.where, unanswered=unanswered)

    return read


def _entries(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield every entry of a `qas` list with its passage and title, and its location."""
    for a, article in enumerate(_list_in(_json_of(path), "data", where=str(path))):
        where = f"{path}: data[{a}]"
        for p, paragraph in enumerate(_list_in(article, "paragraphs", where=where)):
            place = f"{where}.paragraphs[{p}]"
            for q, entry in enumerate(_list_in(paragraph, "qas", where=place)):
                if not isinstance(entry, dict):
                    raise UserError("is not a question", where=f"{place}.qas[{q}]", remedy=_SHAPE)
                around = {"context": paragraph.get("context"), "title": article.get("title", "")}
                yield {**entry, **around}, f"{place}.qas[{q}]"


def _list_in(value: Any, key: str, *, where: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if isinstance(found, list):
        return found
    if isinstance(value, dict) and "Data" in value:
        remedy = "convert it to SQuAD's form with TriviaQA's own convert_to_squad_format.py"
        raise UserError("is in TriviaQA's own form", where=where, remedy=remedy)
    raise UserError(f'lacks a list "{key}"', where=where, remedy=_SHAPE)


def _json_of(path: Path) -> Any:
    with open_text_bytes(path) as file:
        content = file.read()
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UserError(f"is not valid JSON ({error})", where=str(path), remedy=_SHAPE) from error


def _entry_of_row(values: Mapping[str, Any], index: str) -> dict[str, Any]:
    """Convert a row to the form of SQuAD's entries; missing values stay missing."""
    entry = {key: values[key] for key in ("question", "title", "is_impossible") if key in values}
    entry |= {"id": values.get("id", index), "context": values.get("passage", values.get("context"))}
    if "answers" in values:
        golds = values["answers"]
        if isinstance(golds, dict):
            golds = _paired(golds.get("text"), golds.get("answer_start"))
        return entry | {"answers": golds}
    if "answer" in values:
        return entry | {"answers": _paired(values["answer"], values.get("start"))}
    return entry


def _paired(texts: Any, starts: Any) -> list[dict[str, Any]]:
    pairs = zip_longest(_as_list(texts), _as_list(starts))
    return [{"text": text, "answer_start": start} for text, start in pairs]


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [] if value is None or value == "" else [value]


def _question(entry: Mapping[str, Any], *, where: str, unanswered: Unanswered) -> Question | BadLine:
    for key, name in (("id", "id"), ("question", "question"), ("context", "passage")):
        if not isinstance(entry.get(key), str | int) or not str(entry[key]).strip():
            return BadLine(f"the {name} is missing or empty", where, _MEND)
    passage, golds = str(entry["context"]), entry.get("answers")
    is_impossible = str(entry.get("is_impossible")).lower() == "true"  # a boolean in JSON, text in a table
    answers = _answers([] if is_impossible else golds or [], passage)
    if isinstance(answers, str):
        return BadLine(answers, where, _MEND)
    return Question(
        key=str(entry["id"]),
        question=str(entry["question"]),
        passage=passage,
        answers=answers,
        labelled=bool(answers) or is_impossible or (golds is not None and unanswered == "impossible"),
        article=str(entry.get("title") or ""),
        where=where,
    )


def _answers(golds: Any, passage: str) -> tuple[Answer, ...] | str:
    """Return the answers with their starts in the passage, or the fault of one of them."""
    found: list[Answer] = []
    for gold in golds if isinstance(golds, list) else [golds]:
        text = gold.get("text") if isinstance(gold, dict) else None
        start = _number(gold.get("answer_start")) if isinstance(gold, dict) else None
        if not isinstance(text, str) or not text.strip() or start is None:
            return f"an answer lacks a text or a numeric start: {json.dumps(gold, default=str)[:100]}"
        nearest = _nearest(text, passage, start=start)
        if nearest is None:
            return f"the answer {text[:60]!r} is not in its passage"
        found.append(Answer(text, nearest))
    return tuple(found)


def _number(value: Any) -> int | None:
    """Return a start as a number: 0 if missing, None if invalid."""
    if value is None or value == "":
        return 0
    try:
        return max(0, int(value))  # a negative start means unknown
    except (TypeError, ValueError, OverflowError):
        return None


def _nearest(text: str, passage: str, *, start: int) -> int | None:
    """Return the position of the text nearest to its supposed start, on a tie the earlier one."""
    if passage.startswith(text, start):
        return start
    # Not rfind, which is quadratic for some texts: find is linear.
    earlier = passage[: start + len(text)]
    found = [each for each in (passage.find(text, start),) if each >= 0]
    if (behind := earlier[::-1].find(text[::-1])) >= 0:
        found.insert(0, len(earlier) - behind - len(text))
    return min(found, key=lambda each: abs(each - start), default=None)


def _splits(unanswered: Unanswered, version: str) -> dict[str, Split]:
    json_reader, table_reader = squad_reader(unanswered), question_table_reader(unanswered)

    def split(*names: str) -> Split:
        official = [f"{name}{version}.json" for name in names] + [f"{name}{version}*.json" for name in names]
        tables = [f"{name}.{suffix}" for name in names for suffix in ("csv", "tsv", "jsonl")]
        hub = [f"{name}-*.parquet" for name in names]
        readers: dict[str, Reader] = {
            file: json_reader for file in (*official, *(f"{n}.json" for n in names))
        }
        return Split(readers | {file: table_reader for file in (*tables, *hub)})

    return {"train": split("train"), "dev": split("dev", "validation"), "test": split("test")}


def _triviaqa_splits() -> dict[str, Split]:
    """Return splits by pattern: converted files have various names, such as wikipedia-train.json."""
    read = squad_reader("unknown")
    return {name: Split({f"{name}.json": read, f"*{name}*.json": read}) for name in ("train", "dev", "test")}


# Devlin et al. 2018, 4.2 and 4.3; length and step as in run_squad.py.
_SQUAD = {"text.longest": 384, "text.step": 128, "optim.peak_lr": 5e-5, "run.epochs": 3.0, "run.examples": 32}
_SQUAD2 = {**_SQUAD, "run.epochs": 2.0, "run.examples": 48, "answers.null_threshold": "tuned"}
_METRICS = ("f1", "exact")

TASKS: tuple[Task, ...] = (
    Task(
        "squad",
        "SQuAD 1.1",
        SPAN,
        metrics=_METRICS,
        splits=_splits("unknown", "-v1.1"),
        folders=("squad", "SQuAD", "squad1"),
        settings=_SQUAD,
    ),
    Task(
        "squad2",
        "SQuAD 2.0",
        SPAN,
        metrics=_METRICS,
        splits=_splits("impossible", "-v2.0"),
        folders=("squad", "SQuAD", "squad2", "squad_v2"),
        settings=_SQUAD2,
    ),
    Task(
        "triviaqa",
        "TriviaQA",
        SPAN,
        metrics=_METRICS,
        splits=_triviaqa_splits(),
        folders=("triviaqa", "TriviaQA"),
        settings=_SQUAD,  # the paper trains on it before SQuAD 1.1 and does not give other settings for it
    ),
)
