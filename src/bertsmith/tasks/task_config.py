"""task.json: the properties of a fine-tuned model folder that are needed to use it as it was trained."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import PlainSerializer, PlainValidator, ValidationError

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, write_json
from bertsmith.core.wording import counted
from bertsmith.recipe.finetuning_schema import AnswersSection, FeaturesSection, HeadSection, TextSection
from bertsmith.recipe.section import Section
from bertsmith.tasks.kinds.kind import AnyKind, Kind
from bertsmith.tasks.kinds.registry import kind_named
from bertsmith.tasks.metrics import Metric

NULL_RULE = "no answer where null score - best span score > answers.null_threshold"


def _kind(value: object) -> AnyKind:
    return value if isinstance(value, Kind) else kind_named(str(value))


def _name(kind: AnyKind) -> str:
    return kind.name


class TaskConfig(Section):
    """The outputs of a folder's head, and the conversion of its scores to predictions."""

    format: Literal[1] = 1
    task: str
    """Name of the task; "custom" for a user's own."""
    kind: Annotated[AnyKind, PlainValidator(_kind), PlainSerializer(_name, return_type=str)]
    metrics: tuple[str, ...]
    """Metrics of the task; the first one decides."""
    labels: tuple[str, ...] = ()
    """Classes or tags, in the order of the outputs."""
    pairs: bool = False
    """True if the texts are pairs."""
    text: TextSection = TextSection()
    head: HeadSection = HeadSection()
    features: FeaturesSection = FeaturesSection()
    """Settings of the BiLSTM, if the head has one."""
    answers: AnswersSection = AnswersSection()
    custom: dict[str, str | float] = {}
    """Columns of a user's own table (the fields of tasks.custom.CustomSpec)."""
    null_rule: str = NULL_RULE
    """The sign convention of answers.null_threshold, for readers of the file."""

    @property
    def head_name(self) -> str:
        """Name of the network's head for this task."""
        return self.kind.head.name

    @property
    def outputs(self) -> int:
        """Number of outputs of the head per sequence or token."""
        return self.kind.head.outputs(self.labels)

    @property
    def deciding_metric(self) -> Metric:
        """The metric that decides between checkpoints and between runs."""
        return self.kind.metric_named(self.metrics[0])


def write_task_config(file: Path, config: TaskConfig) -> None:
    """Write the task.json of a model folder."""
    write_json(file, config.model_dump(mode="json"))


def read_task_config(file: Path) -> TaskConfig:
    """Read the task.json of a model folder that was fine-tuned here."""
    values = read_json(file, remedy="fine-tune again")
    try:
        config = TaskConfig.model_validate(values)
    except ValidationError as error:
        from bertsmith.recipe.validation_errors import file_error  # its schemas take a moment to build

        remedy = "correct the value or fine-tune again"
        raise file_error(error, values, TaskConfig, where=str(file), remedy=remedy) from error
    check_label_thresholds(config, where=f"{file}: answers.label_thresholds")
    return config


def check_label_thresholds(config: TaskConfig, *, where: str) -> None:
    """Raise if the thresholds do not fit the labels: they are needed only after hours of training."""
    thresholds, count = config.answers.label_thresholds, config.kind.threshold_count(config.labels)
    if thresholds == "off":
        return
    labels = f"a {config.kind.name} task with {counted(len(config.labels), 'label')}"
    if not count:
        remedy = "leave it off: thresholds are for two classes, and for multilabel"
        raise UserError(f"{labels} does not use thresholds", where=where, remedy=remedy)
    if thresholds != "tuned" and len(thresholds) != count:
        what = f"{labels} needs {counted(count, 'threshold')}, not {len(thresholds)}"
        raise UserError(what, where=where, remedy="give one for each label, or tuned")
