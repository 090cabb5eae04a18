"""`bertsmith evaluate`: how right a fine-tuned model is on a labelled file."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo


def evaluate(
    model: Annotated[Path, Argument(metavar="RUN", help="Folder of a `bertsmith finetune` run.")],
    data: Annotated[Path, Option(help="A labelled file, or the task's folder.")],
    split: Annotated[str, Option(help="Which split of the folder; without it dev.")] = "",
    skip_bad: Annotated[bool, Option("--skip-bad", help="Skip bad lines and count them.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Evaluate a fine-tuned model by its task's official metrics.

    Examples:

    bertsmith evaluate runs/sst2 --data glue/SST-2/dev.tsv

    bertsmith evaluate runs/mnli --data glue/MNLI --split dev-mismatched
    """
    from bertsmith.finetuning.predict import predict_labelled
    from bertsmith.tasks.kinds.registry import metric_named

    file = predict_labelled([model.expanduser()], data.expanduser(), split=split, skip_bad=skip_bad)
    metrics = file.metrics()
    for warning in file.warnings:
        echo(warning, err=True)
    if as_json:
        echo(json.dumps({"examples": len(file.examples), "skipped": file.skipped, "measures": metrics}))
        return
    skipped = f" ({file.skipped:,} bad lines skipped)" if file.skipped else ""
    echo(f"{file.task.title}, {len(file.examples):,} examples{skipped}")
    for name, value in metrics.items():
        echo(f"  {name.replace('_', ' ')}: {metric_named(name).text(value)}")
