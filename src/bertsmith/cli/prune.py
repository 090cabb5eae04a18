"""`bertsmith prune`: cut heads, neurons and layers out of a model, or set single weights to zero."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.finetune import stoppable
from bertsmith.cli.presenting import print_json
from bertsmith.cli.request import COMMAS, Place, Request, lines_of
from bertsmith.cli.spelling import Setting
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from bertsmith.studies.magnitude_pruning import SparseResult
    from bertsmith.studies.pruning import Metrics, PruningResult, RoundReport


@dataclass(frozen=True, kw_only=True)
class PruneRequest(Request):
    """A pruning by importance or by magnitude."""

    model: Annotated[Place, Option(help="Fine-tuned model: the folder of a run, or a model folder.")]
    data: Annotated[Place, Option(help="The task's folder, or its file.")]
    out: Annotated[Place, Option(help="Folder to write; a job that was stopped resumes there.")]
    task: Annotated[str, Option(help="The task; by default the task of the model.")] = ""
    heads: Annotated[float, Option(min=0, max=1, help="Fraction of all attention heads to remove.")] = 0.0
    ffn: Annotated[float, Option(min=0, max=1, help="Fraction of feed-forward neurons to remove.")] = 0.0
    widths: Annotated[
        Literal["equal", "free"] | None,
        Option(help="equal (the default): as many neurons from each layer; free: the least important."),
    ] = None
    drop_layers: Annotated[
        str, COMMAS, Option(metavar="LAYERS", help="Whole layers to remove first, counted from 0: 10,11.")
    ] = ""
    examples: Annotated[
        int | None, Option(min=1, help="Training examples to measure importance on: 1024.")
    ] = None
    method: Annotated[
        Literal["importance", "magnitude"],
        Option(help="importance: heads and neurons; magnitude: single weights (--sparsity)."),
    ] = "importance"
    sparsity: Annotated[
        str,
        COMMAS,
        Option(
            metavar="FRACTION",
            help="magnitude: fraction of the layers' weights to set to zero, or several: a,b.",
        ),
    ] = ""
    rewind: Annotated[
        float | None,
        Setting("sparse.early_at"),
        Option(help="magnitude: train first, prune, and rewind to this fraction of the training."),
    ] = None
    retrain: Annotated[
        str,
        COMMAS,
        Option(
            metavar="HOW",
            help="With --rewind, what to rewind: weights (the default), rate, finetune (nothing), or "
            "several: a,b.",
        ),
    ] = ""
    rounds: Annotated[
        int | None, Option(min=1, help="Number of rounds of removal: 4, and 1 with --rewind.")
    ] = None
    epochs: Annotated[
        float | None,
        Setting("run.epochs"),
        Option(min=0, help="Training after each part: 1, or 0 for none; magnitude: the task's."),
    ] = None
    lr: Annotated[
        float | None,
        Setting("optim.peak_lr"),
        Option(help="Peak learning rate of the training (optim.peak_lr)."),
    ] = None
    device: Annotated[str | None, Setting("run.device"), Option(help="auto, cpu or cuda (run.device).")] = (
        None
    )
    seed: Annotated[int | None, Setting("run.seed"), Option(help="Seed (run.seed).")] = None
    skip_bad: options.SkipBad = False
    settings: options.Settings = None

    @property
    def places(self) -> tuple[Path, Path, Path]:
        """Paths of the model, the data and the output."""
        return Path(self.model), Path(self.data), Path(self.out)

    def check(self) -> None:
        """Raise for options of the other method, or if nothing to remove."""
        if self.method == "magnitude":
            units = ("heads", "ffn", "drop_layers", "widths", "examples")
            if named := [name for name in units if getattr(self, name)]:
                what = "single weights are removed by magnitude; heads, neurons and layers by importance"
                raise UserError(what, key=named[0], remedy="remove it, or `method=magnitude`")
            if self.epochs == 0:
                what, remedy = "single weights are removed during training", "remove it"
                raise UserError(what, key="epochs", remedy=remedy)
            if self.rewind is None and (self.retrain or self.rounds):
                key, remedy = "retrain" if self.retrain else "rounds", "remove it, or add `rewind=0.1`"
                raise UserError("weights are removed in a single training", key=key, remedy=remedy)
        elif self.sparsity or self.rewind is not None or self.retrain:
            what = "single weights are removed by magnitude, not by importance"
            where, remedy = "`sparsity`, `rewind`, `retrain`", "add `method=magnitude`"
            raise UserError(what, where=where, remedy=remedy)
        elif not (self.heads or self.ffn or numbered_layers(self.drop_layers)):
            raise UserError("nothing to remove", remedy="give `heads`, `ffn` or `drop_layers`")


def prune(request: PruneRequest, as_json: options.Json = False) -> None:
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
    request.check()
    if request.method == "magnitude":
        show_sparse(run_magnitude(request, as_json=as_json), as_json=as_json)
        return
    result = run_rounds(request, as_json=as_json)
    print_json(plain_result(result)) if as_json else show(result)


def run_rounds(asked: PruneRequest, *, as_json: bool) -> "PruningResult":
    """Remove heads and neurons in rounds."""
    from bertsmith.studies.pruning import PruningJob, Removal, prune, pruning_recipe, task_of_model

    rounds = (asked.rounds or 4) if asked.heads or asked.ffn else 1
    layers, widths = numbered_layers(asked.drop_layers), asked.widths or "equal"
    trains, examples = asked.epochs != 0, asked.examples or 1024
    removal = Removal(asked.heads, asked.ffn, widths, layers, rounds, examples, trains=trains)
    task, config = task_of_model(asked.places[0], asked.task)
    given = replace(asked, epochs=asked.epochs or 1.0).given()
    recipe = pruning_recipe(task, config, lines_of(asked.settings), options=given)
    job = PruningJob(task, *asked.places, recipe, asked.skip_bad)
    return stoppable(lambda callback: prune(job, removal, callback), as_json=as_json)


def run_magnitude(asked: PruneRequest, *, as_json: bool) -> "list[SparseResult]":
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
    words = (asked.retrain or "weights").split(",")
    methods = tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
    if strange := [word for word in methods if word not in RETRAINING] or ([""] if not methods else []):
        remedy = f"choose from {', '.join(RETRAINING)}"
        raise UserError(f"{strange[0]!r} is not a choice", key="retrain", remedy=remedy)
    gradual = [("`sparsity`", f"sparse.gradual={sparsities[0]}")] if asked.rewind is None else []
    given = [*asked.given(), *gradual]
    settings = lines_of(asked.settings)
    if own := [line for line in settings if line.lstrip().startswith("sparse")]:
        what = f"{own[0]} is not set directly: the options decide"
        raise UserError(what, key="settings", remedy="use `sparsity` and `rewind`")
    task, recipe = task_to_train(asked.places[0], asked.task, settings, options=given)
    job = PruningJob(task, *asked.places, recipe, asked.skip_bad)
    wanted = Sparsities(sparsities, methods, asked.rounds or 1)  # type: ignore[arg-type]  # checked above
    return stoppable(lambda callback: prune_by_magnitude(job, wanted, callback), as_json=as_json)


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
