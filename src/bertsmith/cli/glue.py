"""`bertsmith glue`: every GLUE task in a folder, one table."""

import json
from pathlib import Path
from typing import Annotated

from typer import Exit, Option, echo

from bertsmith.cli.finetune import live_line, show_stop
from bertsmith.cli.terminal import STOPPED, progress_display


def glue(
    data: Annotated[Path, Option(help="The folder that holds CoLA/, SST-2/ and so on.")],
    out: Annotated[Path, Option(help="Folder for all runs; what is finished there is not done again.")],
    model: Annotated[Path | None, Option(help="Model folder; without it the small own one.")] = None,
    seeds: Annotated[int, Option(min=1, help="Runs for each task, from run.seed (0) on.")] = 1,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Skip bad lines and count them.")] = False,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="A setting for all tasks, repeatable.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Fine-tune on every GLUE task found and print one table, with the averages that papers report.

    A call that was stopped or killed resumes with the tasks that are not done yet.

    Example: bertsmith glue --model MODEL --data glue/ --out runs/glue --seeds 3
    """
    from bertsmith.inference.default_model import DEFAULT_MODEL  # torch loads here, not for --help
    from bertsmith.studies.glue_table import GlueRequest, plain_table, table_text
    from bertsmith.studies.glue_table import glue as study
    from bertsmith.studies.sweep import Stopped

    start = DEFAULT_MODEL if model is None else model.expanduser()
    given = tuple(settings or ())
    request = GlueRequest(start, data.expanduser(), out.expanduser(), seeds, given, skip_bad)
    try:
        with progress_display(live_line, as_json=as_json) as callback:
            table = study(request, callback)
    except Stopped as stopped:
        show_stop(stopped, as_json=as_json)
        raise Exit(STOPPED) from None
    echo(json.dumps(plain_table(table)) if as_json else table_text(table))
