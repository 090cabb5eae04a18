"""`bertsmith embed`: a vector for each line of a file."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, echo

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
from bertsmith.cli.text_files import line_name, pieces_of, reading_bar
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def embed(
    source: Annotated[Path, Argument(metavar="FILE", help="One text a line; - reads the standard input.")],
    out: Annotated[Path, Option(metavar="FILE", help="The .npy file to write [texts, width], in fp32.")],
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
    """Turn each line of a file into a vector.

    The vectors are written as they come, so a file of any length takes little memory, and the .npy file
    appears only when it is whole. In Python: numpy.load("vectors.npy", mmap_mode="r"). A folder of
    sentence-transformers is followed in its pooling, normalisation, prompt and longest text; options go
    before it.

    Example: bertsmith embed texts.txt --out vectors.npy

    Example: bertsmith embed queries.txt --out vectors.npy --model models/e5-base --prompt "query: "

    Example: zcat texts.gz | bertsmith embed - --out vectors.npy --pooling cls --truncate
    """
    with without_garbage_collection():
        from bertsmith.inference.vectors import write_vectors

    source, out = source.expanduser(), out.expanduser()
    if source.is_file() and out.exists() and source.samefile(out):
        raise UserError("is the input itself", where=str(out), remedy="name another place for the vectors")
    bert = open_model(model, "embed", device=device, precision=precision)
    width = bert.model.network.config.width
    embedded = partial(bert.embed, pooling=pooling, normalize=normalize, prompt=prompt, truncate=truncate)
    rows = write_vectors(out, vectors_of(embedded, source), width=width)
    if as_json:
        print_json({"texts": rows, "width": width, "out": str(out)})
    else:
        echo(f"{rows:,} {'vector' if rows == 1 else 'vectors'} of width {width} -> {out}")


def vectors_of(embedded: "Callable[[list[str]], Tensor]", source: Path) -> "Iterator[Tensor]":
    """The vectors of a file's lines, piece by piece."""
    with reading_bar(source) as advance:
        for piece in pieces_of(source):
            with naming_inputs(partial(line_name, source, piece.first)):
                vectors = embedded(piece.texts)
            yield vectors
            advance(piece.size)
