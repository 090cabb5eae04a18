"""A fine-tuned model that predicts as it was trained: examples in, predictions out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.progress import progress_bar
from bertsmith.core.seeds import key_of
from bertsmith.core.steps import Steps, finished
from bertsmith.features.bilstm import BiLstmScorer, Reading
from bertsmith.inference.engine import BATCH_TOKENS, USUAL_BATCH_TOKENS, Engine, batching_for, in_streams
from bertsmith.inference.finetuned_folder import MIX_FILE, FinetunedTask
from bertsmith.model.heads import OutputHead
from bertsmith.model.network import Network, set_pooling
from bertsmith.tasks.batches import Numbers, TaskBatch, ordered_batches, scores_in_order
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import Example
from bertsmith.tasks.objective import NetworkScorer, Scorer, TaskObjective, freeze_encoder
from bertsmith.tasks.predictions import Predictions
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.trainer import Precision, autocast

GPU_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class TaskModel:
    """A scorer, its tokenizer and its task config."""

    objective: TaskObjective
    tokenizer: Tokenizer
    config: TaskConfig
    device: torch.device
    precision: Precision

    @property
    def scorer(self) -> Scorer:
        """Return the encoder with what reads its states."""
        assert isinstance(self.objective.scorer, Scorer)
        return self.objective.scorer

    @property
    def network(self) -> Network:
        """Return the network under the task's head, which is not a BiLSTM."""
        assert isinstance(self.scorer, NetworkScorer), "the caller has looked"
        return self.scorer.network

    def encode(self, examples: Sequence[Example]) -> EncodedSet:
        """Return the examples in the form that the model takes."""
        return self.config.kind.encode(examples, self.config.labels, self.tokenizer, self.config.text)

    def predict(self, examples: Sequence[Example], encoded: EncodedSet) -> Predictions:
        """Return the model's predictions for these examples."""
        return self.config.kind.predict(self.logits(encoded), encoded, examples, self.config.answers)

    def predict_in_steps(self, examples: Sequence[Example], encoded: EncodedSet) -> Steps[Predictions]:
        """Return the model's predictions, computed a batch at a time."""
        logits = yield from self._logits_in_steps(encoded)
        return self.config.kind.predict(logits, encoded, examples, self.config.answers)

    def logits(self, encoded: EncodedSet) -> NDArray[np.float32]:
        """Return the raw scores of a split, in its order."""
        was_training = self.objective.training
        self.objective.eval()
        try:
            return finished(self._logits_in_steps(encoded))
        finally:
            self.objective.train(was_training)

    def _logits_in_steps(self, encoded: EncodedSet) -> Steps[NDArray[np.float32]]:
        """Return the raw scores; the windows of an overlong text are computed in several batches."""
        most = BATCH_TOKENS.get(self.device.type, USUAL_BATCH_TOKENS)
        apart = encoded.unit == "item" and encoded.lengths_M().max(initial=0) > most
        parts, done = encoded.by_sequence() if apart else encoded, 0
        found = []
        for scores, items in self._scored(parts):
            found.append((scores, items))
            done += len(items)
            yield 1 - done / parts.items
        in_order = scores_in_order(parts, found)
        if not apart:
            return in_order
        counts_M = np.diff(encoded.items_M1).reshape(-1, *[1] * (in_order.ndim - 1))
        return (np.add.reduceat(in_order, encoded.items_M1[:-1]) / counts_M).astype(np.float32)

    def _scored(self, encoded: EncodedSet) -> Iterator[tuple[NDArray[np.float32], Numbers]]:
        """Yield the scores of each batch with the numbers of its items, one at a time to save memory."""

        def scores(numbered: tuple[TaskBatch, Numbers]) -> tuple[NDArray[np.float32], Numbers]:
            batch, items = numbered
            # no_grad and autocast apply to one thread only, and this may be any of the streams.
            with torch.no_grad(), autocast(self.device, self.precision):
                return self.objective.scores(batch.to(self.device)).float().cpu().numpy(), items

        multiple = GPU_MULTIPLE if self.device.type == "cuda" else 1
        cut = batching_for(len(encoded.tokens_T), self.device)
        batches = ordered_batches(encoded, micro_tokens=cut.tokens, multiple=multiple)
        with progress_bar("predicting", encoded.items) as advance:
            for found, items in in_streams(scores, batches, streams=cut.streams):
                yield found, items
                advance(len(items))


def task_model_of(network: Network, finetuned: FinetunedTask, engine: Engine) -> TaskModel:
    """Return a model that predicts with a network as it was fine-tuned to."""
    config = finetuned.config
    if finetuned.skips_pooler:
        leave_pooler_out(network, config.head_name)
    if config.head.pooling != "model":
        set_pooling(network, config.head.pooling)
    scorer = scorer_of(network, config, engine.tokenizer, seed=0)
    _load_mix(scorer, finetuned.mix)
    objective = TaskObjective(scorer.to(engine.device), config.kind, config.head).eval()
    # No autocast: the weights already have the requested precision.
    return TaskModel(objective, engine.tokenizer, config, engine.device, "fp32")


def _load_mix(scorer: Scorer, mix: Mapping[str, Tensor]) -> None:
    """Load the weights that are not part of the network; reject missing and additional ones."""
    wanted = {name: tensor.shape for name, tensor in scorer.own_state().items()}
    given = {name: tensor.shape for name, tensor in mix.items()}
    if wanted != given:
        name = min(wanted.items() ^ given.items())[0]
        there, expected = (list(each[name]) if name in each else "missing" for each in (given, wanted))
        what = f"does not fit task.json: {name} is {there}, not {expected}"
        raise UserError(what, where=MIX_FILE, remedy="copy the whole folder again, or fine-tune again")
    if mix:
        scorer.load_state_dict({**scorer.state_dict(), **mix})


def leave_pooler_out(network: Network, name: str) -> bool:
    """Let a head read the last state instead of the pooler's output; return False for other heads."""
    head = network.heads[name]
    if not isinstance(head, OutputHead) or head.reads != "pooled":
        return False
    head.reads = "sentence"
    del network.heads["pooler"]
    return True


def scorer_of(
    network: Network, config: TaskConfig, tokenizer: Tokenizer, *, seed: int, fresh: tuple[str, ...] = ()
) -> Scorer:
    """Return the scorer of a task: the network's own head, or a BiLSTM over its layers."""
    if config.head.has_bilstm:
        stream = torch.Generator().manual_seed(key_of(seed, "mix"))
        separator = tokenizer.sep_id if config.pairs else None
        reading = Reading(config.kind.head.reads, separator)
        tunes = config.head.encoder == "tuned"
        return BiLstmScorer(
            network, config.outputs, config.features, reading=reading, stream=stream, tunes=tunes
        )
    if config.head.encoder == "frozen-linear":
        freeze_encoder(network, fresh=fresh)
    return NetworkScorer(network, config.head_name)
