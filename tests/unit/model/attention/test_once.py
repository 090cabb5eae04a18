"""One row of each sequence attends as it does among all rows, with the same gradients."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bertsmith.model.attention.attend import KERNELS, attend
from bertsmith.model.attention.once import attend_once, once_takes
from bertsmith.model.attention.projection import Projection
from bertsmith.model.attention.rotary import Rotary
from bertsmith.model.attention.rule import AttentionRule
from bertsmith.model.encoder import first_rows, last_rows
from bertsmith.model.lora import LoraLinear
from bertsmith.model.transformer.transformer import AttentionShape, SelfAttention
from bertsmith.packed import ALL, Layout, pack
from tests.tiny import tiny_network

BATCH = pack([list(range(length)) for length in (5, 9, 4, 12)])
LAYOUT = BATCH.layout
TOKENS = 30


@pytest.fixture
def always_worth(monkeypatch):
    """However narrow the states are."""
    monkeypatch.setattr("bertsmith.model.attention.once.SEQUENCE_COST", 1)


def attention_of(*, bias: bool = True, dropout: float = 0.0) -> SelfAttention:
    torch.manual_seed(0)
    attention = SelfAttention(AttentionShape(24, 3, 4), rule=AttentionRule(dropout=dropout), bias=bias)
    if bias:
        nn.init.normal_(attention.project.bias)
    return attention.double()


def inputs_of(attention, hidden, rows) -> Projection:
    """What its attention is computed from in training."""
    of_layer = (attention.project, attention.head_width, None, BATCH.positions_T)
    return Projection(hidden, *of_layer, rows, learns=True)


def states(*, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(TOKENS, 24, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("rows_of", [first_rows, last_rows, lambda _: torch.tensor([3, 5, 17, 20])])
@pytest.mark.parametrize("bias", [True, False])
def test_it_gives_what_all_rows_give_and_the_same_gradients(rows_of, bias, monkeypatch, always_worth):
    attention, hidden, rows = attention_of(bias=bias), states().requires_grad_(), rows_of(LAYOUT)
    assert once_takes(inputs_of(attention, hidden, rows), LAYOUT, attention.training_rule)
    learned = [hidden, *attention.parameters()]
    found = []
    for takes in (True, False):
        monkeypatch.setitem(KERNELS, "once", KERNELS["once"]._replace(takes=lambda *_, takes=takes: takes))
        output = attention(hidden, BATCH, attend, rows)
        weights = torch.arange(output.numel(), dtype=output.dtype).view_as(output).cos()
        found.append((output, *torch.autograd.grad((output * weights).sum(), learned)))
    for once, among_all in zip(*found, strict=True):
        torch.testing.assert_close(once, among_all, atol=1e-12, rtol=1e-12)


def test_dropout_drops_its_fraction_of_probabilities_and_scales_what_it_keeps():
    # Values that say which token they are of: the mix then is the probabilities themselves.
    sequences, length = 64, 24
    layout = Layout(torch.arange(0, (sequences + 1) * length, length), length)
    attention = SelfAttention(AttentionShape(24, 1, 24), rule=AttentionRule(dropout=0.25), bias=True)
    hidden = torch.eye(24).repeat(sequences, 1)
    with torch.no_grad():
        attention.project.weight[48:] = torch.eye(24)
        attention.project.bias[48:] = 0
    inputs = inputs_of(attention, hidden, first_rows(layout))
    torch.manual_seed(0)
    kept = attend_once(inputs, layout, AttentionRule(dropout=0.25))
    whole = attend_once(inputs, layout, AttentionRule())
    assert abs((kept == 0).float().mean().item() - 0.25) < 0.05
    torch.testing.assert_close(kept[kept != 0], (whole / 0.75)[kept != 0])


def test_with_dropout_the_bias_of_values_counts_as_far_as_its_tokens_are_kept():
    attention = attention_of()
    inputs = inputs_of(attention, states(), first_rows(LAYOUT))
    with torch.no_grad():
        attention.project.weight[12:] = 0  # keys alike, and values that are the bias alone
    mixed = attend_once(inputs, LAYOUT, AttentionRule(dropout=0.5))
    bias = attention.project.bias[24:].view(3, 4)
    kept = (mixed.view(4, 3, 4) / bias).mean(-1)
    for length, kept_H in zip((5, 9, 4, 12), kept, strict=True):
        tokens = kept_H * length * 0.5  # each kept one weighs 2 / length
        torch.testing.assert_close(tokens, tokens.round(), atol=1e-9, rtol=0)


def test_it_is_for_one_row_of_each_sequence_alone(always_worth):
    attention, hidden, rule = attention_of().float(), states(dtype=torch.float32), AttentionRule()
    inputs = inputs_of(attention, hidden, ALL)

    def takes(rows, layout=LAYOUT, rule=rule, **changes):
        return once_takes(replace(inputs, rows=rows, **changes), layout, rule)

    assert takes(torch.tensor([4, 5, 14, 29]))
    assert not takes(torch.tensor([5, 4, 14, 29]))  # not in order
    assert not takes(torch.tensor([0, 1, 14, 29]))  # two of one
    assert not takes(torch.tensor([0, 5, 14]))
    assert not takes(ALL)
    rows = first_rows(LAYOUT)
    assert not takes(rows, rule=replace(rule, causal=True))
    assert not takes(rows, rule=replace(rule, window=2))
    assert not takes(rows, hidden_TD=hidden.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes(rows)
    assert not takes(rows, learns=False)
    assert not takes(rows, rotary=Rotary(100.0))
    assert not takes(rows, linear=LoraLinear(attention.project, 3))
    padded = Layout(torch.cat((LAYOUT.starts_S1, LAYOUT.starts_S1[-1:])), LAYOUT.longest)
    assert not takes(first_rows(padded), padded)
    assert not takes(torch.tensor([], dtype=torch.long), Layout(torch.tensor([0]), 0), hidden_TD=hidden[:0])
    attention.project.register_forward_hook(lambda *_: None)
    assert not takes(rows)


@pytest.mark.parametrize(
    ("width", "tokens", "threads", "worth"),
    [(384, 13, 1, True), (384, 13, 16, False), (384, 53, 16, True), (128, 13, 1, False), (128, 30, 1, True)],
)
def test_many_small_products_are_not_for_narrow_states_nor_many_threads(
    monkeypatch, width, tokens, threads, worth
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layout = Layout(torch.arange(0, 9 * tokens, tokens), tokens)
    attention = SelfAttention(AttentionShape(width, 1, width), rule=AttentionRule())
    inputs = inputs_of(attention, torch.zeros(8 * tokens, width), first_rows(layout))
    assert once_takes(inputs, layout, AttentionRule()) == worth


def test_a_head_on_sentences_that_learns_computes_so_in_the_last_layer(monkeypatch, always_worth):
    network = tiny_network(heads={"classify": 2, "pooler": 0})
    computed = []

    def recorded(inputs, *others):
        computed.append(inputs.linear)
        return attend_once(inputs, *others)

    monkeypatch.setitem(KERNELS, "once", KERNELS["once"]._replace(attend=recorded))
    network.eval().sentence_scores("classify", BATCH)
    assert not computed
    network.train().sentence_scores("classify", BATCH)
    assert computed == [network.encoder.blocks[-1].attention.project]
