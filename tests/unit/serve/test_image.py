"""The Dockerfile, read: nobody builds it here, but what it copies and runs must exist."""

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from typer.main import get_command

from bertsmith.cli.app import app
from bertsmith.inference.model_path import DEFAULT_MODEL
from bertsmith.serve.middleware import OPEN_ROUTES

PROJECT = Path(__file__).parents[3]
FILE = (PROJECT / "deploy" / "Dockerfile").read_text()
STEPS = [
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^#.*\n", "", FILE)).splitlines()
    if line.strip()
]
COPIES = [shlex.split(words) for step, words in STEPS if step == "COPY"]
SOURCES = [source for words in COPIES if not words[0].startswith("--from") for source in words[:-1]]


def only(step):
    """What the one step of this kind says."""
    (words,) = [words for each, words in STEPS if each == step]
    return words


def served(words):
    """The options of a `bertsmith serve` line, by the parser of the command line."""
    program, verb, *options = words
    assert (program, verb) == ("bertsmith", "serve")
    return get_command(app).commands["serve"].make_context("serve", list(options)).params


def is_sent(path):
    """Whether a path of the project reaches the build: the last rule on it or a folder above it says so."""
    rules = [line for line in (PROJECT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    sent = True
    for rule in rules:
        pattern = rule.lstrip("!").removeprefix("**/")
        parts = Path(path).parts
        known = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        known += parts if "**/" in rule else ()
        if any(fnmatch(each, pattern) for each in known if "/" not in each or "/" in pattern):
            sent = rule.startswith("!")
    return sent


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_copied_exists_and_is_sent_to_the_build(source):
    assert (PROJECT / source).exists()
    assert is_sent(source)


@pytest.mark.parametrize(
    "path", ["src/bertsmith/serve/page/page.html", "src/bertsmith/pretrained/bertsmith-tiny/config.json"]
)
def test_what_lies_deeper_is_sent_too(path):
    assert (PROJECT / path).exists()
    assert is_sent(path)


@pytest.mark.parametrize(
    "path", [".git/HEAD", "tests/tiny.py", "runs/sst2", "src/bertsmith/__pycache__/a.pyc"]
)
def test_nothing_else_is_sent_to_the_build(path):
    assert not is_sent(path)


def test_what_the_image_runs_is_a_command_of_ours():
    words = json.loads(only("ENTRYPOINT"))  # JSON: no shell stands between the server and SIGTERM
    assert served(words)["host"] == "0.0.0.0"


def test_the_command_lines_that_it_teaches_are_commands_of_ours():
    lines = [line for line in FILE.splitlines() if line.startswith("#   docker run")]
    taught = [shlex.split(line.partition(" bertsmith")[2]) for line in lines]
    models = [served([*json.loads(only("ENTRYPOINT")), *words])["model"] for words in taught]
    assert [list(each) for each in models] == [[], ["sst2=/runs/sst2", "qa=/runs/squad2"]]


def test_the_health_check_asks_where_the_server_listens_and_needs_no_key():
    port = served(json.loads(only("ENTRYPOINT")))["port"]
    (check,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", only("HEALTHCHECK"))
    assert check == (str(port), "/ready")
    assert check[1] in OPEN_ROUTES
    assert only("EXPOSE") == str(port)


def test_the_server_is_not_root_in_it():
    steps = [step for step, _ in STEPS]
    assert only("USER") not in ("root", "0")
    assert steps.index("USER") < steps.index("ENTRYPOINT")


def test_what_is_installed_is_what_the_server_needs():
    installed = " ".join(words for step, words in STEPS if step == "RUN")
    needed = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "pip install -c constraints.txt . " in installed
    assert {"fastapi", "uvicorn", "prometheus-client"} <= {re.split("[<>=]", each)[0] for each in needed}
    assert "download.pytorch.org/whl/cpu" in only("ARG") and "$TORCH_INDEX" in installed


def test_the_own_model_comes_with_the_code():
    assert ["src", "./src"] in COPIES
    assert DEFAULT_MODEL.is_relative_to(PROJECT / "src" / "bertsmith")
    assert ("WORKDIR", "/src") in STEPS
