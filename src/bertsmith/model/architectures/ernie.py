"""ERNIE (Sun et al. 2019, 2020): BERT with knowledge masking, and from 2.0 on a task type embedding."""

from dataclasses import replace
from typing import Any

from bertsmith.model.architecture import Architecture, Pretraining, constant_std
from bertsmith.model.architectures import bert
from bertsmith.model.encoder_config import ConfigReader
from bertsmith.model.transformer.transformer_config import TransformerConfig


def read_config(reader: ConfigReader) -> TransformerConfig:
    """Read BERT's config and the number of task types."""
    has_task_types = reader.switch("use_task_id", False)
    task_types = reader.size("task_type_vocab_size", 3)
    return replace(bert.read_config(reader), task_types=task_types if has_task_types else 0)


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return BERT's config and the number of task types."""
    tasks = {"task_type_vocab_size": config.task_types} if config.task_types else {}
    return bert.write_config(config) | {"use_task_id": bool(config.task_types)} | tasks


ERNIE = Architecture(
    model_type="ernie",
    read_config=read_config,
    write_config=write_config,
    build_encoder=bert.build_encoder,
    encoder_names=bert.encoder_names,
    prefix="ernie.",
    heads=bert.pretraining_and_task_heads("ernie."),
    classes=bert.published_classes("Ernie"),
    causal_classes={"ErnieForMaskedLM": "ErnieForCausalLM"},
    initial=constant_std,
    tied=bert.tied_names("ernie."),
    next_label=1,
    pretraining=Pretraining(18_000, bert.count_parameters, TransformerConfig),  # Chinese, ERNIE 1.0
)
