"""Kernels of losses of words and of sums against torch's; `test_triton_kernels.py` says how to run them."""

import pytest
import torch
from torch import nn

from bertsmith.objectives.word_losses import fused_word_losses
from tests.interpreted import DEVICE, HALF, OTHER, largest_difference

pytestmark = pytest.mark.gpu


@pytest.fixture
def block():
    """Words that are looked at at once."""
    from bertsmith.objectives.word_losses_triton import FORWARD_LAUNCH

    return FORWARD_LAUNCH["BLOCK"]


@pytest.mark.parametrize("words", [30_528, 1032])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), OTHER], ids=str)
def test_losses_of_words_and_their_gradients_equal_the_plain_ones(dtype, tolerance, words):
    stream = torch.Generator().manual_seed(words)
    scores = (8 * torch.randn(9, words, generator=stream)).to(DEVICE, dtype)
    scores[:, -6:] = -float("inf")  # words that do not exist
    labels = torch.randint(words - 6, (18,), generator=stream).to(DEVICE)[::2]
    labels[:3] = scores[:3].argmax(-1)
    upstream = torch.rand(9, generator=stream).to(DEVICE)
    scores.requires_grad_()
    losses, hits = fused_word_losses(scores, labels)
    (gradient,) = torch.autograd.grad(losses, scores, upstream)
    exact = scores.detach().double().requires_grad_()
    plain = nn.functional.cross_entropy(exact, labels, reduction="none")
    (plain_gradient,) = torch.autograd.grad(plain, exact, upstream.double())
    assert losses.dtype == torch.float32 and gradient.dtype == dtype
    assert largest_difference([losses], [plain]) < 1e-5
    assert largest_difference([gradient], [plain_gradient]) < tolerance
    assert hits.tolist() == [True] * 3 + (scores.argmax(-1) == labels)[3:].tolist()


def test_of_equal_scores_the_first_is_the_best_guess(block):
    scores = torch.zeros(6, 3 * block, device=DEVICE, dtype=HALF)
    # Of the same place of three blocks, and of another place.
    labels = torch.tensor([5, block + 5, block + 6, 2 * block + 5, 0, 5], device=DEVICE)
    scores[:, labels[:4]] = 3.0
    scores[5, 5] = 2.0
    with torch.no_grad():
        _, hits = fused_word_losses(scores, labels)
    assert hits.tolist() == [True, False, False, False, False, False]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_with_a_score_that_is_no_number_has_no_loss_and_leaves_others_alone(value, block):
    scores = torch.randn(3, 2 * block, generator=torch.Generator().manual_seed(0)).to(DEVICE, HALF)
    labels = torch.zeros(3, dtype=torch.long, device=DEVICE)
    with torch.no_grad():
        expected, _ = fused_word_losses(scores, labels)
        scores[1, 1] = value
        losses, _ = fused_word_losses(scores, labels)
    assert losses[1].isnan() and torch.equal(losses[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize(
    "shape", [(1, 0, 48), (2, 1, 17), (1, 256, 16), (1, 257, 33), (2, 1000, 768)], ids=str
)
def test_sums_of_programs_are_sums_of_their_rows(shape):
    from bertsmith.model.kernels.partial_sums_triton import total

    parts = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    torch.testing.assert_close(total(parts).double(), parts.double().sum(1), rtol=1e-5, atol=1e-4)
