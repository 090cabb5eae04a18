"""A run made ready: network, optimiser, feeds and, where there is one, the state to go on from."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bertsmith.corpus.store import TokenStore
from bertsmith.examples.feed import Feed
from bertsmith.model.encoder import Block
from bertsmith.model.network import Network
from bertsmith.objectives.one_sided import attention_of
from bertsmith.objectives.pretraining import PretrainingObjective
from bertsmith.pretraining.course import Course, Position
from bertsmith.pretraining.evaluation import Exam
from bertsmith.pretraining.loop import Clock, Lesson, Window
from bertsmith.pretraining.machine import Machine, choices, fit_machine
from bertsmith.pretraining.run_folder import RunFolder, open_run
from bertsmith.pretraining.start import begin, pair_head_of, with_true_model
from bertsmith.recipe.schema import Recipe
from bertsmith.training.checkpoint import SavedState, latest_state, load_state
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.parallel import World, share_work
from bertsmith.training.steps import Caution, Learner
from bertsmith.training.watch import Watch


@dataclass(frozen=True, slots=True)
class Run:
    """A run in progress."""

    recipe: Recipe
    store: TokenStore
    folder: RunFolder
    network: Network
    lesson: Lesson
    machine: Machine
    exam_feed: Feed
    """Held-out examples."""
    watch: Watch
    notes: tuple[str, ...]
    exams: dict[int, Exam] = field(default_factory=dict)
    """What each stage is judged by, built when it is first looked at."""

    @property
    def world(self) -> World:
        """The processes that share the run."""
        return self.lesson.learner.world

    def say(self, text: str) -> None:
        """Tell the watcher, once."""
        if self.world.main:
            self.watch.note(text)


@dataclass
class Standing:
    """What changes from step to step beside the weights; saved with them."""

    position: Position = field(default_factory=Position)
    window: Window = field(default_factory=Window)
    held_out: dict[str, float] = field(default_factory=dict)
    """The last held-out results."""
    saved_step: int = 0
    """The newest saved step, or 0."""
    saved_seconds: float = 0.0
    drawn_seconds: float = 0.0
    """The run's seconds when it was last saved, and when its curves were last drawn."""
    rolled_back_to: int = -1
    """The step whose saved weights were taken again last."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for."""

    recipe: Recipe
    store: Path
    out: Path


def set_up(request: Request, world: World, watch: Watch) -> tuple[Run, Standing]:
    """The run that was asked for, new or as it was saved last; `refuse_other_run` comes before it."""
    recipe, store = with_true_model(request.recipe), TokenStore.open(request.store)
    folder = RunFolder(request.out)
    beginning = begin(recipe, store)
    saved = latest_state(folder.checkpoints, world)
    machine = fit_machine(recipe, beginning.network, world, micro_tokens_before=_micro_tokens_of(saved))
    train = _feed(recipe, store, folder, world, machine, "train")
    exam = _feed(exam_recipe(recipe, machine), store, folder, world, machine, "held-out")
    world.lead(store.verify)
    world.lead(lambda: _refuse_too_little_text(train, exam))
    world.lead(lambda: open_run(folder, recipe, store))
    learner = _learner(recipe, beginning.network, machine, world)
    standing = _restored(saved, learner)
    lesson = Lesson(learner, train, Course(recipe), Clock(standing.position.seconds), machine.loader_workers)
    notes = (*beginning.notes, *choices(recipe), *machine.notes)
    run = Run(recipe, store, folder, beginning.network, lesson, machine, exam, watch, notes)
    for note in (*notes, *_where_it_goes_on(folder, saved)):
        run.say(note)
    return run, standing


def exam_recipe(recipe: Recipe, machine: Machine) -> Recipe:
    """The recipe for held-out examples: one step holds all that is to be looked at, whoever shares it."""
    batch = recipe.batch.model_copy(update={"by": "sequences", "sequences": machine.evaluation_sequences})
    return recipe.model_copy(update={"batch": batch})


def _refuse_too_little_text(*feeds: Feed) -> None:
    """Complain where a stage has no step, before the folder holds a run that more text would not fit to."""
    for feed in feeds:
        for stage in range(len(feed.recipe.examples.stages)):
            feed.plan(stage).steps_in(0)


def _where_it_goes_on(folder: RunFolder, saved: SavedState | None) -> list[str]:
    if saved is not None:
        return [f"goes on from step {saved.state.step:,}"]
    damaged = list(folder.checkpoints.glob("step-*.damaged"))
    return ["no saved state is whole: the run starts again at step 0"] if damaged else []


def _learner(recipe: Recipe, network: Network, machine: Machine, world: World) -> Learner:
    attend = attention_of(recipe.examples.objective)
    objective = PretrainingObjective(network.to(world.device).train(), pair_head_of(recipe), attend=attend)
    network.encoder.recompute = recipe.run.recompute
    sharded = world.size > 1 and recipe.run.parallel == "fsdp"
    if machine.compiled and not sharded:
        objective.compile_whole()
    if machine.compiled and sharded:  # weights are gathered between the blocks, outside any graph
        for block in (module for module in network.modules() if isinstance(module, Block)):
            block.compile(fullgraph=True)
    wrapped = share_work(objective, world, recipe.run.parallel)
    return Learner(
        wrapped,
        build_optimizer(wrapped, recipe.optim),
        world,
        machine.precision,
        recipe.optim.clip_norm,
        Caution(recipe.run.spike_factor),
    )


def _feed(  # noqa: PLR0913 - each of them matters to what is shown
    recipe: Recipe,
    store: TokenStore,
    folder: RunFolder,
    world: World,
    machine: Machine,
    split: Literal["train", "held-out"],
) -> Feed:
    return Feed(
        store,
        recipe,
        rank=world.rank,
        world=world.size,
        micro_tokens=machine.micro_tokens,
        multiple=machine.multiple,
        cache=folder.plans,
        split=split,
    )


def _restored(saved: SavedState | None, learner: Learner) -> Standing:
    if saved is None:
        return Standing()
    load_state(saved, learner.objective, optimizer=learner.optimizer, world=learner.world)
    scalars = saved.state.scalars
    learner.caution.norms.extend(scalars["norms"])
    window = Window(**scalars["window"]) if learner.world.main else Window()
    position = Position(**scalars["position"])
    return Standing(position, window, scalars["held_out"], position.step, position.seconds)


def _micro_tokens_of(saved: SavedState | None) -> int | None:
    return None if saved is None else int(saved.state.scalars["micro_tokens"])


def scalars_of(run: Run, standing: Standing) -> dict[str, Any]:
    """What a saved state remembers beside its tensors; sums are those of all ranks."""
    return {
        "position": asdict(standing.position),
        "window": asdict(standing.window.over_all_ranks(run.world)),
        "norms": list(run.lesson.learner.caution.norms),
        "held_out": standing.held_out,
        "micro_tokens": run.machine.micro_tokens,
    }
