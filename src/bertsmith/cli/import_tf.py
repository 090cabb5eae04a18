"""`bertsmith import-tf`: turn a published TensorFlow 1 checkpoint into a model folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option, echo

from bertsmith.cli import options

if TYPE_CHECKING:
    from bertsmith.interchange.tensorflow import ImportReport


def import_tf(
    source: Annotated[
        Path, Argument(metavar="SOURCE", help="Folder of the checkpoint, config and vocabulary.")
    ],
    out: Annotated[Path, Option(metavar="FOLDER", help="Model folder to write.")],
    gelu: Annotated[
        Literal["published", "erf", "tanh"],
        Option(help="Form of GELU; 'published' is the one the checkpoint was released with."),
    ] = "published",
    as_json: options.Json = False,
) -> None:
    """Import a TensorFlow 1 checkpoint.

    Writes a model folder that bertsmith.load and the Hugging Face tools open. TensorFlow is not needed.

    SOURCE contains bert_config.json, bert_model.ckpt.* and vocab.txt; if a folder has several checkpoints,
    name one: FOLDER/bert_model.ckpt. Google's code calls two functions "gelu": the erf form until February
    2019 and its tanh approximation since. Give --gelu tanh for a BERT that was trained with the later code.

    Example: bertsmith import-tf uncased_L-12_H-768_A-12 --out models/bert-base
    """
    from bertsmith.interchange.tensorflow import import_checkpoint  # torch loads here, not for --help

    report = import_checkpoint(source, out, gelu=gelu)
    if not as_json:
        show(report)
        return
    summary = {
        "out": str(report.out),
        "architecture": report.architecture,
        "parameters": report.parameters,
        "with_tokenizer": report.with_tokenizer,
        "skipped": list(report.skipped),
        "unknown": list(report.unknown),
    }
    echo(json.dumps(summary))


def show(report: "ImportReport") -> None:
    """Print the report as a few lines for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("wrote", str(report.out))
    table.add_row("model", f"{report.architecture}, {report.parameters:,} parameters")
    if not report.with_tokenizer:
        table.add_row(
            "tokenizer",
            "no vocab.txt or 30k-clean.model came along: put the model's tokenizer.json beside it",
        )
    for label, names in (("skipped", report.skipped), ("unknown", report.unknown)):
        if names:
            table.add_row(
                label, f"{len(names)}: " + ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            )
    Console(highlight=False, markup=False, emoji=False).print(table)
