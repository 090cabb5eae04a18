"""Losses over a whole step: cached gradients are those of one pass, with the same dropout twice."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from bertsmith.core.errors import DoesNotFit
from bertsmith.training.distributed import ALONE
from bertsmith.training.step_losses import gradients_over_step
from tests.tiny_training import SEQUENCES, Sentences, TinyContrast, contrasted

SCALES = torch.tensor([1 / len(SEQUENCES)])
CUT = [SEQUENCES[:1], SEQUENCES[1:3], SEQUENCES[3:]]


def learned(objective: TinyContrast, cut: list[list[list[int]]]) -> tuple[dict[str, Tensor], float]:
    """The gradients of a step of these micro-batches, and its sum of losses."""
    objective.zero_grad()
    torch.manual_seed(3)
    sums = gradients_over_step(
        objective,
        lambda rows_Z: objective.of_step(rows_Z, SCALES),
        [Sentences.of(each) for each in cut],
        world=ALONE,
        passing=lambda _: nullcontext(),
    )
    return {name: each.grad for name, each in objective.named_parameters()}, float(sums[0])


def plain(objective: TinyContrast, cut: list[list[list[int]]]) -> dict[str, Tensor]:
    """The gradients of one graph over all micro-batches, each with its own dropout."""
    objective.zero_grad()
    torch.manual_seed(3)
    rows = []
    for seed, each in zip(torch.randint(2**62, (len(cut),)).tolist(), cut, strict=True):
        torch.manual_seed(seed)
        rows_S, is_real_S = objective(Sentences.of(each))
        rows.append(rows_S[is_real_S])
    objective.of_step(torch.cat(rows), SCALES)[0].backward()
    return {name: each.grad for name, each in objective.named_parameters()}


def check_close(ones: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        torch.testing.assert_close(one, others[name], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("cut", [[SEQUENCES], CUT, [[each] for each in SEQUENCES]])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_cached_gradients_are_those_of_one_graph_with_the_same_dropout(cut, dropout):
    objective = TinyContrast(dropout)
    expected = {name: gradient.clone() for name, gradient in plain(objective, cut).items()}
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())
    check_close(learned(objective, cut)[0], expected)


def test_the_cut_into_micro_batches_changes_nothing_but_rounding():
    (one, one_sum), (three, three_sum) = (contrasted(ALONE, "ddp", cut) for cut in ([SEQUENCES], CUT))
    check_close(one, three)
    assert one_sum == pytest.approx(three_sum, rel=1e-12)


def test_one_micro_batch_takes_one_pass_and_several_take_two_each():
    objective, passes = TinyContrast(), []
    objective.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    learned(objective, [SEQUENCES])
    learned(objective, CUT)
    assert passes == [True, False, False, False, True, True, True]


def test_the_same_step_gives_the_same_bits():
    ones, others = (learned(TinyContrast(0.2), CUT) for _ in range(2))
    assert ones[1] == others[1]
    assert all(torch.equal(gradient, others[0][name]) for name, gradient in ones[0].items())


@pytest.mark.parametrize("cut", [[SEQUENCES], CUT])
def test_a_loss_that_does_not_fit_is_one_line(cut):
    objective = TinyContrast()
    objective.of_step = lambda rows_Z, _: torch.empty((len(rows_Z), 2**46)).sum()
    with pytest.raises(DoesNotFit) as raised:
        learned(objective, cut)
    line = raised.value.line()
    assert "the loss over the 4 rows of a step does not fit into memory; use a smaller batch" in line


def test_any_other_error_of_a_loss_passes_through():
    objective = TinyContrast()
    objective.of_step = lambda rows_Z, _: rows_Z @ rows_Z
    with pytest.raises(RuntimeError, match="size"):
        learned(objective, CUT)
