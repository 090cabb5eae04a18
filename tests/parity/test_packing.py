"""A packed batch gives each sequence what it would get alone."""

import random
from dataclasses import replace

import pytest
import torch

from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.encoder import first_of_rows, largest_of_rows, last_of_rows, mean_of_rows
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.network import new_network
from bertsmith.packed import Layout, pack, unpack
from tests.compile_counter import CompileCounter
from tests.tiny import tiny_encoder_config, tiny_network

every_member = pytest.mark.parametrize("model_type", ARCHITECTURES)


def ragged(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 99) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("bert", torch.float32),
        ("modernbert", torch.float32),
        *((each, torch.float64) for each in ARCHITECTURES),
    ],
    ids=str,
)
def test_packed_equals_one_by_one(model_type, dtype, full, two_threads):
    network = tiny_network(model_type, heads={}).to(dtype)
    stream = torch.Generator().manual_seed(1)
    with torch.no_grad():  # initial weights are so small that little of a difference would come through
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=stream, dtype=dtype), alpha=0.2)
    lengths = [5, 17, 70, 1, 5, 33]
    if full or dtype == torch.float32:  # enough work for two threads to cut it where the batch says
        lengths += [512, *range(301, 321, 2)]
    rng = random.Random(3)
    sequences = [[rng.randrange(5, 99) for _ in range(length)] for length in lengths]
    batch = pack(sequences)
    with torch.no_grad():
        together = unpack(network(batch), batch.layout)
        for sequence, packed in zip(sequences, together, strict=True):
            difference = (network(pack([sequence])) - packed).abs().max()
            assert difference <= (1e-5 if dtype == torch.float32 else 1e-12)


@every_member
def test_poisoning_one_sequence_leaves_every_other_one_finite_and_unchanged(model_type):
    network = tiny_network(model_type, heads={})
    sequences = ragged(8)
    sequences[3] = [7] * 20
    sequences = [
        [1 if token == 7 else token for token in each] if n != 3 else each for n, each in enumerate(sequences)
    ]
    batch = pack(sequences)
    with torch.no_grad():
        clean = unpack(network(batch), batch.layout)
        network.encoder.words.weight[7] = float("nan")
        poisoned = unpack(network(batch), batch.layout)
    assert poisoned[3].isnan().all()
    for number in (0, 1, 2, 4, 5, 6, 7):
        assert torch.equal(poisoned[number], clean[number])


@pytest.mark.parametrize("model_type", ["bert", "albert", "modernbert"])
def test_forward_and_backward_compile_whole_and_at_most_twice_over_ragged_batches(
    model_type, monkeypatch, full
):
    if model_type == "albert" and not full:
        pytest.skip("one block again and again: compiled as BERT's are, and compiling takes seconds")
    torch.compiler.reset()
    monkeypatch.setattr("bertsmith.model.attention.products.MAX_LENGTH", 0)  # that form samples otherwise
    heads = {"mlm": 0, "classify": 3} | ({"pooler": 0} if "pooler" in ARCHITECTURES[model_type].heads else {})
    # A graph holds each layer: more teach nothing new. ModernBERT's second is the first of the local ones.
    config = tiny_encoder_config(model_type, layers=2 if model_type == "modernbert" else 1)
    network = new_network(config, heads, torch.Generator().manual_seed(0)).train()
    for layer in network.modules():
        if isinstance(layer, Dropout):  # compiled it draws otherwise; attention's own dropout stays
            layer.p = 0.0
    counter = CompileCounter("aot_eager")

    def loss_of(network, batch, rows):
        hidden = network(batch)
        words = network.word_scores(hidden, rows).logsumexp(-1).sum()
        return words + network.scores("classify", hidden, batch.layout).square().sum()

    def gradients(function, seed, *arguments):
        network.zero_grad()
        torch.manual_seed(seed)  # attention drops: both must drop the same
        function(network, *arguments).backward()
        return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]

    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for seed in range(20 if full else 4):
        sequences = ragged(3 + seed, seed=seed)
        batch = pack(sequences)
        rows = torch.randint(len(batch.tokens_T), (2 + seed,))
        ours = gradients(compiled, seed, batch, rows)
        plain = gradients(loss_of, seed, batch, rows)
        for mine, eager in zip(ours, plain, strict=True):  # to the rounding of single precision
            assert (mine - eager).abs().max() <= 1e-5 * eager.abs().max()
    assert counter.frame_count <= 2


@every_member
def test_bfloat16_stays_close_to_single_precision(model_type):
    network = tiny_network(model_type, heads={})
    batch = pack(ragged(6))
    with torch.no_grad():
        single = network(batch)
        half = network.bfloat16()(batch).float()
    assert (half - single).abs().mean() < 0.02 * single.abs().mean() + 0.005


@every_member
def test_a_layout_padded_to_a_fixed_length_changes_no_sequence(model_type):
    heads = {"classify": 3} | ({"pooler": 0} if "pooler" in ARCHITECTURES[model_type].heads else {})
    network = tiny_network(model_type, heads)
    batch = pack(ragged(5))
    starts = torch.cat([batch.layout.starts_S1, batch.layout.starts_S1[-1:].repeat(4)])
    padded = replace(batch, layout=Layout(starts, longest=512))
    with torch.no_grad():
        assert torch.equal(network(padded), network(batch))
        scores = network.scores("classify", network(padded), padded.layout)
        expected = network.scores("classify", network(batch), batch.layout)
    assert scores.shape == (9, 3) and scores.isfinite().all()
    assert torch.allclose(scores[:5], expected, atol=1e-6)


@pytest.mark.parametrize("pool", [first_of_rows, last_of_rows, mean_of_rows, largest_of_rows])
def test_rows_are_pooled_as_one_by_one_whatever_pads_the_layout(pool):
    values = torch.randn(12, 4, dtype=torch.float64)
    starts = torch.tensor([0, 5, 6, 12, 12, 12], dtype=torch.int32)
    pooled = pool(values, Layout(starts, longest=6))
    plain = {
        first_of_rows: lambda rows: rows[0],
        last_of_rows: lambda rows: rows[-1],
        mean_of_rows: lambda rows: rows.mean(0),
        largest_of_rows: lambda rows: rows.amax(0),
    }[pool]
    assert pooled.shape == (5, 4)
    for number, (start, end) in enumerate([(0, 5), (5, 6), (6, 12)]):
        assert torch.allclose(pooled[number], plain(values[start:end]), atol=1e-14, rtol=0)
    if pool is mean_of_rows:
        assert (pooled[3:] == 0).all()
