"""`bertsmith embed`: compute a vector for each text of a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.predicting import without_garbage_collection
from bertsmith.cli.presenting import print_json
from bertsmith.cli.text_files import computed_pieces
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    pass


def embed(
    *,
    out: Annotated[
        Path, Option(metavar="FILE", help="File to write, in fp32: .npy [texts, width], .csv or .parquet.")
    ],
    source: Annotated[
        Path, Option("--input", metavar="FILE", help="One text a line, or a table; - reads stdin.")
    ],
    pooling: options.Pooling = None,
    normalize: Annotated[
        bool | None,
        Option(
            "--normalize/--no-normalize",
            help="Vectors of length 1; by default as the folder defines, else of length 1.",
        ),
    ] = None,
    prompt: options.Prompt = None,
    table: options.TextTable,
    asked: options.Asked,
    truncate: options.Truncate = False,
    as_json: options.Json = False,
) -> None:
    """Turn each text of a file into a vector.

    The vectors are written as they are computed, so a file of any length takes little memory; it appears only
    when it is complete. In Python: numpy.load("vectors.npy", mmap_mode="r"). A .csv or .parquet file also has
    the number of each text's line or row, counted from 1. Pooling, normalisation, prompt and longest text
    follow a folder of sentence-transformers; options override it.

    Example: bertsmith embed --input texts.txt --out vectors.npy

    Example: bertsmith embed --input reviews.csv --text review --out vectors.parquet

    Example: bertsmith embed --input queries.txt --out v.npy --model models/e5-base --prompt "query: "

    Example: zcat texts.gz | bertsmith embed --input - --out vectors.npy --pooling cls --truncate
    """
    with without_garbage_collection():
        from bertsmith.inference.vectors import check_vector_file, write_vectors

    if source.is_file() and out.exists() and source.samefile(out):
        raise UserError("is the input itself", where=str(out), remedy="choose another file for the vectors")
    check_vector_file(out)
    texts = table.of(source)
    texts.check()
    bert = asked.open("embed")
    width = bert.model.network.config.width
    bad: list[UserError] = []
    pieces = computed_pieces(
        bert,
        texts,
        lambda piece: bert.embed(
            piece.texts, pooling=pooling, normalize=normalize, prompt=prompt, truncate=truncate
        ),
        truncate=truncate,
        bad=bad,
    )
    rows = write_vectors(out, ((piece.numbers, vectors) for piece, vectors in pieces), width=width)
    if as_json:
        skipped = {"skipped": len(bad)} if table.skip_bad else {}
        print_json({"texts": rows, "width": width, "out": str(out), **skipped})
    else:
        echo(f"{rows:,} {'vector' if rows == 1 else 'vectors'} of width {width} -> {out}")
