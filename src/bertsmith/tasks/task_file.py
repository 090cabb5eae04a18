"""task.json: what a fine-tuned model folder must say of itself to be used as it was trained."""

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_json, write_json
from bertsmith.recipe.finetuning import AnswersSection, HeadSection, TextSection
from bertsmith.recipe.schema import Section
from bertsmith.tasks.examples import Kind
from bertsmith.tasks.task import TASK_FILE

NULL_RULE = "no answer where null score - best span score > answers.null_threshold"


class TaskNote(Section):
    """How a folder's head is asked, and how its scores become answers."""

    format: Literal[1] = 1
    task: str
    """The task's name; "custom" for a user's own."""
    kind: Kind
    metrics: tuple[str, ...]
    """The first one decides."""
    labels: tuple[str, ...] = ()
    """Classes or tags, in the order of the outputs."""
    pairs: bool = False
    """Whether the texts are pairs."""
    text: TextSection = TextSection()
    head: HeadSection = HeadSection()
    answers: AnswersSection = AnswersSection()
    custom: dict[str, str | float] = {}
    """A user's own table: which columns are what (the fields of tasks.custom.CustomSpec)."""
    null_rule: str = NULL_RULE
    """The sign convention of answers.null_threshold, for whoever reads the file."""

    @property
    def head_name(self) -> str:
        """The network's head that answers."""
        heads = {"multilabel": "classify", "regress": "classify"}
        return heads.get(self.kind, self.kind)

    @property
    def outputs(self) -> int:
        """How many numbers the head gives for a sequence or token."""
        return {"regress": 1, "choice": 1, "span": 2}.get(self.kind, len(self.labels))


def write_task_note(folder: Path, note: TaskNote) -> None:
    """Put the note into a model folder."""
    write_json(folder / TASK_FILE, note.model_dump(mode="json"))


def read_task_note(folder: Path) -> TaskNote:
    """The note of a model folder that was fine-tuned here."""
    file = folder / TASK_FILE
    try:
        return TaskNote.model_validate(read_json(file, remedy="fine-tune again"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = f"{key}: {first['msg']}"
        raise UserError(what, where=str(file), remedy="correct the value or fine-tune again") from error
