"""`bertsmith tag`: the words of a text with their tags, and the names among them."""

from typing import TYPE_CHECKING, Annotated

from typer import Argument

from bertsmith.cli.model_options import (
    COLOURS,
    DeviceOption,
    JsonOption,
    ModelOption,
    PrecisionOption,
    bar,
    console,
    highlighted,
    naming_inputs,
    open_model,
    print_json,
)
from bertsmith.inference.outputs import tags_to_json

if TYPE_CHECKING:
    from rich.text import Text

    from bertsmith.inference.outputs import Entity, TaggedWord

OUTSIDE = "O"
"""The tag of a word that is part of nothing (IOB)."""


def tag(
    text: Annotated[str, Argument(metavar="TEXT", help="A sentence, or a longer text.")],
    model: ModelOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Tag the words of a text.

    Prints each word with its tag and how sure the model is of it. Where the tags mark stretches of words,
    such as names, the text follows with these highlighted. A text of any length is read in windows.

    Example: bertsmith tag "She lives in Zürich." --model runs/ner
    """
    bert = open_model(model, "tag", device=device, precision=precision)
    with naming_inputs(lambda _: "the text"):
        (words,) = bert.tag([text])
    entities = bert.entities_of(text, words)
    if as_json:
        print_json(tags_to_json(words, entities))
        return
    screen = console()
    for line in word_lines(words):
        screen.print(line)
    if entities:
        screen.print()
        screen.print(with_entities(text, entities))


def word_lines(words: "list[TaggedWord]") -> "list[Text]":
    """A line for each word: the word, its tag, and how probable it is."""
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
    """The text with each stretch in the colour of its type, the type behind it in brackets."""
    types = sorted({each.type for each in entities})
    colours = {kind: COLOURS[index % len(COLOURS)] for index, kind in enumerate(types)}
    drawn, end = highlighted("", []), 0
    for each in entities:
        drawn.append(text[end : each.start])
        drawn.append(each.text, f"bold reverse {colours[each.type]}")
        drawn.append(f" [{each.type}]", colours[each.type])
        end = each.end
    return drawn.append(text[end:])
