import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.encoder import mean_of_rows
from bertsmith.model.kernels.torch_internals import compiled_whole, mark_dynamic
from bertsmith.model.network import new_network
from bertsmith.packed import pack
from tests.compile_counter import CompileCounter, counters
from tests.tiny import tiny_encoder_config

pytestmark = pytest.mark.gpu

LENGTHS = [64, 5, 1, 128, 33, 5]


def ragged(rng: random.Random, lengths: list[int]):
    return pack([[rng.randrange(90) for _ in range(length)] for length in lengths])


def network_of(model_type: str, **changes):
    sizes = {} if model_type == "elmo" else {"width": 128, "heads": 2, "inner": 256}
    config = tiny_encoder_config(model_type, **sizes, **changes)
    return new_network(
        config, {"mlm": 0, "classify": 3} | needed(model_type), torch.Generator().manual_seed(1)
    )


def needed(model_type: str) -> dict[str, int]:
    return {"pooler": 0} if "pooler" in ARCHITECTURES[model_type].heads else {}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_member_gives_on_cuda_what_it_gives_on_the_cpu(model_type):
    network, batch = network_of(model_type).eval(), ragged(random.Random(3), LENGTHS)
    with torch.no_grad():
        expected = network(batch)
        single = network.cuda()(batch.to("cuda")).cpu()
        half = network.bfloat16()(batch.to("cuda")).float().cpu()
    assert (single - expected).abs().max() < 2e-4
    assert (half - expected).abs().mean() < 2e-2


OWN = {"gated": False, "norm": "rmsnorm", "qk_norm": True, "sandwich_norm": True, "activation": "relu2"}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("bert", {}), ("electra", {}), ("modernbert", {}), ("modernbert", OWN)],
    ids=["bert", "electra", "modernbert", "own"],
)
def test_a_training_step_compiles_whole_and_at_most_twice_over_ragged_batches(model_type, changes):
    torch.compiler.reset()
    rates = {"attention_dropout": 0.0, "dropout": 0.0, "head_dropout": 0.0}
    network = network_of(model_type, **rates, **changes).cuda().train()
    counter = CompileCounter("inductor")

    def loss_of(network, batch, rows):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            hidden = network(batch)
            words = network.word_scores(hidden, rows).float().logsumexp(-1).sum()
            return words + network.scores("classify", hidden, batch.layout).float().square().sum()

    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    rng = random.Random(1)
    for round in range(20):
        lengths = [rng.randint(1, 100) for _ in range(10 + round)]
        batch = ragged(rng, lengths).to("cuda")
        # More rows than the embedding is wide, as in training: the compiler tells the two cases apart.
        rows = torch.randint(sum(lengths), (40 + round,), device="cuda")
        fast, plain = compiled(network, batch, rows), loss_of(network, batch, rows)
        assert abs(fast.item() - plain.item()) < 2e-2 * abs(plain.item())
        fast.backward()
    assert counter.frame_count <= 2
    assert all(
        parameter.grad.isfinite().all() for parameter in network.parameters() if parameter.grad is not None
    )


def test_biases_whose_gradients_kernels_sum_learn_as_in_single_precision():
    network, batch = network_of("bert").eval(), ragged(random.Random(3), LENGTHS)
    names = ("attention.project.bias", "attention.output.bias", "feed_forward.contract.bias")

    def gradients(device, states=network):
        biases = [each for name, each in network.named_parameters() if name.endswith(names)]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = states(batch.to(device)).float().pow(3).mean()
        return [each.cpu() for each in torch.autograd.grad(loss, biases)]

    torch.compiler.reset()
    exact = gradients("cpu")  # single precision, and no kernel of ours
    network.cuda()
    ours, compiled = gradients("cuda"), gradients("cuda", torch.compile(network, fullgraph=True))
    assert len(exact) == 3 * len(network.encoder.blocks)
    for plain, eager, fast in zip(exact, ours, compiled, strict=True):
        assert (eager - plain).norm() < 0.1 * plain.norm() and (fast - plain).norm() < 0.1 * plain.norm()


def test_one_graph_takes_few_rows_and_many():
    torch.compiler.reset()
    counters.clear()
    norm = nn.LayerNorm(768).cuda()
    compiled = compiled_whole(lambda values_TD: norm(values_TD).pow(3).mean())
    for rows in (1_000, 5_000, 8_000):
        values_TD = torch.randn(rows, 768, device="cuda", requires_grad=True)
        mark_dynamic(values_TD)
        compiled(values_TD).backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_a_compiled_step_with_dropout_is_reproducible_from_its_seed():
    torch.compiler.reset()
    network, batch = network_of("bert").cuda().train(), ragged(random.Random(3), LENGTHS).to("cuda")

    @torch.compile(fullgraph=True)
    def states(network, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return network(batch)

    def run(seed):
        torch.manual_seed(seed)
        return states(network, batch)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_compiled_layers_compute_their_rotary_turns_once_for_each_base():
    torch.compiler.reset()
    network, batch = network_of("modernbert", **OWN).cuda().train(), ragged(random.Random(3), LENGTHS)

    @torch.compile(fullgraph=True)
    def states(network, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return network(batch)

    states(network, batch.to("cuda"))
    with torch.profiler.profile() as profiled:
        states(network, batch.to("cuda"))
    assert [event.name for event in profiled.events()].count("bertsmith::rotary_turns") == 2
    assert network.config.layers == 3


@pytest.mark.parametrize(("model_type", "half"), [("bert", True), ("modernbert", False)], ids=str)
def test_static_shapes_run_as_a_cuda_graph(model_type, half):
    torch.compiler.reset()
    network = network_of(model_type, attention_dropout=0.0, dropout=0.0, head_dropout=0.0).cuda().train()

    def loss_of(network, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            return network.scores("classify", network(batch), batch.layout).float().square().sum()

    captured = torch.compile(loss_of, fullgraph=True, mode="reduce-overhead", dynamic=False)
    rng = random.Random(2)
    for _ in range(5):
        lengths = [rng.randint(1, 60) for _ in range(7)]
        lengths.append(512 - sum(lengths))  # one filler sequence: the number of tokens stays the same
        batch = ragged(rng, lengths)
        batch = replace(batch, layout=replace(batch.layout, longest=512)).to("cuda")
        torch.compiler.cudagraph_mark_step_begin()
        fast = captured(network, batch)
        fast.backward()
        ours = network.heads["classify"].output.weight.grad.clone()
        network.zero_grad()
        plain = loss_of(network, batch)
        plain.backward()
        assert abs(fast.item() - plain.item()) < 2e-2 * abs(plain.item())
        assert torch.allclose(ours, network.heads["classify"].output.weight.grad, rtol=5e-2, atol=1e-3)
        network.zero_grad()


def test_single_precision_with_dropout_runs_beside_a_cuda_graph():
    torch.compiler.reset()
    network, batch = network_of("bert").cuda().train(), ragged(random.Random(3), LENGTHS).to("cuda")

    @torch.compile(fullgraph=True, mode="reduce-overhead", dynamic=False)
    def loss_of(network, batch):
        return network.scores("classify", network(batch), batch.layout).square().sum()

    losses = []
    for _ in range(4):
        network.zero_grad()  # gradients live in the graph's memory, which the next step overwrites
        torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(network, batch)
        loss.backward()
        losses.append(loss.item())
    assert len(set(losses)) > 1 and all(loss == loss for loss in losses)


def test_pooling_gives_the_same_bits_every_time():
    values = torch.randn(16_000, 768, device="cuda")
    layout = pack([[0] * 100] * 160).to("cuda").layout
    first = mean_of_rows(values, layout)
    assert all(torch.equal(mean_of_rows(values, layout), first) for _ in range(5))
