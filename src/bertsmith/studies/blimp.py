"""BLiMP: the grammar that a model knows, by 67 sets of minimal pairs (Warstadt et al. 2020).

A model is right about a pair if the acceptable sentence has the larger likelihood: the pseudo-log-likelihood
of a masked model (Salazar et al. 2020), the log-likelihood of a one-sided one. A tie counts half.
"""

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.cache import cache_folder, cached_array, caching_array
from bertsmith.core.errors import UserError
from bertsmith.core.progress import progress_bar
from bertsmith.features.layer_states import weights_hash
from bertsmith.inference.likelihood import is_pseudo, token_log_probabilities
from bertsmith.inference.loaded_model import Bert
from bertsmith.insight.pictures import BLUE, RED
from bertsmith.insight.report import Cell, Report, Table
from bertsmith.tasks.example_types import BadLine
from bertsmith.tasks.published_scores import PUBLISHED_SCORES
from bertsmith.tasks.tables import Columns, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Doubles = NDArray[np.float64]

PERCENT = 100
TIE = 1e-4
"""Difference of log-likelihoods, in nats, up to which a pair is a tie: batches round differently."""
NORMAL_95 = 1.96
CHANCE = 0.5
FIELDS = ("sentence_good", "sentence_bad", "linguistics_term", "UID")
SAME_PHENOMENON = {"s-selection": "argument_structure"}
"""The data divide one of the paper's twelve phenomena."""
BESIDE = 40
"""Percent at which the picture begins: guessing is right in half of the pairs."""

log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class PairSet:
    """Minimal pairs that contrast in one way: an acceptable sentence, and an unacceptable one."""

    name: str
    phenomenon: str
    pairs: tuple[tuple[str, str], ...]
    file: Path


@dataclass(frozen=True, slots=True)
class SetScore:
    """What a model thinks of the pairs of a set."""

    set: PairSet
    right: Doubles
    """1 if the acceptable sentence is the more likely one, 0 if the other is, 0.5 for a tie [pairs]."""


@dataclass(frozen=True, slots=True)
class BlimpResult:
    """The scores of all sets, and what it took to compute those that were not known."""

    scores: tuple[SetScore, ...]
    sentences: int
    """Number of sentences that were computed now, and not by an earlier call."""
    seconds: float
    is_pseudo: bool
    """True if the likelihoods are pseudo-likelihoods."""


def read_pair_sets(data: Path, limit: int | None = None) -> list[PairSet]:
    """Read the first pairs of each set, all by default, from a folder with a .jsonl file for each set."""
    folder = data / "data" if (data / "data").is_dir() else data
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        what = "holds no .jsonl file" if data.is_dir() else "there is no such folder"
        remedy = "git clone https://github.com/alexwarstadt/blimp, and give that folder"
        raise UserError(what, where=str(data), remedy=remedy)
    return [_pair_set(file, limit) for file in files]


def _pair_set(file: Path, limit: int | None) -> PairSet:
    rows: list[list[str]] = []
    for row in islice(rows_of(file, Columns(FIELDS)), limit):
        if isinstance(row, BadLine):
            raise UserError(row.what, where=row.where, remedy=row.remedy)
        rows.append([str(row.values.get(name, "")) for name in FIELDS])
        if not all(map(str.strip, rows[-1])):
            remedy = "take the files as they are published"
            raise UserError(f"has an empty {' or '.join(FIELDS)}", where=row.where, remedy=remedy)
    if not rows:
        raise UserError("holds no pair", where=str(file), remedy="remove it, or take it as it is published")
    _, _, term, name = rows[0]
    return PairSet(name, SAME_PHENOMENON.get(term, term), tuple((good, bad) for good, bad, *_ in rows), file)


# ---- scores


def blimp(bert: Bert, sets: Sequence[PairSet]) -> BlimpResult:
    """Score all sets; those that an earlier call has finished are in the cache and are not computed again."""
    bert.likelihood([])  # raises if it has no head for words
    began, computed, scores = time.perf_counter(), 0, []
    digest = hashlib.sha256(weights_hash(bert.model.network.config, bert.model.network).encode())
    digest.update(f"{bert.tokenizer.spec.pipeline} {bert.precision} {bert.engine.device.type}".encode())
    folder = cache_folder("blimp") / digest.hexdigest()
    with progress_bar("BLiMP: sentences", sum(2 * len(each.pairs) for each in sets)) as advance:
        for each in sets:
            file = folder / f"{each.name}-{hashlib.sha256(repr(each.pairs).encode()).hexdigest()}.npy"
            likelihoods = cached_array(file)
            if likelihoods is None:
                likelihoods = _log_likelihoods(bert, each)
                computed += likelihoods.size
                _keep(likelihoods, file)
            advance(2 * len(each.pairs))
            margin = likelihoods[:, 0] - likelihoods[:, 1]
            right = np.where(abs(margin) <= TIE, 0.5, (margin > 0).astype(np.float64))
            scores.append(SetScore(each, right))
    return BlimpResult(tuple(scores), computed, time.perf_counter() - began, is_pseudo(bert.engine))


def _keep(likelihoods: Doubles, file: Path) -> None:
    try:
        with caching_array(file) as temporary, temporary.open("wb") as opened:
            np.save(opened, likelihoods)
    except UserError as error:
        log.warning("%s: %s; another call computes the set again", file.parent, error.what)


def _log_likelihoods(bert: Bert, pair_set: PairSet) -> Doubles:
    """Return the log-likelihoods of the sentences of each pair [pairs, 2]; equal ones are computed once."""
    texts = [text for pair in pair_set.pairs for text in pair]
    read = bert.reader.tokenize(texts)
    try:
        bert.reader.check(read, truncate=False)
    except UserError as error:
        line = (error.index or 0) // 2 + 1
        raise replace(
            error, where=f"{pair_set.file}:{line}", remedy="take a model for longer texts"
        ) from error
    distinct = {tuple(each.encoded.ids): each.encoded for each in read}
    scored = token_log_probabilities(bert.engine, list(distinct.values()))
    sums = {ids: float(np.nansum(each)) for ids, each in zip(distinct, scored, strict=True)}
    return np.array([sums[tuple(each.encoded.ids)] for each in read]).reshape(-1, 2)


# ---- the report


@dataclass(frozen=True, slots=True)
class _Accuracy:
    """The mean over sets of the fraction of pairs that a model is right about, in percent."""

    sets: int
    pairs: int
    accuracy: float
    interval: float
    """Half of the width of the 95 % interval, by the spread of the pairs within their sets."""

    @classmethod
    def of(cls, scores: Sequence[SetScore]) -> "_Accuracy":
        counts = [len(each.right) for each in scores]
        # Pairs are drawn, sets are not; of a single pair nothing is known.
        variances = [each.right.var(ddof=1) / len(each.right) for each in scores if len(each.right) > 1]
        variance = sum(variances) + (counts.count(1) * CHANCE * (1 - CHANCE))
        value, spread = np.mean([each.right.mean() for each in scores]), np.sqrt(variance) / len(scores)
        return cls(len(scores), sum(counts), PERCENT * float(value), PERCENT * NORMAL_95 * float(spread))

    def cells(self) -> list[Cell]:
        return [self.pairs, _percent(self.accuracy), _percent(self.interval)]


def blimp_report(result: BlimpResult, *, model: str) -> Report:
    """Report the accuracy of a model by phenomenon and by set, compared with published results."""
    names = sorted({each.set.phenomenon for each in result.scores})
    phenomena = {
        name: _Accuracy.of([each for each in result.scores if each.set.phenomenon == name]) for name in names
    }
    overall, sets = _Accuracy.of(result.scores), [(each.set, _Accuracy.of([each])) for each in result.scores]
    protocol = "pseudo-log-likelihood" if result.is_pseudo else "log-likelihood"
    speed, published = result.sentences / result.seconds, PUBLISHED_SCORES["blimp"]
    values = {
        "model": model,
        "protocol": protocol,
        **asdict(overall),
        "phenomena": {name: asdict(each) for name, each in phenomena.items()},
        "by_set": {each.name: asdict(found) for each, found in sets},
        "published": [asdict(each) for each in published],
        "computed_sentences": result.sentences,
        "seconds": result.seconds,
        "sentences_per_second": speed if result.sentences else None,
    }
    title = f"{model}: BLiMP, {overall.pairs:,} pairs of {overall.sets} sets"
    notes = [
        f"accuracy: per cent of pairs whose acceptable sentence has the larger {protocol}; ties count half",
        "the last row is the mean over sets; +-: half of the 95 % interval, as the pairs are a sample",
        f"{result.sentences:,} sentences in {result.seconds:.1f} s: {speed:,.0f} sentences/s",
    ]
    humans = {name: found[0].value for name in names if (found := PUBLISHED_SCORES.get(f"blimp-{name}"))}
    rows = [
        [name.replace("_", " "), each.sets, *each.cells(), _percent(humans.get(name))]
        for name, each in phenomena.items()
    ]
    rows.append(["mean of the sets", overall.sets, *overall.cells(), _percent(published[0].value)])
    columns = ("phenomenon", "sets", "pairs", "accuracy", "+-", "human")
    tables = (
        Table(title, columns, rows, tuple(notes if result.sentences else notes[:-1])),
        Table(
            "Published",
            ("system", "accuracy", "how, and where"),
            [(each.system, _percent(each.value), each.source) for each in published],
        ),
        Table(
            "By set",
            ("set", "phenomenon", "pairs", "accuracy", "+-"),
            [(each.name, each.phenomenon, *found.cells()) for each, found in sets],
        ),
    )
    shown = {name: (each.accuracy, humans.get(name)) for name, each in phenomena.items()}
    return Report("blimp", tables, values, lambda figure: _draw(figure, shown, title), size=(9, 5))


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def _draw(figure: "Figure", shown: Mapping[str, tuple[float, float | None]], title: str) -> None:
    figure.set_layout_engine("constrained")
    axes, places = figure.subplots(), range(len(shown))
    axes.barh(places, [value for value, _ in shown.values()], color=BLUE, label="model")
    humans = [(human, place) for place, (_, human) in enumerate(shown.values()) if human is not None]
    axes.scatter(*zip(*humans, strict=True), color=RED, zorder=3, label="human") if humans else None
    axes.set_yticks(places, [name.replace("_", " ") for name in shown], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(min([BESIDE, *(value for value, _ in shown.values())]), PERCENT)
    axes.set_xlabel("accuracy in per cent (chance: 50)", fontsize=9)
    axes.set_title(title, loc="left", fontsize=11, weight="bold", parse_math=False)
    axes.legend(frameon=False, fontsize=9)
