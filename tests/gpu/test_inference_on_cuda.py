import pytest
import torch

import bertsmith
from bertsmith.inference import engine

pytestmark = pytest.mark.gpu


def test_texts_of_many_windows_and_batches_keep_their_order(monkeypatch):
    texts = [" ".join(["snow", "falls", "again"] * (number * 7 % 40 + 1)) for number in range(500)]
    expected = bertsmith.load("bertsmith-small", device="cpu", precision="fp32").embed(texts)
    bert = bertsmith.load("bertsmith-small", device="cuda", precision="fp32")
    whole = bert.embed(texts)
    monkeypatch.setattr(engine, "FIRST_WINDOW_TEXTS", 7)
    monkeypatch.setattr(engine, "WINDOW_TEXTS", 31)
    monkeypatch.setitem(engine.BATCH_TOKENS, "cuda", 400)
    assert torch.allclose(whole, expected, atol=1e-4)
    assert torch.allclose(bert.embed(texts), whole, atol=1e-4)
