"""Commands take the best precision of the machine; tests compare them with fp32 on every machine."""

import pytest


@pytest.fixture(autouse=True)
def no_bf16_products(monkeypatch):
    monkeypatch.setattr("bertsmith.inference.precision.has_bf16_products", lambda: False)
