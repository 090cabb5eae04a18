"""How soon a question is answered: help without torch, and an answer not much later than torch itself."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import bertsmith
from tests.command_line import bertsmith as command

SOURCE = Path(bertsmith.__file__).parents[1]
VERBS = ("fill", "next", "answer", "classify", "tag", "compare", "embed")
FILL = ("-m", "bertsmith", "fill", "Paris is the [MASK] of France.")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter answers to these arguments."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True
    )


def children_seconds() -> float:
    """User and system time of all processes that have ended here."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_seconds(*arguments: str) -> float:
    """User and system time of a fresh interpreter with these arguments."""
    before = children_seconds()
    python(*arguments)
    return children_seconds() - before


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_teaches_by_example(verb, capsys):
    told = command(capsys, verb, "--help")
    assert told.code == 0
    assert f"Example: bertsmith {verb}" in told.out
    assert "--model" in told.out and "--json" in told.out


def test_help_of_no_verb_imports_torch():
    program = (
        "import sys\n"
        "from bertsmith.cli.app import main\n"
        f"for verb in {VERBS}:\n"
        "    sys.argv = ['bertsmith', verb, '--help']\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "print('torch loaded:', 'torch' in sys.modules)\n"
    )
    assert python("-c", program).stdout.endswith("torch loaded: False\n")


@pytest.fixture(scope="module")
def filled() -> tuple[list[str], float]:
    """What a fresh interpreter says that fills a mask and then names what it has loaded, and its CPU time."""
    program = (
        "import sys\n"
        "from bertsmith.cli.app import main\n"
        f"sys.argv = ['bertsmith', *{FILL[2:]!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules)\n"
    )
    before = children_seconds()
    told = python("-c", program).stdout.splitlines()
    return told, children_seconds() - before


def test_a_mask_is_filled_without_what_only_training_needs(filled):
    heavy = {
        "torch._dynamo",
        "bertsmith.recipe.schema",
        "sympy",
        "matplotlib",
        "bertsmith.training",
        "bertsmith.tasks.batches",
    }
    told, _ = filled
    loaded = set(told[-1].split())
    assert "capital" in told[1] and "torch" in loaded
    assert not heavy & loaded


def test_a_cold_start_costs_at_most_half_as_much_again_as_importing_torch(filled):
    def is_soon(seconds: float) -> bool:
        return seconds <= 1.5 * cpu_seconds("-c", "import torch")

    assert is_soon(filled[1]) or any(is_soon(cpu_seconds(*FILL)) for _ in range(2))
