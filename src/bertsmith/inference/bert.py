"""The object people hold: a trained encoder with its tokenizer, and what it can say of texts."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bertsmith.ground.errors import UserError
from bertsmith.inference.engine import Engine, Text
from bertsmith.inference.filling import Filling, Guess, encode_masked, fill_each_mask, fill_jointly
from bertsmith.model.encoder import first_of_rows, largest_of_rows, mean_of_rows
from bertsmith.model.family import member_of
from bertsmith.model.weights import Model, read_model, write_model
from bertsmith.packed import PackedBatch, unpack
from bertsmith.text.tokenizer import Tokenizer

Pooling = Literal["mean", "cls", "max"]
Precision = Literal["fp32", "bf16"]
POOLS = {"mean": mean_of_rows, "cls": first_of_rows, "max": largest_of_rows}
PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class NextSentence:
    """Whether the second text follows the first, and how sure the model is that it does."""

    follows: bool
    probability: float


def load(folder: Path | str, *, device: str = "auto", precision: Precision = "fp32") -> "Bert":
    """Open a Hugging Face model folder, ours or anyone's."""
    if precision not in PRECISIONS:
        raise UserError(f"unknown precision {precision!r}", remedy=f"choose one of {', '.join(PRECISIONS)}")
    model = read_model(Path(folder), dtype=PRECISIONS[precision])
    tokenizer = Tokenizer.load(folder)
    refuse_other_vocabulary(model, tokenizer, where=str(folder))
    for note in model.notes:
        log.warning("%s: %s", folder, note)
    return Bert(model, tokenizer, device=device)


def refuse_other_vocabulary(model: Model, tokenizer: Tokenizer, *, where: str) -> None:
    """Stop where the tokenizer can give ids that the model has no embedding for."""
    rows, entries = model.network.shape.vocabulary, tokenizer.vocabulary_size
    if entries > rows:
        what = f"the tokenizer has {entries} entries but the model {rows} embedding rows"
        raise UserError(what, where=where, remedy="put the tokenizer there that the model was trained with")


class Bert:
    """A trained encoder with its tokenizer."""

    def __init__(self, model: Model, tokenizer: Tokenizer, *, device: str = "auto") -> None:
        chosen = torch.device(_best_device() if device == "auto" else device)
        self.model, self.tokenizer = model, tokenizer
        self.engine = Engine(model.network.to(chosen).eval(), tokenizer, chosen)

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the folder brought."""
        return tuple(self.model.network.heads)

    def hidden_states(self, texts: Sequence[Text], *, truncate: bool = False) -> list[Tensor]:
        """For each text, its states after the embeddings and after each layer [layers + 1, tokens, width]."""

        def states(batch: PackedBatch) -> list[Tensor]:
            layers_LTD = torch.stack(self.model.network.encoder.hidden_states(batch)).float().cpu()
            return [each.transpose(0, 1).clone() for each in unpack(layers_LTD.transpose(0, 1), batch.layout)]

        return list(self.engine.answer_each(texts, states, truncate=truncate))

    def embed(self, texts: Sequence[Text], *, pooling: Pooling = "mean", truncate: bool = False) -> Tensor:
        """One vector for each text [texts, width]: the mean, first or largest of its last states."""
        if pooling not in POOLS:
            raise UserError(f"unknown pooling {pooling!r}", remedy=f"choose one of {', '.join(POOLS)}")

        def vectors(batch: PackedBatch) -> list[Tensor]:
            return list(POOLS[pooling](self.model.network(batch), batch.layout).float().cpu())

        found = list(self.engine.answer_each(texts, vectors, truncate=truncate))
        return torch.stack(found) if found else torch.empty(0, self.model.network.shape.width)

    def fill(self, text: str, *, top: int = 5, truncate: bool = False) -> list[list[Guess]]:
        """For each mask of the text the most probable tokens, each mask by itself."""
        self._need("mlm", "to fill masks")
        return fill_each_mask(self.engine, encode_masked(self.engine, text, truncate=truncate), top)

    def fill_jointly(
        self, text: str, *, top: int = 5, beam: int = 10, truncate: bool = False
    ) -> list[Filling]:
        """The most probable fillings of all masks together: each sees what was put into those before it."""
        self._need("mlm", "to fill masks")
        return fill_jointly(self.engine, encode_masked(self.engine, text, truncate=truncate), top, beam)

    def next_sentence(self, first: str, second: str, *, truncate: bool = False) -> NextSentence:
        """Whether the second text follows the first."""
        self._need("nsp", "to say whether one sentence follows another")
        network = self.model.network

        def scores(batch: PackedBatch) -> list[Tensor]:
            return list(network.scores("nsp", network(batch), batch.layout).float().softmax(-1).cpu())

        (probabilities,) = self.engine.answer_each([(first, second)], scores, truncate=truncate)
        follows = float(probabilities[member_of(network.shape.model_type).next_label])
        return NextSentence(follows > 0.5, follows)

    def save(self, folder: Path | str) -> None:
        """Write a model folder that `load` and the Hugging Face tools open."""
        write_model(Path(folder), self.model)
        self.tokenizer.save(folder)

    def _need(self, head: str, purpose: str) -> None:
        if head not in self.model.network.heads:
            present = ", ".join(self.heads) or "none"
            remedy = f"load a folder that was saved with it (heads here: {present})"
            raise UserError(f"this model has no {head} head, which it takes {purpose}", remedy=remedy)


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
