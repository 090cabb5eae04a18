"""The toy model for every test of the room, and runs that draw nothing."""

from pathlib import Path

import pytest

import bertsmith
from tests.tuning import quickly, shared_lesson, toy_model

__all__ = ["quickly", "shared_lesson", "toy_model"]


@pytest.fixture(scope="session")
def folder(model: Path) -> Path:
    """The toy model's folder; not to be changed."""
    return model


@pytest.fixture(scope="session")
def bert(folder: Path) -> bertsmith.Bert:
    """The toy model, opened; not to be changed."""
    return bertsmith.load(folder)


@pytest.fixture(scope="module")
def tagger(lesson):
    return bertsmith.load(lesson("wnut17") / "model")
