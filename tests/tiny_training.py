"""A tiny objective that can be trained, shared between processes and saved, in milliseconds."""

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from bertsmith.model.network import new_network
from bertsmith.packed import PackedBatch, pack
from bertsmith.training.checkpoint import model_tensors, moments_of
from bertsmith.training.distributed import World, accumulating, share_work
from tests.tiny import tiny_encoder_config

SEQUENCES = [[2, 5, 6, 7, 3], [2, 8, 3], [2, 9, 10, 11, 12, 13, 3], [2, 14, 15, 3]]


class TinyObjective(nn.Module):
    """A network with losses on every token and every sentence, summed."""

    def __init__(self, model_type: str = "bert", seed: int = 0) -> None:
        super().__init__()
        config = tiny_encoder_config(model_type, layers=2)
        heads = {"mlm": 0, "pooler": 0, "sop" if model_type == "albert" else "nsp": 2}
        self.pair_head = list(heads)[2]
        self.network = new_network(config, heads, torch.Generator().manual_seed(seed)).eval()

    def forward(self, batch: PackedBatch) -> Tensor:
        hidden_TD = self.network(batch)
        scores_TV = self.network.word_scores(hidden_TD, torch.arange(len(batch.tokens_T)))
        words = functional.cross_entropy(scores_TV, batch.tokens_T, reduction="sum")
        return words + self.network.scores(self.pair_head, hidden_TD, batch.layout)[:, 0].sum()


def learn(objective: nn.Module, world: World) -> None:
    """Gradients of the loss over all sequences, each process taking its part of them one by one."""
    own = SEQUENCES[world.rank :: world.size]
    for number, sequence in enumerate(own, start=1):
        with accumulating(objective, last=number == len(own)):
            (objective(pack([sequence])) * world.size / len(SEQUENCES)).backward()


def trained(
    world: World, how: str, *, model_type: str = "bert", seed: int = 0, steps: int = 1
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An objective shared between processes, and its optimizer, after some steps."""
    objective = share_work(TinyObjective(model_type, seed), world, how)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    for _ in range(steps):
        take_step(objective, optimizer, world)
    return objective, optimizer


def take_step(objective: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """One step of training."""
    optimizer.zero_grad()
    learn(objective, world)
    optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from what each process holds of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fingerprint(objective: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A hash of each weight and moment, whole, by its saved name."""
    tensors = model_tensors(objective) | moments_of(objective, optimizer)
    return {
        name: hashlib.sha256(whole(tensor.detach()).contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
