"""`bertsmith glue`: fine-tune on every GLUE task, and print one table."""

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.finetune import stoppable
from bertsmith.cli.presenting import print_json
from bertsmith.cli.request import COMMAS, lines_of
from bertsmith.core.errors import UserError


def glue(
    *,
    data: Annotated[Path, Option(help="The folder with CoLA/, SST-2/ and so on.")],
    out: Annotated[Path, Option(help="Folder for all runs; finished runs are not repeated.")],
    model: Annotated[Path | None, Option(help="Model folder; by default the embedded encoder.")] = None,
    tasks: Annotated[str, COMMAS, Option(help="Only these, with commas: sst2,mrpc.")] = "",
    lr_grid: Annotated[
        bool, Option("--lr-grid", help="The paper's four learning rates; the best on dev counts.")
    ] = False,
    random: Annotated[
        int, Option(min=0, help="Number of runs per task with random settings; the best on dev counts.")
    ] = 0,
    seeds: Annotated[int, Option(min=1, help="Runs for each task, from run.seed (0) on.")] = 1,
    skip_bad: options.SkipBad = False,
    rates: options.Rates,
    settings: options.Settings = None,
    as_json: options.Json = False,
) -> None:
    """Fine-tune on every GLUE task found and print one table, with the averages that papers report.

    A call that was stopped or killed resumes with the tasks that are not done yet.

    Each score is printed next to the score of the constant answer and the papers' figures.

    Example: bertsmith glue --model MODEL --data glue/ --out runs/glue --seeds 3

    Example: bertsmith glue --model MODEL --data glue/ --out runs/small --tasks mrpc,rte --lr-grid
    """
    from bertsmith.inference.embedded_models import default_model  # torch loads here, not for --help
    from bertsmith.studies.glue_table import GlueRequest, plain_table, table_text
    from bertsmith.studies.glue_table import glue as study

    start = model or default_model()
    flags = {"`seeds`": seeds > 1, "`lr_grid`": lr_grid, "`random`": bool(random)}
    several = [flag for flag, is_given in flags.items() if is_given]
    if len(several) > 1:
        remedy = f"give {' or '.join(several)}"
        raise UserError("these options exclude each other", where=" ".join(several), remedy=remedy)
    if rates.lr is not None and (lr_grid or random):
        what = "it has its own learning rates"
        raise UserError(what, where=several[0], remedy="remove `lr`")
    request = GlueRequest(
        start,
        data,
        out,
        seeds=seeds,
        settings=tuple(lines_of(settings)),
        options=tuple(rates.given()),
        skip_bad=skip_bad,
        tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
        search=random,
        lr_grid=lr_grid,
    )
    table = stoppable(partial(study, request), as_json=as_json)
    print_json(plain_table(table)) if as_json else echo(table_text(table))
