"""`bertsmith blimp`: measure the grammar that a model knows, by minimal pairs."""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.look.look_options import name_of_model
from bertsmith.cli.presenting import print_json


def blimp(
    *,
    data: Annotated[Path, Option(metavar="FOLDER", help="Folder with a .jsonl file for each set.")] = Path(
        "blimp"
    ),
    limit: Annotated[
        int | None, Option(min=1, metavar="N", help="Only the first N pairs of each set.")
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FOLDER", help="Also write the report: .txt, .json and .png.")
    ] = None,
    asked: options.AskedExactly,
    as_json: options.Json = False,
) -> None:
    """Measure the grammar that a model knows, on the 67 sets of minimal pairs of BLiMP.

    A model is right about a pair if it finds the acceptable sentence more likely (`bertsmith likelihood`); a
    tie counts half. Prints the accuracy by phenomenon, the mean over sets, and published results.

    A finished set is kept in the cache: a call that was stopped resumes at the set it was in. All sets have
    134,000 sentences, and a masked model reads each about ten times: on a CPU take a sample by --limit.

    Example: bertsmith blimp --data blimp/ --limit 20

    Example: bertsmith blimp --model runs/base --data blimp/ --out reports/base
    """
    from bertsmith.insight.report import plain, write_report
    from bertsmith.studies.blimp import blimp as study
    from bertsmith.studies.blimp import blimp_report, read_pair_sets

    sets = read_pair_sets(data, limit)
    bert = asked.open("fill", "extend")
    report = blimp_report(study(bert, sets), model=name_of_model(asked.folder, "fill"))
    if out is not None:
        write_report(report, out)
    if as_json:
        print_json(plain(report.values))
    else:
        echo(report.text(), nl=False)
