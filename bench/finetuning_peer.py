"""A plain training loop over a model of transformers, on examples that were tokenised before."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from rounds import Round, wait_for
from torch import Tensor

from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.task_config import TaskConfig

GROUP_BATCHES = 50
"""The Trainer's length-grouped sampler sorts within groups of so many batches."""
FEW_SHAPES = 6
"""To compile for more than these takes longer than its user waits."""
CLASSES = {
    "classify": transformers.AutoModelForSequenceClassification,
    "regress": transformers.AutoModelForSequenceClassification,
    "span": transformers.AutoModelForQuestionAnswering,
}


class PeerForm(NamedTuple):
    """How the peer runs."""

    mode: str
    """Of torch.compile for each shape, "dynamic" for one graph of all shapes, or "eager"."""
    multiple: int
    """Batches are padded to their longest example, rounded up to this."""
    attention: str = "sdpa"
    """As transformers names it."""
    order: str = "grouped"
    """By length, as the Trainer does it, or "random"."""

    def __str__(self) -> str:
        return f"{self.mode}, {self.attention} attention, {self.order}, multiples of {self.multiple}"


class Peer:
    """AutoModelFor... with fused AdamW and autocast."""

    def __init__(
        self, folder: Path, recipe: FinetuningRecipe, config: TaskConfig, form: PeerForm, *, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.recipe, self.config, self.form, self.device = recipe, config, form, recipe.run.device
        labels = {} if config.kind.name == "span" else {"num_labels": config.outputs}
        loaded = CLASSES[config.kind.name].from_pretrained(
            folder, dtype=torch.float32, attn_implementation=form.attention, **labels
        )
        self.model = loaded.to(self.device).train()
        optim = recipe.optim
        decayed = [each for each in self.model.parameters() if each.dim() > 1]
        exempt = [each for each in self.model.parameters() if each.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": optim.weight_decay},
            {"params": exempt, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=optim.peak_lr, eps=optim.eps, fused=True)
        self.forward: Callable[..., object] = self.model
        if form.mode == "dynamic":
            self.forward = torch.compile(self.model, dynamic=True)
        elif form.mode != "eager":
            self.forward = torch.compile(self.model, mode=form.mode, dynamic=False)

    def batches(self, encoded: EncodedSet, *, seed: int) -> Iterator[dict[str, Tensor]]:
        """Padded batches without end, one epoch after the other."""
        for number in itertools.count():
            yield from self.epoch(encoded, 1000 * seed + number)

    def epoch(self, encoded: EncodedSet, seed: int) -> Iterator[dict[str, Tensor]]:
        """Padded batches of all examples, each of them once; the last one may be smaller."""
        lengths = np.diff(encoded.starts_N1)
        chance = np.random.default_rng(seed)
        order = chance.permutation(encoded.items)
        size = self.recipe.run.examples
        if self.form.order == "grouped":
            groups = [
                order[first : first + GROUP_BATCHES * size]
                for first in range(0, len(order), GROUP_BATCHES * size)
            ]
            order = np.concatenate([group[np.argsort(-lengths[group], kind="stable")] for group in groups])
        for first in range(0, len(order), size):
            yield self._padded(encoded, order[first : first + size])

    def _padded(self, encoded: EncodedSet, items: np.ndarray) -> dict[str, Tensor]:
        """Some items as a batch."""
        lengths = np.diff(encoded.starts_N1)[items]
        width = -(-int(lengths.max()) // self.form.multiple) * self.form.multiple
        mask = np.arange(width) < lengths[:, None]
        ids, segments = np.zeros(mask.shape, np.int64), np.zeros(mask.shape, np.int64)
        begins = encoded.starts_N1[items]
        rows = np.concatenate([np.arange(*each) for each in zip(begins, begins + lengths, strict=True)])
        ids[mask], segments[mask] = encoded.tokens_T[rows], encoded.segments_T[rows]
        batch = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask.astype(np.int64)}
        targets = encoded.targets[items]
        if self.config.kind.name == "span":
            batch |= {"start_positions": targets[:, 0], "end_positions": targets[:, 1]}
        else:
            batch["labels"] = targets
        return {name: torch.from_numpy(values).to(self.device) for name, values in batch.items()}

    def learn(self, batch: dict[str, Tensor], *, rate: float) -> None:
        """One step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.compiler.cudagraph_mark_step_begin()
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self.forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def logits(self, encoded: EncodedSet) -> np.ndarray:
        """The scores of a split, in order."""
        self.model.eval()
        found = []
        with torch.no_grad(), self._autocast():
            for first in range(0, encoded.items, 64):
                batch = self._padded(encoded, np.arange(first, min(first + 64, encoded.items)))
                batch.pop("labels")
                found.append(self.model(**batch).logits.float().cpu().numpy())
        self.model.train()
        return np.concatenate(found)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.recipe.run.precision == "bf16")


def peer_round(peer: Peer, encoded: EncodedSet) -> Round:
    """An epoch of batches that were padded and put on the device before: its best case."""
    batches = list(peer.epoch(encoded, seed=0))
    shapes = {batch["input_ids"].shape for batch in batches}
    if peer.form.mode not in ("eager", "dynamic") and len(shapes) > FEW_SHAPES:
        raise NotImplementedError(f"{len(shapes)} shapes to compile for")

    def take() -> float:
        for batch in batches:
            peer.learn(batch, rate=peer.recipe.optim.peak_lr / 2)
        wait_for(peer.device)
        return float(sum(len(batch["input_ids"]) for batch in batches))

    return take
