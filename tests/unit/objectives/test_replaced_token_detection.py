"""ELECTRA's objective: what is sampled, what counts as replaced, and the losses against transformers."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertsmith.data.collate import PretrainingBatch
from bertsmith.data.masking import SAMPLING_BITS
from bertsmith.model.folder.model_folder import read_model
from bertsmith.objectives.replaced_token_detection import ReplacedTokenDetection, sample
from bertsmith.packed import pack
from tests.compile_counter import CompileCounter
from tests.declared_values import means_of, scales_of
from tests.example_stores import with_fields
from tests.oracles import saved_oracle
from tests.tiny import tiny_network

FP32 = 2e-5
TEXTS = [[2, 5, 6, 3, 7, 8, 3], [2, 9, 3, 10, 3], [2, 11, 12, 13, 3, 14, 3]]
FILLER = [0, 0, 0]
PLACES = [(0, 1, 55), (0, 5, 56), (1, 1, 57), (2, 2, 58)]
"""Text, place in it, and the id that belongs there."""
TOKENS = sum(map(len, TEXTS))
WEIGHT = 50.0
COUNTS = {"masked": len(PLACES), "tokens": TOKENS}
SCALES = torch.tensor([1 / each for each in COUNTS.values()])


def batch_of(*, filler: list[int] = FILLER, draws: list[float] = (0.1, 0.5, 0.7, 0.95)) -> PretrainingBatch:
    """Three texts and a filler; the last predicted row weighs nothing, and points at a real token."""
    inputs = pack([*TEXTS, filler])
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
            "draws_P": torch.tensor([*(int(draw * 2**SAMPLING_BITS) for draw in draws), 77]),
        },
    )


def objective_of() -> ReplacedTokenDetection:
    discriminator = tiny_network("electra", {"replaced": 1})
    generator = tiny_network("electra", {"mlm": 0}, seed=1)
    return ReplacedTokenDetection(discriminator, generator, discriminator_weight=WEIGHT)


def always_sampling(token: int) -> ReplacedTokenDetection:
    """One whose generator is sure of this token."""
    objective = objective_of()
    with torch.no_grad():
        objective.generator.heads["mlm"].bias[token] = 100.0
    return objective


def oracles(folder: Path) -> tuple[nn.Module, nn.Module]:
    """A discriminator and a generator of transformers that share their embeddings, each in its folder."""
    discriminator = saved_oracle(folder / "discriminator", "electra", "ForPreTraining")
    generator = saved_oracle(folder / "generator", "electra", "ForMaskedLM")
    generator.electra.embeddings = discriminator.electra.embeddings
    generator.generator_lm_head.weight = discriminator.electra.embeddings.word_embeddings.weight
    return discriminator, generator


def theirs(discriminator: nn.Module, generator: nn.Module, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
    """Each text by itself through transformers: the generator's and the discriminator's summed losses."""
    places = [[(place, token) for of, place, token in PLACES if of == text] for text in range(len(TEXTS))]
    draws = iter(batch["draws_P"].tolist())
    mlm, replaced = [], []
    for text, targets in zip(TEXTS, places, strict=True):
        original, shown = list(text), list(text)
        scores = generator(input_ids=torch.tensor([text])).logits[0]
        for place, token in targets:
            mlm.append(functional.cross_entropy(scores[place], torch.tensor(token)))
            draw = torch.tensor([next(draws)])
            original[place], shown[place] = token, int(sample(scores[place][None].detach(), draw))
        labels = torch.tensor([[float(a != b) for a, b in zip(original, shown, strict=True)]])
        logits = discriminator(input_ids=torch.tensor([shown])).logits
        replaced.append(functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum"))
    return torch.stack(mlm).sum(), torch.stack(replaced).sum()


def test_the_losses_are_those_of_transformers(tmp_path):
    discriminator, generator = oracles(tmp_path)
    ours = ReplacedTokenDetection(
        read_model(tmp_path / "discriminator").network,
        read_model(tmp_path / "generator").network,
        discriminator_weight=WEIGHT,
    ).eval()
    batch = batch_of()
    mlm, replaced = theirs(discriminator, generator, batch)
    loss, sums = ours(batch, SCALES)
    assert (sums[0] - mlm).abs() <= FP32 and (sums[1] - replaced).abs() <= FP32
    assert (loss - (mlm / len(PLACES) + WEIGHT * replaced / TOKENS)).abs() <= 50 * FP32
    (mlm / len(PLACES) + WEIGHT * replaced / TOKENS).backward()
    loss.backward()
    expected = discriminator.electra.embeddings.word_embeddings.weight.grad[1:]  # it trains no padding row
    found = ours.network.encoder.embeddings.words.weight.grad[1:]
    assert expected.abs().max() > 0.01
    assert (found - expected).abs().max() <= 50 * FP32


def test_words_that_only_align_scores_are_never_sampled(monkeypatch):
    network, generator = tiny_network("electra", {"replaced": 1}), tiny_network("electra", {"mlm": 0}, seed=1)
    scores, shown = generator.scores_of_words, []
    monkeypatch.setattr(generator, "scores_of_words", lambda hidden, **_: scores(hidden, aligned=True))
    network.encoder.register_forward_pre_hook(lambda _, inputs: shown.append(inputs[0].tokens_T))
    objective = ReplacedTokenDetection(network, generator, discriminator_weight=WEIGHT)
    assert network.config.vocabulary % 64
    for weight in (1.0, math.nan):  # of weights that are no numbers any more, samples are anything
        with torch.no_grad():
            generator.heads["mlm"].bias.mul_(weight)
        objective(batch_of(), SCALES)
        assert shown.pop().max() < network.config.vocabulary


def test_pairs_are_judged_by_what_the_discriminator_sees():
    network = tiny_network("modernbert", {"replaced": 1, "nsp": 2})
    generator = tiny_network("modernbert", {"mlm": 0}, seed=1)
    without = ReplacedTokenDetection(network, generator, discriminator_weight=WEIGHT)
    objective = ReplacedTokenDetection(
        network, generator, discriminator_weight=WEIGHT, pair_head="nsp", pair_weight=3.0
    )
    batch = with_fields(
        batch_of(),
        pair_labels_S=torch.tensor([0, 1, 1, 0]),
        pair_weights_S=torch.tensor([1.0, 0.0, 1.0, 0.0]),  # the second has none, and the last is the filler
    )
    seen = []
    network.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    counts = {**COUNTS, "pairs": 2}
    loss, sums = objective(batch, scales_of(objective, counts))
    pair_loss, pair_hits = sums[2], sums[-1]
    shown = seen[0]
    assert not torch.equal(shown.tokens_T, batch.inputs.tokens_T)
    scores_S2 = network.scores("nsp", network(shown), shown.layout)
    expected = functional.cross_entropy(scores_S2[[0, 2]], torch.tensor([0, 1]), reduction="sum")
    assert (pair_loss - expected).abs() <= FP32
    assert pair_hits == (scores_S2[[0, 2]].argmax(-1) == torch.tensor([0, 1])).sum()
    plain, others = without(batch, SCALES)
    assert (loss - plain - 3 * expected / 2).abs() <= FP32
    assert torch.equal(sums[[0, 1, 3, 4, 5, 6, 7]], others)
    means = means_of(objective, sums, counts)
    assert means["loss"] == means["token_loss"] + 50 * means["replaced_loss"] + 3 * means["pair_loss"]


def test_tokens_are_sampled_as_often_as_the_generator_expects():
    scores_V = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 3
    count = 20_000
    draws = torch.arange(count) * (2**SAMPLING_BITS // count)
    sampled = sample(scores_V.expand(count, -1), draws)
    found = sampled.bincount(minlength=40) / count
    assert (found - scores_V.softmax(-1)).abs().max() < 2 / count


def test_what_the_generator_excludes_is_never_sampled():
    scores_PV = torch.tensor([[-200.0, 0.0, 0.0, -200.0]] * 2)
    assert sample(scores_PV, torch.tensor([0, 2**SAMPLING_BITS - 1])).tolist() == [1, 2]


def test_a_row_is_sampled_by_its_own_draw_alone():
    scores_PV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    draws_P = torch.tensor([3, 2**29, 2**30 - 1, 5 * 10**8, 0, 123])
    together = sample(scores_PV, draws_P)
    alone = [int(sample(scores_PV[row : row + 1], draws_P[row : row + 1])) for row in range(6)]
    assert together.tolist() == alone
    assert sample(torch.full((1, 50), torch.nan), torch.tensor([2**30 - 1])).max() < 50


def test_a_sample_that_is_the_original_is_not_replaced():
    batch = batch_of()
    same = with_fields(batch, masked_ids_P=torch.full_like(batch["masked_ids_P"], 60))
    replaced = objective_of().declared.sums.index("replaced")
    assert always_sampling(60)(same, SCALES)[1][replaced] == 0
    assert always_sampling(60)(batch, SCALES)[1][replaced] == len(PLACES)


def test_the_discriminator_sees_what_was_sampled_and_no_mask():
    seen = []
    objective = always_sampling(60)
    objective.network.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].tokens_T))
    objective(batch_of(), SCALES)
    expected = [list(text) for text in TEXTS]
    for text, place, _ in PLACES:
        expected[text][place] = 60
    assert seen[0].tolist() == [token for text in (*expected, FILLER) for token in text]


def test_filler_does_not_count():
    objective = objective_of()
    batch, longer = batch_of(), batch_of(filler=[0] * 9)
    draws = torch.where(batch["masked_weights_P"] > 0, batch["draws_P"], 2**29)
    other = with_fields(
        batch, draws_P=draws, masked_ids_P=batch["masked_ids_P"] + (batch["masked_weights_P"] == 0)
    )
    loss, sums = objective(batch, SCALES)
    assert torch.equal(sums, objective(other, SCALES)[1])
    assert (sums - objective(longer, SCALES)[1]).abs().max() <= FP32
    assert sums[3] <= TOKENS


def test_what_was_found_is_counted():
    objective = always_sampling(60)
    with torch.no_grad():
        objective.network.heads["replaced"].output.bias.fill_(100.0)  # it takes every token for replaced
    sums = objective(batch_of(), SCALES)[1]
    assert sums[3:].tolist() == [len(PLACES), len(PLACES), TOKENS, len(PLACES)]
    means = means_of(objective, sums, COUNTS)
    assert means["replaced_accuracy"] == means["replaced_precision"] == len(PLACES) / TOKENS
    assert (means["replaced_recall"], means["replaced_majority"]) == (1.0, 1 - len(PLACES) / TOKENS)
    assert means["loss"] == means["token_loss"] + WEIGHT * means["replaced_loss"]
    nothing = means_of(objective, torch.tensor([1.0, 1.0, 1.0, *[0.0] * 4]), COUNTS)
    assert (nothing["replaced_precision"], nothing["replaced_recall"]) == (0.0, 0.0)


def test_no_gradient_leads_from_the_discriminator_through_the_samples():
    objective = objective_of()
    objective(batch_of(), torch.tensor([0.0, 1.0]))[0].backward()
    of_generator = [each.grad for each in objective.generator.encoder.blocks.parameters()]
    assert all(grad is None or not grad.any() for grad in of_generator)
    assert objective.generator.encoder.embeddings.words.weight.grad.any()  # they are the discriminator's


def test_both_networks_share_their_embeddings_and_nothing_else():
    objective = objective_of()
    shared = {
        name
        for name, each in objective.generator.named_parameters()
        if any(each is other for other in objective.network.parameters())
    }
    tables = {f"added.{table}.weight" for table in ("position", "segment")}
    expected = {"words.weight", "norm.weight", "norm.bias", *tables}
    assert shared == {f"encoder.embeddings.{name}" for name in expected}


def test_it_is_one_graph():
    objective, counter = objective_of(), CompileCounter("eager")
    whole = torch.compile(objective.plain, fullgraph=True, backend=counter)
    loss, sums = whole(batch_of(), SCALES)
    expected_loss, expected = objective(batch_of(), SCALES)
    assert counter.frame_count == 1
    assert (loss - expected_loss).abs() <= FP32 and (sums - expected).abs().max() <= FP32


def test_losses_are_summed_up_in_fp32_under_bf16():
    objective = objective_of()
    with torch.autocast("cpu", torch.bfloat16):
        loss, sums = objective(batch_of(), SCALES)
    assert loss.dtype == sums.dtype == torch.float32
    assert (loss - objective(batch_of(), SCALES)[0]).abs() < 0.5
