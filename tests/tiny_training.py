"""A tiny objective that can be trained, shared between processes and saved, in milliseconds."""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from bertsmith.model.network import new_network
from bertsmith.packed import PackedBatch, pack
from bertsmith.training.checkpoint import model_tensors, moments_of
from bertsmith.training.distributed import World, accumulating, share_work
from bertsmith.training.step_losses import OverTheStep
from bertsmith.training.trainer import StepInput, Trainer
from bertsmith.training.trainer import take_step as trainer_step
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


class Sentences(NamedTuple):
    """A micro-batch of sequences, of which the last one is filler."""

    inputs: PackedBatch

    @classmethod
    def of(cls, sequences: list[list[int]]) -> "Sentences":
        return cls(pack([*sequences, [0, 0]]))

    def to(self, *_: object, **__: object) -> "Sentences":
        return self


class TinyContrast(nn.Module, OverTheStep):
    """Two vectors of each sequence, in double precision, of which each is to find the other (InfoNCE)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        config = tiny_encoder_config("bert", layers=2, dropout=dropout, attention_dropout=dropout)
        self.network = new_network(config, {}, torch.Generator().manual_seed(0)).double().train()

    def forward(self, batch: Sentences, loss_scales_C: Tensor | None = None) -> tuple[Tensor, Tensor]:
        encoder, layout = self.network.encoder, batch.inputs.layout
        one_SD, other_SD = (encoder.sentence_states(encoder(batch.inputs), layout) for _ in range(2))
        return torch.stack([one_SD, other_SD.flip(-1)], 1), torch.arange(len(one_SD)) < len(one_SD) - 1

    def of_step(self, rows_Z: Tensor, loss_scales_C: Tensor) -> tuple[Tensor, Tensor]:
        scores_ZZ = rows_Z[:, 0] @ rows_Z[:, 1].T
        losses_Z = functional.cross_entropy(scores_ZZ, torch.arange(len(scores_ZZ)), reduction="none")
        return losses_Z.sum() * loss_scales_C[0], losses_Z.detach()[:, None]


def contrasted(world: World, how: str, cut: list[list[list[int]]]) -> tuple[dict[str, Tensor], float]:
    """All gradients of a step of these micro-batches over all processes, and this one's sum of losses."""
    objective = share_work(TinyContrast(), world, how)
    trainer = Trainer(objective, torch.optim.SGD(objective.parameters(), lr=0.0), world)
    rows = world.sum([sum(map(len, cut))])
    report = trainer_step(trainer, StepInput([Sentences.of(each) for each in cut], tuple(rows), 0.0))
    named = {name.removeprefix("module."): each.grad for name, each in objective.named_parameters()}
    return {name: whole(gradient) for name, gradient in named.items()}, float(report.sums[0])


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
