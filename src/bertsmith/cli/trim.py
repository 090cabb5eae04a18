"""`bertsmith trim`: reduce a model's vocabulary to the pieces that a user's texts need."""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.classify import text_or_pair
from bertsmith.cli.presenting import print_json
from bertsmith.cli.text_files import pieces_of, reading_bar
from bertsmith.core.files import new_folder


def trim(
    *,
    model: Annotated[Path, Option(metavar="FOLDER", help="Model, run or adapter folder (which is merged).")],
    source: Annotated[
        Path, Option("--input", metavar="FILE", help="Your texts, one per line (a pair: a tab), or a table.")
    ],
    out: Annotated[Path, Option(metavar="FOLDER", help="Model folder to write.")],
    table: options.TextTable,
    base: options.Base = None,
    as_json: options.Json = False,
) -> None:
    """Trim the vocabulary of a model to your texts, with its tokenizer: the table of words gets smaller.

    Your texts are split into the same pieces as before, and the model computes the same for them. Every
    character that occurs in them, and ASCII, is kept as a piece, so that new words are split into smaller
    pieces and not unknown. Give enough texts: pieces that never occur in them are removed.

    A multilingual model shrinks most: of BERT's 119,547 pieces a text in one language needs a fraction.

    Example: bertsmith trim --model models/mbert --input german.txt --out models/german

    Example: bertsmith trim --model runs/mine --input reviews.csv --text review --out runs/mine-small
    """
    texts = table.of(source)
    texts.check()
    from bertsmith.inference.loaded_model import load  # torch loads here, not for --help
    from bertsmith.shrink.vocabulary import with_vocabulary
    from bertsmith.text.trim_vocabulary import seen_ids, trimmed_vocabulary

    with new_folder(out) as fresh:
        bert = load(model, device="cpu", base=base)
        seen: set[int] = set()
        with reading_bar(texts) as advance:
            for piece in pieces_of(texts, text_or_pair):
                parts = [
                    text for each in piece.texts for text in ((each,) if isinstance(each, str) else each)
                ]
                seen = seen.union(*seen_ids(bert.tokenizer, parts))
                advance(piece.size)
        smaller = with_vocabulary(bert, trimmed_vocabulary(bert.tokenizer, seen))
        smaller.save(fresh)
    pieces = [each.model.network.config.vocabulary for each in (bert, smaller)]
    weights = [sum(one.numel() for one in each.model.network.parameters()) for each in (bert, smaller)]
    if as_json:
        print_json({"out": str(out), "pieces": pieces, "parameters": weights})
        return
    echo(f"{model} -> {out}: {pieces[0]:,} pieces -> {pieces[1]:,}, {weights[0]:,} weights -> {weights[1]:,}")
