"""`bertsmith quantise`: convert a model to 8-bit or 4-bit integers."""

from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.classify import text_or_pair
from bertsmith.cli.predicting import naming_inputs
from bertsmith.cli.presenting import print_json
from bertsmith.cli.text_files import TextSource, pieces_of
from bertsmith.core.errors import UserError
from bertsmith.core.files import new_folder

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Precision
    from bertsmith.inference.text_reader import TextOrPair

MEGABYTE = 1e6


def quantise(
    *,
    model: Annotated[Path, Option(metavar="FOLDER", help="Model, run or adapter folder (which is merged).")],
    out: Annotated[Path, Option(metavar="FOLDER", help="Model folder to write.")],
    calibrate: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Texts like the ones to predict, the first 512: one per line (a pair: a tab), or a table.",
        ),
    ] = None,
    bits: Annotated[int, Option(help="8, or with --weights-only 4.")] = 8,
    weights_only: Annotated[
        bool, Option("--weights-only", help="Quantise only the weights, to save memory.")
    ] = False,
    data: Annotated[
        Path | None, Option(help="The task's folder or a labelled file: evaluate before and after.")
    ] = None,
    table: options.PairTable,
    base: options.Base = None,
    as_json: options.Json = False,
) -> None:
    """Quantise a model to 8-bit or 4-bit integers.

    With --calibrate, your texts give the ranges for 8-bit products. The folder opens like any model folder
    (classify, serve, evaluate ...), is a quarter as large, and needs no further calibration. CPUs with 8-bit
    products (AVX-512 VNNI, AMX, ARM's dot products) use them; other CPUs multiply the same weights as real
    numbers, as fast as before. The model can predict, but not be trained.

    With --weights-only only the weights are rounded, and they stay small in memory.

    Example: bertsmith quantise --model runs/sst2 --calibrate texts.txt --out runs/int8

    Example: bertsmith quantise --model runs/sst2 --calibrate texts.txt --data glue/SST-2 --out runs/int8

    Example: bertsmith quantise --model runs/sst2 --weights-only --bits 4 --out runs/int4
    """
    if of_weights := calibrate is None or weights_only or bits != 8:
        _check_weights_only(bits, calibrate, weights_only=weights_only)
    from bertsmith.shrink.quantise import CALIBRATION_TEXTS, quantise_for_products, quantise_weights
    from bertsmith.tasks.kinds.registry import metric_named

    with new_folder(out) as fresh:
        scores = {} if data is None else {"before": _metrics(model, data, "fp32", base)}
        if of_weights:
            made = quantise_weights(model, fresh, bits=bits, base=base)
        else:
            assert calibrate is not None, "calibration needs texts"
            source = table.of(calibrate)
            chosen = _calibration(source, CALIBRATION_TEXTS)
            with naming_inputs([where for where, _ in chosen].__getitem__):
                made = quantise_for_products(model, [text for _, text in chosen], fresh, base=base)
        # Before the folder gets its name, so that a killed command can be run again and evaluates.
        if data is not None:
            scores["after"] = _metrics(fresh, data, made.precision)
    if as_json:
        print_json({"out": str(out), **asdict(made), **scores})
        return
    before, after = made.bytes_before / MEGABYTE, made.bytes_after / MEGABYTE
    how = f"calibrated on {made.texts:,} texts" if made.texts else "weights only"
    echo(f"{model} -> {out}: {bits} bits, {how}, {before:.1f} MB in fp32 -> {after:.1f} MB")
    for name in scores.get("before", {}):
        was, now = (metric_named(name).text(scores[when][name]) for when in ("before", "after"))
        echo(f"  {name.replace('_', ' ')}: {was} -> {now}")


def _calibration(source: TextSource, most: int) -> "list[tuple[str, TextOrPair]]":
    """Return the first texts of a file that are not blank, each with its place."""
    pieces = pieces_of(source, text_or_pair)
    lines = (line for piece in pieces for line in zip(piece.wheres, piece.texts, strict=True))
    chosen = list(islice((line for line in lines if "".join(line[1]).strip()), most))
    if not chosen:
        raise UserError("does not contain a text", where=str(source.path), remedy="write one text per line")
    return chosen


def _check_weights_only(bits: int, calibrate: Path | None, *, weights_only: bool) -> None:
    if bits not in (4, 8):
        raise UserError(f"is {bits}", key="bits", remedy="choose 8 or 4")
    if not weights_only and bits == 4:
        remedy = "add `weights_only`, or use 8 bits"
        raise UserError("4 bits are supported for weights only", key="bits", remedy=remedy)
    if not weights_only:
        remedy = "give texts with `calibrate=FILE`, or quantise only the weights with `weights_only`"
        raise UserError("8-bit products need calibration texts", remedy=remedy)
    if calibrate is not None:
        remedy = "remove one of the two"
        raise UserError("weights are quantised without texts", key="weights_only", remedy=remedy)


def _metrics(model: Path, data: Path, precision: str, base: Path | None = None) -> dict[str, float]:
    """Return the task's metrics on the CPU in this precision."""
    from bertsmith.finetuning.predict import predict_labelled

    chosen = cast("Precision", precision)
    return predict_labelled([model], data, device="cpu", precision=chosen, base=base).metrics()
