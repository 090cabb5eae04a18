"""`bertsmith answer`: what a passage answers to a question."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from bertsmith.cli.asking import (
    DeviceOption,
    JsonOption,
    ModelOption,
    PrecisionOption,
    bars,
    console,
    highlighted,
    naming,
    open_model,
    say_json,
)
from bertsmith.cli.text_lines import STANDARD_INPUT
from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_text
from bertsmith.inference.facts import answer_facts, is_decided_by_threshold

if TYPE_CHECKING:
    from rich.text import Text

    from bertsmith.tasks.answers import QuestionAnswer

AROUND = 300
"""Characters of the passage that are shown on each side of the answer."""
ANSWER_STYLE = "bold reverse green"
NO_ANSWER = "no answer in the passage"
BY_THRESHOLD = {
    False: "No answer, though one is more probable: the model's no-answer threshold decided.",
    True: "An answer, though no answer is more probable: the model's no-answer threshold decided.",
}
"""Why the first is not the most probable one, by whether it is an answer."""


def answer(
    question: Annotated[str, Argument(metavar="QUESTION", help="The question.")],
    passage: Annotated[
        Path | None, Option(metavar="FILE", help="File of the passage; - reads the standard input.")
    ] = None,
    text: Annotated[str, Option(metavar="TEXT", help="The passage itself, in place of a file.")] = "",
    best: Annotated[int, Option(min=1, help="How many answers to print.")] = 3,
    model: ModelOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer a question from a passage, in the passage's own words.

    Prints the passage with the answer highlighted and the next best ones below. A passage of any length is
    read in windows. A model for SQuAD 2.0 may also say that the passage holds no answer; where its threshold
    for that decides against what is more probable, a line below says so.

    Example: bertsmith answer "Why did Alyssa go to Miami?" --passage story.txt --model runs/squad2

    Example: bertsmith answer "Who wrote it?" --text "Emma was written by Jane Austen." --model runs/squad2
    """
    written = passage_of(passage, text)
    bert = open_model(model, "answer", device=device, precision=precision)
    with naming(lambda _: "the question and its passage"):
        ((*found,),) = bert.answers_each([(question, written)], best=best)
    if as_json:
        say_json(answer_facts(found))
        return
    screen = console()
    screen.print(excerpt(written, found[0]))
    for line in bars((each.probability, each.text or NO_ANSWER) for each in found):
        screen.print(line)
    if is_decided_by_threshold(found[0]):
        screen.print(BY_THRESHOLD[bool(found[0].text)], style="dim")


def passage_of(file: Path | None, text: str) -> str:
    """The passage: the text that was given, or that of a file."""
    if (file is None) == (not text):
        remedy = "say --passage FILE, --passage - for the standard input, or --text TEXT"
        raise UserError("one passage is wanted", remedy=remedy)
    if file is None:
        return text
    if file == STANDARD_INPUT:
        return sys.stdin.read()
    return read_text(file.expanduser(), remedy="give a text file in UTF-8")


def excerpt(passage: str, found: "QuestionAnswer") -> "Text":
    """The passage around the answer, which is highlighted; where there is none, how the passage begins."""
    if not found.text:
        shown = passage[: 2 * AROUND]
        return highlighted(shown + ("…" if len(passage) > len(shown) else ""), [])
    begin, end = max(0, found.start - AROUND), min(len(passage), found.end + AROUND)
    before, after = "…" if begin else "", "…" if end < len(passage) else ""
    start = found.start - begin + len(before)
    return highlighted(before + passage[begin:end] + after, [(start, start + len(found.text), ANSWER_STYLE)])
