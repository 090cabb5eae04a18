"""Pre-train an encoder on your own text: vocabulary, token store, model, and a first filled mask.

python examples/own_corpus.py                           # the text of `bertsmith demo`, two minutes
python examples/own_corpus.py corpus/*.txt --minutes 30
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import bertsmith
from bertsmith.cli.app import app
from bertsmith.cli.village import write_village


def command(*words: object) -> None:
    """Run a bertsmith command here, as the shell would."""
    print("$ bertsmith", *words)
    app([str(word) for word in words], standalone_mode=False)


def main(words: Sequence[str] | None = None) -> None:
    """Learn a vocabulary, build a store, pre-train, and fill a mask."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("texts", nargs="*", type=Path, help="plain text, an empty line between documents")
    parser.add_argument(
        "--size", type=int, default=600, help="pieces of the vocabulary; 16,000 for real text"
    )
    parser.add_argument("--steps", type=int, help="steps of pre-training")
    parser.add_argument("--minutes", type=float, help="or minutes of it")
    parser.add_argument("--ask", default="People ask the baker for [MASK].", help="text with a mask")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/own-corpus"), help="a new folder for all of it"
    )
    asked = parser.parse_args(words)
    asked.out.mkdir(parents=True)

    texts, recipe = (
        asked.texts,
        "auto",
    )  # `auto` chooses shape and rate for the text, the machine and the budget
    if not texts:
        write_village(asked.out)
        texts, recipe = [asked.out / "village.txt"], str(asked.out / "village.toml")
    vocabulary, store = asked.out / "vocab", asked.out / "store"
    command("vocab", *texts, "--size", asked.size, "--workers", 1, "--out", vocabulary)
    command("corpus", *texts, "--vocab", vocabulary, "--workers", 1, "--out", store)

    steps = asked.steps or (None if asked.minutes else 1_000)
    run = bertsmith.pretrain(recipe, store=store, out=asked.out / "run", steps=steps, minutes=asked.minutes)
    for name, value in run.metrics["held-out"].items():
        print(f"held-out {name:20} {value:.3f}")

    for candidate in run.load().fill(asked.ask, top=3)[0]:
        print(f"{candidate.probability:6.1%} {candidate.token}")


if __name__ == "__main__":
    main()
