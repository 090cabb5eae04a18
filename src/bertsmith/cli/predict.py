"""`bertsmith predict`: what a fine-tuned model, or several together, say of a file."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from bertsmith.ground.errors import UserError


def predict(
    models: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of `bertsmith finetune` runs.")],
    data: Annotated[Path, Option("--input", help="File in the task's format; labels are not needed.")],
    out: Annotated[Path, Option(help="File to write; for questions a folder with three JSON files.")],
    ensemble: Annotated[bool, Option("--ensemble", help="Let several models answer together.")] = False,
    official: Annotated[Path | None, Option(help="Also write the GLUE site's TSV into this folder.")] = None,
    split: Annotated[str, Option(help="Which split the file is, where its name does not say.")] = "",
    skip_bad: Annotated[bool, Option("--skip-bad", help="Leave bad lines out and count them.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Write what a model says of each example of a file.

    Texts and choices become a TSV with the prediction and the probability of each class or option; tagged
    words become columns for conlleval; questions become the three JSON files of the SQuAD scripts.

    Examples:

    bertsmith predict runs/sst2 --input new.tsv --out predictions.tsv

    bertsmith predict --ensemble runs/a runs/b runs/c --input new.tsv --out predictions.tsv
    """
    from bertsmith.finetuning.using import foretell, write_official, write_predictions
    from bertsmith.tasks.submissions import submission_file

    if len(models) > 1 and not ensemble:
        remedy = "add --ensemble to let them answer together, or give one folder"
        raise UserError("several models were given", remedy=remedy)
    data, out = data.expanduser(), out.expanduser()
    _refuse_to_overwrite(data, out)
    said = foretell([folder.expanduser() for folder in models], data, split=split, skip_bad=skip_bad)
    _refuse_to_overwrite(said.path, out)
    if official is not None:
        _refuse_to_overwrite(said.path, official.expanduser() / submission_file(said.task, said.split))
    # The official file first: a task that the site does not take must not leave half of what was asked for.
    submitted = [] if official is None else [write_official(official.expanduser(), said)]
    names = [str(path) for path in (*write_predictions(out, said), *submitted)]
    if as_json:
        echo(json.dumps({"examples": len(said.examples), "skipped": said.skipped, "written": names}))
        return
    echo(f"{len(said.examples):,} examples -> {', '.join(names)}")
    if said.skipped:
        echo(f"{said.skipped:,} bad lines were left out")


def _refuse_to_overwrite(data: Path, out: Path) -> None:
    """Stop where the predictions would take the place of the texts."""
    if data.is_file() and out.exists() and data.samefile(out):
        raise UserError(
            "is the input itself", where=str(out), remedy="name another place for the predictions"
        )
