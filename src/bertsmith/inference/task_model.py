"""A fine-tuned model that is asked as it was trained: examples in, what it says of them out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertsmith.features.bilstm import FrozenMixScorer
from bertsmith.ground.errors import UserError
from bertsmith.ground.progress import progress_bar
from bertsmith.ground.seeds import key_of
from bertsmith.inference.bert import load
from bertsmith.inference.engine import Engine, cut_for
from bertsmith.inference.streams import in_streams
from bertsmith.inference.tuned import MIX_FILE, Tuned
from bertsmith.model.heads import OutputHead
from bertsmith.model.network import Network
from bertsmith.tasks.batches import Numbers, ordered_batches, scores_in_order
from bertsmith.tasks.encoded import EncodedSet, TaskBatch
from bertsmith.tasks.encoding import encode_split
from bertsmith.tasks.examples import Example
from bertsmith.tasks.objective import NetworkScorer, TaskObjective, freeze_encoder
from bertsmith.tasks.outcome import Outcome, outcome_of
from bertsmith.tasks.task_file import TaskNote
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.steps import autocast

GPU_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class TaskModel:
    """A scorer with what it takes to ask it."""

    objective: TaskObjective
    tokenizer: Tokenizer
    note: TaskNote
    device: torch.device
    precision: Literal["fp32", "bf16"]

    def encode(self, examples: Sequence[Example]) -> EncodedSet:
        """The examples as the model takes them."""
        return encode_split(self.note.kind, examples, self.note.labels, self.tokenizer, self.note.text)

    def outcome(self, examples: Sequence[Example], encoded: EncodedSet) -> Outcome:
        """What the model says of these examples."""
        return outcome_of(self.note, examples, encoded, self.logits(encoded))

    def logits(self, encoded: EncodedSet) -> NDArray[np.float32]:
        """The raw scores of a split, in its order."""
        was_training = self.objective.training
        self.objective.eval()
        try:
            return scores_in_order(encoded, self._scored(encoded))
        finally:
            self.objective.train(was_training)

    def _scored(self, encoded: EncodedSet) -> Iterator[tuple[NDArray[np.float32], Numbers]]:
        multiple = GPU_MULTIPLE if self.device.type == "cuda" else 1
        cut = cut_for(len(encoded.tokens_T), self.device)
        batches = ordered_batches(encoded, micro_tokens=cut.tokens, multiple=multiple)
        with progress_bar("judging", encoded.items) as advance:
            for scores, items in in_streams(self._scores, batches, streams=cut.streams):
                yield scores, items
                advance(len(items))

    def _scores(self, numbered: tuple[TaskBatch, Numbers]) -> tuple[NDArray[np.float32], Numbers]:
        batch, items = numbered
        # Both hold for one thread only, and this may be any.
        with torch.no_grad(), autocast(self.device, self.precision):
            return self.objective.scores(batch.to(self.device)).float().cpu().numpy(), items


def open_task_model(folder: Path, *, device: str = "auto") -> TaskModel:
    """The fine-tuned model of a run folder or of the model folder in it."""
    bert = load(folder, device=device)
    if bert.tuned is None:
        remedy = "give the folder of a `bertsmith finetune` run"
        raise UserError("was not fine-tuned here: it has no task.json", where=str(folder), remedy=remedy)
    return task_model_of(bert.engine.network, bert.tuned, bert.engine)


def task_model_of(network: Network, tuned: Tuned, engine: Engine) -> TaskModel:
    """A network that is asked as it was fine-tuned."""
    note = tuned.note
    if tuned.reads_raw:
        leave_pooler_out(network, note.head_name)
    scorer = scorer_of(network, note, engine.tokenizer, seed=0)
    if isinstance(scorer, FrozenMixScorer):
        _load_mix(scorer, tuned.mix)
    objective = TaskObjective(scorer.to(engine.device), note.kind, span_over=note.head.span_over).eval()
    # No autocast: the weights have the precision that was asked for.
    return TaskModel(objective, engine.tokenizer, note, engine.device, "fp32")


def _load_mix(scorer: FrozenMixScorer, mix: Mapping[str, Tensor]) -> None:
    """Put what was learned onto a frozen encoder, and all of it."""
    wanted = {name: tensor.shape for name, tensor in mix_state(scorer).items()}
    given = {name: tensor.shape for name, tensor in mix.items()}
    if wanted != given:
        name = min(wanted.items() ^ given.items())[0]
        what = f"does not fit task.json: {name} is {_shape(given, name)}, not {_shape(wanted, name)}"
        raise UserError(what, where=MIX_FILE, remedy="copy the whole folder again, or fine-tune again")
    scorer.load_state_dict({**scorer.state_dict(), **mix})


def _shape(shapes: Mapping[str, Sequence[int]], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "missing"


def leave_pooler_out(network: Network, name: str) -> bool:
    """Let a head that reads the pooler's output read the last state instead; whether it is such a head."""
    head = network.heads[name]
    if not isinstance(head, OutputHead) or head.reads != "pooled":
        return False
    head.reads = "sentence"
    del network.heads["pooler"]
    return True


def scorer_of(
    network: Network, note: TaskNote, tokenizer: Tokenizer, *, seed: int, fresh: tuple[str, ...] = ()
) -> nn.Module:
    """What gives a network's scores for a task: its own head, or a mix of a frozen encoder's layers."""
    if note.head.encoder == "frozen-mix":
        stream = torch.Generator().manual_seed(key_of(seed, "mix"))
        separator = tokenizer.sep_id if note.pairs else None
        return FrozenMixScorer(network, note.outputs, kind=note.kind, separator=separator, stream=stream)
    if note.head.encoder == "frozen-linear":
        freeze_encoder(network, fresh=fresh)
    return NetworkScorer(network, note.head_name)


def mix_state(scorer: FrozenMixScorer) -> dict[str, Tensor]:
    """What was learned on top of a frozen encoder."""
    state = scorer.state_dict()
    return {name: tensor.cpu() for name, tensor in state.items() if not name.startswith("network.")}
