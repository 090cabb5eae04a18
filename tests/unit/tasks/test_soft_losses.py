"""Losses beside a teacher against plain loops, item by item; filler and micro-batches change nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bertsmith.recipe.distill_section import TaskDistillSection
from bertsmith.recipe.finetuning_schema import HeadSection
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.kinds.registry import KINDS as BY_NAME
from bertsmith.tasks.objective import TaskObjective
from bertsmith.tasks.soft_losses import soft_passage_loss
from tests.compile_counter import CompileCounter
from tests.unit.tasks.made_sets import made_set
from tests.unit.tasks.test_objective import CASES, OUTPUTS, TableScorer, step_of, summed

TEMPERATURE, SOFT = 3.0, 0.7


def taught_set(kind: str) -> EncodedSet:
    """A made set with a teacher's scores."""
    encoded = made_set(kind)
    rows = {
        "item": encoded.items,
        "sequence": len(encoded.starts_N1) - 1,
        "token": len(encoded.tokens_T),
        "word": len(encoded.rows_P),
    }[encoded.unit]
    shape = (rows,) if encoded.unit == "sequence" else (rows, OUTPUTS[kind])
    scores = np.random.default_rng(5).normal(0, 3, shape).astype(np.float16)
    return replace(encoded, teacher=scores)


def divergence(ours: Tensor, theirs: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Of two rows of scores, at a temperature, times its square."""
    told, mine = ((each / temperature).softmax(-1) for each in (theirs, ours))
    return temperature**2 * sum(p * (p.log() - q.log()) for p, q in zip(told, mine, strict=True))


def of_item(kind: str, ours: Tensor, theirs: Tensor, passage: slice | None = None) -> Tensor:
    """The loss of an item's scores beside the teacher's."""
    if kind == "regress":
        return (ours[0] - theirs[0]) ** 2
    if kind == "multilabel":
        pairs = [
            (torch.stack((a, a * 0)), torch.stack((b, b * 0))) for a, b in zip(ours, theirs, strict=True)
        ]
        return sum(divergence(*pair) for pair in pairs) / len(pairs)
    if kind != "span":
        return divergence(ours, theirs)
    rows = [0, *range(len(ours))[passage]] if passage is not None else list(range(len(ours)))
    return sum(divergence(ours[rows, end], theirs[rows, end]) for end in (0, 1)) / 2


def plain(kind: str, span_over: str, table: torch.nn.Embedding, encoded: EncodedSet) -> Tensor:
    """The mean over all labelled targets."""
    texts = [
        table(torch.from_numpy(each).long()) for each in np.split(encoded.tokens_T, encoded.starts_N1[1:-1])
    ]
    assert encoded.teacher is not None
    teacher = torch.from_numpy(encoded.teacher.astype(np.float64))
    found, begins = [], encoded.starts_N1
    if kind == "tag":
        every = torch.cat(texts)[torch.from_numpy(encoded.rows_P)]
        known = encoded.targets >= 0
        pairs = zip(every[known], teacher[known], strict=True)
        return torch.stack([divergence(*pair) for pair in pairs]).mean()
    for item in range(encoded.items):
        first, past = encoded.items_M1[item], encoded.items_M1[item + 1]
        targets = encoded.targets[item]
        if np.isnan(targets).any() if targets.dtype.kind == "f" else (targets < 0).any():
            continue
        if kind == "span":
            passage = slice(*encoded.passages_N2[item].tolist()) if span_over == "passage" else None
            theirs = teacher[begins[item] : begins[item + 1]]
            found.append(of_item(kind, texts[item], theirs, passage))
            continue
        means = torch.stack([each.mean(0) for each in texts[first:past]])
        ours, theirs = (
            (means[:, 0], teacher[first:past]) if kind == "choice" else (means.mean(0), teacher[item])
        )
        found.append(of_item(kind, ours, theirs))
    return torch.stack(found).mean()


def objectives(kind: str, span_over: str) -> tuple[TaskObjective, TaskObjective]:
    """One that learns from labels alone, and one beside a teacher."""
    head = HeadSection(span_over=span_over)
    distill = TaskDistillSection(soft_weight=SOFT, temperature=TEMPERATURE)
    scorer = TableScorer(kind)
    return TaskObjective(scorer, BY_NAME[kind], head), TaskObjective(scorer, BY_NAME[kind], head, distill)


@pytest.mark.parametrize(("kind", "span_over"), CASES)
def test_the_loss_beside_a_teacher_is_that_of_plain_loops(kind, span_over):
    encoded = taught_set(kind)
    hard, both = objectives(kind, span_over)
    told = step_of(encoded)
    labels = summed(hard, step_of(replace(encoded, teacher=None)))[0]
    loss = summed(both, told)[0]
    expected = SOFT * plain(kind, span_over, both.scorer.table, encoded) + (1 - SOFT) * labels
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(each, both.scorer.table.weight)[0] for each in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_a_low_temperature_leaves_the_loss_over_a_passage_finite():
    (micro,) = step_of(taught_set("span")).micros
    scores_T2 = torch.randn(micro.teacher.shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found_S = soft_passage_loss(scores_T2, micro, 0.25)
    rows = [0, *range(*micro.passages_S2[0].tolist())]  # the first sequence begins with row 0
    expected = sum(divergence(scores_T2[rows, end], micro.teacher[rows, end], 0.25) for end in (0, 1)) / 2
    torch.testing.assert_close(found_S[0], expected)
    found_S.sum().backward()
    assert found_S.isfinite().all() and scores_T2.grad.isfinite().all()


@pytest.mark.parametrize(("kind", "span_over"), CASES)
def test_filler_and_micro_batches_change_nothing(kind, span_over):
    encoded, (_, both) = taught_set(kind), objectives(kind, span_over)
    whole = summed(both, step_of(encoded))[0]
    parts = step_of(encoded, micro_tokens=64, multiple=16)
    assert len(parts.micros) > 1
    torch.testing.assert_close(summed(both, parts)[0], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["classify", "span"])
def test_a_student_that_scores_as_its_teacher_learns_from_labels_alone(kind):
    hard, both = objectives(kind, "all")
    encoded = made_set(kind)
    (micro,) = step_of(encoded).micros
    same = replace(micro, teacher=hard.scores(micro).detach())
    scale = torch.ones(1)
    torch.testing.assert_close(both(same, scale)[0], (1 - SOFT) * hard(micro, scale)[0], rtol=1e-4, atol=1e-4)


def test_scores_of_a_teacher_are_part_of_one_compiled_graph():
    _, both = objectives("tag", "all")
    (micro,) = step_of(taught_set("tag"), multiple=16).micros
    counter = CompileCounter("eager")
    whole = torch.compile(both._plain, fullgraph=True, backend=counter)
    torch.testing.assert_close(whole(micro, torch.ones(1)), both(micro, torch.ones(1)))
    assert counter.frame_count == 1
    assert len(micro.tensors()) == 10 and micro.to("cpu").teacher is not None
