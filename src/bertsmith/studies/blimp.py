"""BLiMP: the grammar that a model knows, by 67 sets of minimal pairs (Warstadt et al. 2020).

A model is right about a pair if the acceptable sentence has the larger likelihood: the pseudo-log-likelihood
of a masked model (Salazar et al. 2020), the log-likelihood of a one-sided one. A tie counts half.

Shapes: P pairs of a set.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
from bertsmith.inference.likelihood import is_pseudo, read_texts, token_log_probabilities
from bertsmith.inference.loaded_model import Bert
from bertsmith.insight.pictures import BLUE, GREY, RED
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
OVERALL = "mean of the sets"
FIELDS = ("sentence_good", "sentence_bad", "linguistics_term", "UID")
SAME_PHENOMENON = {"s-selection": "argument_structure"}
"""The data divide one of the paper's twelve phenomena."""


@dataclass(frozen=True, slots=True)
class PairSet:
    """Minimal pairs that contrast in one way: an acceptable sentence, and an unacceptable one."""

    name: str
    phenomenon: str
    pairs: tuple[tuple[str, str], ...]
    file: Path


@dataclass(frozen=True, slots=True)
class BlimpResult:
    """The scores of all sets, and the time for the sets that were not in the cache."""

    scores: Mapping[PairSet, Doubles]
    """For each pair of a set 1 if the acceptable sentence is more likely, 0 if less, 0.5 for a tie."""
    protocol: str
    """pseudo-log-likelihood or log-likelihood."""
    sentences: int
    """Number of sentences of the sets that were not in the cache."""
    seconds: float


def read_pair_sets(data: Path, limit: int | None = None) -> list[PairSet]:
    """Read the first pairs of each set, all by default, from a folder with a .jsonl file for each set."""
    files = sorted(data.glob("*.jsonl")) or sorted((data / "data").glob("*.jsonl"))
    if not files:
        remedy = "git clone https://github.com/alexwarstadt/blimp, and give that folder"
        raise UserError("does not contain .jsonl files of BLiMP", where=str(data), remedy=remedy)
    return [_pair_set(file, limit) for file in files]


def _pair_set(file: Path, limit: int | None) -> PairSet:
    rows: list[list[str]] = []
    for row in islice(rows_of(file, Columns(FIELDS)), limit):
        if isinstance(row, BadLine):
            raise UserError(row.what, where=row.where, remedy=row.remedy)
        rows.append([str(row.values.get(name, "")) for name in FIELDS])
        if not all(map(str.strip, rows[-1])):
            remedy = "use the published files"
            raise UserError(f"has an empty {' or '.join(FIELDS)}", where=row.where, remedy=remedy)
    if not rows:
        raise UserError(
            "does not contain a pair", where=str(file), remedy="remove it, or use the published file"
        )
    _, _, term, name = rows[0]
    return PairSet(name, SAME_PHENOMENON.get(term, term), tuple((good, bad) for good, bad, *_ in rows), file)


def blimp(bert: Bert, sets: Sequence[PairSet]) -> BlimpResult:
    """Score all sets; sets that an earlier call has finished are read from the cache."""
    bert.likelihood([])  # raises if it lacks a head for words
    began, computed, scores = time.perf_counter(), 0, {}
    digest = hashlib.sha256(weights_hash(bert.model.network.config, bert.model.network).encode())
    digest.update(f"{bert.tokenizer.spec.pipeline} {bert.precision} {bert.engine.device.type}".encode())
    folder = cache_folder("blimp") / digest.hexdigest()
    with progress_bar("BLiMP: sentences", sum(2 * len(each.pairs) for each in sets)) as advance:
        for each in sets:
            file = folder / f"{each.name}-{hashlib.sha256(repr(each.pairs).encode()).hexdigest()}.npy"
            likelihoods_P2 = cached_array(file)
            if likelihoods_P2 is None:
                likelihoods_P2 = _log_likelihoods(bert, each)
                computed += likelihoods_P2.size
                # Without a cache, another call computes the set again.
                with suppress(UserError), caching_array(file) as temporary, temporary.open("wb") as opened:
                    np.save(opened, likelihoods_P2)
            margin_P = likelihoods_P2[:, 0] - likelihoods_P2[:, 1]
            scores[each] = np.where(abs(margin_P) <= TIE, 0.5, (margin_P > 0).astype(np.float64))
            advance(2 * len(each.pairs))
    protocol = "pseudo-log-likelihood" if is_pseudo(bert.engine) else "log-likelihood"
    return BlimpResult(scores, protocol, computed, time.perf_counter() - began)


def _log_likelihoods(bert: Bert, pair_set: PairSet) -> Doubles:
    """Return the log-likelihoods of the sentences of each pair [P, 2]; equal ones are computed once."""
    try:
        texts = [text for pair in pair_set.pairs for text in pair]
        read = read_texts(bert.engine, texts, truncate=False)
    except UserError as error:
        where = f"{pair_set.file}:{(error.index or 0) // 2 + 1}"
        raise replace(error, where=where, remedy="use a model for longer texts") from error
    distinct = {tuple(each.encoded.ids): each.encoded for each in read}
    scored = token_log_probabilities(bert.engine, list(distinct.values()))
    sums = {ids: float(np.nansum(each)) for ids, each in zip(distinct, scored, strict=True)}
    return np.array([sums[tuple(each.encoded.ids)] for each in read]).reshape(-1, 2)


# ---- the report


def accuracy(scores: Sequence[Doubles]) -> dict[str, float]:
    """Return the mean over sets in percent, and half of its 95 % interval by the pairs within the sets."""
    pairs = [len(each) for each in scores]
    # A set with a single pair does not show its spread: assume the largest, which is chance.
    variances = [each.var(ddof=1) / len(each) if len(each) > 1 else 0.25 for each in scores]
    interval = NORMAL_95 * np.sqrt(sum(variances)) / len(scores)
    mean = np.mean([each.mean() for each in scores])
    found = {"accuracy": PERCENT * float(mean), "interval": PERCENT * float(interval)}
    return {"sets": len(scores), "pairs": sum(pairs), **found}


def blimp_report(result: BlimpResult, *, model: str) -> Report:
    """Report the accuracy of a model by phenomenon and by set, compared with published results."""
    of_sets = {each: accuracy([score]) for each, score in result.scores.items()}
    phenomena = {
        name: accuracy([score for each, score in result.scores.items() if each.phenomenon == name])
        for name in sorted({each.phenomenon for each in of_sets})
    }
    overall, published = accuracy([*result.scores.values()]), PUBLISHED_SCORES["blimp"]
    humans = {name: PUBLISHED_SCORES.get(f"blimp-{name}", ()) for name in phenomena} | {OVERALL: published}
    speed = result.sentences / result.seconds
    values = {
        "model": model,
        "protocol": result.protocol,
        **overall,
        "phenomena": phenomena,
        "by_set": {each.name: found for each, found in of_sets.items()},
        "published": [asdict(each) for each in published],
        "computed_sentences": result.sentences,
        "seconds": result.seconds,
        "sentences_per_second": speed if result.sentences else None,
    }
    title = f"{model}: BLiMP, {overall['pairs']:,} pairs of {overall['sets']} sets"
    notes = [
        f"accuracy: per cent of pairs with a larger {result.protocol} of the acceptable sentence; ties: half",
        "+-: half of the 95 % interval, as the pairs are a sample",
        f"{result.sentences:,} sentences in {result.seconds:.1f} s: {speed:,.0f} sentences/s",
    ]
    rows: list[list[Cell]] = [
        [
            name.replace("_", " "),
            found["sets"],
            *_cells(found),
            next((f"{each.value:.1f}" for each in humans[name]), None),
        ]
        for name, found in {**phenomena, OVERALL: overall}.items()
    ]
    ours = ("pairs", "accuracy", "+-")
    others = [(each.system, f"{each.value:.1f}", each.source) for each in published]
    sets = [(each.name, each.phenomenon, *_cells(found)) for each, found in of_sets.items()]
    tables = (
        Table(
            title,
            ("phenomenon", "sets", *ours, "human"),
            rows,
            tuple(notes if result.sentences else notes[:2]),
        ),
        Table("Published", ("system", "accuracy", "how, and where"), others),
        Table("By set", ("set", "phenomenon", *ours), sets),
    )
    drawn = {name: found["accuracy"] for name, found in phenomena.items()}
    human = [(each.value, place) for place, name in enumerate(phenomena) for each in humans[name]]
    return Report("blimp", tables, values, lambda figure: _draw(figure, drawn, human, title), size=(9, 5))


def _cells(found: Mapping[str, float]) -> list[Cell]:
    return [found["pairs"], f"{found['accuracy']:.1f}", f"{found['interval']:.1f}"]


def _draw(
    figure: "Figure", ours: Mapping[str, float], human: Sequence[tuple[float, int]], title: str
) -> None:
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    axes.barh(range(len(ours)), [*ours.values()], color=BLUE)
    axes.scatter([value for value, _ in human], [place for _, place in human], color=RED, zorder=3)
    axes.axvline(PERCENT / 2, color=GREY, lw=0.8)
    axes.set_yticks(range(len(ours)), [name.replace("_", " ") for name in ours], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, PERCENT)
    axes.set_xlabel("accuracy in per cent: bars the model, points humans, the line chance", fontsize=9)
    axes.set_title(title, loc="left", fontsize=11, weight="bold", parse_math=False)
