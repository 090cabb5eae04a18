"""One tiny store for the whole room, and runs that draw nothing unless a test asks for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bertsmith.corpus.token_store import TokenStore
from tests.tiny_runs import run_tiny, tiny_store, without_pictures


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return tiny_store(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    with without_pictures():
        yield


@pytest.fixture(scope="session")
def finished(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never interrupted, pictures included; not to be changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert run_tiny(store, out).state == "finished"
    return out
