"""`bertsmith compare`: measure the similarity of texts."""

from typing import TYPE_CHECKING, Annotated

from typer import Argument

from bertsmith.cli import options
from bertsmith.cli.predicting import naming_inputs
from bertsmith.cli.presenting import bar, console, print_json
from bertsmith.cli.text_files import STANDARD_INPUT, lines_of
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from rich.text import Text

NEAR, FAR = 0.8, 0.5
"""Minimum cosine that is shown as near, and the cosine below which texts are shown as far."""


def compare(
    *,
    texts: Annotated[
        list[str], Argument(metavar="A B [C...]", help="Two texts or more; - reads one per line from stdin.")
    ],
    pooling: options.Pooling = None,
    prompt: options.Prompt = None,
    asked: options.Asked,
    truncate: options.Truncate = False,
    as_json: options.Json = False,
) -> None:
    """Compare texts by the cosine of their vectors.

    1 is the same direction, 0 a right angle. Pooling and prompt follow a folder of sentence-transformers.
    Two texts give one number, several a matrix. A model that was not trained for similarity prints a warning
    and ranks texts poorly: compare its cosines only with each other.

    Example: bertsmith compare "A boy runs." "A child is running." "It rains in Rome."
    """
    if texts == [str(STANDARD_INPUT)]:
        texts = lines_of(STANDARD_INPUT)
    if len(texts) < 2:
        raise UserError("one text cannot be compared", remedy="give two texts or more")
    from bertsmith.inference.vectors import cosines

    bert = asked.open("embed")
    with naming_inputs(lambda number: f"text {number + 1}"):
        # Cosines are the same for vectors of any length.
        vectors = bert.embed(texts, pooling=pooling, normalize=False, prompt=prompt, truncate=truncate)
    similarity: list[list[float]] = cosines(vectors).tolist()
    if as_json:
        print_json({"similarity": similarity})
        return
    screen = console()
    if len(texts) == 2:
        cosine = similarity[0][1]
        screen.print(f"{cosine:.3f}  {bar(cosine)}", style=style_of(cosine))
        return
    for line in matrix_lines(texts, similarity):
        screen.print(line)


def matrix_lines(texts: list[str], similarity: list[list[float]]) -> "list[Text]":
    """Format the cosines as a table, each text after its row."""
    from rich.text import Text

    header = "    " + "".join(f"{number:>7}" for number in range(1, len(texts) + 1))
    lines = [Text(header, style="dim")]
    for number, (text, row) in enumerate(zip(texts, similarity, strict=True), start=1):
        line = Text(f"{number:>4}", style="dim")
        for cosine in row:
            line.append(f"{cosine:7.3f}", style_of(cosine))
        lines.append(line.append(f"  {text}", ""))
    return lines


def style_of(cosine: float) -> str:
    """Return the colour of a cosine."""
    if cosine >= NEAR:
        return "bold green"
    return "dim" if cosine < FAR else "yellow"
