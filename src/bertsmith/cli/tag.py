"""`bertsmith tag`: tag the words of a text, and highlight the names among them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, echo

from bertsmith.cli import options
from bertsmith.cli.predicting import naming_inputs
from bertsmith.cli.presenting import COLOURS, bar, console, highlighted, print_json
from bertsmith.cli.text_files import PATIENCE_SECONDS, STANDARD_INPUT, TextSource, computed_pieces
from bertsmith.core.errors import UserError
from bertsmith.inference.outputs import tags_to_json

if TYPE_CHECKING:
    from rich.text import Text

    from bertsmith.inference.loaded_model import Bert
    from bertsmith.inference.outputs import Entity, TaggedWord

OUTSIDE = "O"
"""Tag of a word outside all spans (IOB)."""


def tag(
    *,
    text: Annotated[
        str | None, Argument(metavar="[TEXT]", help="A sentence, or a longer text; - reads stdin.")
    ] = None,
    source: Annotated[
        Path | None,
        Option("--input", metavar="FILE", help="Instead, one text per line, or a table; - reads stdin."),
    ] = None,
    table: options.TextTable,
    asked: options.Asked,
    as_json: options.Json = False,
) -> None:
    """Tag the words of a text, or of every text of a file.

    Prints each word with its tag and the tag's probability. If the tags mark spans of words, such as names,
    the text follows with these highlighted. A text of any length is read in windows. For a file, each word is
    a line with its tag and probability, tabs between them, an empty line between texts; with --json, each
    text is a line.

    Example: bertsmith tag "She lives in Zürich." --model runs/ner

    Example: bertsmith tag --input sentences.txt --model runs/ner > tagged.tsv
    """
    if text == str(STANDARD_INPUT) and source is None:
        text, source = None, STANDARD_INPUT
    if (text is None) == (source is None):
        raise UserError("nothing to tag", remedy="give a text, or `input=FILE`")
    texts = None
    if source is not None:
        texts = table.of(source)
        texts.check(before_opening=True)
    bert = asked.open("tag")
    if texts is not None:
        tag_file(bert, texts.as_trained(bert), as_json=as_json)
    elif text is not None:
        with naming_inputs(lambda _: "the text"):
            (words,) = bert.tag([text])
        show(text, words, bert.entities_of(text, words), as_json=as_json)


def show(text: str, words: "list[TaggedWord]", entities: "list[Entity]", *, as_json: bool) -> None:
    """Print the words of one text, and the text with its entities highlighted."""
    if as_json:
        print_json(tags_to_json(words, entities))
        return
    screen = console()
    for line in word_lines(words):
        screen.print(line)
    if entities:
        screen.print()
        screen.print(with_entities(text, entities))


def tag_file(bert: "Bert", source: TextSource, *, as_json: bool) -> None:
    """Print the words of each text of a file, piece by piece."""
    which, begun = "row" if source.is_table else "line", False
    for piece, tagged in computed_pieces(
        bert, source, lambda piece: bert.tag(map(str, piece.texts)), patience=PATIENCE_SECONDS
    ):
        for number, text, words in zip(piece.numbers, map(str, piece.texts), tagged, strict=True):
            if as_json:
                print_json({which: number, **tags_to_json(words, bert.entities_of(text, words))})
                continue
            if begun:
                echo()
            begun = True
            for word in words:
                echo(f"{word.word}\t{word.tag}\t{word.probability:.6f}")


def word_lines(words: "list[TaggedWord]") -> "list[Text]":
    """Return a line for each word: the word, its tag, and the tag's probability."""
    from rich.cells import cell_len
    from rich.text import Text

    widest = max(cell_len(word.word) for word in words)
    longest = max(len(word.tag) for word in words)
    return [
        Text.assemble(
            (f"  {word.word}{' ' * (widest - cell_len(word.word))}  ", ""),
            (f"{word.tag:<{longest}} ", "dim" if word.tag == OUTSIDE else "bold green"),
            (f" {word.probability:6.1%} ", ""),
            (bar(word.probability), "dim" if word.tag == OUTSIDE else "green"),
        )
        for word in words
    ]


def with_entities(text: str, entities: "list[Entity]") -> "Text":
    """Return the text with each entity in the colour of its type, followed by the type in brackets."""
    types = sorted({each.type for each in entities})
    colours = {kind: COLOURS[index % len(COLOURS)] for index, kind in enumerate(types)}
    drawn, end = highlighted("", []), 0
    for each in entities:
        drawn.append(text[end : each.start])
        drawn.append(each.text, f"bold reverse {colours[each.type]}")
        drawn.append(f" [{each.type}]", colours[each.type])
        end = each.end
    return drawn.append(text[end:])
