"""Losses against a plain padded computation, and what must not change them: filler, micro-batches, graphs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from bertsmith.model.encoder import mean_of_rows
from bertsmith.model.lora import LoraShape, add_fresh_adapters
from bertsmith.model.network import new_network
from bertsmith.packed import Layout
from bertsmith.recipe.finetuning_schema import HeadSection
from bertsmith.tasks.batches import ShuffledBatches
from bertsmith.tasks.kinds.registry import KINDS as BY_NAME
from bertsmith.tasks.losses import logsumexp_of_rows
from bertsmith.tasks.objective import NetworkScorer, TaskObjective, freeze_encoder, mark_sizes_as_changing
from tests.compile_counter import CompileCounter
from tests.tiny import tiny_encoder_config, tiny_network
from tests.unit.tasks.made_sets import CLASSES, KINDS, WORDS, made_set

OUTPUTS = {"classify": CLASSES, "multilabel": CLASSES, "tag": CLASSES, "span": 2, "regress": 1, "choice": 1}
CASES = [*((kind, "all") for kind in KINDS), ("span", "passage")]
ONE = torch.ones(1)


class TableScorer(nn.Module):
    """Scores that depend on tokens alone: of every token, or the mean of a sequence."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(WORDS, OUTPUTS[kind], dtype=torch.float64)
        nn.init.normal_(self.table.weight, std=2.0, generator=torch.Generator().manual_seed(1))

    def forward(self, inputs):
        scores_TC = self.table(inputs.tokens_T)
        if self.kind in ("tag", "span"):
            return scores_TC
        return mean_of_rows(scores_TC, inputs.layout)


def step_of(encoded, *, micro_tokens=10_000, multiple=1, weights_C=None):
    """One step with all items of a set."""
    settings = {"seed": 0, "micro_tokens": micro_tokens, "multiple": multiple, "class_weights_C": weights_C}
    return ShuffledBatches(encoded, examples_per_step=encoded.items, **settings).step(0)


def summed(objective, step):
    """The step's loss and sums over its micro-batches."""
    parts = [objective(micro, torch.tensor([1 / step.count])) for micro in step.micros]
    return sum(loss for loss, _ in parts), torch.stack([sums for _, sums in parts]).sum(0)


# ---- the plain computation: one padded rectangle, or one item after the other


def plain_loss(kind, span_over, table, encoded, weights_C):
    """The mean loss over all labelled targets, from padded scores."""
    tokens = torch.from_numpy(encoded.tokens_T).long()
    texts = torch.split(tokens, torch.from_numpy(encoded.starts_N1).diff().tolist())
    padded_NLC = pad_sequence([table(text) for text in texts], batch_first=True)
    real_NL = pad_sequence([torch.ones(len(text)) for text in texts], batch_first=True) > 0
    targets = torch.from_numpy(encoded.targets)
    if kind == "span":
        return plain_span_loss(padded_NLC, real_NL, targets, encoded, span_over)
    if kind == "tag":
        scores = table(tokens[torch.from_numpy(encoded.rows_P)])
        return functional.cross_entropy(scores, targets, weight=weights_C, ignore_index=-1)
    means_NC = padded_NLC.sum(1) / real_NL.sum(1, keepdim=True)
    groups = torch.split(means_NC, torch.from_numpy(encoded.items_M1).diff().tolist())
    if kind == "choice":
        options_MO = pad_sequence([each[:, 0] for each in groups], batch_first=True, padding_value=-torch.inf)
        return functional.cross_entropy(options_MO, targets, ignore_index=-1)
    means_MC = torch.stack([each.mean(0) for each in groups])
    if kind == "classify":
        return functional.cross_entropy(means_MC, targets, weight=weights_C, ignore_index=-1)
    if kind == "multilabel":
        known = targets[:, 0] >= 0
        return functional.binary_cross_entropy_with_logits(means_MC[known], targets[known].double())
    known = ~targets.isnan()
    return functional.mse_loss(means_MC[known, 0], targets[known].double())


def plain_span_loss(padded_NLC, real_NL, targets, encoded, span_over):
    if span_over == "passage":
        place_L = torch.arange(real_NL.shape[1])
        first, past = torch.from_numpy(encoded.passages_N2).unbind(-1)
        inside_NL = (place_L >= first[:, None]) & (place_L < past[:, None])
        real_NL = real_NL & (inside_NL | (place_L == 0))
    scores_NL2 = padded_NLC.masked_fill(~real_NL[..., None], -torch.inf)
    ends = [
        functional.cross_entropy(scores_NL2[..., end], targets[:, end], ignore_index=-1) for end in (0, 1)
    ]
    return (ends[0] + ends[1]) / 2


@pytest.mark.parametrize(("kind", "span_over"), CASES)
@pytest.mark.parametrize(("micro_tokens", "multiple"), [(10_000, 1), (40, 1), (48, 16)])
def test_loss_and_gradient_are_those_of_a_plain_padded_computation(kind, span_over, micro_tokens, multiple):
    weights_C = torch.tensor([0.5, 2.0, 3.0]) if kind in ("classify", "tag") else None
    for seed in range(3):
        encoded = made_set(kind, seed)
        scorer = TableScorer(kind)
        weights = None if weights_C is None else weights_C.numpy()
        step = step_of(encoded, micro_tokens=micro_tokens, multiple=multiple, weights_C=weights)
        loss, sums = summed(TaskObjective(scorer, BY_NAME[kind], HeadSection(span_over=span_over)), step)
        (gradient,) = torch.autograd.grad(loss, scorer.table.weight)
        double_weights = None if weights_C is None else weights_C.double()
        expected = plain_loss(kind, span_over, scorer.table, encoded, double_weights)
        (expected_gradient,) = torch.autograd.grad(expected, scorer.table.weight)
        assert (loss - expected).abs() < 1e-6  # weights and shares are fp32
        assert (gradient - expected_gradient).abs().max() < 1e-6 < expected_gradient.abs().max()
        assert sums[0] / step.count == pytest.approx(loss.item(), rel=1e-6)


def test_spans_over_the_passage_lose_less_than_over_all_rows():
    step, scorer = step_of(made_set("span")), TableScorer("span")
    over_all, over_passage = (
        summed(TaskObjective(scorer, BY_NAME["span"], HeadSection(span_over=rows)), step)[0]
        for rows in ("all", "passage")
    )
    assert over_passage < over_all - 0.05


def heads_for(kind):
    return {"pooler": 0, {"multilabel": "classify", "regress": "classify"}.get(kind, kind): OUTPUTS[kind]}


def network_objective(kind, **kwargs):
    heads = heads_for(kind)
    network = tiny_network("bert", heads).double()
    return TaskObjective(NetworkScorer(network, list(heads)[1]), BY_NAME[kind], HeadSection(**kwargs)).eval()


@pytest.mark.parametrize(("kind", "span_over"), CASES)
def test_micro_batches_and_filler_change_neither_loss_nor_gradient_of_a_network(kind, span_over):
    encoded = made_set(kind)
    found = []
    for micro_tokens, multiple in ((10_000, 1), (24, 1), (32, 16)):
        objective = network_objective(kind, span_over=span_over)
        step = step_of(encoded, micro_tokens=micro_tokens, multiple=multiple)
        loss, sums = summed(objective, step)
        loss.backward()
        gradients = [each.grad.flatten() for each in objective.parameters() if each.grad is not None]
        found.append((len(step.micros), torch.cat([loss[None], sums / step.count, *gradients]).detach()))
    assert found[0][0] == 1 and found[1][0] > 2 and found[2][0] > 2
    for _, other in found[1:]:
        assert (other - found[0][1]).abs().max() < 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_scores_do_not_depend_on_what_else_is_in_the_batch(kind):
    objective, encoded = network_objective(kind), made_set(kind, items=1)
    alone, filled = (step_of(encoded, multiple=multiple).micros[0] for multiple in (1, 16))
    scores = objective.scores(alone)
    assert (objective.scores(filled)[: len(scores)] - scores).abs().max() < 1e-12
    counts = {"tag": len(encoded.rows_P), "span": len(encoded.tokens_T), "choice": encoded.items_M1[-1]}
    assert len(scores) == counts.get(kind, 1)


@pytest.mark.parametrize("kind", ["classify", "multilabel", "tag", "span", "choice"])
def test_right_guesses_are_counted(kind):
    encoded, scorer = made_set(kind, unlabelled=0.0), TableScorer(kind)
    objective, batch = TaskObjective(scorer, BY_NAME[kind]), step_of(encoded).micros[0]
    right = replace(batch, targets=best_targets(kind, objective.scores(batch), batch))
    assert objective(right, ONE)[1][1] == batch.weights.sum()
    wrong = right.targets.clone()
    wrong[0] = 1 - wrong[0] if kind == "multilabel" else (wrong[0] + 1) % 2
    assert objective(replace(right, targets=wrong), ONE)[1][1] == batch.weights.sum() - 1


def best_targets(kind, scores, batch):
    if kind == "multilabel":
        return (scores > 0).long()
    if kind == "choice":
        return torch.stack([part.argmax() for part in scores.split(batch.items_S.bincount().tolist())])
    if kind == "span":
        return torch.stack([scores[start:end].argmax(0) for start, end in batch.inputs.layout.bounds()])
    return scores.argmax(-1)


def test_the_loss_is_in_fp32_under_bf16():
    heads = heads_for("classify")
    objective = TaskObjective(
        NetworkScorer(tiny_network("bert", heads), "classify"), BY_NAME["classify"]
    ).eval()
    batch = step_of(made_set("classify")).micros[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss, sums = objective(batch, ONE)
    assert loss.dtype == sums.dtype == torch.float32
    assert (loss - objective(batch, ONE)[0]).abs() < 0.1


@pytest.mark.parametrize(
    ("kind", "span_over"), [("classify", "all"), ("tag", "all"), ("choice", "all"), ("span", "passage")]
)
def test_one_graph_of_a_loss_serves_all_sizes(kind, span_over):
    assert_compiles_once(TaskObjective(TableScorer(kind), BY_NAME[kind], HeadSection(span_over=span_over)))


def test_one_graph_of_a_network_serves_all_sizes(full):
    if not full:
        pytest.skip("with adapters it is the same network and more")
    config = tiny_encoder_config("bert", layers=1)
    network = new_network(config, heads_for("classify"), torch.Generator().manual_seed(0)).double()
    assert_compiles_once(TaskObjective(NetworkScorer(network.eval(), "classify"), BY_NAME["classify"]))


def test_one_graph_of_a_network_with_adapters_serves_all_sizes():
    config = tiny_encoder_config("bert", layers=1)
    network = new_network(config, heads_for("classify"), torch.Generator().manual_seed(0)).double()
    freeze_encoder(network)
    shape = LoraShape(4, 8.0, dropout=0.1)
    add_fresh_adapters(network, ("query", "value"), shape, torch.Generator().manual_seed(0))
    assert_compiles_once(TaskObjective(NetworkScorer(network.eval(), "classify"), BY_NAME["classify"]))
    assert all(each.grad is not None for name, each in network.named_parameters() if "lora" in name)


def assert_compiles_once(objective):
    torch.compiler.reset()
    counter = CompileCounter("aot_eager")
    compiled = torch.compile(objective._plain, fullgraph=True, backend=counter)
    for seed, items in enumerate((4, 9, 2)):
        for batch in step_of(
            made_set(objective.kind.name, seed, items=items), micro_tokens=64, multiple=16
        ).micros:
            mark_sizes_as_changing(batch)
            loss, sums = compiled(batch, ONE)
            expected_loss, expected_sums = objective._plain(batch, ONE)
            assert (loss - expected_loss).abs() < 1e-9 and (sums - expected_sums).abs().max() < 1e-9
            loss.backward()
    assert counter.frame_count == 1


# ---- a frozen encoder


def test_a_frozen_encoder_neither_learns_nor_drops_anything():
    network = tiny_network("bert", heads_for("classify"))
    freeze_encoder(network)
    objective = TaskObjective(NetworkScorer(network, "classify"), BY_NAME["classify"]).train()
    assert not network.encoder.training and not network.encoder.blocks[0].attention.training
    assert network.heads["classify"].training
    objective(step_of(made_set("classify")).micros[0], ONE)[0].backward()
    learned = {name for name, each in network.named_parameters() if each.grad is not None}
    assert learned == {"heads.classify.output.weight", "heads.classify.output.bias"}


def test_a_fresh_pooler_learns_on_a_frozen_encoder():
    network = tiny_network("bert", heads_for("classify"))
    freeze_encoder(network, fresh=["classify", "pooler"])
    assert network.heads["pooler"].dense.weight.requires_grad


def test_an_encoder_that_learns_drops_in_training():
    network = tiny_network("bert", heads_for("classify"))
    scorer = NetworkScorer(network, "classify")
    assert scorer.train().network.encoder.training and not scorer.eval().network.encoder.training


# ---- softmax over packed rows


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), size=st.sampled_from([1.0, 300.0, 1e4]))
def test_logsumexp_of_rows_is_that_of_each_sequence(lengths, size):
    stream = torch.Generator().manual_seed(len(lengths))
    values_TC = (torch.randn(sum(lengths), 2, generator=stream, dtype=torch.float64) * size).requires_grad_()
    starts_S1 = torch.tensor([0, *lengths]).cumsum(0).int()
    found = logsumexp_of_rows(values_TC, Layout(starts_S1, max(lengths)))
    expected = torch.stack([part.logsumexp(0) for part in values_TC.split(lengths)])
    assert (found - expected).abs().max() <= 1e-12 * size
    chosen = torch.randn(found.shape, generator=stream, dtype=torch.float64)
    gradient, expected_gradient = (
        torch.autograd.grad((each * chosen).sum(), values_TC)[0] for each in (found, expected)
    )
    assert (gradient - expected_gradient).abs().max() < 1e-9
