"""What `pip install` puts elsewhere is whole: the wheel is built, unpacked and used far from the checkout."""

import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
BYTECODE = "page.cpython-311.pyc"
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")
LARGEST = 70_000_000
"""Bytes of the unpacked wheel: who adds a large file should notice."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that holds what the wheel brings."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"  # a copy: a build leaves files beside the code
    shutil.copytree(
        PROJECT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    )
    (source / "src" / "bertsmith" / BYTECODE).touch()  # as in a checkout that was used
    for name in BUILT_FROM:
        shutil.copy(PROJECT / name, source)
    # As pip does, without pip, which starts several processes, and without packing models for seconds.
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1], {})"
    stored = {"--build-option": "--compression=stored"}
    subprocess.run(
        [sys.executable, "-c", build.format(stored), place], cwd=source, check=True, capture_output=True
    )
    (wheel,) = place.glob("bertsmith-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place / "target")
    return place / "target"


def command(*words):
    """A command without the paths that a checkout adds to an environment (-S)."""
    return [sys.executable, "-S", *words]


def environment(installed, home):
    """What a new user has: the wheel with what it needs, and an empty home."""
    kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS") if name in os.environ}
    places = os.pathsep.join([str(installed), *site.getsitepackages()])
    return {**kept, "HOME": str(home), "PYTHONPATH": places, "PYTHONUNBUFFERED": "1"}


def python(installed, elsewhere, *words):
    """Return the output of a fresh interpreter, in another folder and with the unpacked wheel only."""
    done = subprocess.run(
        command(*words),
        cwd=elsewhere,
        env=environment(installed, elsewhere),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def data_files(folder):
    """All files below a folder that are neither code nor left by running it, by their paths."""
    return {
        file.relative_to(folder).as_posix()
        for file in (folder / "bertsmith").rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }


def test_the_wheel_is_all_that_is_found_of_bertsmith(installed, tmp_path):
    program = "import bertsmith, pathlib, sys; print(bertsmith.__file__)\n"
    program += "print(*(each for each in sys.path if pathlib.Path(each, 'bertsmith').is_dir()), sep='\\n')"
    file, *places = python(installed, tmp_path, "-c", program).splitlines()
    assert Path(file).is_relative_to(installed)
    assert places == [str(installed)]


def test_the_wheel_has_every_file_below_src(installed):
    files = data_files(PROJECT / "src")
    assert data_files(installed) == files
    assert {Path(each).suffix for each in files} >= {".css", ".html", ".js", ".safetensors", ".toml"}
    assert not (installed / "bertsmith" / BYTECODE).exists()


def test_the_wheel_is_small_enough(installed):
    assert sum(file.stat().st_size for file in installed.rglob("*") if file.is_file()) <= LARGEST


def test_the_source_distribution_has_the_package_and_nothing_else(installed, tmp_path):
    source = installed.parent / "source"
    program = "import setuptools; setuptools.setup()"  # as a build does, without compressing for seconds
    words = (sys.executable, "-c", program, "-q", "sdist", "--formats=tar", "-d", str(tmp_path))
    subprocess.run(words, cwd=source, check=True, capture_output=True)
    (packed,) = tmp_path.glob("bertsmith-*.tar")
    with tarfile.open(packed) as names:
        files = {Path(each.name).relative_to(packed.stem) for each in names.getmembers() if each.isfile()}
    assert {str(each) for each in files if each.parts[0] != "src"} == {*BUILT_FROM, "PKG-INFO", "setup.cfg"}
    kept = {
        each.as_posix()
        for each in files
        if each.suffix not in (".py", ".pyc") and ".egg-info" not in str(each)
    }
    assert {each.removeprefix("src/") for each in kept if each.startswith("src/")} == data_files(
        PROJECT / "src"
    )


def test_presets_come_with_the_wheel(installed, tmp_path):
    assert "roberta-base" in python(installed, tmp_path, "-m", "bertsmith", "recipe", "list")


def test_a_view_of_look_is_written_from_the_wheel(installed, tmp_path):
    python(installed, tmp_path, "-m", "bertsmith", "look", "attention", "A dog runs.", "--out", "view.html")
    page = (tmp_path / "view.html").read_text(encoding="utf-8")
    for name in ("insight/page/view.css", "serve/page/style.css"):
        assert (PROJECT / "src" / "bertsmith" / name).read_text(encoding="utf-8") in page
    assert "attention_view_module.show(" in page


def test_the_first_step_of_the_demonstration_runs_from_the_wheel(installed, tmp_path):
    program = "from bertsmith.cli.demo import ask_embedded_models; ask_embedded_models()"
    told = python(installed, tmp_path, "-c", program)
    assert re.findall(r"^\$ bertsmith (\w+)", told, re.MULTILINE) == [
        *("fill", "fill", "next", "answer", "tag", "classify")
    ]
    assert "capital" in told


def test_the_models_in_the_wheel_are_served_with_their_page_and_fill_a_mask(installed, tmp_path):
    with subprocess.Popen(
        command("-m", "bertsmith", "serve", "--port", "0"),
        cwd=tmp_path,
        env=environment(installed, tmp_path),
        stderr=subprocess.PIPE,
        text=True,
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
