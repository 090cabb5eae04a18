"""Packed BiLSTMs against a loop over sequences, and scorers that learn on top of a frozen encoder."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.features.bilstm import BiLstmScorer, LayerMix, PackedBiLstm, PairReader, Reading
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.encoder_config import PassSize
from bertsmith.packed import Layout, pack
from bertsmith.recipe.finetuning_schema import FeaturesSection, FinetuningOptimSection
from bertsmith.tasks.batches import ShuffledBatches
from bertsmith.tasks.kinds.registry import kind_named
from bertsmith.tasks.objective import TaskObjective
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.optimizers import build_optimizer
from tests.tiny import tiny_network
from tests.tokenizer_makers import gpt_bpe
from tests.unit.tasks.made_sets import made_set

TEXTS = [[2, 5, 6, 3, 7, 8, 3], [2, 9, 3, 10, 3], [2, 11, 12, 13, 3, 14, 3], [4, 4]]
SEGMENTS = [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 1], [0, 0]]
PAIRS = pack(TEXTS, SEGMENTS)
SEPARATOR = 3


def scorer_for(kind, *, separator=None, outputs=2, seed=0, features=None):
    network = tiny_network(heads={"pooler": 0, "mlm": 0})
    stream = torch.Generator().manual_seed(seed)
    reading = Reading(kind_named(kind).head.reads, separator)
    return BiLstmScorer(network, outputs, features or FeaturesSection(), reading=reading, stream=stream)


def tuned_scorer(model_type, kind="tag", layers="all-and-embeddings"):
    network, reading = tiny_network(model_type, {}), Reading(kind_named(kind).head.reads)
    stream, features = torch.Generator().manual_seed(0), FeaturesSection(layers=layers)
    return BiLstmScorer(network, 2, features, reading=reading, stream=stream, tunes=True)


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
def test_a_packed_bilstm_is_a_loop_over_sequences(lengths):
    torch.manual_seed(0)
    bilstm = PackedBiLstm(4, 3, dropout=0.0).double()
    values_TD = torch.randn(sum(lengths), 4, dtype=torch.float64, requires_grad=True)
    layout = Layout(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))
    parts = [part for part in values_TD.split(lengths) if len(part)]
    expected = torch.cat([bilstm.lstm(part)[0] for part in parts])
    found = bilstm(values_TD, layout)
    assert (found - expected).abs().max() < 1e-12
    chosen, learned = torch.randn_like(found), [values_TD, *bilstm.parameters()]
    gradients = [torch.autograd.grad((each * chosen).sum(), learned) for each in (found, expected)]
    assert all((one - other).abs().max() < 1e-11 for one, other in zip(*gradients, strict=True))


def plain_pair(reader, mixed_TD, segments):
    """ESIM for one pair: read both, align each with the other, compare, read again, pool."""
    texts = [mixed_TD[torch.tensor(segments) == number] for number in (0, 1)]
    texts = [text for text in texts if len(text)]
    first = [reader.bilstm.lstm(text)[0] for text in texts]
    partners = list(reversed(first)) if len(first) == 2 else [first[0].new_zeros(1, first[0].shape[1])]
    pooled = []
    for states, partner in zip(first, partners, strict=True):
        found = (states @ partner.T).softmax(-1) @ partner
        compared = torch.cat((states, found, states - found, states * found), -1)
        again = reader.second_bilstm.lstm(reader.compare(compared).relu())[0]
        pooled += [again.amax(0), again.mean(0)]
    missing = [torch.zeros_like(pooled[0])] * (4 - len(pooled))
    return torch.cat((*pooled, *missing))


def test_pairs_look_at_each_other_as_in_a_plain_computation():
    torch.manual_seed(0)
    reader = PairReader(6, 6, separator=SEPARATOR, dropout=0.0).double()
    mixed_TD = torch.randn(len(PAIRS.tokens_T), 6, dtype=torch.float64, requires_grad=True)
    found = reader(mixed_TD, PAIRS)
    texts = mixed_TD.split([len(text) for text in TEXTS])
    pairs = zip(texts, SEGMENTS, strict=True)
    expected = torch.stack([plain_pair(reader, text, segments) for text, segments in pairs])
    assert found.shape == (len(TEXTS), reader.outputs)
    assert (found - expected).abs().max() < 1e-12
    gradients = [torch.autograd.grad(each.square().sum(), mixed_TD)[0] for each in (found, expected)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-10
    assert gradients[0].isfinite().all()


def test_two_texts_of_one_segment_look_at_each_other_too():
    """As RoBERTa has them: <s> A </s></s> B </s>."""
    texts = [[0, 5, 6, 2, 2, 7, 8, 2], [0, 9, 2, 2, 10, 2]]
    parts = [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
    torch.manual_seed(0)
    reader = PairReader(6, 6, separator=2, dropout=0.0).double()
    values = [torch.randn(len(text), 6, dtype=torch.float64) for text in texts]
    expected = [plain_pair(reader, each, part) for each, part in zip(values, parts, strict=True)]
    assert (reader(torch.cat(values), pack(texts)) - torch.stack(expected)).abs().max() < 1e-12


def test_a_gpt_pair_is_two_texts_that_look_at_each_other(tmp_path):
    gpt = Tokenizer.load(gpt_bpe(tmp_path))
    pair = gpt.encode_pair("the smith heats", "the sun")
    part = [max(number, 0) for number in pair.sequence]  # the token between them ends the first
    torch.manual_seed(0)
    reader = PairReader(6, 6, separator=gpt.sep_id, dropout=0.0).double()
    values = torch.randn(len(pair), 6, dtype=torch.float64)
    expected = plain_pair(reader, values, part)
    assert (reader(values, pack([pair.ids]))[0] - expected).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("kind", "separator", "rows"),
    [
        ("tag", None, len(PAIRS.tokens_T)),
        ("span", SEPARATOR, len(PAIRS.tokens_T)),
        ("classify", None, len(TEXTS)),
        ("regress", SEPARATOR, len(TEXTS)),
    ],
)
def test_only_the_mix_the_lstms_and_the_output_learn(kind, separator, rows):
    scorer = scorer_for(kind, separator=separator, outputs=2).train()
    before = [each.clone() for each in scorer.network.parameters()]
    scores = scorer(PAIRS)
    assert scores.shape == (rows, 2)
    scores.square().sum().backward()
    learned = {name for name, each in scorer.named_parameters() if each.grad is not None}
    own = {name for name, _ in scorer.named_parameters() if not name.startswith("network.")}
    assert learned == own
    assert all(scorer.get_parameter(name).grad.abs().max() > 0 for name in own)
    optimizer = build_optimizer(scorer, FinetuningOptimSection())
    optimizer.step()
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(own)
    assert all(torch.equal(a, b) for a, b in zip(before, scorer.network.parameters(), strict=True))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("layers", ["all-and-embeddings", "second-to-last", "embeddings"])
def test_what_learns_under_a_tuned_bilstm_is_what_it_reads(model_type, layers):
    scorer = tuned_scorer(model_type, layers=layers).train()
    assert scorer.network.encoder.training
    if model_type == "albert" and layers == "embeddings":
        assert not any(each.requires_grad for each in scorer.network.encoder.own_blocks()[0].parameters())
    batch = pack([[2, 5, 6, 3, 7, 8, 3], [2, 9, 3]])
    torch.manual_seed(0)
    scorer(batch).square().sum().backward()
    learned = {name for name, each in scorer.named_parameters() if each.grad is not None}
    # Several processes wait for a gradient of every weight that is said to learn.
    assert learned == {name for name, each in scorer.named_parameters() if each.requires_grad}
    count = len([name for name in learned if name.startswith("network.encoder.")])
    assert 0 < count <= len(list(scorer.network.encoder.parameters()))
    assert (count == len(list(scorer.network.encoder.parameters()))) or layers != "all-and-embeddings"


def test_a_frozen_and_a_tuned_bilstm_begin_with_the_same_scores():
    frozen = scorer_for("tag").eval()
    tuned = tuned_scorer("bert").eval()
    assert torch.equal(frozen(PAIRS), tuned(PAIRS))


def test_the_operations_of_the_bilstm_are_counted():
    size = PassSize(tokens=100, sequences=1)
    scorer = tuned_scorer("bert")
    width, units = scorer.network.config.width, scorer.reader.bilstm.lstm.hidden_size
    products = 2 * 4 * units * ((width + units) + (2 * units + units))  # two directions of two layers
    assert scorer.operations(size) - scorer.network.config.operations(size) == 2 * 100 * products


def test_the_encoder_never_drops_anything():
    scorer = scorer_for("tag").train()
    assert not any(each.training for each in scorer.network.encoder.modules())
    assert scorer.dropout.training


def test_the_stream_alone_decides_the_first_weights():
    torch.manual_seed(1)
    one = scorer_for("classify", seed=5)
    torch.manual_seed(2)
    same, other = scorer_for("classify", seed=5), scorer_for("classify", seed=6)
    weights = [each.reader.bilstm.lstm.weight_ih_l0 for each in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(one.output.weight, same.output.weight)


@pytest.mark.parametrize("separator", [None, SEPARATOR])
def test_micro_batches_and_filler_change_neither_loss_nor_gradient(separator):
    encoded, found = made_set("choice"), []
    for micro_tokens, multiple in ((10_000, 1), (48, 16)):
        objective = TaskObjective(
            scorer_for("choice", separator=separator, outputs=1).double(), kind_named("choice")
        ).eval()
        settings = {"examples_per_step": 12, "seed": 0, "micro_tokens": micro_tokens, "multiple": multiple}
        step = ShuffledBatches(encoded, **settings).step(0)
        for micro in step.micros:
            objective(micro, torch.tensor([1 / step.count]))[0].backward()
        found.append([each.grad for each in objective.parameters() if each.grad is not None])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 1e-8


def test_it_runs_under_bf16():
    scorer = scorer_for("classify", separator=SEPARATOR).train()
    with torch.autocast("cpu", torch.bfloat16):
        scores = scorer(PAIRS)
    scores.float().sum().backward()
    assert scorer.mix.weights_L.grad.isfinite().all()


def test_a_new_mix_is_the_mean_of_all_layers():
    states = [torch.full((2, 3), float(layer)) for layer in range(5)]
    assert LayerMix(5)(states).tolist() == torch.full((2, 3), 2.0).tolist()


def test_a_mix_weighs_layers_by_a_softmax_and_scales_their_sum():
    mix = LayerMix(2)
    with torch.no_grad():
        mix.weights_L.copy_(torch.tensor([0.0, 3.0]).log1p())  # e to these are 1 and 4
        mix.gamma.fill_(10.0)
    assert mix([torch.zeros(1, 1), torch.ones(1, 1)]).item() == pytest.approx(8.0)


def test_a_mix_learns_its_weights_and_its_scale():
    mix = LayerMix(2)
    mix([torch.zeros(1, 1), torch.ones(1, 1)]).sum().backward()
    assert mix.weights_L.grad.tolist() == [-0.25, 0.25] and mix.gamma.grad.item() == 0.5
