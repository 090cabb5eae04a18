"""The loss that keeps no scores against the plain one, in value, gradient and hits."""

import pytest
import torch
from torch import Tensor, nn

from bertsmith.model.heads import MaskedLanguageHead
from bertsmith.model.network import Network
from bertsmith.objectives import linear_cross_entropy
from bertsmith.objectives.linear_cross_entropy import word_sums
from bertsmith.objectives.pretraining_objective import weighted_sums
from tests.tiny import tiny_network

ROWS = 11


def network_of(*, tied: bool, bias: bool) -> Network:
    network = tiny_network().double()
    head = network.heads["mlm"]
    assert isinstance(head, MaskedLanguageHead) and head.bias is not None
    torch.manual_seed(1)
    nn.init.normal_(head.bias)
    if not bias:
        head.bias = None
    if not tied:
        head.untie(network.encoder.embeddings.words.weight)
        nn.init.normal_(head.decoder)
    return network


def inputs_of(network: Network) -> tuple[Tensor, Tensor, Tensor]:
    """States, labels of which a few are the best guess, and weights of which one is 0."""
    torch.manual_seed(2)
    hidden_PD = torch.randn(ROWS, network.config.width, dtype=torch.float64, requires_grad=True)
    labels_P = torch.randint(network.config.vocabulary, (ROWS,))
    labels_P[::3] = network.scores_of_words(hidden_PD)[::3].argmax(-1)
    weights_P = torch.rand(ROWS)
    weights_P[4] = 0.0
    return hidden_PD, labels_P, weights_P


def gradients(network: Network, hidden_PD: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """Of a multiple of the loss, as a step asks for it."""
    network.zero_grad()
    hidden_PD.grad = None
    (0.25 * loss).backward()
    found = {name: each.grad for name, each in network.named_parameters() if each.grad is not None}
    return {"hidden": hidden_PD.grad, **found}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_aligned_scores_teach_the_same(tied, bias):
    network = network_of(tied=tied, bias=bias)
    hidden_PD, labels_P, weights_P = inputs_of(network)
    scores_PV, aligned_PV = (network.scores_of_words(hidden_PD, aligned=each) for each in (False, True))
    words = network.config.vocabulary
    assert words % 64 and aligned_PV.shape == (ROWS, -(-words // 64) * 64)
    assert torch.equal(aligned_PV[:, :words], scores_PV)
    assert (aligned_PV[:, words:] == -torch.inf).all()
    (loss, hits), (our_loss, our_hits) = (
        weighted_sums(each, labels_P, weights_P) for each in (scores_PV, aligned_PV)
    )
    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-6) and torch.equal(our_hits, hits)
    expected, found = (gradients(network, hidden_PD, each) for each in (loss, our_loss))
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert torch.allclose(each, expected[name], rtol=1e-5, atol=1e-9), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 4, ROWS])
def test_it_is_the_plain_loss_however_it_is_cut(tied, bias, rows, monkeypatch):
    network = network_of(tied=tied, bias=bias)
    hidden_PD, labels_P, weights_P = inputs_of(network)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_SCORES", rows * network.config.vocabulary)
    loss, hits = weighted_sums_in_double(network, hidden_PD, labels_P, weights_P)
    expected = gradients(network, hidden_PD, loss)
    our_loss, our_hits = word_sums(network, hidden_PD, labels_P, weights_P)
    found = gradients(network, hidden_PD, our_loss)
    torch.testing.assert_close(our_loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(our_hits, hits.to(our_hits), rtol=1e-6, atol=0)
    assert hits > 0 and found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def weighted_sums_in_double(
    network: Network, hidden_PD: Tensor, labels_P: Tensor, weights_P: Tensor
) -> tuple[Tensor, Tensor]:
    """What `weighted_sums` sums up, without its rounding to fp32."""
    scores_PV = network.scores_of_words(hidden_PD)
    losses_P = -scores_PV.log_softmax(-1)[torch.arange(len(labels_P)), labels_P]
    hits_P = scores_PV.argmax(-1) == labels_P
    return (losses_P * weights_P).sum(), (hits_P * weights_P).sum()


def test_of_equal_scores_the_first_is_the_guess_as_in_an_argmax():
    network = network_of(tied=True, bias=True).float()
    with torch.no_grad():
        network.encoder.embeddings.words.weight.zero_()
        network.heads["mlm"].bias.zero_()
    hidden_PD, labels_P, weights_P = (
        torch.randn(3, network.config.width),
        torch.tensor([0, 1, 0]),
        torch.ones(3),
    )
    _, hits = word_sums(network, hidden_PD, labels_P, weights_P)
    assert hits == weighted_sums(network.scores_of_words(hidden_PD), labels_P, weights_P)[1] == 2


def test_where_nothing_learns_the_head_itself_is_asked():
    network = network_of(tied=True, bias=True)
    inputs = inputs_of(network)
    learned, _ = word_sums(network, *inputs)
    seen = []
    network.heads["mlm"].register_forward_hook(lambda _, __, scores_PV: seen.append(scores_PV))
    with torch.no_grad():
        loss, _ = word_sums(network, *inputs)
    torch.testing.assert_close(loss.double(), learned.detach(), rtol=1e-6, atol=0)
    assert [len(each) for each in seen] == [ROWS]


def test_huge_scores_overflow_nothing():
    network = network_of(tied=True, bias=True).float()
    with torch.no_grad():
        network.heads["mlm"].bias.mul_(1e4)
    hidden_PD, labels_P, weights_P = inputs_of(network_of(tied=True, bias=True))
    hidden_PD = hidden_PD.detach().float().requires_grad_()
    loss, _ = word_sums(network, hidden_PD, labels_P, weights_P)
    plain, _ = weighted_sums(network.scores_of_words(hidden_PD), labels_P, weights_P)
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    assert all(bool(each.isfinite().all()) for each in gradients(network, hidden_PD, loss).values())
