"""`bertsmith cost`: compare the cost and the quality of models."""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json


def cost(
    model: Annotated[
        list[Path],
        Option(metavar="FOLDER...", help="Fine-tuned models: runs, folders of seeds, what was made of them."),
    ],
    task: Annotated[str, Option(help="The task they were fine-tuned for: sst2, mrpc, ner ...")],
    data: Annotated[Path, Option(help="The task's folder, or a labelled file.")],
    out: Annotated[Path, Option(metavar="FOLDER", help="Folder to write; what is measured there stays.")],
    seconds: Annotated[float, Option(min=0.0, help="For each timing, at least.")] = 3.0,
    as_json: options.Json = False,
) -> None:
    """Compare the cost and the quality of models.

    For each model: weights, size on disk, operations, latency of one text (median and 95th percentile),
    texts per second in batches of 64, seconds from start to the first scores, peak memory, energy if the
    machine has readable RAPL counters, latency by length, and the task's metric, with its spread if a folder
    has several seeds. Measured on the CPU and, if there is one, on the GPU.

    Each model is measured in a separate process, one after the other, and opened as by other commands
    (--precision auto). Writes cost.txt, cost.json and cost.png, a picture of quality against latency in which
    a line joins the models that no other beats in both. A call that was stopped continues.

    Example: bertsmith cost --model runs/sst2 runs/pruned runs/int8 --task sst2 --data glue/SST-2 --out cost
    """
    from bertsmith.insight.report import plain
    from bertsmith.studies.cost_table import CostTableRequest, cost_table
    from bertsmith.tasks.catalogue import task_named

    folders = tuple(dict.fromkeys(model))
    request = CostTableRequest(task_named(task), folders, data, out, seconds)
    report = cost_table(request, lambda text: echo(text, err=True))
    if as_json:
        print_json(plain(report.values))
    else:
        echo(report.text())
