"""`bertsmith prune`: cut heads, neurons and layers out of a model, or set single weights to zero."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.finetune import stoppable
from bertsmith.cli.presenting import print_json
from bertsmith.cli.request import lines_of
from bertsmith.cli.spelling import Setting
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bertsmith.studies.magnitude_pruning import SparseResult
    from bertsmith.studies.pruning import Metrics, PruningResult, Removal, RoundReport


def prune(
    model: Annotated[Path, Option(help="Fine-tuned model: the folder of a run, or a model folder.")],
    data: Annotated[Path, Option(help="The task's folder, or its file.")],
    out: Annotated[Path, Option(help="Folder to write; a job that was stopped resumes there.")],
    task: Annotated[str, Option(help="The task; by default the task of the model.")] = "",
    heads: Annotated[float, Option(min=0, max=1, help="Fraction of all attention heads to remove.")] = 0.0,
    ffn: Annotated[float, Option(min=0, max=1, help="Fraction of feed-forward neurons to remove.")] = 0.0,
    widths: Annotated[
        Literal["equal", "free"] | None,
        Option(help="equal (the default): as many neurons from each layer; free: the least important."),
    ] = None,
    drop_layers: Annotated[
        str, Option(metavar="LAYERS", help="Whole layers to remove first, counted from 0: 10,11.")
    ] = "",
    examples: Annotated[
        int | None, Option(min=1, help="Training examples to measure importance on: 1024.")
    ] = None,
    method: Annotated[
        Literal["importance", "magnitude"],
        Option(help="importance: heads and neurons; magnitude: single weights (--sparsity)."),
    ] = "importance",
    sparsity: Annotated[
        str,
        Option(
            metavar="FRACTION",
            help="magnitude: fraction of the layers' weights to set to zero, or several: a,b.",
        ),
    ] = "",
    rewind: Annotated[
        float | None,
        Option(help="magnitude: train first, prune, and rewind to this fraction of the training."),
    ] = None,
    retrain: Annotated[
        str,
        Option(
            metavar="HOW",
            help="With --rewind, what to rewind: weights (the default), rate, finetune (nothing), or "
            "several: a,b.",
        ),
    ] = "",
    rounds: Annotated[
        int | None, Option(min=1, help="Number of rounds of removal: 4, and 1 with --rewind.")
    ] = None,
    epochs: Annotated[
        float | None,
        Setting("run.epochs"),
        Option(min=0, help="Training after each part: 1, or 0 for none; magnitude: the task's."),
    ] = None,
    lr: Annotated[
        float | None,
        Setting("optim.peak_lr"),
        Option(help="Peak learning rate of the training (optim.peak_lr)."),
    ] = None,
    device: Annotated[
        str | None, Setting("run.device"), Option(help="auto, cpu or cuda (run.device).")
    ] = None,
    seed: Annotated[int | None, Setting("run.seed"), Option(help="Seed (run.seed).")] = None,
    skip_bad: options.SkipBad = False,
    settings: options.Settings = None,
    as_json: options.Json = False,
) -> None:
    """Cut the least important heads and neurons out of a fine-tuned model: it gets smaller and faster.

    Importance is measured on the task's own data: the gradient of the loss by a gate on each head and each
    neuron (Michel et al. 2019). A part is removed, the rest is trained a little, and so on. Every layer keeps
    at least one head.

    Example: bertsmith prune --model runs/sst2 --task sst2 --data SST-2 --heads 0.4 --ffn 0.5 --out runs/cut

    Example: bertsmith prune --model runs/ner --data conll --heads 0.4 --rounds 1 --epochs 0 --out runs/cut

    Example: bertsmith prune --model runs/sst2 --data glue/SST-2 --drop-layers 9,10,11 --out runs/nine-layers

    With --method magnitude the smallest single weights become zero, gradually while a pre-trained model is
    fine-tuned. With --rewind they become zero after fine-tuning, and the others are trained again from an
    early step. Such a model is as large and as fast as before: it is for studying which weights a task needs.

    Example: bertsmith prune --model M --task sst2 --data SST-2 --method magnitude --sparsity 0.7 --out runs/7

    Example: bertsmith prune --model M --task sst2 --data SST-2 --method magnitude --sparsity 0.5,0.7,0.9
    --rewind 0.1 --retrain weights,rate,finetune --out runs/lottery
    """
    places = Places(model, data, out, skip_bad=skip_bad)
    given = [
        ("epochs", "run.epochs", epochs or (None if method == "magnitude" else 1.0)),
        ("lr", "optim.peak_lr", lr),
        ("device", "run.device", device),
        ("seed", "run.seed", seed),
    ]
    training = Training(task, tuple(lines_of(settings)), tuple(options.settings_of(given)))
    if method == "magnitude":
        units = {"heads": heads, "ffn": ffn, "drop_layers": drop_layers, "widths": widths}
        check_no_units(units | {"examples": examples})
        if epochs == 0:
            what, remedy = "single weights are removed during training", "remove it"
            raise UserError(what, key="epochs", remedy=remedy)
        if rewind is None and (retrain or rounds):
            key, remedy = "retrain" if retrain else "rounds", "remove it, or add `rewind=0.1`"
            raise UserError("weights are removed in a single training", key=key, remedy=remedy)
        asked = SparseOptions(sparsity, rewind, retrain or "weights", rounds or 1)
        show_sparse(run_magnitude(places, training, asked, as_json=as_json), as_json=as_json)
        return
    if sparsity or rewind is not None or retrain:
        what = "single weights are removed by magnitude, not by importance"
        raise UserError(what, where="`sparsity`, `rewind`, `retrain`", remedy="add `method=magnitude`")
    layers = numbered_layers(drop_layers)
    if not (heads or ffn or layers):
        raise UserError("nothing to remove", remedy="give `heads`, `ffn` or `drop_layers`")
    from bertsmith.studies.pruning import Removal

    parts = (rounds or 4) if heads or ffn else 1
    removal = Removal(heads, ffn, widths or "equal", layers, parts, examples or 1024, trains=epochs != 0)
    result = run_rounds(places, training, removal, as_json=as_json)
    print_json(plain_result(result)) if as_json else show(result)


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of the model, the data and the output."""

    model: Path
    data: Path
    out: Path
    skip_bad: bool


@dataclass(frozen=True, slots=True)
class Training:
    """The named task, if any, and the settings of the training."""

    task: str
    settings: tuple[str, ...]
    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SparseOptions:
    """The options of pruning by magnitude."""

    sparsity: str
    rewind: float | None
    retrain: str
    rounds: int


def run_rounds(places: Places, training: Training, removal: "Removal", *, as_json: bool) -> "PruningResult":
    """Remove heads and neurons in rounds."""
    from bertsmith.studies.pruning import PruningJob, prune, pruning_recipe, task_of_model

    chosen, config = task_of_model(places.model, training.task)
    recipe = pruning_recipe(chosen, config, training.settings, options=training.options)
    where = (places.model, places.data, places.out)
    job = PruningJob(chosen, *where, recipe, places.skip_bad)
    return stoppable(lambda callback: prune(job, removal, callback), as_json=as_json)


def run_magnitude(
    places: Places, training: Training, asked: SparseOptions, *, as_json: bool
) -> "list[SparseResult]":
    """Set single weights to zero."""
    from bertsmith.studies.magnitude_pruning import RETRAINING, Sparsities, prune_by_magnitude
    from bertsmith.studies.pruning import PruningJob, task_to_train

    if not (sparsities := listed_fractions(asked.sparsity)):
        what = "needs the fraction of the weights to set to zero"
        raise UserError(what, where="`method=magnitude`", remedy="add `sparsity=0.7`")
    for sparsity in sparsities:
        if not 0 < sparsity < 1:
            what = f"{sparsity:g} of the weights cannot be zero"
            raise UserError(what, key="sparsity", remedy="choose one, for example 0.7")
    if asked.rewind is None and len(sparsities) > 1:
        what = "training reaches one sparsity only"
        raise UserError(what, key="sparsity", remedy="give one, or add `rewind=0.1`")
    methods = tuple(dict.fromkeys(word.strip() for word in asked.retrain.split(",") if word.strip()))
    if strange := [word for word in methods if word not in RETRAINING] or ([""] if not methods else []):
        remedy = f"choose from {', '.join(RETRAINING)}"
        raise UserError(f"{strange[0]!r} is not a choice", key="retrain", remedy=remedy)
    rows = [
        ("rewind", "sparse.early_at", asked.rewind),
        ("sparsity", "sparse.gradual", sparsities[0] if asked.rewind is None else None),
    ]
    given = [*training.options, *options.settings_of(rows)]
    task, recipe = task_to_train(places.model, training.task, training.settings, options=given)
    job = PruningJob(task, places.model, places.data, places.out, recipe, places.skip_bad)
    wanted = Sparsities(sparsities, methods, asked.rounds)  # type: ignore[arg-type]  # checked above
    return stoppable(lambda callback: prune_by_magnitude(job, wanted, callback), as_json=as_json)


def check_no_units(given: "Mapping[str, object]") -> None:
    """Raise if an option for heads, neurons or layers is given with --method magnitude."""
    if named := [name for name, value in given.items() if value]:
        what = "single weights are removed by magnitude; heads, neurons and layers by importance"
        raise UserError(what, key=named[0], remedy="remove it, or `method=magnitude`")


def numbered_layers(text: str) -> tuple[int, ...]:
    """Parse layer numbers in a list such as 3,7."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if strange := [word for word in words if not word.isdecimal()]:
        raise UserError(f"{strange[0]!r} is not a layer", key="drop_layers", remedy="write numbers: 10,11")
    return tuple(sorted({int(word) for word in words}))


def listed_fractions(text: str) -> tuple[float, ...]:
    """Parse fractions in a list such as 0.5,0.7, without duplicates."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        return tuple(dict.fromkeys(map(float, words)))
    except ValueError:
        what, remedy = f"{text!r} is not a fraction of the weights", "write a number, or several: 0.5,0.7"
        raise UserError(what, key="sparsity", remedy=remedy) from None


def plain_result(result: "PruningResult") -> dict[str, Any]:
    """Return the result in a form for JSON."""
    rounds = [asdict(each) for each in result.rounds]
    return {"folder": str(result.folder), "rounds": rounds, "kept_heads": result.kept_heads}


def show(result: "PruningResult") -> None:
    """Print the result of each round."""
    for number, report in enumerate(result.rounds):
        title = f"round {number}" if number else "as given"
        shape = f"{sum(report.heads)} heads, {sum(report.neurons):,} neurons, {report.parameters:,} weights"
        echo(f"  {title}: {shape}{_scores(report)}")
    echo(f"heads left by layer: {', '.join(map(str, result.rounds[-1].heads))}")
    echo(f"model: {result.folder / 'model'}")


def show_sparse(results: "list[SparseResult]", *, as_json: bool) -> None:
    """Print the result of each training."""
    if as_json:
        plain = [
            {"folder": str(each.folder), "reports": [asdict(one) for one in each.reports], "kept": each.kept}
            for each in results
        ]
        print_json(plain if len(plain) > 1 else plain[0])
        return
    for result in results:
        for report in result.reports:
            kept = " (kept)" if report.name == result.kept else ""
            echo(f"  {report.name}: {report.sparsity:.1%} zeros{_score('', report.metrics)}{kept}")
        echo(f"mask: {result.folder / 'mask.safetensors'}")
        echo(f"model: {result.folder / 'model'}")


def _scores(report: "RoundReport") -> str:
    return _score("", report.pruned) + _score("trained: ", report.tuned)


def _score(word: str, metrics: "Metrics") -> str:
    """Format the deciding metric of the first split, if there is one."""
    from bertsmith.tasks.kinds.registry import metric_named

    for split, values in metrics.items():
        name = next(iter(values))
        return f"; {word}{split} {name.replace('_', ' ')} {metric_named(name).text(values[name])}"
    return ""
