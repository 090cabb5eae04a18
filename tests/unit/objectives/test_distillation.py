"""Distillation's losses against plain loops: each text by itself, row by row, head by head."""

import math

import pytest
import torch
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.data.collate import PretrainingBatch
from bertsmith.model.encoder_config import PassSize
from bertsmith.model.flops import forward_flops
from bertsmith.model.network import Network, new_network
from bertsmith.objectives.distillation import (
    LOSSES,
    Distillation,
    check_comparable,
    matching_depths,
    sum_of,
)
from bertsmith.packed import pack
from bertsmith.recipe.distill_section import DistillSection
from tests.compile_counter import CompileCounter
from tests.declared_values import means_of, scales_of
from tests.tiny import tiny_encoder_config, tiny_network

TEXTS = [[2, 5, 6, 4, 7, 8, 3], [2, 9, 4, 10, 3], [2, 11, 12, 13, 4, 14, 15, 3]]
PLACES = [(0, 3, 55), (1, 2, 57), (2, 4, 58), (2, 6, 20)]
"""Text, place in it, and the id that belongs there."""
COUNTS = {"masked": len(PLACES), "tokens": sum(map(len, TEXTS))}
FP32 = 1e-5
EVERY = {
    **{"soft_weight": 5.0, "mlm_weight": 2.0, "cosine_weight": 1.0},
    **{"hidden_weight": 0.7, "attention_weight": 0.3, "relation_weight": 1.5},
}


def batch_of(filler: list[int] = (0, 0, 0)) -> PretrainingBatch:
    """Three texts and a filler; the last predicted row weighs nothing, and points at a real token."""
    inputs = pack([*TEXTS, list(filler)])
    starts = inputs.layout.starts_S1.tolist()
    return PretrainingBatch(
        inputs,
        end_1=inputs.layout.starts_S1[-2:-1].long(),
        fields={
            "masked_rows_P": torch.tensor([*(starts[text] + place for text, place, _ in PLACES), 0]),
            "masked_ids_P": torch.tensor([*(token for _, _, token in PLACES), 0]),
            "masked_weights_P": torch.tensor([1.0] * len(PLACES) + [0.0]),
            "pair_labels_S": torch.zeros(len(TEXTS) + 1, dtype=torch.long),
            "pair_weights_S": torch.zeros(len(TEXTS) + 1),
        },
    )


def lively(network: Network) -> Network:
    """The network with weights so large that attention is no mean and predictions differ."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return network


def student_of(model_type: str = "bert", **sizes) -> Network:
    config = tiny_encoder_config(model_type, **sizes)
    return lively(new_network(config, {"mlm": 0}, torch.Generator().manual_seed(1))).eval()


def teacher_of(model_type: str = "bert") -> Network:
    return lively(tiny_network(model_type, {"mlm": 0}, seed=2))


def projections(network: Network, text: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value [N, D] of each layer of a BERT."""
    states = network.encoder.hidden_states(pack([text]))
    return [
        block.attention.project(state).chunk(3, dim=-1)
        for block, state in zip(network.encoder.blocks, states[:-1], strict=True)
    ]


def head_scores(ones: Tensor, others: Tensor, head: int, heads: int) -> Tensor:
    """What every row of one head gives every other [N, N], two vectors at a time."""
    width = ones.shape[1] // heads
    part = slice(head * width, (head + 1) * width)
    rows = [[(one[part] * other[part]).sum() / math.sqrt(width) for other in others] for one in ones]
    return torch.stack([torch.stack(row) for row in rows])


def divergence(theirs: Tensor, ours: Tensor) -> Tensor:
    """The divergence of two rows of scores, word by word."""
    their_chances, our_chances = theirs.softmax(-1), ours.softmax(-1)
    return sum(p * (p.log() - q.log()) for p, q in zip(their_chances, our_chances, strict=True))


def of_heads(objective: Distillation, text: list[int], heads: int) -> dict[str, Tensor]:
    """The summed losses of a text that compare what heads compute."""
    found: dict[str, Tensor] = {}
    if not objective.distill.compares_heads:
        return found
    ours, theirs = (projections(network, text) for network in (objective.network, objective.teacher))
    for head in range(heads):
        for depth, other in objective.depths[1:]:
            mine = head_scores(*ours[depth - 1][:2], head, heads)
            gap = mine - head_scores(*theirs[other - 1][:2], head, heads)
            found["attention"] = found.get("attention", 0) + (gap**2).mean(-1).sum() / heads
        for relation in objective.distill.relations:
            one, other = ("qkv".index(letter) for letter in relation)
            mine = head_scores(ours[-1][one], ours[-1][other], head, heads)
            told = head_scores(theirs[-1][one], theirs[-1][other], head, heads)
            rows = [divergence(*pair) for pair in zip(told, mine, strict=True)]
            found["relation"] = found.get("relation", 0) + sum(rows) / heads
    return found


def reference(objective: Distillation, *, heads: int = 4) -> dict[str, Tensor]:
    """The mean losses, written down as the papers have them."""
    student, teacher, distill = objective.network, objective.teacher, objective.distill
    names = [name for name in LOSSES if sum_of(name) in objective.declared.sums]
    total: dict[str, Tensor] = {name: torch.zeros(()) for name in (*names, "rows")}
    masked = {(text, place): token for text, place, token in PLACES}
    for number, text in enumerate(TEXTS):
        ours, theirs = (network.encoder.hidden_states(pack([text])) for network in (student, teacher))
        for row in range(len(text)):
            target = masked.get((number, row))
            if target is not None:
                scores = student.scores_of_words(ours[-1][row][None])[0]
                total["mlm"] = total["mlm"] - scores.log_softmax(-1)[target]
            if distill.rows == "predicted" and target is None:
                continue
            total["rows"] = total["rows"] + 1
            one, other = objective.project(ours[-1][row]), theirs[-1][row]
            total["cosine"] = total["cosine"] + 1 - (one @ other) / (one.norm() * other.norm())
            words = [
                net.scores_of_words(state[row][None])[0] / distill.temperature
                for net, state in ((student, ours[-1]), (teacher, theirs[-1]))
            ]
            total["soft"] = total["soft"] + distill.temperature**2 * divergence(words[1], words[0])
        if "hidden" in total:
            for depth, other_depth in objective.depths:
                differences = (objective.project(ours[depth]) - theirs[other_depth]) ** 2
                total["hidden"] = total["hidden"] + differences.mean(-1).sum()
        for name, value in of_heads(objective, text, heads).items():
            total[name] = total[name] + value
    rows = total.pop("rows")
    divisors = {"mlm": COUNTS["masked"], "soft": rows, "cosine": rows}
    return {name: value / divisors.get(name, COUNTS["tokens"]) for name, value in total.items()}


def assert_as_reference(objective: Distillation, *, heads: int = 4) -> None:
    expected = reference(objective, heads=heads)
    loss, sums = objective(batch_of(), scales_of(objective, COUNTS))
    means = means_of(objective, sums, COUNTS)
    for name, value in expected.items():
        assert means[sum_of(name)] == pytest.approx(value.item(), rel=FP32, abs=FP32), name
        assert value > 1e-3, f"{name} has nothing to compare"
    weighed = sum(getattr(objective.distill, f"{name}_weight") * value for name, value in expected.items())
    torch.testing.assert_close(loss, weighed, rtol=FP32, atol=FP32)
    assert means["loss"] == pytest.approx(weighed.item(), rel=FP32)
    trained = list(objective.parameters())
    ours, theirs = (torch.autograd.grad(each, trained, allow_unused=True) for each in (loss, weighed))
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rows", ["all", "predicted"])
def test_the_losses_of_distilbert_are_those_of_plain_loops(rows):
    assert_as_reference(Distillation(student_of(), teacher_of(), DistillSection(rows=rows)))


def test_every_loss_at_once_between_two_widths_and_depths():
    distill = DistillSection(**EVERY, temperature=3.0, relations=("qk", "kk", "vv"))
    student = student_of(width=16, layers=2, inner=32)
    objective = Distillation(student, teacher_of(), distill)
    assert objective.project.weight.shape == (32, 16)
    assert_as_reference(objective)


def test_models_with_other_numbers_of_heads_are_compared_in_relation_heads():
    distill = DistillSection(
        soft_weight=0, cosine_weight=0, relation_weight=1, attention_weight=1, relation_heads=8
    )
    objective = Distillation(student_of(heads=2), teacher_of(), distill)
    assert_as_reference_of_heads(objective)


def assert_as_reference_of_heads(objective: Distillation) -> None:
    means = means_of(objective, objective(batch_of(), scales_of(objective, COUNTS))[1], COUNTS)
    full = Distillation(objective.network, objective.teacher, DistillSection(**EVERY, relation_heads=8))
    expected = reference(full, heads=8)
    for name in ("relation", "attention"):
        assert means[f"{name}_loss"] == pytest.approx(expected[name].item(), rel=FP32)
    assert "soft_loss" not in means and "teacher_agreement" not in means


@pytest.mark.parametrize("model_type", ["modernbert", "albert", "roberta", "distilbert"])
def test_words_and_states_of_other_architectures_are_compared_alike(model_type):
    objective = Distillation(
        student_of(model_type, layers=2), teacher_of(model_type), DistillSection(hidden_weight=1)
    )
    assert_as_reference(objective)


def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it():
    network = teacher_of("modernbert")
    objective = Distillation(network, teacher_of("modernbert"), DistillSection(**EVERY))
    means = means_of(objective, objective(batch_of(), scales_of(objective, COUNTS))[1], COUNTS)
    for name in ("soft", "cosine", "hidden", "attention", "relation"):
        assert means[f"{name}_loss"] == pytest.approx(0, abs=1e-5)
    assert means["teacher_agreement"] == 1 and means["teacher_accuracy"] == means["token_accuracy"]
    assert means["token_loss"] > 1


def test_how_often_both_are_right_and_agree_is_counted():
    objective = Distillation(student_of(), teacher_of(), DistillSection())
    best = []
    for network in (objective.network, objective.teacher):
        hidden = [network(pack([text])) for text in TEXTS]
        best.append([int(network.scores_of_words(hidden[t][p][None]).argmax()) for t, p, _ in PLACES])
    means = means_of(objective, objective(batch_of(), scales_of(objective, COUNTS))[1], COUNTS)
    right = [[mine == token for mine, (_, _, token) in zip(each, PLACES, strict=True)] for each in best]
    agreed = [one == other for one, other in zip(*best, strict=True)]
    assert [means["token_accuracy"], means["teacher_accuracy"], means["teacher_agreement"]] == [
        sum(each) / len(PLACES) for each in (*right, agreed)
    ]


def test_the_teacher_is_neither_trained_nor_saved_nor_dropped_out():
    objective = Distillation(student_of(width=16), teacher_of(), DistillSection()).train()
    assert {name.split(".")[0] for name in objective.state_dict()} == {"network", "project"}
    assert not objective.teacher.training
    objective(batch_of(), scales_of(objective, COUNTS))[0].backward()
    assert all(each.grad is None for each in objective.teacher.parameters())
    assert all(each.grad is not None for each in objective.parameters())


@pytest.mark.parametrize(
    ("rows", "soft_weight", "scored"), [("all", 1, 90), ("all", 0, 12), ("predicted", 1, 12)]
)
def test_operations_are_the_students_training_and_one_pass_of_the_teacher(rows, soft_weight, scored):
    student, teacher = student_of(layers=2), teacher_of()
    distill = DistillSection(rows=rows, soft_weight=soft_weight)
    found = Distillation(student, teacher, distill).flops(90, 10, 12)
    size = PassSize(90, 10, scored)
    assert found == 3 * forward_flops(student, size) + forward_flops(teacher, size)


def test_filler_changes_nothing():
    objective = Distillation(student_of(), teacher_of(), DistillSection(**EVERY))
    one, other = (
        objective(batch_of(filler), scales_of(objective, COUNTS))
        for filler in ([0], [0, 7, 9, 1, 1, 1, 1, 1, 1, 30])
    )
    torch.testing.assert_close(one, other, rtol=FP32, atol=FP32)


def test_student_and_teacher_are_one_compiled_graph():
    objective, counter = (
        Distillation(student_of(), teacher_of(), DistillSection(**EVERY)),
        CompileCounter("eager"),
    )
    whole = torch.compile(objective.plain, fullgraph=True, backend=counter)
    torch.testing.assert_close(
        whole(batch_of(), scales_of(objective, COUNTS)),
        objective(batch_of(), scales_of(objective, COUNTS)),
        rtol=FP32,
        atol=FP32,
    )
    assert counter.frame_count == 1


def test_losses_are_summed_up_in_fp32_under_bf16():
    objective = Distillation(student_of(), teacher_of(), DistillSection(**EVERY))
    with torch.autocast("cpu", torch.bfloat16):
        loss, sums = objective(batch_of(), scales_of(objective, COUNTS))
    assert loss.dtype == sums.dtype == torch.float32
    torch.testing.assert_close(
        loss, objective(batch_of(), scales_of(objective, COUNTS))[0], rtol=0.05, atol=0.05
    )


def test_projections_follow_from_the_seed():
    first, again, another = (
        Distillation(student_of(width=16), teacher_of(), DistillSection(), seed=seed).project.weight
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, another)


def test_layers_are_compared_with_those_as_far_up():
    assert matching_depths(4, 12) == [(0, 0), (1, 3), (2, 6), (3, 9), (4, 12)]  # TinyBERT
    assert matching_depths(3, 3) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_heads_that_cannot_be_compared_are_named():
    bert, other = tiny_encoder_config("bert"), tiny_encoder_config("bert", heads=2)
    relations = DistillSection(relation_weight=1)
    check_comparable(bert, bert, relations)
    check_comparable(bert, other, DistillSection())
    check_comparable(bert, other, DistillSection(relation_weight=1, relation_heads=8))
    for student, distill, word in (
        (other, relations, "the student has 2 heads, but the teacher has 4"),
        (
            other,
            DistillSection(attention_weight=1, relation_heads=5),
            "5 does not divide the widths 32 and 32",
        ),
        (tiny_encoder_config("deberta-v2"), relations, "a DeBERTa's attention"),
    ):
        with pytest.raises(UserError, match=word):
            check_comparable(student, bert, distill)


def test_a_linear_projection_is_there_only_where_something_goes_through_it():
    assert isinstance(Distillation(student_of(), teacher_of(), DistillSection()).project, nn.Identity)
    only_words = DistillSection(cosine_weight=0)
    assert isinstance(Distillation(student_of(width=16), teacher_of(), only_words).project, nn.Identity)
