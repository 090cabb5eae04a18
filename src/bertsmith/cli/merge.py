"""`bertsmith merge`: merge an adapter and its base into one ordinary model folder."""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json
from bertsmith.core.errors import UserError
from bertsmith.core.files import new_folder


def merge(
    model: Annotated[
        Path, Option(metavar="FOLDER", help="Adapter or run folder (LoRA), of bertsmith or peft.")
    ],
    out: Annotated[Path, Option(metavar="FOLDER", help="Model folder to write.")],
    base: options.Base = None,
    as_json: options.Json = False,
) -> None:
    """Merge an adapter into its base model.

    Writes an ordinary model folder, which every tool opens without peft and without the base. Wherever a
    model folder is accepted, an adapter folder is, too: merge for other tools, and for the quickest answers
    of a server.

    Example: bertsmith merge --model runs/sst2-lora --out models/sst2

    Example: bertsmith merge --model their-adapter --base models/bert-base --out models/theirs
    """
    from bertsmith.inference.model_path import is_adapter, model_folder

    if not is_adapter(model_folder(model)):
        remedy = "give a folder with adapter_config.json, for example of a run with head.encoder=lora"
        raise UserError("is not an adapter folder", where=str(model), remedy=remedy)
    from bertsmith.inference.loaded_model import load  # torch loads here, not for --help

    with new_folder(out) as fresh:
        load(model, device="cpu", base=base).save(fresh)
    print_json({"out": str(out)}) if as_json else echo(f"{model} -> {out}")
