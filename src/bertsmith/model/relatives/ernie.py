"""ERNIE (Sun et al. 2019, 2020): BERT with knowledge masking, and from 2.0 on a task type embedding."""

from dataclasses import replace
from typing import Any

from bertsmith.model.member import Member, constant_std
from bertsmith.model.relatives import bert
from bertsmith.model.settings import Settings
from bertsmith.model.shape import Shape


def read_shape(settings: Settings) -> Shape:
    """BERT's shape and the number of task types."""
    has_task_types = settings.switch("use_task_id", False)
    task_types = settings.size("task_type_vocab_size", 3)
    return replace(bert.read_shape(settings), task_types=task_types if has_task_types else 0)


def write_config(shape: Shape) -> dict[str, Any]:
    """BERT's config and the number of task types."""
    tasks = {"task_type_vocab_size": shape.task_types} if shape.task_types else {}
    return bert.write_config(shape) | {"use_task_id": bool(shape.task_types)} | tasks


ERNIE = Member(
    model_type="ernie",
    read_shape=read_shape,
    write_config=write_config,
    build_encoder=bert.build_encoder,
    encoder_names=bert.encoder_names,
    prefix="ernie.",
    heads=bert.pretraining_and_task_heads("ernie."),
    architectures=bert.published_classes("Ernie"),
    initial=constant_std,
    tied=bert.tied_names("ernie."),
    next_label=1,
)
