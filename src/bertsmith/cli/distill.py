"""`bertsmith distill`: train a small model to imitate a large one, on text or on a task."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from bertsmith.cli import options
from bertsmith.cli.finetune import OWN, run_one
from bertsmith.cli.pretrain import check_one_budget, chosen_recipe, run
from bertsmith.cli.request import Place, Places, lines_of, listed
from bertsmith.cli.spelling import Setting
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from typing import Any

    from bertsmith.finetuning.assignment import Assignment
    from bertsmith.recipe.schema import Recipe
    from bertsmith.tasks.task import Task

RECIPE = "distilbert"
TEACHERS = ("distill.teacher", "distill.teachers")


@dataclass(frozen=True, kw_only=True)
class DistillRequest(options.Budget, options.Machine):
    """A distillation on text, or on a task."""

    teacher: Annotated[
        Places,
        Setting(*TEACHERS, derived=TEACHERS),
        Option(metavar="MODEL", help="Teacher model; for a task repeatable."),
    ]
    out: Annotated[Place, Option(help="Run folder; a run found there resumes.")]
    store: Annotated[
        Place | None, Option(help="Token store with the teacher's vocabulary (`bertsmith corpus`).")
    ] = None
    task: Annotated[
        str,
        Option(metavar="TASK", help="Distil a task: sst2, mnli, squad2, ner ... or the teacher's custom."),
    ] = ""
    data: Annotated[Place | None, Option(help="The task's folder, or the file of your own.")] = None
    layers: Annotated[
        int | None, Option(help="Number of the teacher's layers in the student (distill.layers).")
    ] = None
    student: Annotated[
        str,
        Setting("start.model", derived=["start.model"]),
        Option(metavar="MODEL", help="A separate student: a model, or on text a preset or a recipe file."),
    ] = ""
    epochs: Annotated[
        float | None, Setting("run.epochs"), Option(help="For a task: passes through the data (run.epochs).")
    ] = None
    lr: Annotated[
        float | None, Setting("optim.peak_lr"), Option(help="Peak learning rate (optim.peak_lr).")
    ] = None
    batch: Annotated[
        int | None,
        Setting("batch.sequences", "run.examples", also={"batch.by": "sequences"}),
        Option(help="Sequences, or of a task examples, a step."),
    ] = None
    max_length: Annotated[
        int | None,
        Setting("examples.stages", "text.longest", derived=["examples.stages"]),
        Option(help="Longest sequence in tokens."),
    ] = None
    seed: Annotated[int | None, Setting("run.seed"), Option(help="Seed (run.seed).")] = None
    settings: options.Settings = None

    @property
    def teachers(self) -> tuple[str, ...]:
        """Folders of the teachers."""
        return tuple(map(str, listed(self.teacher)))

    def check(self) -> None:
        """Raise if the data to distil on are missing, or an option does not apply to them."""
        if (self.store is None) == (not self.task):
            remedy = "`store` to distil its knowledge of text, `task` with `data` to distil a task"
            raise UserError("give one of the two", where="`store`, `task`", remedy=remedy)
        beside, idle = (
            ("store", ("epochs", "data")) if self.store else ("task", ("steps", "minutes", "layers"))
        )
        for key in idle:
            if getattr(self, key) is not None:
                raise UserError(f"cannot be used with `{beside}`", key=key, remedy="remove it")

    def recipe(self) -> "Recipe":
        """Return the recipe of a pre-training with a teacher."""
        if len(self.teachers) > 1:
            raise UserError(
                "distilling on text supports one teacher", key="teacher", remedy="give one of them"
            )
        teacher = self.teachers[0]
        begins = [
            ("teacher", "distill.teacher", teacher),
            ("teacher", "examples.objective", "distilled"),
            *_student_options(teacher, self.layers, self.student),
        ]
        check_one_budget(steps=self.steps, minutes=self.minutes)
        given = [*options.settings_of(begins), *self.given(tuning=False)]
        return chosen_recipe(RECIPE, given, lines_of(self.settings), self.max_length)

    def assignment(self) -> "Assignment":
        """Return the fine-tuning with teachers."""
        from bertsmith.finetuning.assignment import Assignment
        from bertsmith.tasks.task_recipe import finetuning_recipe

        if self.data is None or not self.student:
            where, remedy = "`data`, `student`", "as in `data=glue/SST-2` `student=runs/student`"
            raise UserError("a task needs both", where=where, remedy=remedy)
        if _is_recipe(self.student):
            remedy = f"distil it on text first (`store=store/` `student={self.student}`), and give that run"
            what = "is a recipe, but a task needs a model"
            raise UserError(what, where=f"`student={self.student}`", remedy=remedy)
        task = _task_named(self.task, Path(self.teachers[0]).expanduser())
        begins = options.settings_of([("teacher", "distill.teachers", list(self.teachers))])
        recipe = finetuning_recipe(task, lines_of(self.settings), options=[*begins, *self.given()])
        return Assignment(task, recipe, Path(self.student).expanduser(), Path(self.data), Path(self.out))


def distill(request: DistillRequest, as_json: options.JsonLines = False) -> None:
    """Train a small model to imitate a large one.

    With --store it is a pre-training run: the student learns from the teacher's predictions of words, the
    masked words and the teacher's last states, as DistilBERT did (bertsmith recipe show distilbert). With
    --task it is a fine-tuning run that learns from the labels and from the teachers' scores. Both resume when
    the same command is given again.

    Examples:

    bertsmith distill --teacher MODEL --layers 6 --store store/ --out runs/student

    bertsmith distill --teacher MODEL --layers 6 --store store/ --out runs/student --minutes 60 --batch 256

    bertsmith distill --teacher MODEL --student bert-mini --store store/ --out runs/mini

    bertsmith distill --teacher MODEL --student mine.toml --store store/ --out runs/mine

    bertsmith distill --teacher runs/sst2 --student MODEL --task sst2 --data glue/SST-2 --out runs/small

    bertsmith distill --teacher runs/a --teacher runs/b --student MODEL --task mrpc --data MRPC --out small
    """
    started = time.monotonic()  # as in `pretrain`
    request.check()
    if request.store is None:
        run_one(request.assignment(), as_json=as_json)
        return
    store, out = Path(request.store), Path(request.out)
    run(request.recipe(), store=store, out=out, as_json=as_json, started=started)


def _task_named(name: str, teacher: Path) -> "Task":
    """Return a published task, or the user's own task that a teacher was fine-tuned for."""
    from bertsmith.finetuning.predict import task_config_in
    from bertsmith.tasks.catalogue import task_named
    from bertsmith.tasks.custom import custom_task, spec_of

    if name != OWN:
        return task_named(name)
    config = task_config_in(teacher)
    if config is None or not config.custom:
        remedy = "give the folder of a `bertsmith finetune custom` run"
        raise UserError("was not fine-tuned on your own table", where=str(teacher), remedy=remedy)
    return custom_task(spec_of(config.custom))


def _student_options(teacher: str, layers: int | None, student: str) -> "tuple[tuple[str, str, Any], ...]":
    """Return the student's initial model: layers of the teacher, a model folder, or a shape to initialise."""
    if (layers is None) == (not student):
        remedy = "`layers=6` takes six of the teacher's; `student` names a model or a recipe"
        raise UserError("give one of the two", where="`layers`, `student`", remedy=remedy)
    if layers is not None:
        return (("layers", "distill.layers", list(_teacher_layers(teacher, layers))),)
    if _is_recipe(student):
        from bertsmith.recipe.load import load_recipe

        shape = load_recipe(student).model.model_dump()
        return tuple(("student", f"model.{key}", value) for key, value in shape.items())
    return (("student", "start.model", student),)


def _is_recipe(student: str) -> bool:
    """True if a student is a preset or a recipe file, and not a model."""
    from bertsmith.recipe.load import preset_names

    path = Path(student).expanduser()
    return path.is_file() or path.suffix == ".toml" or (student in preset_names() and not path.exists())


def _teacher_layers(teacher: str, wanted: int) -> "tuple[int, ...]":
    from bertsmith.model.layer_subset import evenly_spaced
    from bertsmith.pretraining.initial_model import folder_and_config

    folder, config = folder_and_config(teacher, key="teacher")
    if not 0 < wanted <= config.layers:
        what = f"the teacher has {config.layers} layers, but a student of {wanted} would"
        what += " be larger" if wanted > 0 else " be empty"
        raise UserError(what, key="layers", remedy=f"give a number from 1 to {config.layers} ({folder})")
    return evenly_spaced(config.layers, wanted)
