"""`bertsmith look attention`, `senses` and `words`: views for a browser, each in one file.

For attention and senses, a .png file gets a picture instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, echo

from bertsmith.cli import options
from bertsmith.cli.look import look_options as looking
from bertsmith.cli.predicting import naming_inputs
from bertsmith.cli.presenting import print_json
from bertsmith.core.errors import TRUNCATE, UserError
from bertsmith.core.wording import counted

if TYPE_CHECKING:
    from bertsmith.inference.text_reader import TextOrPair
    from bertsmith.insight.deciding_words import DecidingWords, Faithfulness

ViewOption = Annotated[
    Path, Option("--out", metavar="FILE", help="HTML file to write; it needs nothing else.")
]
ViewOrPictureOption = Annotated[
    Path, Option("--out", metavar="FILE", help="HTML file to write, which needs nothing else; or a .png.")
]
PICTURE = ".png"
SecondOption = Annotated[str, Option("--text2", help="The second text of a pair.")]


def attention(
    text: Annotated[str, Argument(metavar="TEXT", help="Text to read.")],
    out: ViewOrPictureOption,
    second: SecondOption = "",
    model: options.Model = None,
    device: options.Device = "auto",
) -> None:
    """Write a view of all heads over one text: choose a head, then a token, and see what it reads.

    It works offline and by keyboard, with texts up to the model's maximum length. A .png shows one head as
    arcs over the text, the flow from layer to layer, and all heads.

    Example: bertsmith look attention "The dog that chased the cats was tired." --out view.html
    """
    from bertsmith.insight.html_view import write_view
    from bertsmith.insight.view_pictures import write_attention_picture
    from bertsmith.insight.views import attention_data

    place, bert = _checked(out, PICTURE), looking.open_for_looking(model, device)
    title, given = f"Attention in {looking.name_of_model(model)}", (text, second) if second else text
    try:
        if place.suffix.lower() == PICTURE:
            echo(f"{write_attention_picture(place, bert, given, title=title):,} tokens -> {place}")
            return
        data = attention_data(bert, given)
    except UserError as error:  # do not truncate: attention differs over half of a text
        if error.index is None:  # the error is about something else
            raise
        remedy = "shorten it" if error.remedy == TRUNCATE else error.remedy
        raise replace(error, index=None, where="the text", remedy=remedy) from error
    write_view(place, "attention_view", data, title=title)
    echo(f"{len(data['tokens']):,} tokens, {data['layers']} layers of {data['heads']} heads -> {place}")


def senses(
    word: Annotated[str, Option(help="The word.")],
    texts: looking.Texts,
    out: ViewOrPictureOption,
    model: options.Model = None,
    device: options.Device = "auto",
) -> None:
    """Write a map of a word's vectors in the sentences of a file; sentences without the word are left out.

    A .png shows the embeddings, a layer in the middle and the last one.

    Example: bertsmith look senses --word bank --input texts.txt --out senses.html
    """
    from bertsmith.insight.html_view import write_view
    from bertsmith.insight.view_pictures import write_senses_picture
    from bertsmith.insight.views import senses_data

    place, bert = _checked(out, PICTURE), looking.open_for_looking(model, device)
    title = f"“{word}” in {looking.name_of_model(model)}"
    given = [str(each) for each in looking.texts_or_pairs(texts) if isinstance(each, str)]
    with naming_inputs(lambda index: f"{texts}:{index + 1}"):
        if place.suffix.lower() == PICTURE:
            sentences = write_senses_picture(place, bert, word, given, title=title)
        else:
            data = senses_data(bert, word, given)
            write_view(place, "senses_view", data, title=title)
            sentences = len(data["sentences"])
    echo(f"{sentences:,} sentences of {len(given):,} -> {place}")


def words(
    out: ViewOption,
    text: Annotated[str, Argument(metavar="[TEXT]", help="A text to explain, or --input.")] = "",
    second: SecondOption = "",
    texts: Annotated[
        Path | None, Option("--input", metavar="FILE", help="One text a line, a tab between two of a pair.")
    ] = None,
    model: options.Model = None,
    seed: looking.Seed = 0,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Write a view of the words that decided a text's class, by two methods, with their faithfulness.

    Leave-one-out is the loss of the class's probability without the word; gradient x input is the change of
    the class's score with the word's vector. Comprehensiveness and sufficiency (DeYoung et al. 2020) measure
    how much the probability falls without the words that a method ranks first, and with them alone, compared
    with random words.

    Without --model, the embedded model for sentiment decides.

    Example: bertsmith look words "A stunning ballet dancer." --out why.html

    Example: bertsmith look words --model runs/sst2 --input reviews.txt --out why.html
    """
    from bertsmith.insight.deciding_words import deciding_words, mean_faithfulness
    from bertsmith.insight.html_view import write_view
    from bertsmith.insight.views import words_data

    place = _checked(out)
    if bool(text) == (texts is not None):
        remedy = "give a text, or `input=FILE`"
        raise UserError("nothing to explain", remedy=remedy)
    given: list[TextOrPair] = (
        looking.texts_or_pairs(texts) if texts is not None else [(text, second) if second else text]
    )
    bert = looking.open_for_looking(model, device, "classify")
    with naming_inputs(lambda index: f"{texts}:{index + 1}" if texts is not None else "the text"):
        found = deciding_words(bert, given, seed=seed)
    name = looking.name_of_model(model, "classify")
    data = words_data(found, model=name)
    # Printed first, so that minutes of work are not lost if the view cannot be written.
    if as_json:
        print_json(data)
    else:
        _show(found[:1] if texts is None else (), mean_faithfulness(found))
    write_view(place, "words_view", data, title=f"Which words decided in {name}")
    if not as_json:
        echo(f"{counted(len(found), 'text')} -> {place}")


def _show(found: "Sequence[DecidingWords]", faithfulness: "Mapping[str, Faithfulness]") -> None:
    """Print the words of these texts, and the faithfulness of each method."""
    for each in found:
        echo(f"{each.label} {each.probability:.1%}")
        order = sorted(range(len(each.words)), key=lambda at: -each.scores["leave-one-out"][at])
        for at in order:
            scores = "  ".join(f"{name} {values[at]:+.3f}" for name, values in each.scores.items())
            echo(f"  {each.words[at][1].text:<20} {scores}")
    for name, trust in faithfulness.items():
        numbers = f"comprehensiveness {trust.comprehensiveness:.3f}, sufficiency {trust.sufficiency:.3f}"
        echo(f"{name}: {numbers}")


def _checked(out: Path, *others: str) -> Path:
    if out.suffix.lower() not in (".html", ".htm", *others):
        remedy = f"use a file name that ends in {' or '.join(('.html', *others))}"
        raise UserError("is not the name of a page", where=f"`out={out}`", remedy=remedy)
    return out
