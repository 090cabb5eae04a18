"""`bertsmith examples`: what the model is shown, and what the recipe's random draws come to."""

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, echo

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from bertsmith.examples.plan import StagePlan
    from bertsmith.examples.view import Shares, ShownSequence, UnitShares
    from bertsmith.recipe.schema import Recipe, Unit
    from bertsmith.text.tokenizer import Tokenizer

BARS, BAR_WIDTH = 10, 40
LABELS = ("position", "segment", "token", "target")
LABEL_WIDTH = 10
SEGMENT_COLOURS = ("cyan", "magenta")


@dataclass(frozen=True, slots=True)
class Question:
    """Which examples to look at."""

    store: Path
    stage: int
    step: int
    show: int
    over: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The examples, and shares over more of them."""

    recipe: "Recipe"
    tokenizer: "Tokenizer"
    stage: int
    in_epoch: int
    sequences: list["ShownSequence"]
    shares: "Shares"
    units: dict["Unit", "UnitShares"]


def examples(
    recipe: Annotated[str, Argument(metavar="RECIPE", help="A preset, or a recipe file in TOML.")],
    store: Annotated[Path, Option(metavar="FOLDER", help="Token store, as `bertsmith corpus` makes it.")],
    show: Annotated[int, Option(min=0, help="How many examples to print.")] = 5,
    step: Annotated[int, Option(min=0, help="The step they belong to, counted in the stage.")] = 0,
    stage: Annotated[int, Option(min=0, help="The stage of the recipe, counted from 0.")] = 0,
    over: Annotated[int, Option(min=1, help="How many examples of the first epoch to count over.")] = 10_000,
    overrides: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Change one value; may be repeated.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, for machines.")] = False,
) -> None:
    """Look at what the model is shown.

    Prints examples of a step token by token: position, segment, what the model sees, and what it must guess.
    Below stand the shares that the draws came to over many examples: predicted tokens, what they were
    replaced by, random or swapped pairs, and lengths.

    Example: bertsmith examples bert-base --store store/ --show 5
    """
    from bertsmith.recipe.load import load_recipe  # heavy parts load here, not for --help

    question = Question(store.expanduser(), stage, step, show, over)
    answer = look(load_recipe(recipe, overrides or []), question)
    if as_json:
        echo(to_json(answer))
    else:
        print_answer(answer)


def look(recipe: "Recipe", question: Question) -> Answer:
    """The examples that were asked for."""
    from bertsmith.corpus.store import TokenStore
    from bertsmith.examples.feed import Feed, StepAddress
    from bertsmith.examples.view import measure, measure_units, sequences_of
    from bertsmith.ground.errors import UserError

    store, stages = TokenStore.open(question.store), len(recipe.examples.stages)
    store.verify()
    if question.stage >= stages:
        raise UserError(
            f"the recipe has no stage {question.stage}", remedy=f"it has {stages}, counted from 0"
        )
    with TemporaryDirectory() as cache:
        micro_tokens = max(stage.length for stage in recipe.examples.stages) * 64
        feed = Feed(store, recipe, micro_tokens=micro_tokens, cache=Path(cache))
        plan = feed.plan(question.stage)
        refuse_step_beyond_the_run(recipe, question, plan)
        shown = feed.build(StepAddress(question.stage, question.step))
        wanted = -(-question.over // len(list(sequences_of(shown))))
        steps = min(plan.steps_in(0), wanted)
        counted = [feed.build(StepAddress(question.stage, number)) for number in range(steps)]
        tokenizer = store.tokenizer()
        mask_id = tokenizer.mask_id if recipe.examples.objective == "masked" else -1
        shares, units = measure(counted, mask_id=mask_id), measure_units(feed, counted)
        sequences = list(islice(sequences_of(shown), question.show))
        return Answer(recipe, tokenizer, question.stage, len(plan.epoch(0).index), sequences, shares, units)


def refuse_step_beyond_the_run(recipe: "Recipe", question: Question, plan: "StagePlan") -> None:
    """Nothing, if training comes to the step: each epoch on the way to it would have to be made."""
    from bertsmith.ground.errors import UserError

    if recipe.run.budget == "minutes":  # nobody knows how many steps there will be
        return
    tokens = -(-int(plan.epoch(0).index.length.sum()) // plan.steps_in(0))
    steps = steps_of_stage(recipe, question.stage, tokens_in_step=tokens)
    if question.step >= steps:
        about = "about " if recipe.run.budget == "tokens" else ""
        remedy = f"it has {about}{steps:,} steps, counted from 0"
        raise UserError(f"stage {question.stage} has no step {question.step:,}", remedy=remedy)


def steps_of_stage(recipe: "Recipe", stage: int, *, tokens_in_step: int) -> int:
    """How many steps training takes in a stage, where its budget is not one of time."""
    from bertsmith.pretraining.course import Course, Position

    def stage_of(step: int) -> int:
        return Course(recipe).entered(Position(step=step, tokens=step * tokens_in_step)).stage

    run = recipe.run
    steps = range(run.steps if run.budget == "steps" else -(-run.tokens // tokens_in_step))
    return bisect_right(steps, stage, key=stage_of) - bisect_left(steps, stage, key=stage_of)


def to_json(answer: Answer) -> str:
    """The answer as one JSON object."""
    sequences = [_sequence_facts(answer.tokenizer, sequence) for sequence in answer.sequences]
    lengths = dict(sorted(Counter(answer.shares.lengths.tolist()).items()))
    shares = asdict(answer.shares) | {"lengths": lengths}
    shares |= {"sequences": answer.shares.sequences, "tokens": answer.shares.tokens}
    shares |= {"units": {unit: asdict(counts) for unit, counts in answer.units.items()}}
    facts = {"recipe": answer.recipe.name, "stage": answer.stage, "examples_in_epoch": answer.in_epoch}
    return json.dumps({**facts, "examples": sequences, "shares": shares}, ensure_ascii=False)


def _sequence_facts(tokenizer: "Tokenizer", sequence: "ShownSequence") -> dict[str, Any]:
    pieces = [tokenizer.token(number) for number in sequence.tokens]
    targets = {str(place): tokenizer.token(number) for place, number in sequence.targets.items()}
    return asdict(sequence) | {"pieces": pieces, "target_pieces": targets}


# ---- for people


def print_answer(answer: Answer) -> None:
    """Print the examples token by token, then the shares."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for number, sequence in enumerate(answer.sequences, start=1):
        console.print(f"Example {number}: {_headline(answer.recipe, sequence)}", style="bold")
        print_sequence(console, answer.tokenizer, sequence)
    print_shares(console, answer)


def _headline(recipe: "Recipe", sequence: "ShownSequence") -> str:
    meanings = {
        "nsp": ("B follows A (label 0)", "B is random (label 1)"),
        "sop": ("A and B in order (label 0)", "A and B swapped, or B random (label 1)"),
    }
    counts = f"{len(sequence.tokens)} tokens, {len(sequence.targets)} to predict"
    if sequence.pair_label is None:
        return counts
    return f"{counts}; {meanings[recipe.examples.pairs][sequence.pair_label]}"


def print_sequence(console: "Console", tokenizer: "Tokenizer", sequence: "ShownSequence") -> None:
    """Print position, segment, token and target one below the other, in as many strips as it takes."""
    from rich.cells import cell_len

    columns = [_column(tokenizer, sequence, place) for place in range(len(sequence.tokens))]
    strip, used = _empty_strip(), LABEL_WIDTH
    for column in columns:
        width = max(cell_len(text) for text, _ in column) + 1
        if used + width > console.width and used > LABEL_WIDTH:
            _print_strip(console, strip)
            strip, used = _empty_strip(), LABEL_WIDTH
        for line, (text, style) in zip(strip, column, strict=True):
            line.append(text, style)
            line.append(" " * (width - cell_len(text)))
        used += width
    _print_strip(console, strip)


def _column(tokenizer: "Tokenizer", sequence: "ShownSequence", place: int) -> list[tuple[str, str]]:
    """The four texts of a token, and their colours."""
    token, target = sequence.tokens[place], sequence.targets.get(place)
    segment = sequence.segments[place]
    colour = "dim" if token in tokenizer.special_ids else SEGMENT_COLOURS[segment % 2]
    return [
        (str(sequence.positions[place]), "dim"),
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


def print_shares(console: "Console", answer: Answer) -> None:
    """Print what the draws came to, beside what the recipe says."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for label, text in _share_lines(answer):
        table.add_row(label, text)
    console.print(table)
    console.print("\nLengths in tokens")
    for line in _bars(answer.shares.lengths.tolist()):
        console.print(line, style="cyan")


def _share_lines(answer: Answer) -> list[tuple[str, str]]:
    shares, recipe = answer.shares, answer.recipe
    masking, stage = recipe.masking, recipe.examples.stages[answer.stage]
    lines = [
        ("counted over", f"{shares.sequences:,} of {answer.in_epoch:,} examples, {shares.tokens:,} tokens")
    ]
    predicted = f"{shares.predicted / shares.tokens:.2%} of the tokens"
    if recipe.examples.objective == "masked" and shares.predicted:
        lines.append(
            ("predicted", f"{predicted} (rate {masking.rate:.0%}, at most {stage.predictions} a sequence)")
        )
        shown = [shares.as_mask, shares.as_random, shares.unchanged]
        parts = [f"{count / shares.predicted:.2%}" for count in shown]
        lines.append(("shown as", f"the mask {parts[0]}, another token {parts[1]}, what they are {parts[2]}"))
    else:
        lines.append(("predicted", predicted))
    names = {"phrase": "phrases", "entity": "entities"}
    for unit, counts in answer.units.items():
        found = f"{counts.whole:,} of {counts.found:,} are predicted whole, {counts.in_part:,} in part"
        lines.append((names[unit], found))
    if shares.pairs:
        lines.append(("pairs", _pair_line(recipe, shares.negatives / shares.pairs)))
    return lines


def _pair_line(recipe: "Recipe", share: float) -> str:
    asked = recipe.examples.negative_share
    what = "have a random B" if recipe.examples.pairs == "nsp" else "are swapped or have a random B"
    line = f"{share:.2%} {what}; the recipe asks for {asked:.0%}"
    if share <= asked or asked == 1:
        return line
    single = (share - asked) / (1 - asked)
    why = f"about {single:.0%} of the examples begin with a sentence that has no other after it to be B"
    return f"{line}, but {why}: it reaches the target length alone or is the document's last"


def _bars(lengths: list[int]) -> list[str]:
    """A histogram in text, a line for each range of lengths."""
    step = -(-max(lengths) // BARS)
    counts = [0] * BARS
    for length in lengths:
        counts[(length - 1) // step] += 1
    return [
        f"{number * step + 1:>4}-{min((number + 1) * step, max(lengths)):<4} "
        f"{'█' * round(BAR_WIDTH * count / max(counts)):<{BAR_WIDTH}} {count / len(lengths):6.2%}"
        for number, count in enumerate(counts)
    ]
