"""The Dockerfile and compose.yaml, read: nobody builds them here, but what they copy and run must exist."""

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from typer.main import get_command

from bertsmith.cli.app import app
from bertsmith.inference.embedded_models import default_model
from bertsmith.serve.middleware import OPEN_ROUTES
from bertsmith.serve.server_config import Limits

PROJECT = Path(__file__).parents[3]
FILE = (PROJECT / "deploy" / "Dockerfile").read_text()
STEPS = [
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^#.*\n", "", FILE)).splitlines()
    if line.strip()
]
COPIES = [shlex.split(words) for step, words in STEPS if step == "COPY"]
SOURCES = [source for words in COPIES if not words[0].startswith("--from") for source in words[:-1]]

COMPOSE = yaml.safe_load((PROJECT / "deploy" / "compose.yaml").read_text())
SERVICE = COMPOSE["services"]["bertsmith"]
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
    *("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}
SERVE = get_command(app).commands["serve"]


def only(step):
    """What the one step of this kind says."""
    (words,) = [words for each, words in STEPS if each == step]
    return words


def served(words):
    """The options of a `bertsmith serve` line, by the parser of the command line."""
    program, verb, *options = words
    assert (program, verb) == ("bertsmith", "serve")
    return SERVE.make_context("serve", list(options)).params


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


def seconds(text):
    """A duration of Docker's in seconds."""
    return {"s": 1, "m": 60}[text[-1]] * int(text[:-1])


def test_every_instruction_is_known_and_stands_in_a_stage():
    assert {step for step, _ in STEPS} <= INSTRUCTIONS
    # Only what names the base image may stand before the first stage.
    assert [step for step, _ in STEPS[:2]] == ["ARG", "FROM"]
    stages = {words.split(" AS ")[1] for step, words in STEPS if step == "FROM" and " AS " in words}
    taken = {words[0].removeprefix("--from=") for words in COPIES if words[0].startswith("--from=")}
    assert taken == stages


def test_the_python_of_every_stage_is_one_that_the_project_takes():
    assert {words.split()[0] for step, words in STEPS if step == "FROM"} == {"${BASE}"}
    versions = {STEPS[0][1].removeprefix("BASE=python:").split("-")[0]}
    assert versions <= set(SpecifierSet(PYPROJECT["requires-python"]).filter(versions))


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_copied_exists_and_is_sent_to_the_build(source):
    assert (PROJECT / source).exists()
    assert is_sent(source)


@pytest.mark.parametrize(
    "path",
    [
        f"src/bertsmith/{name}"
        for name in (
            "serve/page/page.html",
            "insight/page/view.css",
            "pretrained/bertsmith-small/config.json",
        )
    ],
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


def test_the_digest_of_the_base_image_can_be_given_and_the_command_that_reads_it_is_told():
    base = STEPS[0][1].removeprefix("BASE=")
    assert f"imagetools inspect {base} --format '{{{{.Manifest.Digest}}}}'" in FILE
    assert f"--build-arg BASE={base}@sha256:" in FILE


def test_what_is_installed_is_the_lock_torch_and_the_project():
    runs = [words for step, words in STEPS if step == "RUN"]
    locked, torch, project = [shlex.split(words)[2:] for words in runs if words.startswith("pip install")]
    assert locked == ["--require-hashes", "-r", "deploy/lock/image.txt"]
    assert torch == ["--index-url", "$TORCH_INDEX", "-r", "deploy/lock/torch.txt"]
    assert project == [
        "--no-deps",
        "--no-build-isolation",
        ".",
    ]  # all it needs is there, and so is its builder
    assert "download.pytorch.org/whl/cpu" in STEPS[2][1] and STEPS[2][0] == "ARG"


def test_the_own_model_comes_with_the_code():
    assert ["src", "./src"] in COPIES
    assert default_model().is_relative_to(PROJECT / "src" / "bertsmith")
    assert ("WORKDIR", "/src") in STEPS


# ---- compose.yaml


def test_compose_builds_this_image_of_the_whole_project():
    context = (PROJECT / "deploy" / SERVICE["build"]["context"]).resolve()
    assert context == PROJECT
    assert (context / SERVICE["build"]["dockerfile"]).read_text() == FILE


def test_compose_publishes_the_port_that_the_image_listens_at_on_this_machine_alone():
    default = next(option.default for option in SERVE.params if option.name == "port")
    address, outside, inside = SERVICE["ports"][0].replace(":-", "-").split(":")
    assert (address, inside) == ("127.0.0.1", only("EXPOSE"))
    assert only("EXPOSE") == str(default) and str(default) in outside


def test_compose_checks_health_as_the_image_does():
    options, command = only("HEALTHCHECK").split("CMD ", 1)
    check = SERVICE["healthcheck"]
    assert check["test"] == ["CMD", *json.loads(command)]
    assert {f"--{name.replace('_', '-')}={check[name]}" for name in check if name != "test"} == set(
        options.split()
    )


def test_compose_gives_the_key_by_the_variable_that_the_server_reads():
    (variable,) = [option.envvar for option in SERVE.params if option.name == "api_key"]
    assert SERVICE["environment"].keys() == {variable}
    assert SERVICE["environment"][variable].startswith(f"${{{variable}:?")  # nothing starts without one


def test_compose_lets_the_server_write_nothing_and_bounds_what_it_takes():
    assert SERVICE["read_only"] is True and SERVICE["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in SERVICE["security_opt"]
    assert all(volume.endswith(":ro") for volume in SERVICE["volumes"])
    assert SERVICE["deploy"]["resources"]["limits"].keys() == {"cpus", "memory", "pids"}
    assert seconds(SERVICE["stop_grace_period"]) > Limits().drain_seconds


def test_the_arguments_that_compose_teaches_are_options_of_ours():
    text = (PROJECT / "deploy" / "compose.yaml").read_text()
    (taught,) = re.findall(r'BERTSMITH_ARGUMENTS="([^"]+)"', text)
    folders = served([*json.loads(only("ENTRYPOINT")), *shlex.split(taught)])["model"]
    inside = SERVICE["volumes"][0].split(":")[-2]
    assert len(folders) == 2 and all(f"={inside}/" in each for each in folders)
