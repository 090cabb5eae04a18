"""`bertsmith evaluate`: how right a fine-tuned model is on a labelled file."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo


def evaluate(
    model: Annotated[Path, Argument(metavar="RUN", help="Folder of a `bertsmith finetune` run.")],
    data: Annotated[Path, Option(help="A labelled file, or the task's folder.")],
    split: Annotated[str, Option(help="Which split of the folder; without it dev.")] = "",
    skip_bad: Annotated[bool, Option("--skip-bad", help="Leave bad lines out and count them.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Judge a fine-tuned model by its task's official measures.

    Examples:

    bertsmith evaluate runs/sst2 --data glue/SST-2/dev.tsv

    bertsmith evaluate runs/mnli --data glue/MNLI --split dev-mismatched
    """
    from bertsmith.finetuning.using import ask  # torch loads here, not for --help
    from bertsmith.tasks.number_errors import measure_text

    said = ask([model.expanduser()], data.expanduser(), split=split, skip_bad=skip_bad)
    measures = said.measures()
    for remark in said.remarks:
        echo(remark, err=True)
    if as_json:
        echo(json.dumps({"examples": len(said.examples), "skipped": said.skipped, "measures": measures}))
        return
    echo(f"{said.task.title}, {len(said.examples):,} examples" + _skipped(said.skipped))
    for name, value in measures.items():
        echo(f"  {name.replace('_', ' ')}: {measure_text(name, value)}")


def _skipped(count: int) -> str:
    return f" ({count:,} bad lines left out)" if count else ""
