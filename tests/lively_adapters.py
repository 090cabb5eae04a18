"""Adapter folders whose weights change what a base predicts, made without training."""

from pathlib import Path

import torch

from bertsmith.inference.adapter_folder import write_adapter
from bertsmith.inference.finetuned_folder import FinetunedTask, write_finetuned
from bertsmith.model.lora import LoraShape, adapters_of, add_fresh_adapters, with_shared_weights
from bertsmith.model.network import Network, add_fresh_head
from bertsmith.tasks.objective import freeze_encoder
from bertsmith.tasks.task_config import TaskConfig

SHAPE = LoraShape(4, 8.0)


def write_lively_adapter(folder: Path, base: Network, config: TaskConfig, *, named: str, seed: int) -> None:
    """An adapter over a pre-trained network, whose name in the adapter's config is given."""
    network, stream = with_shared_weights(base), torch.Generator().manual_seed(seed)
    for head in ("mlm", "nsp"):
        del network.heads[head]
    add_fresh_head(network, config.head_name, config.outputs, stream)
    freeze_encoder(network)
    add_fresh_adapters(network, ("query", "value", "feed-forward"), SHAPE, stream)
    with torch.no_grad():
        for part in [each for _, each in adapters_of(network)]:
            part.lora_B.normal_(0, 0.2, generator=stream)
        network.heads[config.head_name].output.weight.normal_(0, 1.0, generator=stream)
    folder.mkdir()
    write_adapter(folder, network, config.head_name, shape=SHAPE, base=named)
    write_finetuned(folder, FinetunedTask(config))
