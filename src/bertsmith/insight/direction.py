"""Left or right: the attention that each side gets, and the loss of a task if one side is hidden.

Shapes: L layers, H heads, G texts of similar length, N tokens of the longest, S sequences, C outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bertsmith.core.errors import UserError
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.task_model import TaskModel, task_model_of
from bertsmith.inference.text_reader import TextInput
from bertsmith.insight.attention_pass import Analysis, attention_pass
from bertsmith.insight.pictures import draw_head_grids
from bertsmith.insight.report import UNTRAINED_TOO, Report, Table, head_name
from bertsmith.insight.report_views import measures_view
from bertsmith.insight.surface import PerHead, shortened
from bertsmith.model.encoder_config import need
from bertsmith.model.network import Network
from bertsmith.model.transformer.transformer_config import with_heads
from bertsmith.packed import PackedBatch, moved_to_device
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import Example
from bertsmith.tasks.kinds.registry import metric_named
from bertsmith.tasks.objective import NetworkScorer, TaskObjective
from bertsmith.tasks.predictions import PredictedSplit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Side = Literal["left", "right"]
SHARES = ("left", "right", "itself", "special")


@dataclass(frozen=True, slots=True)
class Direction:
    """The attention of words to each side, as fractions [L, H]; special tokens count as a separate side."""

    shares: dict[str, PerHead]
    texts: int
    words: int
    """Number of tokens that are not special."""


def study_direction(bert: Bert, texts: Sequence[TextInput], *, longest: int) -> Direction:
    """Measure the fractions of attention from words to either side, themselves and special tokens."""
    encoded = shortened(bert, texts, longest)
    inside = [torch.tensor(each.sequence) >= 0 for each in encoded]
    config, device = with_heads(bert.model.network.config), bert.engine.device

    def prepare(numbers: Sequence[int]) -> Tensor:
        return moved_to_device(pad_sequence([inside[each] for each in numbers], batch_first=True), device)

    shape = (config.layers, len(SHARES), config.heads)
    sums_LMH = torch.zeros(shape, dtype=torch.float64, device=device)
    for _, layers in attention_pass(bert, encoded, Analysis(prepare, _sums), what="attention"):
        sums_LMH += torch.stack(layers)
    words = sum(int(each.sum()) for each in inside)
    shares = {name: sums_LMH[:, at].cpu().numpy() / words for at, name in enumerate(SHARES)}
    return Direction(shares, len(encoded), words)


def _sums(inside_GN: Tensor, weights_GHNN: Tensor) -> Tensor:
    """Return the attention of words to each side, summed over words [M, H]."""
    words = inside_GN.double()
    from_words = weights_GHNN.double() * words[:, None, :, None]
    to_words = from_words * words[:, None, None, :]
    left, right = to_words.tril(-1).sum((0, 2, 3)), to_words.triu(1).sum((0, 2, 3))
    itself = to_words.diagonal(0, 2, 3).sum((0, 2))
    return torch.stack([left, right, itself, from_words.sum((0, 2, 3)) - left - right - itself])


# ---- the loss of a task


class OneSidedScorer(nn.Module):
    """A head; its words see only special tokens, themselves and one side, but special tokens see all.

    Without that exception [CLS], which is the first token, would see only itself if the right side is hidden.
    """

    def __init__(self, network: Network, head: str, *, hidden: Side, special: frozenset[int]) -> None:
        super().__init__()
        self.network, self.head, self.hidden = network, head, hidden
        self.special = torch.tensor(sorted(special))

    def forward(self, inputs: PackedBatch) -> Tensor:
        special_T = torch.isin(inputs.tokens_T, self.special.to(inputs.tokens_T.device))
        bounds = list(inputs.layout.bounds())

        def watch(_: int, numbers: list[int], weights_GHNN: Tensor) -> Tensor:
            special_GN = torch.stack([special_T[slice(*bounds[number])] for number in numbers])
            seen_GNN = visible(special_GN, self.hidden)
            kept_GHNN = weights_GHNN * seen_GNN[:, None]
            return kept_GHNN / kept_GHNN.sum(-1, keepdim=True).clamp(min=torch.finfo(kept_GHNN.dtype).tiny)

        hidden_TD = need(self.network.encoder.heads, "attention heads").watch(inputs, watch)
        return self.network.scores(self.head, hidden_TD, inputs.layout)


def visible(special_GN: Tensor, hidden: Side) -> Tensor:
    """Return the mask of tokens (rows) that may read others (columns) with one side hidden [G, N, N]."""
    length = special_GN.shape[1]
    square = torch.ones(length, length, dtype=torch.bool, device=special_GN.device)
    one_side_NN = square.tril() if hidden == "right" else square.triu()
    return one_side_NN | special_GN[:, :, None] | special_GN[:, None, :]


def one_sided_metrics(
    bert: Bert, examples: Sequence[Example], encoded: EncodedSet, *, hidden: Side
) -> dict[str, float]:
    """Return the task's metrics with one side of each word hidden in every layer."""
    if bert.finetuned is None:
        raise UserError(
            "was not fine-tuned by bertsmith", remedy="give the folder of a `bertsmith finetune` run"
        )
    model = task_model_of(bert.engine.network, bert.finetuned, bert.engine)
    scorer = model.objective.scorer
    if not isinstance(scorer, NetworkScorer):
        what = "a BiLSTM over the encoder's layers reads both sides, regardless of the encoder"
        raise UserError(what, remedy="give a run with the head on its encoder")
    one_sided = OneSidedScorer(scorer.network, scorer.head, hidden=hidden, special=bert.tokenizer.special_ids)
    config = model.config
    objective = TaskObjective(one_sided, config.kind, config.head).eval()
    hiding: TaskModel = replace(model, objective=objective)
    predictions = hiding.predict(examples, encoded)
    split = PredictedSplit(examples, encoded, predictions)
    return config.kind.evaluate(config.metrics, config.labels, split)


# ---- the report


@dataclass(frozen=True, slots=True)
class TaskLoss:
    """The deciding metric of a task with both sides visible, and with either side hidden."""

    task: str
    metric: str
    examples: int
    values: Mapping[str, float]
    """Values under "both sides", "left hidden", "right hidden" and, if known, "constant answer"."""


def direction_report(
    found: Direction, untrained: Sequence[Direction], loss: TaskLoss | None, *, model: str
) -> Report:
    """Report the attention to each side, compared with untrained networks, and the loss of a task."""
    title = f"{model}: left or right, {found.texts:,} texts, {found.words:,} tokens of words"
    rows = []
    for name in SHARES:
        values_LH = found.shares[name]
        layer, head = np.unravel_index(values_LH.argmax(), values_LH.shape)
        control = max(float(each.shares[name].max()) for each in untrained)
        best, mean = float(values_LH[layer, head]), float(values_LH.mean())
        mark = UNTRAINED_TOO if control >= best else ""
        rows.append((name, mean, head_name(int(layer), int(head)), best, control, mark))
    notes = (
        "Fractions of the attention of words; special: to [CLS], [SEP] and their like.",
        f"untrained: the largest in {len(untrained)} random initialisations; {UNTRAINED_TOO} if as large.",
    )
    columns = ("side", "mean", "largest in", "value", "untrained", "")
    tables = [Table(title, columns, rows, notes), _by_layer(found)]
    values: dict[str, object] = {
        "model": model,
        "shares": found.shares,
        "untrained": [each.shares for each in untrained],
    }
    if loss is not None:
        tables.append(_loss_table(loss))
        values["task"] = {"name": loss.task, "metric": loss.metric, **loss.values}
    lead = "Each square is a head: the fraction of words' attention to either side."
    view = measures_view(found.shares, [each.shares for each in untrained], lead=lead)
    size = (13, 3.8)
    return Report("direction", tuple(tables), values, lambda figure: _draw(figure, found, title), size, view)


def _by_layer(found: Direction) -> Table:
    rows: list[tuple[str | float, ...]] = [
        (f"layer {layer + 1}", *(float(found.shares[name][layer].mean()) for name in SHARES))
        for layer in range(len(found.shares["left"]))
    ]
    return Table("Means over the heads of a layer", ("", *SHARES), rows)


def _loss_table(loss: TaskLoss) -> Table:
    metric, whole = metric_named(loss.metric), loss.values["both sides"]
    rows = [
        (name, metric.text(value), "-" if name == "both sides" else metric.text(value - whole))
        for name, value in loss.values.items()
    ]
    title = f"{loss.task}, {loss.metric.replace('_', ' ')} on {loss.examples:,} examples"
    notes = ("Hidden: in every layer, words see only themselves, special tokens and the other side.",)
    return Table(title, ("what words see", loss.metric, "change"), rows, notes)


def _draw(figure: "Figure", found: Direction, title: str) -> None:
    draw_head_grids(figure, found.shares, title=title)
