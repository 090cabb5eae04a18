"""The cost of reading a file grows with its size and no faster, whatever the file contains."""

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bertsmith.cli.text_files import pieces_of
from bertsmith.core.errors import UserError
from bertsmith.corpus.clean import Cleaning, clean_document
from bertsmith.corpus.decontaminate import task_strings
from bertsmith.corpus.documents import Document, documents_of, spaced_sentences
from bertsmith.corpus.readers import read_blocks
from bertsmith.insight.gap import read_gap
from bertsmith.insight.mentions import read_mentions
from bertsmith.insight.treebank import read_treebank
from bertsmith.tasks.choice_tasks import read_adversarial_arct, read_race, read_swag
from bertsmith.tasks.conll import conllu_reader, read_columns, read_tagged_rows
from bertsmith.tasks.label_rules import number, several
from bertsmith.tasks.squad import question_table_reader, squad_reader
from bertsmith.tasks.tables import LabelColumn, TextColumns, rows_of, text_reader
from bertsmith.text.extend_vocabulary import read_words
from bertsmith.text.lexicon import Lexicon
from bertsmith.text.tokenizer import Tokenizer
from tests.linear_growth import slow_growth

SIZES = [16_000 * 2**power for power in range(8)]
"""Bytes, up to 2 MB; small ones first, so that a quadratic reader fails within seconds."""
UNITS = {
    "letters": "a",
    "words": "a ",
    "spaces": " ",
    "tabs": "\t",
    "rows": "a\tb\n",
    "carriage returns": "\r",
    "empty lines": "\n",
    "blank lines": " \n",
    "quotes": '"',
    "backslashes": "\\",
    "curly quotes": "\u201c",
    "guillemets": "\u00bb",
    "apostrophes": "'",
    "brackets": "(",
    "named brackets": "(a",
    "bars": "|",
    "separators": ",",
    "braces": "{",
    "lists": "[",
    "digits": "1",
    "sentences": "A b. ",
    "quoted sentences": "\u201ca. B",
    "references": "&#1",
    "titles": 'title="',
    "pages": '<doc title="a">\n',
    "tags": "\tO",
    "prefixed tags": " B-a",
    "blanks": "_",
    "equals": "=",
    "accents": "\u0301",
    "mojibake": "\u00c3\u00bc",
    "no UTF-8": "\udcff",
    "nulls": "\0",
}
WORD = "1\ta\ta\tNOUN\t_\t_\t0\troot\t_\t_"
PLACES = {
    ".txt": [("", ""), ("a", "b"), ("a ", " b\n"), ("a\n", "\nb")],
    ".csv": [("text,label\n", ""), ('text,label\n"', '",1'), ("", "\ntext,label"), ("text,label\na,", "")],
    ".tsv": [("text\tlabel\n", ""), ("text\tlabel\na\t", ""), ("", "\ntext\tlabel")],
    ".jsonl": [
        ("", ""),
        ('{"text": "', '"}'),
        ('{"text": [', "]}"),
        ('{"words": ["', '"]}'),
        ('{"a": ', "}"),
    ],
    ".json": [("", ""), ("[", "]"), ('{"data": [', "]}"), ('{"data": "', '"}')],
    ".wiki": [("<doc ", ">\na\n</doc>\n"), ("<doc >\n", "\n</doc>\n"), ('<doc title="', '">\na\n</doc>\n')],
    ".conllu": [
        ("", ""),
        ("# sent_id = ", f"\n{WORD}\n"),
        ("# newdoc", f"\n{WORD}\n"),
        ("# global.Entity = ", f"\n{WORD}\n"),
        ("1\t", WORD[3:]),
        ("", WORD[1:]),
        (f"{WORD}|Entity=", "\n"),
        (WORD, "\t\ta"),
    ],
    ".conll": [("a 0 0 b NN - ", "\n"), ("", " 0 0 b NN - (1)\n"), ("a", "b"), ("a\tb\n", "")],
}
"""The beginnings and ends of files with a hostile middle."""


def corpus(layout: str) -> Callable[[Path], Any]:
    def read(path: Path) -> Iterable[object]:
        for block in read_blocks([path], format=layout, errors="replace"):
            for document in documents_of(block):
                cleaned = clean_document(document, Cleaning(repair_mojibake=True, drop_junk=True))
                lines = cleaned.text if isinstance(cleaned, Document) else document.text
                yield [spaced_sentences(line) for line in lines.split("\n")]

    return read


def table(**label: Any) -> Callable[[Path], Any]:
    return text_reader(TextColumns(("text",), LabelColumn("label", **label)))


READERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "corpus text": (corpus("text"), (".txt",)),
    "corpus jsonl": (corpus("jsonl"), (".jsonl",)),
    "corpus wiki": (corpus("wiki"), (".wiki",)),
    "corpus --exclude": (task_strings, (".txt", ".csv", ".tsv", ".json", ".jsonl", ".conllu", ".conll")),
    "input lines": (pieces_of, (".txt",)),
    "rows": (rows_of, (".csv", ".tsv", ".json", ".jsonl")),
    "numbers": (table(rule=number), (".csv", ".tsv", ".jsonl")),
    "several labels": (table(rule=several(";")), (".csv", ".tsv", ".jsonl")),
    "columns": (read_columns, (".conll", ".txt", ".tsv")),
    "CoNLL-U": (conllu_reader("upos"), (".conllu",)),
    "treebank": (read_treebank, (".conllu",)),
    "mentions": (read_mentions, (".conllu", ".conll")),
    "tagged rows": (read_tagged_rows, (".jsonl",)),
    "GAP": (read_gap, (".tsv",)),
    "SQuAD": (squad_reader("impossible"), (".json",)),
    "questions": (question_table_reader("unknown"), (".csv", ".jsonl")),
    "RACE": (read_race, (".jsonl",)),
    "SWAG": (read_swag, (".csv",)),
    "ARCT": (read_adversarial_arct, (".csv",)),
    "lexicon": (lambda path: Lexicon.read([path]).kinds, (".txt", ".tsv")),
    "words": (read_words, (".txt",)),
    "vocab.txt": (lambda path: [Tokenizer.load(path.parent)], ("/vocab.txt",)),
}


@dataclass(frozen=True)
class Case:
    """A reader, and a file of any size for it."""

    reader: str
    what: str
    suffix: str
    content: Callable[[int], str]


def cases() -> list[Case]:
    """Every reader with every unit in every place of its files."""
    return [
        Case(reader, f"{unit} between {around}", suffix, repeated(UNITS[unit], *around))
        for reader, (_, suffixes) in READERS.items()
        for suffix in suffixes
        for around in PLACES.get(suffix, [("", "")])
        for unit in UNITS
    ]


def repeated(unit: str, begin: str = "", end: str = "") -> Callable[[int], str]:
    return lambda size: begin + unit * (size // len(unit.encode(errors="surrogateescape"))) + end


def rows(line: str) -> Callable[[int], str]:
    """Numbered lines, with {0} in the place of the number, counted from 0, and {1} in that of the next."""
    return lambda size: "".join(line.format(at, at + 1) for at in range(size // len(line)))


def nested(size: int) -> str:
    count = size // 40
    opened = "".join(f"a 0 0 b NN - ({name}\n" for name in range(count))
    return opened + "".join(f"a 0 0 b NN - {name})\n" for name in range(count))


KNOWN = [
    Case("corpus wiki", "titles", ".wiki", repeated('title="', "<doc ", "x>\na\n</doc>\n")),
    Case("corpus wiki", "long references", ".wiki", repeated("1", "<doc >\n&#", ";\n</doc>\n")),
    Case("corpus text", "carriage returns", ".txt", repeated("\r", "a", "a")),
    Case("corpus text", "quotes", ".txt", repeated("\u201c")),
    Case("corpus --exclude", "spaces", ".txt", repeated(" ", "x", "y")),
    Case("corpus --exclude", "cells of spaces", ".txt", repeated(" ", WORD, "\tx")),
    Case("mentions", "a name that never ends", ".conll", repeated("a", "a 0 0 b NN - ", "\n")),
    Case("mentions", "nested and closed", ".conll", nested),
    Case("CoNLL-U", "spaces as an id", ".conllu", repeated(" ", "# sent_id =", f"\n{WORD}\n")),
    Case("treebank", "a chain of heads", ".conllu", rows("{1}\ta\t_\tX\t_\t_\t{0}\troot\t_\t_\n")),
    Case("treebank", "a long number", ".conllu", lambda size: WORD.replace("0", "1" * size)),
    Case("numbers", "one name for all columns", ".tsv", repeated("text\t", "", "label\n")),
    Case("RACE", "blanks", ".jsonl", lambda size: race("_" * (size // 2), "a" * (size // 2))),
    Case(
        "SQuAD", "repeated letters", ".json", lambda size: squad("a" * (size // 2), "ab" + "a" * (size // 4))
    ),
]
"""Files on which readers were quadratic or ended in a traceback."""


def race(question: str, option: str) -> str:
    return (
        f'{{"article": "a", "questions": ["{question}"], "options": [["{option}", "b"]], "answers": ["A"]}}'
    )


def squad(passage: str, answer: str) -> str:
    asked = (
        f'{{"id": "1", "question": "q", "answers": [{{"text": "{answer}", "answer_start": {len(answer)}}}]}}'
    )
    return f'{{"data": [{{"paragraphs": [{{"context": "{passage}", "qas": [{asked}]}}]}}]}}'


def slow_case(folder: Path, chosen: Iterable[Case], sizes: list[int]) -> list[str]:
    """The cases whose cost grows faster than the size of the file."""
    found = []
    for at, case in enumerate(chosen):

        async def seconds(size: int, case: Case = case, at: int = at) -> float:
            name = case.suffix if case.suffix.startswith("/") else f"/{at}{case.suffix}"
            file = Path(f"{folder}{name}")
            file.write_bytes(case.content(size).encode(errors="surrogateescape"))
            begin = time.process_time()
            try:
                for _ in READERS[case.reader][0](file):
                    pass
            except UserError:
                pass
            return time.process_time() - begin

        if costs := asyncio.run(slow_growth(seconds, sizes)):
            found.append(f"{case.reader}: {case.what}: {costs}")
    return found


@pytest.mark.parametrize("case", KNOWN, ids=lambda case: f"{case.reader}: {case.what}")
def test_a_file_that_took_minutes_takes_time_by_its_size(tmp_path: Path, case: Case, full: bool) -> None:
    assert slow_case(tmp_path, [case], SIZES if full else SIZES[:-1]) == []


@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_twice_the_size_costs_twice_the_time(tmp_path: Path, reader: str, full: bool) -> None:
    own = [case for case in cases() if case.reader == reader]
    chosen = own if full else random.Random(0).sample(own, 2)
    assert slow_case(tmp_path, chosen, SIZES if full else SIZES[:-2]) == []
