"""Model folders with task heads that nobody trained, but that tell texts apart."""

from pathlib import Path

import torch

import bertsmith
from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.network import new_network
from bertsmith.tasks.task_config import TaskConfig, write_task_config
from tests.oracles import saved_oracle
from tests.tiny import tiny_encoder_config
from tests.toy_folder import toy_vocabulary, write_toy_folder


def untrained(
    folder: Path, heads: dict[str, int], *, note: TaskConfig | None = None, **extras
) -> bertsmith.Bert:
    """A folder with lively heads that nobody trained."""
    config = tiny_encoder_config(vocabulary=len(toy_vocabulary()), positions=64)
    network = new_network(config, {"pooler": 0, **heads}, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in network.heads.parameters():
            parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(len(parameter)))
    write_toy_folder(folder)
    write_model(folder, Model(network, extras))
    if note:
        write_task_config(folder / "task.json", note)
    return bertsmith.load(folder)


def numbered_labels(*labels: str) -> dict[str, dict[str, str]]:
    """What a config.json says of a head's outputs."""
    return {"id2label": {str(number): label for number, label in enumerate(labels)}}


def strangers(folder: Path, kind: str, **changes) -> bertsmith.Bert:
    """A folder that transformers wrote, with the toy vocabulary."""
    write_toy_folder(folder)
    saved_oracle(folder, "bert", kind, vocab_size=len(toy_vocabulary()), **changes)
    return bertsmith.load(folder)
