"""Two tiers of counts (`--full`), clocks that jump (`--jitter`), GPU tests that say why they are skipped."""

import gc
import logging
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.touched import touches_clocks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run property tests and sweeps at their full counts")
    parser.addoption(
        "--jitter",
        nargs="?",
        const=random.randrange(1, 10**6),
        type=int,
        help="let clocks jump and hold up threads and processes at random; --jitter=SEED repeats a run",
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # while modules are loaded, which make next to no garbage
    # A shell that starts the tests in the background has Ctrl-C ignored in them and in all they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Torch notes each call while a state is saved, and pytest keeps every note: a twentieth of a run's time.
    logging.getLogger("c10d-NullHandler-dcp_logger").disabled = True
    # No machine loses its power while it is tested: a tiny run waited 74 times for the disk, half its time.
    os.fsync = lambda _: None
    # What a run keeps for later runs must not outlive the tests, nor come from the user's own.
    # A worker's is inside that of the process that started it, which clears up after a killed worker too.
    place = os.environ["XDG_CACHE_HOME"] if hasattr(config, "workerinput") else None
    if config.option.jitter and "BERTSMITH_TESTS_JITTER" not in os.environ:  # workers inherit it
        begin_jitter(config.option.jitter)
    cache = tempfile.mkdtemp(prefix="bertsmith-tests-", dir=place)
    os.environ["XDG_CACHE_HOME"] = cache
    config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    if not config.pluginmanager.hasplugin("hypothesispytest"):  # a machine that only runs the GPU tests
        return
    from hypothesis import HealthCheck, settings

    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    # The quick tier shows every run the same examples; the full tier looks for new ones.
    settings.register_profile("quick", max_examples=30, derandomize=True, **patient)
    settings.register_profile("full", max_examples=5000, derandomize=False, **patient)
    settings.load_profile("full" if config.getoption("--full") else "quick")


def pytest_collection_finish() -> None:
    """Set apart what was loaded: searches for garbage walked through it, for a fifth of the tests' time."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # with the usual 700, searches still took a twentieth


def begin_jitter(seed: int) -> None:
    """Let the clocks jump, from now on and in all processes that are started."""
    folder = str(Path(__file__).parent / "jitter")
    os.environ["BERTSMITH_TESTS_JITTER"] = f"{seed} {time.monotonic()}"
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    from tests.jitter import sitecustomize  # noqa: F401 - what it does, it does when it is imported


def pytest_report_header(config: pytest.Config) -> str | None:
    return config.option.jitter and f"jitter: --jitter={config.option.jitter} repeats it"


@pytest.hookimpl(tryfirst=True)  # before those of other marks are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # To look at every test takes seconds: only if marks are asked for.
    for item in items if config.option.markexpr else []:
        if touches_clocks(item):
            item.add_marker("clocks")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not cuda_is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def cuda_is_available() -> bool:
    """Whether torch sees a GPU; torch is imported only when a GPU test asks."""
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What takes longer is then the work, not how it is shared out."""
    with _threads(1):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Work is cut among threads at places that depend on the batch; results must not."""
    with _threads(2):
        yield


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether this run is at full counts."""
    return bool(pytestconfig.getoption("--full"))
