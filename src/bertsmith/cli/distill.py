"""`bertsmith distill`: a small model that learns from a large one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from bertsmith.cli.pretrain import chosen_recipe, run, run_options, spelled
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from typing import Any

RECIPE = "distilbert"


def distill(
    teacher: Annotated[str, Option(metavar="MODEL", help="What is learned from: a folder, or org/name.")],
    store: Annotated[Path, Option(help="Token store with the teacher's vocabulary (`bertsmith corpus`).")],
    out: Annotated[Path, Option(help="Run folder; a run found there resumes.")],
    layers: Annotated[
        int | None, Option(help="So many of the teacher's layers make the student (distill.layers).")
    ] = None,
    student: Annotated[
        str, Option(metavar="MODEL", help="A student of its own instead: a model, or a preset for its shape.")
    ] = "",
    steps: Annotated[int | None, Option(help="Budget in steps (run.steps).")] = None,
    minutes: Annotated[float | None, Option(help="Budget in minutes (run.minutes).")] = None,
    batch: Annotated[int | None, Option(help="Sequences a step (batch.sequences).")] = None,
    max_length: Annotated[
        int | None, Option(help="Longest sequence, in one stage (examples.stages).")
    ] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda (run.device).")] = "",
    precision: Annotated[str, Option(help="auto, fp32, bf16 or fp16 (run.precision).")] = "",
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Any other setting, repeatable.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON lines, for machines.")] = False,
) -> None:
    """Train a small model to do as a large one does.

    The student learns from the teacher's predictions, the masked words and the teacher's last states, as
    DistilBERT did. It is a pre-training run: stopped, it resumes when the same command is given again. All
    settings: bertsmith recipe show distilbert

    Examples:

    bertsmith distill --teacher MODEL --layers 6 --store store/ --out runs/student

    bertsmith distill --teacher MODEL --layers 6 --store store/ --out runs/student --minutes 60 --batch 256

    bertsmith distill --teacher MODEL --student bert-mini --store store/ --out runs/mini

    bertsmith distill --teacher MODEL --layers 6 --store store/ --out runs/fast --set distill.rows=predicted
    """
    begins: tuple[tuple[str, str, Any], ...] = (
        ("--teacher", "distill.teacher", teacher),
        ("--teacher", "examples.objective", "distilled"),
        *_student_options(teacher, layers, student),
    )
    sizes = run_options(steps=steps, minutes=minutes, batch=batch, device=device, precision=precision)
    recipe = chosen_recipe(RECIPE, [*spelled(begins), *sizes], settings or [], max_length)
    run(recipe, store=store.expanduser(), out=out.expanduser(), as_json=as_json)


def _student_options(teacher: str, layers: int | None, student: str) -> "tuple[tuple[str, str, Any], ...]":
    """What the student begins with: layers of the teacher, a model folder, or fresh weights of a shape."""
    if (layers is None) == (not student):
        remedy = "--layers 6 takes six of the teacher's; --student names a model or a preset"
        raise UserError("a student is one of two things", where="--layers and --student", remedy=remedy)
    if layers is not None:
        return (("--layers", "distill.layers", list(_teacher_layers(teacher, layers))),)
    from bertsmith.recipe.load import load_recipe, preset_names

    if student in preset_names():
        shape = load_recipe(student).model.model_dump()
        return tuple(("--student", f"model.{key}", value) for key, value in shape.items())
    return (("--student", "start.model", student),)


def _teacher_layers(teacher: str, wanted: int) -> "tuple[int, ...]":
    from bertsmith.model.layer_subset import evenly_spaced
    from bertsmith.pretraining.initial_model import config_of

    folder, config = config_of(teacher, option="--teacher")
    if not 0 < wanted <= config.layers:
        what = f"the teacher has {config.layers} layers, and a student of {wanted} would"
        what += " be larger" if wanted > 0 else " have none"
        raise UserError(what, where="--layers", remedy=f"give a number from 1 to {config.layers} ({folder})")
    return evenly_spaced(config.layers, wanted)
