"""`bertsmith examples`: show training examples, and the fractions of the recipe's random choices."""

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_facts
from bertsmith.cli.request import lines_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.text import Text

    from bertsmith.data.batch_inspection import BatchStatistics, ShownSequence, UnitStatistics
    from bertsmith.data.data_loader import PretrainingDataset
    from bertsmith.data.epoch_index import StageIndex
    from bertsmith.recipe.data_sections import PairHead, Unit
    from bertsmith.recipe.schema import Recipe
    from bertsmith.text.tokenizer import Tokenizer

BARS, BAR_WIDTH = 10, 40
"""Maximum lines of the histogram, and their width in characters."""
LABELS = ("position", "segment", "token", "target")
LABEL_WIDTH = 10
SEGMENT_COLOURS = ("cyan", "magenta")
PAIR_LABELS: dict["PairHead", tuple[str, str]] = {
    "nsp": ("B follows A (label 0)", "B is random (label 1)"),
    "sop": ("A and B in order (label 0)", "A and B swapped, or B random (label 1)"),
}
"""Meaning of the labels 0 and 1 of a pair, by the pair head."""


@dataclass(frozen=True, slots=True)
class ExamplesRequest:
    """The examples to show, and the number to compute statistics over."""

    store: Path
    stage: int
    step: int
    show: int
    over: int


@dataclass(frozen=True, slots=True)
class ExamplesReport:
    """The examples, and statistics over more of them."""

    recipe: "Recipe"
    tokenizer: "Tokenizer"
    stage: int
    in_epoch: int
    sequences: list["ShownSequence"]
    statistics: "BatchStatistics"
    units: dict["Unit", "UnitStatistics"]


def examples(
    recipe: Annotated[str, Argument(metavar="RECIPE", help="A preset, or a recipe file in TOML.")],
    store: Annotated[Path, Option(metavar="FOLDER", help="Token store, as `bertsmith corpus` makes it.")],
    show: Annotated[int, Option(min=0, help="Number of examples to print.")] = 5,
    step: Annotated[int, Option(min=0, help="The step they belong to, counted in the stage.")] = 0,
    stage: Annotated[int, Option(min=0, help="The stage of the recipe, counted from 0.")] = 0,
    over: Annotated[int, Option(min=1, help="Number of examples of the first epoch to count over.")] = 10_000,
    settings: options.Settings = None,
    as_json: options.Json = False,
) -> None:
    """Show what the model is trained on.

    Prints examples of a step token by token: position, segment, the token that the model sees and the one to
    predict. Below are the fractions of the random choices over many examples: predicted tokens, their
    replacements, random or swapped pairs, and lengths.

    Example: bertsmith examples bert-base --store store/ --show 5
    """
    from bertsmith.recipe.load import load_recipe  # heavy parts load here, not for --help

    request = ExamplesRequest(store, stage, step, show, over)
    report = build_report(load_recipe(recipe, lines_of(settings)), request)
    if as_json:
        echo(to_json(report))
    else:
        print_report(report)


def build_report(recipe: "Recipe", request: ExamplesRequest) -> ExamplesReport:
    """Return the examples of the requested step, and statistics over the beginning of the first epoch."""
    from bertsmith.core.errors import UserError
    from bertsmith.corpus.token_store import TokenStore
    from bertsmith.data.batch_inspection import batch_statistics, sequences_of, unit_statistics
    from bertsmith.data.data_loader import PretrainingDataset, StepIndex
    from bertsmith.objectives.registry import declaration

    store, stages = TokenStore.open(request.store), len(recipe.examples.stages)
    store.verify()
    if request.stage >= stages:
        raise UserError(
            f"the recipe does not have a stage {request.stage}", remedy=f"it has {stages}, counted from 0"
        )
    with TemporaryDirectory() as cache:  # only a run has a folder for its indices
        micro_tokens = max(stage.length for stage in recipe.examples.stages) * 64
        asked: dict[str, Any] = {"micro_tokens": micro_tokens, "fields": declaration(recipe).fields}
        datasets = partial(PretrainingDataset, store, cache=Path(cache), **asked)
        dataset = _with_a_step(datasets, recipe, request)
        plan = dataset.stage_index(request.stage)
        check_step(recipe, request, plan)
        shown = dataset[StepIndex(request.stage, request.step)]
        wanted = -(-request.over // len(list(sequences_of(shown))))
        steps = min(plan.steps_in(0), wanted)
        counted = [dataset[StepIndex(request.stage, number)] for number in range(steps)]
        tokenizer = store.tokenizer()
        mask_id = tokenizer.mask_id if recipe.examples.masks_tokens else -1
        statistics, units = batch_statistics(counted, mask_id=mask_id), unit_statistics(dataset, counted)
        sequences = list(islice(sequences_of(shown), request.show))
        in_epoch = len(plan.epoch(0).examples)
        return ExamplesReport(recipe, tokenizer, request.stage, in_epoch, sequences, statistics, units)


def _with_a_step(
    datasets: "Callable[[Recipe], PretrainingDataset]", recipe: "Recipe", request: ExamplesRequest
) -> "PretrainingDataset":
    """Return the recipe's dataset, or one with smaller steps if a whole epoch does not fill the first."""
    from bertsmith.core.errors import UserError
    from bertsmith.data.epoch_index import make_epoch_index

    dataset = datasets(recipe)
    plan = dataset.stage_index(request.stage)
    try:
        plan.steps_in(0)
    except UserError as error:
        found = len(make_epoch_index(plan.source, 0).examples)
        if request.step or not found:
            raise
        echo(f"{error.line()} before you train on it", err=True)
        smaller = {"by": "sequences", "sequences": found, "ramp_from": "off"}
        batch = recipe.batch.model_copy(update=smaller)
        return datasets(recipe.model_copy(update={"batch": batch}))
    return dataset


def check_step(recipe: "Recipe", request: ExamplesRequest, plan: "StageIndex") -> None:
    """Raise if training never reaches the step; searching for it would build every epoch before."""
    from bertsmith.core.errors import UserError

    if recipe.run.budget == "minutes":  # the number of steps is unknown
        return
    tokens = -(-int(plan.epoch(0).examples.length.sum()) // plan.steps_in(0))
    steps = steps_of_stage(recipe, request.stage, tokens_in_step=tokens)
    if request.step >= steps:
        about = "about " if recipe.run.budget == "tokens" else ""
        remedy = f"it has {about}{steps:,} steps, counted from 0"
        raise UserError(f"stage {request.stage} does not have a step {request.step:,}", remedy=remedy)


def steps_of_stage(recipe: "Recipe", stage: int, *, tokens_in_step: int) -> int:
    """Return the number of training steps in a stage, for a budget in steps or tokens."""
    from bertsmith.pretraining.data_stages import Stages, budget_of
    from bertsmith.training.trainer import Progress

    stages = Stages(recipe, budget_of(recipe))

    def stage_of(step: int) -> int:
        return stages.enter(Progress(step=step, tokens=step * tokens_in_step)).stage

    run = recipe.run
    steps = range(run.steps if run.budget == "steps" else -(-run.tokens // tokens_in_step))
    return bisect_right(steps, stage, key=stage_of) - bisect_left(steps, stage, key=stage_of)


def to_json(report: ExamplesReport) -> str:
    """Format the report as one JSON object."""
    token, statistics = report.tokenizer.token, report.statistics
    sequences = []
    for sequence in report.sequences:
        pieces = [token(number) for number in sequence.tokens]
        targets = {str(index): token(number) for index, number in sequence.targets.items()}
        sequences.append(asdict(sequence) | {"pieces": pieces, "target_pieces": targets})
    shares = asdict(statistics) | {
        "lengths": dict(sorted(Counter(statistics.lengths.tolist()).items())),
        "sequences": statistics.sequences,
        "tokens": statistics.tokens,
        "units": {unit: asdict(counts) for unit, counts in report.units.items()},
    }
    summary = {"recipe": report.recipe.name, "stage": report.stage, "examples_in_epoch": report.in_epoch}
    return json.dumps({**summary, "examples": sequences, "shares": shares}, ensure_ascii=False)


# ---- for people


def print_report(report: ExamplesReport) -> None:
    """Print the examples token by token, then the statistics."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for number, sequence in enumerate(report.sequences, start=1):
        headline = f"{len(sequence.tokens)} tokens, {len(sequence.targets)} to predict"
        if sequence.pair_label is not None:
            headline += f"; {PAIR_LABELS[report.recipe.examples.pair_head][sequence.pair_label]}"
        console.print(f"Example {number}: {headline}", style="bold")
        print_sequence(console, report.tokenizer, sequence)
    print_statistics(console, report)


def print_sequence(console: "Console", tokenizer: "Tokenizer", sequence: "ShownSequence") -> None:
    """Print position, segment, token and target below each other, in strips of the terminal's width."""
    from rich.cells import cell_len

    strip, used = _empty_strip(), LABEL_WIDTH
    for index in range(len(sequence.tokens)):
        column = _column(tokenizer, sequence, index)
        width = max(cell_len(text) for text, _ in column) + 1
        if used + width > console.width and used > LABEL_WIDTH:
            _print_strip(console, strip)
            strip, used = _empty_strip(), LABEL_WIDTH
        for line, (text, style) in zip(strip, column, strict=True):
            line.append(text, style)
            line.append(" " * (width - cell_len(text)))
        used += width
    _print_strip(console, strip)


def _column(tokenizer: "Tokenizer", sequence: "ShownSequence", index: int) -> list[tuple[str, str]]:
    """Return the four texts of a token, and their colours."""
    token, target = sequence.tokens[index], sequence.targets.get(index)
    segment = sequence.segments[index]
    colour = "dim" if token in tokenizer.special_ids else SEGMENT_COLOURS[segment % 2]
    return [
        (str(sequence.positions[index]), "dim"),
        (str(segment), SEGMENT_COLOURS[segment % 2]),
        (tokenizer.token(token), colour if target is None else "bold yellow"),
        ("" if target is None else tokenizer.token(target), "bold green"),
    ]


def _empty_strip() -> list["Text"]:
    from rich.text import Text

    return [Text(f"{label:<{LABEL_WIDTH}}", style="dim") for label in LABELS]


def _print_strip(console: "Console", strip: list["Text"]) -> None:
    for line in strip:
        console.print(line, no_wrap=True, crop=False, overflow="ignore")
    console.print()


def print_statistics(console: "Console", report: ExamplesReport) -> None:
    """Print the fractions of the random choices, the recipe's values, and a histogram of lengths."""
    print_facts(_statistics_lines(report))
    console.print("\nLengths in tokens")
    lengths = report.statistics.lengths.tolist()
    step = -(-max(lengths) // BARS)
    counts = Counter((length - 1) // step for length in lengths)
    for number in range(-(-max(lengths) // step)):
        bar = "█" * round(BAR_WIDTH * counts[number] / max(counts.values()))
        first, last = number * step + 1, min((number + 1) * step, max(lengths))
        fraction = counts[number] / len(lengths)
        end = "" if first == last else f"-{last}"
        console.print(f"{first:>4}{end:<5} {bar:<{BAR_WIDTH}} {fraction:6.2%}", style="cyan")


def _statistics_lines(report: ExamplesReport) -> list[tuple[str, str]]:
    counted, recipe = report.statistics, report.recipe
    masking, stage = recipe.masking, recipe.examples.stages[report.stage]
    over = f"{counted.sequences:,} of {report.in_epoch:,} examples, {counted.tokens:,} tokens"
    lines = [("counted over", over)]
    predicted = f"{counted.predicted / counted.tokens:.2%} of the tokens"
    if recipe.examples.masks_tokens and counted.predicted:
        limits = f"rate {masking.rate:.0%}, at most {stage.predictions} a sequence"
        lines.append(("predicted", f"{predicted} ({limits})"))
        shown = [counted.as_mask, counted.as_random, counted.unchanged]
        parts = [f"{count / counted.predicted:.2%}" for count in shown]
        lines.append(("shown as", f"the mask {parts[0]}, another token {parts[1]}, what they are {parts[2]}"))
    else:
        lines.append(("predicted", predicted))
    names = {"phrase": "phrases", "entity": "entities"}
    for unit, counts in report.units.items():
        found = f"{counts.whole:,} of {counts.found:,} are predicted whole, {counts.in_part:,} in part"
        lines.append((names[unit], found))
    if counted.pairs:
        lines.append(("pairs", _pair_line(recipe, counted.negatives / counted.pairs)))
    return lines


def _pair_line(recipe: "Recipe", fraction: float) -> str:
    """Describe the fraction of negative pairs, and the reason if it is higher than in the recipe."""
    wanted = recipe.examples.negative_probability
    what = "have a random B" if recipe.examples.pair_head == "nsp" else "are swapped or have a random B"
    line = f"{fraction:.2%} {what}; the recipe's value is {wanted:.0%}"
    if fraction <= wanted or wanted == 1:
        return line
    # As in the published code, a chunk of one sentence always gets a random partner.
    single = (fraction - wanted) / (1 - wanted)
    why = f"about {single:.0%} of the examples begin with a sentence without a following one to be B"
    last = "it is the document's last"
    if recipe.examples.pairs != "sentence-pair":
        last = "it reaches the target length alone or is the document's last"
    return f"{line}, but {why}: {last}"
