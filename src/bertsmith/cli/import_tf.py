"""`bertsmith import-tf`: turn a published TensorFlow 1 checkpoint into a model folder."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from bertsmith.cli import options
from bertsmith.cli.presenting import print_facts, print_json

if TYPE_CHECKING:
    from bertsmith.interchange.tensorflow import ImportReport


def import_tf(
    source: Annotated[
        Path, Argument(metavar="SOURCE", help="Folder of the checkpoint, config and vocabulary.")
    ],
    out: Annotated[Path, Option(metavar="FOLDER", help="Model folder to write.")],
    gelu: Annotated[
        Literal["published", "erf", "tanh"],
        Option(help="Form of GELU; 'published': the form of the released checkpoint."),
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
    if as_json:
        print_json(asdict(report) | {"out": str(report.out)})
    else:
        show(report)


def show(report: "ImportReport") -> None:
    """Print the report as a few lines for people."""
    facts = [("wrote", str(report.out))]
    facts += [("model", f"{report.architecture}, {report.parameters:,} parameters")]
    if not report.with_tokenizer:
        why = "vocab.txt or 30k-clean.model is missing: add the model's tokenizer.json"
        facts += [("tokenizer", why)]
    for label, names in (("skipped", report.skipped), ("unknown", report.unknown)):
        if names:
            facts += [(label, f"{len(names)}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")]
    print_facts(facts)
