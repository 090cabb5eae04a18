"""`bertsmith answer`: answer questions from a passage."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from bertsmith.cli import options
from bertsmith.cli.predicting import naming_inputs
from bertsmith.cli.presenting import bars, console, highlighted, print_json
from bertsmith.cli.text_files import (
    STANDARD_INPUT,
    check_unpacked,
    name_of,
    standard_input,
    text_of,
    texts_of,
)
from bertsmith.core.errors import UserError
from bertsmith.core.files import read_text
from bertsmith.inference.outputs import answers_to_json, is_decided_by_threshold

if TYPE_CHECKING:
    from rich.text import Text

    from bertsmith.tasks.answers import QuestionAnswer

AROUND = 300
"""Number of characters of the passage that are shown on each side of the answer."""
ANSWER_STYLE = "bold reverse green"
NO_ANSWER = "no answer in the passage"


def answer(
    *,
    question: Annotated[
        str, Argument(metavar="QUESTION", help="The question; - reads one per line from stdin.")
    ],
    passage: Annotated[
        Path | None, Option(metavar="FILE", help="File of the passage; - reads the standard input.")
    ] = None,
    text: Annotated[
        str | None, Option("--passage-text", metavar="TEXT", help="The passage itself, in place of a file.")
    ] = None,
    best: Annotated[int, Option(min=1, help="Number of answers to print.")] = 3,
    asked: options.Asked,
    as_json: options.Json = False,
) -> None:
    """Answer a question from a passage, in the passage's own words.

    Prints the passage with the answer highlighted and the next best ones below. A passage of any length is
    read in windows. A model for SQuAD 2.0 may also find that the passage does not contain an answer. If its
    threshold for that decides against a more probable outcome, a line below reports it.

    Example: bertsmith answer "Why did Alyssa go to Miami?" --passage story.txt --model runs/squad2

    Example: bertsmith answer "Who wrote it?" --passage-text "Emma was by Jane Austen." --model runs/squad2
    """
    if question == str(STANDARD_INPUT) == str(passage):
        remedy = "give the questions or the passage in another way"
        raise UserError("the standard input cannot be both", where="QUESTION and `passage`", remedy=remedy)
    written = passage_of(passage, text)
    bert = asked.open("answer")
    questions = list(texts_of(question, "the question and its passage"))
    with naming_inputs(lambda number: questions[number][0]):
        several = bert.answers_each([(each, written) for _, each in questions], best=best)
    for found in several:
        show(written, found, as_json=as_json)


def show(written: str, found: "list[QuestionAnswer]", *, as_json: bool) -> None:
    """Print the answers to one question, the best first."""
    if as_json:
        print_json(answers_to_json(found))
        return
    screen = console()
    screen.print(excerpt(written, found[0]))
    for line in bars((each.probability, each.text or NO_ANSWER) for each in found):
        screen.print(line)
    if is_decided_by_threshold(found[0]):
        screen.print(by_threshold(found[0]), style="dim")


def by_threshold(found: "QuestionAnswer") -> str:
    """Explain that the threshold decided, and name the more probable outcome."""
    likelier = max(found.nbest, key=lambda candidate: candidate.probability)
    chosen = "An answer" if found.text else "No answer"
    other = f"“{likelier.text}”" if likelier.text else "no answer"
    return (
        f"{chosen}, though {other} is more probable ({likelier.probability:.1%}): "
        "the model's no-answer threshold decided."
    )


def passage_of(file: Path | None, text: str | None) -> str:
    """Return the passage: the given text, or the text of a file."""
    if text is not None and file is None:
        return text
    if file is None or text is not None:
        remedy = "`passage=FILE`, `passage=-` for the standard input, or `passage_text=TEXT`"
        raise UserError("give exactly one passage", remedy=remedy)
    if file != STANDARD_INPUT:
        return read_text(file, remedy="give a text file in UTF-8")
    written, where = standard_input().read(), name_of(STANDARD_INPUT)
    check_unpacked(written, where=where)
    return text_of(written, where=where)


def excerpt(passage: str, found: "QuestionAnswer") -> "Text":
    """Return the passage around the highlighted answer, or the passage's beginning."""
    if not found.text:
        shown = passage[: 2 * AROUND]
        return highlighted(shown + ("…" if len(passage) > len(shown) else ""), [])
    begin, end = max(0, found.start - AROUND), min(len(passage), found.end + AROUND)
    before, after = "…" if begin else "", "…" if end < len(passage) else ""
    start = found.start - begin + len(before)
    return highlighted(before + passage[begin:end] + after, [(start, start + len(found.text), ANSWER_STYLE)])
