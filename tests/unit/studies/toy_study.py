"""A study of toy stages, also as a process of its own that tests kill."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.insight.report import Report
from bertsmith.studies.cells import Cells, Failure
from bertsmith.studies.comparison import comparison
from bertsmith.studies.scheduler import Places, Stopped
from bertsmith.studies.study import Row, Seeds, Trial, run_study
from tests.unit.studies.toy_stage import Heard, stage


def trial(title: str, *, seeds: Sequence[Seeds] = (Seeds(0, 0), Seeds(1, 0)), **own: Any) -> Trial:
    """A walk, and one that begins where it ends."""
    stages = {
        each: stage(seed=10 + each.finetuning, before=stage(seed=each.pretraining, **own), seconds=0.01)
        for each in seeds
    }
    return Trial(title, stages)


@dataclass
class ToyStudy:
    """Four variants: one to compare with, one that diverges, a duplicate, and one that is impossible."""

    seconds: float = 0.0

    def trials(self) -> list[Trial]:
        impossible = Trial(
            "impossible", {}, impossible=Failure("factor = many is not a number", repeats=True)
        )
        pace = {"seconds": self.seconds}
        diverging = trial("diverges", seeds=(Seeds(0, 0),), end="diverges", **pace)
        return [trial("baseline", **pace), diverging, trial("again", name="again", **pace), impossible]

    def report(self, rows: Sequence[Row]) -> Report:
        return comparison("toy", "Does it matter?", rows)


def run_toy_study(place: Path) -> Heard:
    """Run it, two cells at once."""
    heard = Heard()
    run_study(ToyStudy(seconds=0.02), place / "study", Cells(place / "cells"), Places(together=2), heard)
    return heard


def main() -> None:
    """Run it as a program."""
    try:
        run_toy_study(Path(sys.argv[1]))
    except Stopped:
        sys.exit(130)
