"""Programs of a test's own, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def started(folder: Path, source: str, **options: Any) -> subprocess.Popen[bytes]:
    """A program that finds what the tests find; what it prints comes through a pipe."""
    script = folder / "script.py"
    script.write_text(source)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(it for it in sys.path if it)}
    return subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, **options)
