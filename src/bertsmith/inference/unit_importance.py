"""Importance of each head and neuron of a fine-tuned model to the loss of its task."""

from bertsmith.core.progress import progress_bar
from bertsmith.inference.task_model import TaskModel
from bertsmith.model.importance import UnitImportance, importance_gates
from bertsmith.tasks.batches import ordered_batches
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.objective import NetworkScorer

IMPORTANCE_TOKENS = 2048
"""Tokens of one backward pass."""


def task_importance(model: TaskModel, encoded: EncodedSet) -> UnitImportance:
    """Return the mean absolute gradient of a gate on each head and neuron over examples, without dropout."""
    scorer, objective = model.objective.scorer, model.objective.eval()
    assert isinstance(scorer, NetworkScorer), "the caller has looked"
    with importance_gates(scorer.network) as gates, progress_bar("importance", encoded.items) as advance:
        for batch, items in ordered_batches(encoded, micro_tokens=IMPORTANCE_TOKENS, multiple=1):
            on_device = batch.to(model.device)
            loss, _ = objective(on_device, on_device.weights.new_ones(1))
            gates.collect(loss)
            advance(len(items))
    return gates.importance()
