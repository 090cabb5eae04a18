"""`bertsmith checkpoint`: list and export the checkpoints that a pre-training run kept."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json
from bertsmith.cli.terminal import duration
from bertsmith.cli.verb import App
from bertsmith.core.errors import UserError

checkpoint = App(
    help="List the checkpoints of a pre-training run, and export them as model folders.",
)

RunArgument = Annotated[Path, Argument(metavar="RUN", help="Folder of a `bertsmith pretrain` run.")]


@checkpoint.command("list")
def list_checkpoints(run: RunArgument, as_json: options.Json = False) -> None:
    """List the checkpoints that a run kept, with the last held-out loss before each.

    Example: bertsmith checkpoint list runs/base
    """
    from bertsmith.objectives.registry import declaration  # torch loads here, not for --help
    from bertsmith.pretraining.checkpoint_export import kept_checkpoints
    from bertsmith.recipe.load import load_recipe

    found = kept_checkpoints(run)
    declared = declaration(load_recipe(run / "recipe.toml"))
    watched = declared.own[declared.watched]
    for kept in found:
        if as_json:
            print_json(asdict(kept))
            continue
        value = kept.held_out.get(watched.name)
        losses = [] if value is None else [f"held-out {watched.label} {watched.text(value)}"]
        spent = [f"{kept.tokens:,} tokens", duration(kept.seconds)]
        echo("  ".join([f"step {kept.step:,}", *spent, *losses]))


@checkpoint.command("export")
def export(
    run: RunArgument,
    out: Annotated[Path, Option(metavar="FOLDER", help="Model folder to write; with --all, one for each.")],
    step: Annotated[int | None, Option(help="Step of the checkpoint; by default the newest.")] = None,
    everything: Annotated[bool, Option("--all", help="All of them, as FOLDER/step-00001000 ...")] = False,
    store: Annotated[
        Path | None, Option(help="The store of a run that is not finished yet; otherwise not needed.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write checkpoints of a pre-training run as model folders, which open everywhere.

    A run keeps its newest two; run.keep_at names steps that it keeps for good. The last checkpoint of a
    finished run has the weights of its model. If a run averages its weights (run.average_from), a checkpoint
    is written with their average up to its step. Fine-tuned one by one, checkpoints can predict together:
    bertsmith evaluate --model A B C, bertsmith predict --model A B C.

    Example: bertsmith checkpoint export runs/base --step 500000 --out models/base-500k

    Example: bertsmith checkpoint export runs/base --all --out models/base
    """
    from bertsmith.pretraining.checkpoint_export import export_checkpoints, kept_checkpoints
    from bertsmith.training.checkpoint_storage import step_folder

    if everything and step is not None:
        raise UserError(
            "--step and --all exclude each other", where="`step` and `all`", remedy="give one of the two"
        )
    steps = [kept.step for kept in kept_checkpoints(run)]
    chosen = steps if everything else [steps[-1] if step is None else step]
    targets = {each: step_folder(out, each) if everything else out for each in chosen}
    export_checkpoints(run, targets, store=store)
    if as_json:
        print_json([{"step": each, "out": str(target)} for each, target in targets.items()])
        return
    for each, target in targets.items():
        echo(f"step {each:,} -> {target}")
