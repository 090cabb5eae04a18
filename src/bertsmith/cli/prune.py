"""`bertsmith prune`: heads, feed-forward neurons and layers cut out of a fine-tuned model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option, echo

from bertsmith.cli.model_options import JsonOption, print_json
from bertsmith.cli.terminal import STOPPED, progress_display
from bertsmith.cli.text_files import SkipBadOption
from bertsmith.core.errors import UserError
from bertsmith.recipe.toml_text import value_text

if TYPE_CHECKING:
    from bertsmith.studies.pruning import PruningResult, RoundReport


def prune(
    model: Annotated[Path, Option(help="Fine-tuned model: the folder of a run, or a model folder.")],
    data: Annotated[Path, Option(help="The task's folder, or its file.")],
    out: Annotated[Path, Option(help="Folder to write; a job that was stopped resumes there.")],
    task: Annotated[str, Option(help="The task, to make sure; else the one that the model knows.")] = "",
    heads: Annotated[float, Option(min=0, max=1, help="Fraction of all attention heads to remove.")] = 0.0,
    ffn: Annotated[float, Option(min=0, max=1, help="Fraction of feed-forward neurons to remove.")] = 0.0,
    widths: Annotated[
        str, Option(help="equal: each layer loses as many neurons; free: the least important of all layers.")
    ] = "equal",
    drop_layers: Annotated[
        str, Option(metavar="LAYERS", help="Whole layers to remove first, counted from 0: 10,11.")
    ] = "",
    rounds: Annotated[int, Option(min=1, help="Heads and neurons go in so many equal parts.")] = 4,
    epochs: Annotated[float, Option(min=0, help="Training after each part, in passes; 0 for none.")] = 1.0,
    examples: Annotated[int, Option(min=1, help="Training examples that importance is taken over.")] = 1024,
    lr: Annotated[float | None, Option(help="Peak learning rate of the training (optim.peak_lr).")] = None,
    device: Annotated[str | None, Option(help="auto, cpu or cuda (run.device).")] = None,
    seed: Annotated[int | None, Option(help="Seed (run.seed).")] = None,
    skip_bad: SkipBadOption = False,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="A setting of the training, repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Cut the least important heads and neurons out of a fine-tuned model: it gets smaller and faster.

    What matters is found from the task's own data: the gradient of the loss by a gate on each head and each
    neuron (Michel et al. 2019). A part goes, the rest is trained a little, and so on. Every layer keeps at
    least one head.

    Example: bertsmith prune --model runs/sst2 --task sst2 --data SST-2 --heads 0.4 --ffn 0.5 --out runs/cut

    Example: bertsmith prune --model runs/ner --data conll --heads 0.4 --rounds 1 --epochs 0 --out runs/cut

    Example: bertsmith prune --model runs/sst2 --data glue/SST-2 --drop-layers 9,10,11 --out runs/nine-layers

    The result opens wherever a bertsmith folder does. With heads gone or widths that differ, transformers
    cannot have it: bertsmith export --transformers writes zeros in their place.
    """
    from bertsmith.studies.pruning import PruningRequest, Removal, pruning_recipe, task_of_model
    from bertsmith.studies.pruning import prune as job
    from bertsmith.studies.sweep import Stopped

    if widths not in ("equal", "free"):
        raise UserError(f"there is no {widths!r}", where="--widths", remedy="choose equal or free")
    layers = numbered_layers(drop_layers)
    if not (heads or ffn or layers):
        raise UserError("nothing is to be removed", remedy="give --heads, --ffn or --drop-layers")
    chosen, config = task_of_model(model.expanduser(), task)
    given = [
        ("--epochs", "run.epochs", epochs or None),
        ("--lr", "optim.peak_lr", lr),
        ("--device", "run.device", device),
        ("--seed", "run.seed", seed),
    ]
    options = [(name, f"{key}={value_text(value)}") for name, key, value in given if value is not None]
    removal = Removal(heads, ffn, widths, layers, rounds if heads or ffn else 1, examples)  # type: ignore[arg-type]
    request = PruningRequest(
        chosen,
        model.expanduser(),
        data.expanduser(),
        out.expanduser(),
        removal,
        pruning_recipe(chosen, config, settings or [], options=options),
        trains=epochs > 0,
        skip_bad=skip_bad,
    )
    from bertsmith.cli.finetune import live_line, show_stop

    try:
        with progress_display(live_line, as_json=as_json) as callback:
            result = job(request, callback)
    except Stopped as stopped:
        show_stop(stopped, as_json=as_json)
        raise Exit(STOPPED) from None
    print_json(plain_result(result)) if as_json else show(result)


def numbered_layers(text: str) -> tuple[int, ...]:
    """The numbers in a list such as 3,7."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if strange := [word for word in words if not word.isdecimal()]:
        raise UserError(f"{strange[0]!r} is no layer", where="--drop-layers", remedy="write numbers: 10,11")
    return tuple(sorted({int(word) for word in words}))


def plain_result(result: "PruningResult") -> dict[str, Any]:
    """The result for machines."""
    from dataclasses import asdict

    rounds = [asdict(each) for each in result.rounds]
    return {"folder": str(result.folder), "rounds": rounds, "kept_heads": result.kept_heads}


def show(result: "PruningResult") -> None:
    """Print what each round came to."""
    for number, report in enumerate(result.rounds):
        title = f"round {number}" if number else "as given"
        shape = f"{sum(report.heads)} heads, {sum(report.neurons):,} neurons, {report.parameters:,} weights"
        echo(f"  {title}: {shape}{_scores(report)}")
    echo(f"heads left by layer: {', '.join(map(str, result.rounds[-1].heads))}")
    echo(f"model: {result.folder / 'model'}")


def _scores(report: "RoundReport") -> str:
    from bertsmith.tasks.kinds.registry import metric_named

    parts = []
    for word, metrics in (("", report.pruned), ("trained: ", report.tuned)):
        for split, values in list(metrics.items())[:1]:
            name = next(iter(values))
            shown = metric_named(name).text(values[name])
            parts.append(f"; {word}{split} {name.replace('_', ' ')} {shown}")
    return "".join(parts)
