"""What the image, demo, tests and docs install, with hashes: deploy/lock/*.txt and the SBOM made from them.

    python deploy/lock.py             # the newest versions that pyproject.toml allows; asks PyPI
    python deploy/lock.py -c old.txt  # any options of `pip install`
    python deploy/lock.py --sbom      # deploy/sbom.json alone, from the lock, without a network

torch is in none of them: its build depends on the machine (CPU, a version of CUDA), so deploy/lock/torch.txt
gives its version alone. Needs the environment of the tests.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

PROJECT = Path(__file__).parents[1]
LOCK, SBOM = PROJECT / "deploy" / "lock", PROJECT / "deploy" / "sbom.json"
ENVIRONMENTS = {"image": "", "demo": "[plots]", "test": "[dev]", "docs": "[dev,docs]"}
"""What is installed of the project in each; each has all of the one before it."""
INDEX = "https://pypi.org/simple"
OF_THE_MACHINE = re.compile(r"torch$|triton$|nvidia-|cuda-")
"""torch, and what only its builds for CUDA bring."""
PYTHONS = re.compile(r"py3|cp31[1-4]")
PLATFORMS = re.compile(r"any|(manylinux|musllinux|macosx)\w*_(x86_64|aarch64|arm64|universal2)")
Pins = dict[str, tuple[str, list[str]]]
"""Versions and the hashes of their files, by name."""


def main() -> None:
    if sys.argv[1:] != ["--sbom"]:
        renew(sys.argv[1:])
    SBOM.write_text(sbom())


def renew(options: list[str]) -> None:
    """Write a file for each environment: what it has over the one before."""
    everything = resolved(ENVIRONMENTS["docs"], options)
    with ThreadPoolExecutor(8) as pool:
        hashes = dict(zip(everything, pool.map(hashes_of, everything, everything.values()), strict=True))
    known, before = set[str](), ""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write("\n".join(f"{name}=={version}" for name, version in everything.items()))
        pins.flush()
        for environment, extras in ENVIRONMENTS.items():
            new = [name for name in resolved(extras, ["-c", pins.name]) if name not in known]
            lines = [
                f"# By deploy/lock.py: all of the environment `{environment}` but torch and the project."
            ]
            lines += [f"-r {before}.txt"] if before else []
            for name in new:
                lines.append(" \\\n    --hash=sha256:".join((f"{name}=={everything[name]}", *hashes[name])))
            (LOCK / f"{environment}.txt").write_text("\n".join(lines) + "\n")
            known, before = known.union(new), environment


def resolved(extras: str, options: list[str]) -> dict[str, str]:
    """Every package that pip would install with the project, by name."""
    with tempfile.NamedTemporaryFile() as report:
        words = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", report.name]
        build = tomllib.loads((PROJECT / "pyproject.toml").read_text())["build-system"]["requires"]
        subprocess.run(
            [sys.executable, "-m", "pip", *words, *options, f"{PROJECT}{extras}", *build], check=True
        )
        installed = json.load(report)["install"]
    found = {canonicalize_name(each["metadata"]["name"]): each["metadata"]["version"] for each in installed}
    del found["bertsmith"]
    return {name: found[name] for name in sorted(found) if not OF_THE_MACHINE.match(name)}


def hashes_of(name: str, version: str) -> list[str]:
    """The hashes of all its wheels for Linux and macOS, or of its source where there is none."""
    with urllib.request.urlopen(f"{INDEX}/{name}/", timeout=60) as answer:
        page = answer.read().decode()
    files = re.findall(r'href="[^"]*#sha256=([0-9a-f]{64})"[^>]*>\s*([^<]+?)\s*<', page)
    wheels = [digest for digest, file in files if is_wheel(file, version)]
    sources = [digest for digest, file in files if is_source(file, version)]
    if not wheels + sources:
        sys.exit(f"{INDEX}/{name}/ has no file of {name} {version}")
    return sorted(wheels or sources)


def is_wheel(file: str, version: str) -> bool:
    try:
        _, found, _, tags = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return False
    return str(found) == version and any(
        (PYTHONS.fullmatch(tag.interpreter) or tag.abi == "abi3")
        and tag.abi in ("none", "abi3", tag.interpreter)
        and PLATFORMS.fullmatch(tag.platform)
        for tag in tags
    )


def is_source(file: str, version: str) -> bool:
    try:
        return str(parse_sdist_filename(file)[1]) == version
    except InvalidSdistFilename:
        return False


def locked(environment: str) -> Pins:
    """What one file of the lock pins, without the file that it continues."""
    text = (LOCK / f"{environment}.txt").read_text()
    lines = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^(#|-r ).*\n", "", text)).splitlines()
    pins = {}
    for line in lines:
        requirement, *hashes = line.split()
        name, _, version = requirement.partition("==")
        pins[name] = (version, [each.removeprefix("--hash=sha256:") for each in hashes])
    return pins


def sbom() -> str:
    """The lock as a CycloneDX document, one package a line; those of the image are the required ones."""
    components = [
        component(name, version, hashes, "required" if environment in ("torch", "image") else "excluded")
        for environment in ("torch", *ENVIRONMENTS)
        for name, (version, hashes) in locked(environment).items()
    ]
    described = {"type": "application", "name": "bertsmith", "purl": "pkg:pypi/bertsmith"}
    head = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": described},
    }
    lines = ",\n".join(json.dumps(each) for each in sorted(components, key=lambda it: it["name"]))
    return json.dumps(head)[:-1] + ', "components": [\n' + lines + "\n]}\n"


def component(name: str, version: str, hashes: list[str], scope: str) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "library", "name": name, "version": version, "scope": scope}
    found["purl"] = f"pkg:pypi/{name}@{version}"
    if hashes:
        found["hashes"] = [{"alg": "SHA-256", "content": each} for each in hashes]
    return found


if __name__ == "__main__":
    main()
