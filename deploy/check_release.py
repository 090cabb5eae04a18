"""Check a release that was built into a folder: files, sizes, version, and the demonstration from the wheel.

    python deploy/check_release.py dist               # `make release`
    python deploy/check_release.py dist --tag v0.1.0  # as the workflow does: the tag is the version

What the wheel and the sdist hold is compared with src by tests/unit/test_wheel.py. Needs the packages of the
project; the project itself is taken from the wheel.
"""

import argparse
import os
import site
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LARGEST = 60_000_000
"""Bytes of a file; the embedded models take 47 million of them."""


def main() -> None:
    """Exit with a line that says what is wrong, or print the sizes."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", help="tag of the release: v and the version")
    asked = parser.parse_args()
    files = sorted(asked.folder.iterdir())
    version = files[0].name.split("-")[1] if files else ""
    names = [f"bertsmith-{version}-py3-none-any.whl", f"bertsmith-{version}.tar.gz"]
    if [file.name for file in files] != names:
        sys.exit(f"{asked.folder}: expected one wheel and one sdist, found {[file.name for file in files]}")
    if asked.tag not in (None, f"v{version}"):
        sys.exit(f"{asked.tag} is not the tag of {version}: change core/version.py, or tag v{version}")
    for file in files:
        if (size := file.stat().st_size) > LARGEST:
            sys.exit(f"{file}: {size:,} bytes, more than {LARGEST:,}")
        print(f"{file.name}: {size / 1e6:.1f} MB")
    show(files[0])
    print("bertsmith demo runs from the wheel alone")


def show(wheel: Path) -> None:
    """Run the demonstration with the unpacked wheel, far from a checkout and from the user's home."""
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as packed:
        packed.extractall(Path(name, "wheel"))
        places = os.pathsep.join([str(Path(name, "wheel")), *site.getsitepackages()])
        environment = {**os.environ, "HOME": name, "PYTHONPATH": places}
        call = [sys.executable, "-S", "-m", "bertsmith", "demo", "--steps", "50", "--out", "demo"]
        subprocess.run(call, cwd=name, env=environment, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
