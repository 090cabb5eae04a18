"""transformers' model of the same shape and weights, as a pre-training loop at its best runs it.

Its batches are random ids without filler that lie on the device already. Shapes: P predicted rows, D width.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from rounds import preferring_cudnn, wait_for
from torch import Tensor, nn

from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.network import Network
from bertsmith.training.trainer import Precision


class PeerForm(NamedTuple):
    """How the peer runs."""

    mode: str
    """Of torch.compile, or "eager"."""
    masked: bool
    """Whether it is given an attention mask of ones, with which SDPA may take another kernel."""
    tokens: int
    """In a step."""
    sparse: bool = False
    """Whether its head scores masked positions only, which its own class for BERT does not offer."""
    cudnn: bool = False
    """Whether SDPA is told to prefer cuDNN's attention."""

    def __str__(self) -> str:
        mask = "a mask of ones" if self.masked else "no mask"
        head = ", head on masked positions only" if self.sparse else ""
        attention = ", cuDNN's attention" if self.cudnn else ""
        return f"{self.mode}, {mask}, {self.tokens:,} tokens a step{attention}{head}"


class Batch(NamedTuple):
    """What both kinds of heads learn from."""

    inputs: dict[str, Tensor]
    labels: Tensor
    """A word for each masked token, -100 for others."""
    rows_P: Tensor
    """The masked tokens among all of the batch."""
    pairs: Tensor | None
    """Whether the second sentence follows the first; None without such a head."""


class EveryToken(nn.Module):
    """The loss as transformers' class computes it: the head scores every token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        pairs = {} if batch.pairs is None else {"next_sentence_label": batch.pairs}
        return self.model(**batch.inputs, labels=batch.labels, **pairs).loss


class MaskedPositions(EveryToken):
    """The same loss of the same layers, with the head on the masked positions alone."""

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        states = self.model.base_model(**batch.inputs)
        hidden_PD = states.last_hidden_state.flatten(0, 1)[batch.rows_P]
        labels_P = batch.labels.flatten()[batch.rows_P]
        if batch.pairs is None:
            return nn.functional.cross_entropy(self.model.decoder(self.model.head(hidden_PD)), labels_P)
        words, pairs = self.model.cls(hidden_PD, states.pooler_output)
        return nn.functional.cross_entropy(words, labels_P) + nn.functional.cross_entropy(pairs, batch.pairs)


class Loop:
    """A plain training loop: autocast, clipping, fused AdamW."""

    def __init__(self, network: Network, form: PeerForm, device: str, precision: Precision) -> None:
        self.device, self.half, self.cudnn = device, precision == "bf16", form.cudnn
        self.model = same_in_transformers(network).to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        loss = (MaskedPositions if form.sparse else EveryToken)(self.model)
        compiled = form.mode != "eager"
        self.loss: Callable[[Batch], Tensor] = (
            torch.compile(loss, mode=form.mode, dynamic=False) if compiled else loss
        )

    def take(self, steps: int, batch: Batch) -> float:
        """So many steps on one batch; how many tokens they had."""
        with preferring_cudnn(self.cudnn):
            return self._take(steps, batch)

    def _take(self, steps: int, batch: Batch) -> float:
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
                loss = self.loss(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        wait_for(self.device)
        return float(steps * batch.inputs["input_ids"].numel())


def same_in_transformers(network: Network) -> nn.Module:
    """The network as transformers opens it."""
    kind = transformers.BertForPreTraining if "nsp" in network.heads else transformers.AutoModelForMaskedLM
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), Model(network))
        model: nn.Module = kind.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    return model


def random_batch(network: Network, form: PeerForm, length: int, rate: float, device: str) -> Batch:
    """Sequences of one length with as many masked tokens in each."""
    sequences, each = max(1, form.tokens // length), max(1, round(rate * length))
    ids = torch.randint(5, network.config.vocabulary, (sequences, length), device=device)
    masked = torch.rand(sequences, length, device=device).argsort(1) < each
    inputs = {"input_ids": ids}
    if network.config.segments > 1:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    if form.masked:
        inputs["attention_mask"] = torch.ones_like(ids)
    rows_P = masked.flatten().nonzero()[:, 0]
    pairs = torch.randint(0, 2, (sequences,), device=device) if "nsp" in network.heads else None
    return Batch(inputs, ids.masked_fill(~masked, -100), rows_P, pairs)
