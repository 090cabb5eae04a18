"""`bertsmith fill` and `next`: fill in masks, and predict if one sentence follows another."""

import math
import time
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Annotated, cast

from typer import Argument, Option

from bertsmith.cli import options
from bertsmith.cli.predicting import naming_inputs
from bertsmith.cli.presenting import bars, console, highlighted, print_json
from bertsmith.cli.text_files import STANDARD_INPUT, pieces_of, texts_of
from bertsmith.core.errors import UserError
from bertsmith.inference.outputs import masks_to_json

if TYPE_CHECKING:
    from bertsmith.inference.fill_mask import Candidate, Extension, Filling
    from bertsmith.inference.loaded_model import Bert
    from bertsmith.text.tokenizer import Tokenizer


TOP, BEAM = 5, 10
MASK_STYLE, OTHER_MASK_STYLE, NEW_STYLE = "bold reverse", "dim", "bold green"
WHY_SLOW = (
    "Why so slow? Nothing can be kept from one token to the next. Each layer of a BERT lets every token look "
    "at all others, to its left and to its right, so a new token changes the states of all before it, and "
    "the network reads the whole text again. A model that only looks to the left, such as a GPT, keeps these "
    "states and reads the new token alone."
)
WHY_KEPT = (
    "This model only looks to the left, so a new token does not change earlier states: its layers keep "
    "the states that they need, and it reads the new token alone."
)


def fill(
    *,
    text: Annotated[
        str,
        Argument(metavar="TEXT", help="A text with [MASK] in place of a token; - reads lines of stdin."),
    ],
    top: Annotated[
        int | None, Option(min=1, show_default=str(TOP), help="Number of tokens for each mask.")
    ] = None,
    together: Annotated[
        bool, Option("--together", help="Fill several masks with tokens that fit each other.")
    ] = False,
    extend: Annotated[
        int,
        Option(min=0, metavar="N", help="Instead, add N tokens at the end, and the rest of the last word."),
    ] = 0,
    asked: options.Asked,
    truncate: options.Truncate = False,
    as_json: options.Json = False,
) -> None:
    """Fill in the masks of a text.

    Prints the most probable tokens for each mask, while the other masks stay masked. With --together, masks
    are filled from left to right, and each sees the tokens in the masks before it (a beam search). With
    --extend, the text is continued without a mask, which is slow with an encoder that looks to both sides. A
    model that was pre-trained from left to right (GPT-2) sees only the text before the mask.

    Example: bertsmith fill "Paris is the [MASK] of France."

    Example: bertsmith fill "The [MASK] sat on the [MASK]." --together

    Example: bertsmith fill "In 1914 the war" --extend 12

    Example: bertsmith fill - --json < texts.txt
    """
    if extend and together:
        raise UserError("`extend` and `together` exclude each other", remedy="remove one of them")
    if extend and top is not None:
        remedy = "remove one of them: each new token is the most probable one"
        raise UserError("`extend` and `top` exclude each other", remedy=remedy)
    wanted = TOP if top is None else top
    bert = asked.open("fill", "extend")
    for where, each in texts_of(text, "the text"):
        with naming_inputs(lambda _, where=where: where):  # type: ignore[misc]  # mypy sees no type of a default
            if extend:
                show_extended(bert, each, extend, as_json=as_json)
            elif together:
                found = bert.fill_jointly(each, top=wanted, beam=max(wanted, BEAM), truncate=truncate)
                show_fillings(found, as_json=as_json)
            else:
                candidates = bert.fill(each, top=wanted, truncate=truncate)
                show_candidates(each, candidates, tokenizer=bert.tokenizer, as_json=as_json)


def show_candidates(
    text: str, candidates: "list[list[Candidate]]", *, tokenizer: "Tokenizer", as_json: bool
) -> None:
    """Print the tokens for each mask."""
    from bertsmith.inference.fill_mask import mask_offsets

    # If a long text was truncated, masks at its end lack candidates.
    offsets = mask_offsets(text, tokenizer)[: len(candidates)]
    if as_json:
        print_json({"masks": masks_to_json(offsets, candidates)})
        return
    screen = console()
    for number, of_mask in enumerate(candidates):
        styles = [MASK_STYLE if index == number else OTHER_MASK_STYLE for index in range(len(offsets))]
        screen.print(highlighted(text, [(*span, style) for span, style in zip(offsets, styles, strict=True)]))
        for line in bars((each.probability, each.token) for each in of_mask):
            screen.print(line)


def show_fillings(fillings: "list[Filling]", *, as_json: bool) -> None:
    """Print the texts with all masks filled."""
    if as_json:
        print_json({"fillings": [asdict(each) for each in fillings]})
        return
    screen = console()
    for line in bars((math.exp(each.log_probability), each.text) for each in fillings):
        screen.print(line)


def show_extended(bert: "Bert", text: str, count: int, *, as_json: bool) -> None:
    """Print the longer text, the time per token, and the reason for it."""
    added: list[tuple[Extension, float]] = []
    began = time.perf_counter()
    for each in bert.extend(text, count=count):
        now = time.perf_counter()
        added.append((each, 1000 * (now - began)))
        began = now
    longer = added[-1][0].text
    if as_json:
        tokens = [
            {"token": each.token, "probability": each.probability, "tokens_read": each.tokens, "ms": spent}
            for each, spent in added
        ]
        print_json({"text": longer, "added": tokens, "ms_per_token": median(spent for _, spent in added)})
        return
    screen = console()
    screen.print(highlighted(longer, [(len(text), len(longer), NEW_STYLE)]))
    first, last = added[0][0].tokens, added[-1][0].tokens
    spent = median(spent for _, spent in added)
    screen.print(
        f"\n{spent:.1f} ms per token: {first} tokens were read for the first one, {last} for the last."
    )
    keeps = bert.engine.network.encoder.stream() is not None
    if keeps or bert.model.network.config.direction == "both":
        screen.print(WHY_KEPT if keeps else WHY_SLOW, style="dim")


def next_sentence(
    *,
    first: Annotated[
        str,
        Argument(metavar="A", help="A sentence, or several; - reads pairs from stdin, with a tab each."),
    ],
    second: Annotated[str | None, Argument(metavar="B", help="Text that may follow it.")] = None,
    asked: options.Asked,
    truncate: options.Truncate = False,
    as_json: options.Json = False,
) -> None:
    """Predict if B follows A.

    Uses the head of BERT's second pre-training task, next sentence prediction: in training, half of the pairs
    were consecutive in a document, the others were not.

    Example: bertsmith next "We got some time." "Should we get some coffee?"

    Example: bertsmith next - --json < pairs.txt
    """
    if (first == str(STANDARD_INPUT)) != (second is None):
        remedy = "A and B, or only - for pairs on the standard input"
        raise UserError("give two texts", remedy=remedy)
    bert = asked.open("next")
    if second is not None:
        pairs, wheres = [(first, second)], ["the pair"]
    else:
        pieces = list(pieces_of(STANDARD_INPUT, pair_of_line))
        pairs = [cast(tuple[str, str], pair) for piece in pieces for pair in piece.texts]
        wheres = [where for piece in pieces for where in piece.wheres]
    with naming_inputs(wheres.__getitem__):
        several = bert.next_sentences(pairs, truncate=truncate)
    for found in several:
        if as_json:
            print_json(asdict(found))
            continue
        both = [(found.probability, "B follows A"), (1 - found.probability, "B does not follow A")]
        for line in bars(sorted(both, reverse=True)):
            console().print(line)


def pair_of_line(line: str) -> tuple[str, str]:
    """Parse the two texts of a line, separated by a tab."""
    first, tab, second = line.partition("\t")
    if not tab or "\t" in second:
        raise UserError("is not a pair of texts", remedy="write two texts with one tab between them")
    return first, second
