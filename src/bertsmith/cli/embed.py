"""`bertsmith embed`: compute a vector for each text of a file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option, echo

from bertsmith.cli.model_options import (
    DeviceOption,
    JsonOption,
    ModelOption,
    PoolingOption,
    PrecisionOption,
    PromptOption,
    TruncateOption,
    naming_inputs,
    open_model,
    print_json,
    without_garbage_collection,
)
from bertsmith.cli.text_files import (
    ColumnsOption,
    DelimiterOption,
    EncodingOption,
    Piece,
    SkipBadOption,
    TextColumnOption,
    TextSource,
    pieces_of,
    reading_bar,
    report_skipped,
    without_unreadable,
)
from bertsmith.core.errors import UserError
from bertsmith.tasks.table_format import TableFormat

if TYPE_CHECKING:
    from torch import Tensor

    from bertsmith.inference.text_reader import TextOrPair


def embed(
    out: Annotated[
        Path, Option(metavar="FILE", help="File to write, in fp32: .npy [texts, width], .csv or .parquet.")
    ],
    source: Annotated[
        Path, Option("--input", metavar="FILE", help="One text a line, or a table; - reads stdin.")
    ],
    column: TextColumnOption = "",
    delimiter: DelimiterOption = "",
    encoding: EncodingOption = "",
    columns: ColumnsOption = "",
    skip_bad: SkipBadOption = False,
    pooling: PoolingOption = None,
    normalize: Annotated[
        bool | None,
        Option(
            "--normalize/--no-normalize",
            help="Vectors of length 1; without it, what the folder says, else of length 1.",
        ),
    ] = None,
    prompt: PromptOption = None,
    model: ModelOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    truncate: TruncateOption = False,
    as_json: JsonOption = False,
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

    path, out = source.expanduser(), out.expanduser()
    if path.is_file() and out.exists() and path.samefile(out):
        raise UserError("is the input itself", where=str(out), remedy="name another place for the vectors")
    check_vector_file(out)
    form = TableFormat.parse(delimiter=delimiter, encoding=encoding, columns=columns)
    texts = TextSource(path, column, form=form, skip_bad=skip_bad)
    texts.check()
    bert = open_model(model, "embed", device=device, precision=precision)
    width = bert.model.network.config.width
    bad: list[UserError] = []
    embedded = partial(bert.embed, pooling=pooling, normalize=normalize, prompt=prompt, truncate=truncate)

    def readable(piece: Piece) -> Piece:
        return without_unreadable(bert, piece, truncate=truncate) if skip_bad else piece

    pieces = map(readable, pieces_of(texts))
    rows = write_vectors(out, vectors_of(embedded, texts, pieces, bad), width=width)
    report_skipped(bad)
    if as_json:
        skipped = {"skipped": len(bad)} if skip_bad else {}
        print_json({"texts": rows, "width": width, "out": str(out), **skipped})
    else:
        echo(f"{rows:,} {'vector' if rows == 1 else 'vectors'} of width {width} -> {out}")


def vectors_of(
    embedded: "Callable[[list[TextOrPair]], Tensor]",
    source: TextSource,
    pieces: Iterable[Piece],
    bad: list[UserError],
) -> "Iterator[tuple[Sequence[int], Tensor]]":
    """Yield the numbers and vectors of a file's texts; append skipped ones to `bad`."""
    with reading_bar(source) as advance:
        for piece in pieces:
            bad += piece.bad
            with naming_inputs(piece.wheres.__getitem__):
                vectors = embedded(piece.texts)
            yield piece.numbers, vectors
            advance(piece.size)
