"""The pre-training loss against transformers, what does not count in it, and what each objective may see."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.data.collate import PretrainingBatch
from bertsmith.model.folder.model_folder import read_model
from bertsmith.model.network import set_direction
from bertsmith.objectives.masked_language_modelling import MaskedLanguageModelling
from bertsmith.objectives.pretraining_objective import PretrainingObjective, weighted_sums
from bertsmith.packed import pack
from bertsmith.training.trainer import same_bits
from tests.declared_values import means_of
from tests.example_stores import with_fields
from tests.oracles import saved_oracle
from tests.tiny import tiny_network

FP32 = 2e-5
TEXTS = [[2, 5, 6, 3, 7, 8, 3], [2, 9, 3, 10, 3], [2, 11, 12, 13, 3, 14, 3]]
SEGMENTS = [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 1]]
FILLER = [0, 0, 0]
PLACES = [(0, 1, 55), (0, 5, 56), (1, 1, 57), (2, 2, 58)]
"""Text, place in it, and the id that belongs there."""
LABELS = [0, 1, 1]
EVERY_COUNT = torch.tensor([1.0, 1.0])


def batch_of(texts: list[list[int]] = TEXTS) -> PretrainingBatch:
    """Three texts and a filler; a predicted row and the filler's label weigh nothing."""
    inputs = pack([*texts, FILLER], [*SEGMENTS, [0] * len(FILLER)])
    starts = inputs.layout.starts_S1.tolist()
    return PretrainingBatch(
        inputs,
        end_1=inputs.layout.starts_S1[-2:-1].long(),
        fields={
            "masked_rows_P": torch.tensor([*(starts[text] + place for text, place, _ in PLACES), 0]),
            "masked_ids_P": torch.tensor([*(token for _, _, token in PLACES), 0]),
            "masked_weights_P": torch.tensor([1.0] * len(PLACES) + [0.0]),
            "pair_labels_S": torch.tensor([*LABELS, 0]),
            "pair_weights_S": torch.tensor([1.0] * len(LABELS) + [0.0]),
        },
    )


def plain_losses(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Each text by itself through transformers' BertForPreTraining: both losses, summed."""
    outputs = [
        model(input_ids=torch.tensor([text]), token_type_ids=torch.tensor([segments]))
        for text, segments in zip(TEXTS, SEGMENTS, strict=True)
    ]
    masked = [
        -outputs[text].prediction_logits[0, place].log_softmax(-1)[token] for text, place, token in PLACES
    ]
    pairs = [
        -output.seq_relationship_logits[0].log_softmax(-1)[label]
        for output, label in zip(outputs, LABELS, strict=True)
    ]
    return torch.stack(masked).sum(), torch.stack(pairs).sum()


def objective_of(folder: Path, pair_head: str = "nsp") -> PretrainingObjective:
    return MaskedLanguageModelling(read_model(folder).network, pair_head).eval()


def test_the_loss_is_that_of_transformers_over_the_counts(tmp_path):
    masked, pairs = plain_losses(saved_oracle(tmp_path, "bert", "ForPreTraining"))
    loss, sums = objective_of(tmp_path)(batch_of(), torch.tensor([1 / 4, 1 / 3]))
    assert (loss - (masked / 4 + pairs / 3)).abs() <= FP32
    assert (sums[0] - masked).abs() <= FP32 and (sums[1] - pairs).abs() <= FP32


def test_the_gradient_is_that_of_transformers(tmp_path):
    theirs = saved_oracle(tmp_path, "bert", "ForPreTraining")
    masked, pairs = plain_losses(theirs)
    (masked / 4 + pairs / 3).backward()
    objective = objective_of(tmp_path)
    objective(batch_of(), torch.tensor([1 / 4, 1 / 3]))[0].backward()
    expected = theirs.bert.embeddings.word_embeddings.weight.grad[1:]  # it never trains its padding row
    found = objective.network.encoder.embeddings.words.weight.grad[1:]
    assert expected.abs().max() > 0.01
    assert (found - expected).abs().max() <= FP32


def test_rows_and_sequences_of_weight_0_do_not_count(tmp_path):
    objective = MaskedLanguageModelling(tiny_network(), "nsp")
    batch = batch_of()
    others = with_fields(
        batch,
        masked_ids_P=torch.where(batch["masked_weights_P"] > 0, batch["masked_ids_P"], 7),
        masked_rows_P=torch.where(batch["masked_weights_P"] > 0, batch["masked_rows_P"], 3),
        pair_labels_S=torch.where(batch["pair_weights_S"] > 0, batch["pair_labels_S"], 1),
    )
    loss, sums = objective(batch, EVERY_COUNT)
    other_loss, other_sums = objective(others, EVERY_COUNT)
    assert torch.equal(loss, other_loss) and torch.equal(sums, other_sums)
    weighted = with_fields(batch, masked_weights_P=torch.ones(len(PLACES) + 1))
    assert objective(weighted, EVERY_COUNT)[1][0] > sums[0]


def test_the_loss_of_pairs_is_multiplied_by_its_weight():
    network, batch = tiny_network(), batch_of()
    loss, sums = MaskedLanguageModelling(network, "nsp")(batch, EVERY_COUNT)
    lighter = MaskedLanguageModelling(network, "nsp", pair_weight=0.25)
    light_loss, same_sums = lighter(batch, EVERY_COUNT)
    assert torch.equal(sums, same_sums) and sums[1] > 0
    assert (loss - light_loss - 0.75 * sums[1]).abs() <= FP32
    means = means_of(lighter, sums, {"masked": 4, "pairs": 3})
    assert means["loss"] == means["token_loss"] + 0.25 * means["pair_loss"]


def test_ernie_says_1_where_bert_says_0(tmp_path):
    network = tiny_network("ernie")
    objective = MaskedLanguageModelling(network, "nsp")
    batch = batch_of()
    scores_S2 = network.scores("nsp", network(batch.inputs), batch.inputs.layout)[:3]
    turned = functional.cross_entropy(scores_S2, 1 - torch.tensor(LABELS), reduction="sum")
    straight = functional.cross_entropy(scores_S2, torch.tensor(LABELS), reduction="sum")
    found = objective(batch, EVERY_COUNT)[1][1]
    assert (found - turned).abs() <= FP32 < (found - straight).abs()


@pytest.mark.parametrize(("model_type", "pair_head"), [("bert", "nsp"), ("albert", "sop")])
def test_bert_and_albert_take_the_label_as_it_is(model_type, pair_head):
    network = tiny_network(model_type, {"pooler": 0, "mlm": 0, pair_head: 2})
    batch = batch_of()
    scores_S2 = network.scores(pair_head, network(batch.inputs), batch.inputs.layout)[:3]
    straight = functional.cross_entropy(scores_S2, torch.tensor(LABELS), reduction="sum")
    found = MaskedLanguageModelling(network, pair_head)(batch, EVERY_COUNT)[1][1]
    assert (found - straight).abs() <= FP32


def test_best_guesses_are_counted():
    network = tiny_network()
    batch = batch_of()
    hidden = network(batch.inputs)
    guesses = network.word_scores(hidden, batch["masked_rows_P"]).argmax(-1)
    pairs = network.scores("nsp", hidden, batch.inputs.layout).argmax(-1)
    wrong_once = guesses.clone()
    wrong_once[1] += 1
    changed = with_fields(batch, masked_ids_P=wrong_once, pair_labels_S=pairs)
    sums = MaskedLanguageModelling(network, "nsp")(changed, EVERY_COUNT)[1].tolist()
    assert (sums[2], sums[3]) == (len(PLACES) - 1, len(LABELS))


def test_without_pairs_there_is_the_masked_loss_alone():
    network = tiny_network("roberta", {"mlm": 0})
    loss, sums = MaskedLanguageModelling(network, "none")(batch_of(), torch.tensor([0.25]))
    assert torch.equal(loss, sums[0] * 0.25) and len(sums) == 2


def test_the_softmax_is_taken_in_fp32_under_bf16(tmp_path):
    objective = MaskedLanguageModelling(tiny_network(), "nsp")
    with same_bits(True), torch.autocast("cpu", torch.bfloat16):
        loss, sums = objective(batch_of(), EVERY_COUNT)
    assert loss.dtype == sums.dtype == torch.float32
    assert (loss - objective(batch_of(), EVERY_COUNT)[0]).abs() < 0.05


def test_scores_in_bf16_are_summed_up_in_fp32():
    scores_PV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels_P, weights_P = torch.arange(6), torch.ones(6)
    loss, _ = weighted_sums(scores_PV, labels_P, weights_P)
    assert torch.equal(loss, weighted_sums(scores_PV.float(), labels_P, weights_P)[0])


# ---- objectives that see one side


def changed_rows(direction: str, text: int, place: int) -> set[tuple[int, int]]:
    """Texts and places whose states change when one token does."""
    network = tiny_network()
    set_direction(network, direction)
    encoder = network.encoder
    texts = [list(each) for each in TEXTS]
    before = encoder(batch_of().inputs)
    texts[text][place] = 77
    batch = batch_of(texts)
    after = encoder(batch.inputs)
    rows = (before != after).any(-1).nonzero().flatten().tolist()
    starts = batch.inputs.layout.starts_S1.tolist()
    owner = [max(number for number, start in enumerate(starts) if start <= row) for row in rows]
    return {(number, row - starts[number]) for number, row in zip(owner, rows, strict=True)}


def test_left_to_right_a_token_is_seen_by_itself_and_those_behind_it():
    assert changed_rows("left-to-right", 1, 2) == {(1, 2), (1, 3), (1, 4)}


def test_right_to_left_a_token_is_seen_by_itself_and_those_before_it():
    assert changed_rows("right-to-left", 1, 2) == {(1, 0), (1, 1), (1, 2)}


def test_masked_a_token_is_seen_by_all_of_its_sequence():
    assert changed_rows("both", 1, 2) == {(1, place) for place in range(5)}


def test_an_encoder_that_no_graph_can_hold_is_trained_without_one():
    objective = MaskedLanguageModelling(tiny_network("deberta-v2", heads={"mlm": 0}), "none")
    objective.compile_whole()
    assert not objective.compiled
