"""The lock of deploy/lock: complete, with hashes, allowed by pyproject.toml, and told again by the SBOM."""

import json
import re
import tomllib
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2]
SPEC = spec_from_file_location("lock", PROJECT / "deploy" / "lock.py")
lock = module_from_spec(SPEC)
SPEC.loader.exec_module(lock)

PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())
PINS = {name: lock.locked(name) for name in ("torch", *lock.ENVIRONMENTS)}
ALL = {name: pin for pins in PINS.values() for name, pin in pins.items()}
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
ASKED = {
    "image": [*PYPROJECT["project"]["dependencies"], *PYPROJECT["build-system"]["requires"]],
    "demo": EXTRAS["plots"],
    "test": [
        *(
            each
            for name, extra in EXTRAS.items()
            for each in extra
            if name != "docs" and each[:9] != "bertsmith"
        )
    ],
    "docs": EXTRAS["docs"],
}
MACHINES = [
    {"sys_platform": system, "platform_system": name, "python_version": version, "extra": "",
     "python_full_version": f"{version}.0", "platform_machine": machine}
    for system, name in (("linux", "Linux"), ("darwin", "Darwin"))
    for machine in ("x86_64", "aarch64")
    for version in ("3.11", "3.12", "3.13", "3.14")
]  # fmt: skip


def held_by(environment):
    """The pins of an environment with those of the files that it continues, and torch."""
    names = list(lock.ENVIRONMENTS)
    return {
        name: pin
        for each in ("torch", *names[: names.index(environment) + 1])
        for name, pin in PINS[each].items()
    }


def test_each_package_is_pinned_once_and_all_but_torch_with_hashes():
    assert sum(map(len, PINS.values())) == len(ALL)
    assert PINS["torch"].keys() == {"torch"} and PINS["torch"]["torch"][1] == []
    for name, (version, hashes) in ALL.items():
        assert version and (name == "torch" or hashes), name
        assert all(re.fullmatch("[0-9a-f]{64}", each) for each in hashes), name


@pytest.mark.parametrize("environment", lock.ENVIRONMENTS)
def test_what_pyproject_asks_for_is_pinned_at_a_version_that_it_allows(environment):
    pins = held_by(environment)
    for asked in map(Requirement, ASKED[environment]):
        assert asked.specifier.contains(pins[canonicalize_name(asked.name)][0]), asked


@pytest.mark.parametrize("environment", [name for name in lock.ENVIRONMENTS if name != "docs"])
def test_what_the_packages_need_is_pinned_on_linux_and_macos_for_every_python(environment):
    """`pip install --require-hashes` stops at the first package without a hash; `make docs` tries its own."""
    pins, asked = held_by(environment), [Requirement(each) for each in ASKED[environment]]
    extras = {canonicalize_name(each.name): each.extras for each in asked}
    for name, (version, _) in pins.items():
        if name == "torch":  # its build for CUDA needs more, which comes with it
            continue
        found = metadata.distribution(name)
        if found.version != version:
            pytest.skip(f"{name} is {found.version} here and locked at {version}: run `make setup`")
        for need in map(Requirement, found.requires or ()):
            wanted = [
                machine
                for machine in MACHINES
                for extra in ("", *extras.get(name, ()))
                if need.marker is None or need.marker.evaluate(machine | {"extra": extra})
            ]
            if wanted:
                assert need.specifier.contains(pins[canonicalize_name(need.name)][0]), (name, str(need))


def test_no_address_of_an_index_is_written_down():
    """pip asks those that the machine is set up with."""
    texts = [path.read_text() for path in lock.LOCK.iterdir()]
    assert texts and not [text for text in texts if "://" in text or "--index" in text]


def test_the_sbom_is_the_one_of_the_lock():
    assert lock.SBOM.read_text() == lock.sbom(), "run `python deploy/lock.py --sbom`"
    told = json.loads(lock.SBOM.read_text())
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    assert {each["name"]: each["version"] for each in told["components"]} == {
        name: version for name, (version, _) in ALL.items()
    }
    required = {each["name"] for each in told["components"] if each["scope"] == "required"}
    assert required == held_by("image").keys()


def test_the_versions_that_the_docs_tell_are_the_locked_ones():
    text = (PROJECT / "docs" / "dependencies.md").read_text()
    rows = re.findall(r"(?m)^\|(?: \w+ \|)? ([\w-]+)(?: \(above\))? \| (\d[\w.]*) \|", text)
    assert len(rows) > 30
    assert [(name, version) for name, version in rows if ALL[canonicalize_name(name)][0] != version] == []


PAGE = """
<a href="https://files/1/made-2.0-cp312-cp312-manylinux2014_aarch64.whl#sha256={a}" data-x="1">made-2.0-cp312-cp312-manylinux2014_aarch64.whl</a>
<a href="https://files/2/made-2.0-cp39-abi3-macosx_11_0_arm64.whl#sha256={b}">made-2.0-cp39-abi3-macosx_11_0_arm64.whl</a>
<a href="https://files/3/made-2.0-py3-none-any.whl#sha256={c}">made-2.0-py3-none-any.whl</a>
<a href="https://files/4/made-2.0-cp310-cp310-manylinux_2_28_x86_64.whl#sha256={d}">made-2.0-cp310-cp310-manylinux_2_28_x86_64.whl</a>
<a href="https://files/5/made-2.0-cp312-cp312-win_amd64.whl#sha256={d}">made-2.0-cp312-cp312-win_amd64.whl</a>
<a href="https://files/6/made-2.0.1-py3-none-any.whl#sha256={d}">made-2.0.1-py3-none-any.whl</a>
<a href="https://files/7/made-2.0.tar.gz#sha256={d}">made-2.0.tar.gz</a>
<a href="https://files/8/made-1.0.tar.gz#sha256={e}">made-1.0.tar.gz</a>
<a href="https://files/9/made-0.1-py3.2.tar.gz#sha256={d}">made-0.1-py3.2.tar.gz</a>
"""  # noqa: E501


def test_the_hashes_of_a_version_are_those_of_its_wheels_or_of_its_source(tmp_path, monkeypatch):
    digests = {letter: letter * 64 for letter in "abcde"}
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "index.html").write_text(PAGE.format(**digests))
    opened = lock.urllib.request.urlopen
    monkeypatch.setattr(lock, "INDEX", tmp_path.as_uri())
    monkeypatch.setattr(
        lock.urllib.request, "urlopen", lambda address, timeout: opened(f"{address}index.html")
    )
    assert lock.hashes_of("made", "2.0") == [digests[letter] for letter in "abc"]
    assert lock.hashes_of("made", "1.0") == [digests["e"]]
    with pytest.raises(SystemExit, match="no file of made 3.0"):
        lock.hashes_of("made", "3.0")
