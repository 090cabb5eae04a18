"""Distil a run of `bertsmith finetune custom` into a model of fewer layers, and serve it over HTTP.

python examples/distil_and_serve.py runs/mine reviews.csv --drop 1,2,4,5,7,8
"""

import argparse
import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from bertsmith.cli.app import app


def command(*words: object) -> None:
    """Run a bertsmith command here, as the shell would."""
    print("$ bertsmith", *words)
    app([str(word) for word in words], standalone_mode=False)


def ask(address: str, text: str) -> list[dict[str, object]]:
    """Return the server's classes for a text."""
    body = json.dumps({"texts": [text]}).encode()
    request = urllib.request.Request(f"{address}/classify", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["results"]


def main(words: Sequence[str] | None = None) -> None:
    """Remove layers of the teacher, teach the student, serve it, and ask it."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("teacher", type=Path, help="run of `bertsmith finetune custom`")
    parser.add_argument("data", type=Path, help="the table that it learned from")
    parser.add_argument("--drop", default="1,2,4,5,7,8", help="layers that the student lacks, from 0")
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--text", default="What a lovely morning.", help="text to classify")
    parser.add_argument("--out", type=Path, default=Path("runs/distilled"), help="a new folder")
    asked = parser.parse_args(words)
    cut, student = asked.out / "cut", asked.out / "student"

    layers = ("--drop-layers", asked.drop, "--epochs", 0)
    command("prune", "--model", asked.teacher, "--data", asked.data, *layers, "--out", cut)
    lesson = ("--task", "custom", "--data", asked.data, "--epochs", asked.epochs)
    command("distill", "--teacher", asked.teacher, "--student", cut, *lesson, "--out", student)

    serve = [sys.executable, "-m", "bertsmith", "serve", "--model", f"small={student}", "--port", "0"]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address = next(line.split()[0] for line in server.stderr if " serves " in line)
        print(address, *ask(address, asked.text))
        server.terminate()
        server.stderr.read()


if __name__ == "__main__":
    main()
