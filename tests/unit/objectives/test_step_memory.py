from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from bertsmith.core.errors import UserError
from bertsmith.model.network import new_network
from bertsmith.objectives.linear_cross_entropy import word_sums
from bertsmith.objectives.step_memory import TrainingLoad, estimate_memory, largest_micro_batch
from bertsmith.packed import pack
from tests.tiny import tiny_encoder_config

CONFIGS = {
    "narrow": tiny_encoder_config("bert", width=32, inner=64, heads=4, layers=3),
    "wide": tiny_encoder_config("bert", width=64, inner=256, heads=2, layers=4),
    "albert": tiny_encoder_config("albert", width=64, inner=256, heads=2, layers=4, dropout=0.1),
    "pruned": tiny_encoder_config(
        "bert", width=64, inner=256, heads=4, layers=3, layer_heads=(1, 4, 2), layer_inner=(64, 256, 128)
    ),
    "elmo": tiny_encoder_config("elmo", width=64, embedding_width=32, cell=128, layers=3),
}

SURE = 5


def load_of(config, **changes):
    load = TrainingLoad(
        config=config, parameters=1000, moments=2, longest=64, predicted_fraction=0.15, device="cpu",
        precision="fp32", recompute=False,
    )  # fmt: skip
    return replace(load, **changes)


def network_of(config):
    return new_network(config, {"mlm": 0}, torch.Generator().manual_seed(0)).train()


def saved_bytes(network, work):
    """What autograd keeps of some work on a network, each storage once, without the network's weights."""
    known = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = work()
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    assert result.requires_grad
    return sum(size for place, size in storages.items() if place not in known)


@pytest.fixture(params=[False, True], ids=["fused", "products"], autouse=True)
def _each_form_of_attention(request, monkeypatch):
    """Where MKL is, short sequences with dropout are computed as products, which keep their probabilities."""
    monkeypatch.setattr("bertsmith.model.attention.products.MKL", request.param)
    monkeypatch.setattr("bertsmith.model.attention.products.MAX_THREADS", 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_are_what_autograd_keeps(name):
    network, batch = network_of(CONFIGS[name]), pack([list(range(64))] * 4)
    seen = saved_bytes(network, lambda: network(batch))
    assert estimate_memory(load_of(CONFIGS[name]), 256).activations == pytest.approx(seen, rel=0.05)


def test_activations_in_half_precision_are_what_autograd_keeps():
    config, batch = CONFIGS["wide"], pack([list(range(64))] * 4)
    network = network_of(config)
    with torch.autocast("cpu", torch.bfloat16):
        seen = saved_bytes(network, lambda: network(batch))
    estimate = estimate_memory(load_of(config, precision="bf16", parameters=0), 256)
    copies = sum(each.numel() for each in network.encoder.blocks.parameters() if each.dim() > 1) * 2
    assert estimate.activations == pytest.approx(seen - copies, rel=0.1)


def test_recomputed_layers_keep_their_inputs():
    network, batch = network_of(CONFIGS["wide"]), pack([list(range(64))] * 4)
    for block in network.encoder.blocks:
        plain = block.forward
        block.forward = lambda *inputs, plain=plain: checkpoint(plain, *inputs, use_reentrant=False)
    seen = saved_bytes(network, lambda: network(batch))
    estimate = estimate_memory(load_of(CONFIGS["wide"], recompute=True), 256)
    assert estimate.activations == pytest.approx(seen, rel=0.05)


def test_scores_cover_what_the_head_keeps_and_its_gradient():
    config = replace(CONFIGS["narrow"], vocabulary=2000)
    network, rows = network_of(config), torch.arange(30)
    hidden = torch.zeros(200, config.width, requires_grad=True)

    def loss():
        scores = network.word_scores(hidden, rows)
        return torch.nn.functional.cross_entropy(scores, torch.zeros(30, dtype=torch.long))

    gradient = 30 * 2000 * 4
    seen = saved_bytes(network, loss) + gradient
    estimate = estimate_memory(load_of(config, compiled=True), 200)
    assert estimate.scores == pytest.approx(seen, rel=0.05)


def peak_bytes(work):
    """The most memory that some work has at once of what torch's allocator gave it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = seen.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def sure_network_of(config):
    """A network whose best guess is always the same word."""
    network = network_of(config)
    network.heads["mlm"].bias.data[SURE] = 1000.0
    return network


def peak_of_learning(network, states, rows):
    """The same of learning to predict that word, where there are gradients already: they count apart."""

    def learn():
        loss, hits = word_sums(network, states(), torch.full((rows,), SURE), torch.ones(rows))
        assert hits == rows
        loss.backward()

    learn()
    return peak_bytes(learn)


@pytest.mark.parametrize("rows", [30, 300], ids=["a chunk", "several chunks"])
def test_scores_that_are_not_kept_are_what_the_allocator_sees(rows, monkeypatch):
    config = replace(CONFIGS["narrow"], vocabulary=5000)
    monkeypatch.setattr("bertsmith.objectives.linear_cross_entropy.CHUNK_SCORES", 100 * config.vocabulary)
    network, hidden = sure_network_of(config), torch.randn(rows, config.width, requires_grad=True)
    seen = peak_of_learning(network, lambda: hidden, rows)
    estimate = estimate_memory(load_of(config, predicted_fraction=1.0), rows)
    assert estimate.scores + estimate.working == pytest.approx(seen, rel=0.1)


def test_a_step_on_a_cpu_takes_no_more_than_its_estimate_and_not_much_less():
    config = replace(CONFIGS["narrow"], vocabulary=8000, attention_dropout=0.1)
    network, batch, rows = sure_network_of(config), pack([list(range(64))] * 8), torch.arange(0, 512, 7)
    seen = peak_of_learning(network, lambda: network.encoder(batch, rows=rows), len(rows))
    assert seen <= estimate_memory(load_of(config, parameters=0), 512).total <= 1.5 * seen


def test_weights_gradients_and_moments_are_sixteen_bytes_a_parameter():
    estimate = estimate_memory(load_of(CONFIGS["narrow"]), 0)
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (4000, 4000, 8000)
    assert estimate.total == 16_000
    assert estimate_memory(load_of(CONFIGS["narrow"], moments=1), 0).total == 12_000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_half_precision_and_recomputing_need_less(device):
    plain = load_of(CONFIGS["wide"], device=device)
    needs = [
        estimate_memory(load, 1 << 20).total
        for load in (
            plain,
            replace(plain, precision="bf16"),
            replace(plain, precision="bf16", recompute=True),
        )
    ]
    assert needs[0] > 1.4 * needs[1] > 1.4 * needs[2]


@pytest.mark.parametrize("free", [2**22, 2**24, 3 * 2**24, 2**28, 2**31])
def test_the_chosen_micro_batch_fits_and_the_next_one_would_not(free):
    load = load_of(CONFIGS["wide"])
    tokens = largest_micro_batch(load, free_bytes=free)
    assert estimate_memory(load, tokens).total <= free
    assert estimate_memory(load, 2 * tokens).total > 0.85 * free
    assert bin(tokens).count("1") <= 2


def test_a_micro_batch_holds_a_whole_sequence_of_any_length():
    load = load_of(CONFIGS["wide"], longest=100)
    just_enough = int(estimate_memory(load, 100).total / 0.85) + 2
    assert largest_micro_batch(load, free_bytes=just_enough) == 100


def test_a_sequence_that_does_not_fit_is_reported_with_what_to_change():
    load = load_of(CONFIGS["wide"])
    too_little = int(estimate_memory(load, 64).total / 0.85) - 100
    with pytest.raises(UserError, match=r"one sequence of 64 tokens .*run\.recompute = true.*smaller model"):
        largest_micro_batch(load, free_bytes=too_little)
    with pytest.raises(UserError, match=r"one sequence of 64 tokens needs [^;]*; shorten examples\.stages"):
        largest_micro_batch(replace(load, recompute=True), free_bytes=20_000)
    with pytest.raises(UserError, match=r"weights, gradients and moments need .*fsdp"):
        largest_micro_batch(load, free_bytes=1000)
