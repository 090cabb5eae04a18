"""`bertsmith choose`: choose the text that continues or answers another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from bertsmith.cli import options
from bertsmith.cli.predicting import naming_inputs
from bertsmith.cli.presenting import bars, console, print_json
from bertsmith.cli.text_files import PATIENCE_SECONDS, STANDARD_INPUT, TextSource, pieces_of
from bertsmith.core.errors import UserError
from bertsmith.core.wording import counted
from bertsmith.inference.outputs import choice_to_json


@dataclass(frozen=True, slots=True)
class ChoiceQuestion:
    """A context and the options to choose from."""

    context: str
    options: tuple[str, ...]
    where: str
    number: int = 0
    """Number of the line, or of the row in a table, counted from 1; 0 for the command line."""


def choose(
    *,
    context: Annotated[
        str | None, Argument(metavar="[CONTEXT]", help="Text that all options share; - reads stdin.")
    ] = None,
    options: Annotated[
        list[str] | None, Argument(metavar="[OPTION]...", help="Two texts or more to choose among.")
    ] = None,
    source: Annotated[
        Path | None,
        Option(
            "--input", metavar="FILE", help="Instead, a question per line, with tabs, or a table; - is stdin."
        ),
    ] = None,
    column: Annotated[
        str, Option("--text", metavar="COLUMN", help="Column of the contexts in a table.")
    ] = "",
    option_columns: Annotated[
        str,
        Option(
            "--options",
            metavar="A,B,C",
            help="Columns of the options in a table, or one column of JSON lists.",
        ),
    ] = "",
    table: options.Table,
    asked: options.Asked,
    truncate: options.Truncate = False,
    as_json: options.Json = False,
) -> None:
    """Choose among several texts the one that fits a context best.

    CONTEXT is common to all options: the sentence that one of them continues, or a passage; its options are
    then the question with each of its answers. One question gets a bar for each option. A file has a
    question on each line, the context and its options with tabs between them, or is a table; each question
    gets a line: the number of the option, counted from 0, its probability and the option itself.

    Example: bertsmith choose "The boy sits down." "He eats an apple." "He flies away." --model runs/swag

    Example: bertsmith choose --input questions.txt --model runs/swag > chosen.tsv

    Example: bertsmith choose --input swag.csv --text sent1 --options ending0,ending1 --model runs/swag
    """
    if context == str(STANDARD_INPUT) and not options and source is None:
        context, source = None, STANDARD_INPUT
    if (context is None) == (source is None):
        remedy = "give a context and its options, or `input=FILE`"
        raise UserError("nothing to choose among", remedy=remedy)
    if source is not None:
        questions = questions_of(TextSource(source, column, form=table.form), option_columns)
    else:
        question = ChoiceQuestion(context or "", tuple(options or ()), "the question")
        questions = iter([_checked(question, remedy="give the context, then its options")])
    bert = asked.open("choose")
    for question in questions:
        with naming_inputs(partial(_name, question)):
            pairs = [(question.context, option) for option in question.options]
            found = bert.choose(pairs, truncate=truncate)
        if as_json:
            place = {"row" if column else "line": question.number} if question.number else {}
            print_json({**place, **choice_to_json(found, question.options)})
        elif question.number:
            chosen = question.options[found.index]
            echo(f"{found.index}\t{found.probabilities[found.index]:.6f}\t{chosen}")
        else:
            show(found.probabilities, question.options)


def show(probabilities: Sequence[float], options: Sequence[str]) -> None:
    """Print a bar for each option, the most probable first."""
    screen = console()
    for line in bars(sorted(zip(probabilities, options, strict=True), key=lambda each: -each[0])):
        screen.print(line)


def questions_of(source: TextSource, options: str) -> Iterator[ChoiceQuestion]:
    """Yield the questions of a file of lines, or of a table if columns are named."""
    source.check()
    if bool(source.text) != bool(options):
        remedy = "give both, or neither for a file of lines"
        raise UserError(
            "a table needs columns of the context and the options",
            where="`text` and `options`",
            remedy=remedy,
        )
    columns = tuple(name.strip() for name in options.split(","))
    return table_questions(source, columns) if source.text else line_questions(source)


def line_questions(source: TextSource) -> Iterator[ChoiceQuestion]:
    """Yield the questions of a file of lines: the context and its options, with tabs between them."""
    for piece in pieces_of(source, patience=PATIENCE_SECONDS):
        for text, number, where in zip(piece.texts, piece.numbers, piece.wheres, strict=True):
            context, *options = str(text).split("\t")
            yield _checked(ChoiceQuestion(context, tuple(options), where, number))


def table_questions(source: TextSource, columns: tuple[str, ...]) -> Iterator[ChoiceQuestion]:
    """Yield the questions of a table: a column of contexts, and columns of options or one of lists."""
    from bertsmith.tasks.example_types import BadLine
    from bertsmith.tasks.label_rules import cell_text
    from bertsmith.tasks.tables import Columns, rows_of

    rows = rows_of(source.path, Columns((source.text, *columns)), source.form)
    for number, row in enumerate(rows, 1):
        if isinstance(row, BadLine):
            raise UserError(row.what, where=row.where, remedy=row.remedy)
        cells = [row.values[name] for name in columns]
        listed = cells[0] if len(cells) == 1 and isinstance(cells[0], list) else cells
        try:
            options = tuple(text for text in map(cell_text, listed) if text)
            context = cell_text(row.values[source.text])
        except ValueError as error:
            raise UserError(str(error), where=row.where, remedy="correct the line") from error
        yield _checked(ChoiceQuestion(context, options, row.where, number))


def _checked(
    question: ChoiceQuestion, *, remedy: str = "write the context and its options, tabs between them"
) -> ChoiceQuestion:
    if len(question.options) < 2:
        what = f"has {counted(len(question.options), 'option')}, but a choice needs at least two"
        raise UserError(what, where=question.where, remedy=remedy)
    return question


def _name(question: ChoiceQuestion, index: int) -> str:
    return f"{question.where}, option {index}"
