"""What `pip install` puts elsewhere is whole: the wheel is built, unpacked and used far from the checkout."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that holds what the wheel brings."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"  # a copy: a build leaves files beside the code
    shutil.copytree(
        PROJECT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    )
    for name in BUILT_FROM:
        shutil.copy(PROJECT / name, source)
    # As pip does, without pip, which starts several processes, and without packing models for seconds.
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1], {})"
    stored = {"--build-option": "--compression=stored"}
    command = [sys.executable, "-c", build.format(stored), place]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = place.glob("bertsmith-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place / "target")
    return place / "target"


def python(installed, elsewhere, *arguments):
    """A fresh interpreter's output, in another folder and with the unpacked wheel only."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_what_is_imported(installed, tmp_path):
    found = python(installed, tmp_path, "-c", "import bertsmith; print(bertsmith.__file__)")
    assert Path(found.strip()).is_relative_to(installed)


def test_presets_come_with_the_wheel(installed, tmp_path):
    assert "roberta-base" in python(installed, tmp_path, "-m", "bertsmith", "recipe", "list")


def test_the_models_in_the_wheel_are_served_with_their_page_and_fill_a_mask(installed, tmp_path):
    command = [sys.executable, "-m", "bertsmith", "serve", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            address = next(
                found[0] for line in server.stderr if (found := re.search(r"http://[\w.:]+", line))
            )
            with urllib.request.urlopen(f"{address}/", timeout=60) as page:
                assert b"<html" in page.read()
            with urllib.request.urlopen(f"{address}/models", timeout=60) as listed:
                models = json.load(listed)["models"]
            asked = json.dumps({"text": "Paris is the [MASK] of France."}).encode()
            request = urllib.request.Request(f"{address}/fill", asked, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as filled:
                (mask,) = json.load(filled)["masks"]
            assert mask["guesses"][0]["token"] == "capital"
            able = {ability for model in models for ability in model["abilities"]}
            assert able >= {"fill", "next", "classify", "tag", "answer"}
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()
