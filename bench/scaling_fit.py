"""Fit how the loss of pre-training depends on size, tokens and text, from the runs of `scaling_runs.py`.

    python bench/scaling_fit.py bench/scaling_runs.jsonl
    python bench/scaling_fit.py runs/scaling/runs.jsonl --minutes 4 20 --speed h200.toml
    python bench/scaling_fit.py bench/scaling_runs.jsonl --law

It fits L(N, D) = E + A / N^a + B / D^b by objective, where D counts repeated passes less (Muennighoff et al.
2023), and prints the compute-optimal sizes and which of these the data do not determine.

`--law` fits the constants of `bertsmith.pretraining.scaling_law` instead, on all runs for masked tokens
whatever their rate and batch, and prints them with the errors on runs that were left out of the fit.
"""

import argparse
import itertools
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--speed", type=Path, help="TOML: tokens a second by shape, for --minutes")
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 4, 10, 20, 60])
    parser.add_argument("--text-tokens", type=float, default=float("inf"), help="tokens of the text at hand")
    parser.add_argument("--law", action="store_true", help="fit the constants of pretrain auto")
    options = parser.parse_args()
    (print_law if options.law else fit)(options)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The finished runs; one that was made twice counts once."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return list({row["name"]: row for row in rows}.values())


@dataclass(frozen=True, slots=True)
class Data:
    """The best run of each cell, as arrays."""

    shapes: list[str]
    weights: Any
    tokens: Any
    unique: Any
    loss: Any


@dataclass(frozen=True, slots=True)
class Law:
    """L = E + A / weights^a + B / counted^b; `repeats` is R* of Muennighoff et al. 2023."""

    a: float
    b: float
    repeats: float
    coefficients: tuple[float, float, float]
    squares: float

    def loss(self, weights: Any, tokens: Any, unique: Any) -> Any:
        """The predicted loss."""
        constant, size, data = self.coefficients
        return constant + size / weights**self.a + data / counted(tokens, unique, self.repeats) ** self.b


def counted(tokens: Any, unique: Any, repeats: float) -> Any:
    """Tokens, those of repeated passes worth less and less: U + U R* (1 - exp(-(D / U - 1) / R*))."""
    seen = np.minimum(tokens, unique)
    return seen * (1 + repeats * -np.expm1(-np.maximum(0.0, tokens / seen - 1) / repeats))


def fit(options: argparse.Namespace) -> None:
    rows = rows_of(options.runs)
    speeds = tomllib.loads(options.speed.read_text(encoding="utf-8")) if options.speed else {}
    for objective in dict.fromkeys(row["objective"] for row in rows):
        of_it = [row for row in rows if row["objective"] == objective]
        print(f"\n## {objective}: {len(of_it)} runs\n")
        tell_variations(of_it)
        data = data_of(of_it)
        if len(data.loss) < 7:
            print(f"{len(data.loss)} cells are too few for a fit")
            continue
        laws = laws_of(data)
        tell_law(data, laws)
        flops = {row["shape"]: row["flops_per_token"] for row in of_it}
        for power in np.arange(13, 18.6, 0.5):
            budget = {shape: 10**power / each for shape, each in flops.items()}
            tell_best(f"10^{power:.1f} FLOPs", budget, data=data, laws=laws, unique=options.text_tokens)
        for minutes in options.minutes if speeds else ():
            budget = {shape: 60 * minutes * speeds[shape] for shape in flops if shape in speeds}
            tell_best(f"{minutes:g} minutes", budget, data=data, laws=laws, unique=options.text_tokens)


def score(row: dict[str, Any]) -> float:
    """What a run is judged by."""
    return float(row["found_loss" if row["objective"] == "replaced" else "fixed_mlm_loss"])


def data_of(rows: list[dict[str, Any]]) -> Data:
    """The best run of each shape, budget and text among the tried rates and batches."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=score, reverse=True):
        best[row["shape"], row["tokens"], row["text"]] = row
    chosen = list(best.values())
    columns = ([row[key] for row in chosen] for key in ("layer_weights", "tokens_seen", "store_tokens"))
    weights, tokens, unique = (np.array(column, float) for column in columns)
    return Data([row["shape"] for row in chosen], weights, tokens, unique, np.array(list(map(score, chosen))))


def tell_variations(rows: list[dict[str, Any]]) -> None:
    """How the loss of a cell depends on rate and batch, as factors of the rule, and on the seed."""
    for key in ("rate", "batch", "seed"):
        others = [name for name in ("shape", "tokens", "text", "rate", "batch", "seed") if name != key]
        groups: dict[tuple[Any, ...], dict[float, float]] = {}
        for row in rows:
            groups.setdefault(tuple(row[name] for name in others), {})[row[key]] = score(row)
        for cell, losses in groups.items():
            if len(losses) < 2:
                continue
            told = ", ".join(f"{factor:g}: {losses[factor]:.4f}" for factor in sorted(losses))
            factors = np.log2(sorted(losses)) if key != "seed" else np.zeros(0)
            if len(factors) == 3:
                bend, slope, _ = np.polyfit(factors, [losses[each] for each in sorted(losses)], 2)
                inside = bend > 0 and abs(slope / bend / 2) <= 1
                told += f"; best at {2 ** (-slope / bend / 2):.2f}" if inside else "; best at an end"
            print(f"{key} of {cell[0]}, {cell[1]:g} M tokens, {cell[2]}: {told}")


def laws_of(data: Data) -> list[Law]:
    """All laws on a grid that the data do not reject at 90 %, best first; errors are relative to the loss.

    For given exponents the rest is linear. The constant may be 0, nothing may be negative.
    """
    from scipy.stats import f as fisher

    exponents, ones, found = np.arange(0.04, 1.41, 0.02), np.ones_like(data.loss), []
    repeated = np.unique((data.tokens / data.unique > 1.5) * data.unique).size > 1
    for repeats in (1, 2, 4, 8, 16, 32, 64, 1e6) if repeated else (16,):
        seen = counted(data.tokens, data.unique, repeats)
        for a, b in itertools.product(exponents, exponents):
            # Scaled, so that columns are of about 1.
            parts = np.stack([ones, (data.weights / 1e7) ** -a, (seen / 1e8) ** -b], 1) / data.loss[:, None]
            for used in ([0, 1, 2], [1, 2]):
                solved = np.linalg.lstsq(parts[:, used], ones, rcond=None)[0]
                if (solved > 0).all():
                    break
            else:
                continue
            whole = np.zeros(3)
            whole[used] = solved
            scaled = float(whole[0]), float(whole[1] * 1e7**a), float(whole[2] * 1e8**b)
            found.append(Law(a, b, repeats, scaled, float(((parts @ whole - 1) ** 2).sum())))
    found.sort(key=lambda law: law.squares)
    numbers = 6 if repeated else 5
    free = max(1, len(ones) - numbers)
    allowed = found[0].squares * (1 + numbers / free * fisher.ppf(0.9, numbers, free))
    return [law for law in found if law.squares <= allowed]


def tell_law(data: Data, laws: list[Law]) -> None:
    """Print a fit, what it leaves, and how far its numbers may lie."""
    best, columns = laws[0], [(law.a, law.b, law.repeats, law.coefficients[0]) for law in laws]
    left = best.loss(data.weights, data.tokens, data.unique) - data.loss
    constant, size, tokens = best.coefficients
    print(
        f"\n{len(data.loss)} cells, N without embeddings: L = {constant:.3f} + {size:.4g} / N^{best.a:.2f}",
        end="",
    )
    print(f" + {tokens:.4g} / D^{best.b:.2f}, R* {best.repeats:g}; residuals {left.std():.4f}", end="")
    print(f", at most {np.abs(left).max():.4f}")
    for name, column in zip(("a", "b", "R*", "E"), zip(*columns, strict=True), strict=True):
        print(f"  {name}: {min(column):.3g} to {max(column):.3g} fit as well (90 %)")
    worst = np.argsort(-np.abs(left))[:6]
    cells = (f"{data.shapes[i]} {data.tokens[i] / 1e6:.0f} M ({left[i]:+.3f})" for i in worst)
    print(f"  largest residuals: {', '.join(cells)}")


def tell_best(what: str, budget: dict[str, float], *, data: Data, laws: list[Law], unique: float) -> None:
    """Print the best shape for a budget in tokens for each shape, and how sure that is."""
    sizes = dict(zip(data.shapes, data.weights, strict=True))
    shapes = sorted(budget.keys() & sizes.keys(), key=lambda shape: sizes[shape])
    weights = np.array([sizes[shape] for shape in shapes])
    tokens = np.array([budget[shape] for shape in shapes])
    predicted = [law.loss(weights, tokens, np.full_like(tokens, unique)) for law in laws]
    first, least = int(np.argmin(predicted[0])), float(min(predicted[0]))
    near = [shape for shape, loss in zip(shapes, predicted[0], strict=True) if loss < least + 0.01]
    chosen = {int(np.argmin(losses)) for losses in predicted}
    longest = max(data.tokens[[each == shapes[first] for each in data.shapes]])
    notes = [f"within 0.01: {' '.join(near)}"] if len(near) > 1 else []
    if len(chosen) > 1:
        notes.append(f"not determined: {shapes[min(chosen)]} to {shapes[max(chosen)]}")
    if first in (0, len(shapes) - 1):
        notes.append("at the end of the shapes")
    if tokens[first] > 1.2 * longest:
        notes.append("beyond its longest run")
    ratio = tokens[first] / weights[first]
    told = f"{shapes[first]:>7}, {tokens[first] / 1e6:8.1f} M tokens, D/N {ratio:6.1f}, loss {least:.3f}"
    print(f"  {what:>14}: {told}  {'; '.join(notes)}")


# ---- the law of pretrain auto

PARTS, TRIALS = 8, 6
"""Every part of the runs is left out once; fits begin at several places."""
SMALL_BATCH, SMALL_BATCH_WEIGHT = 4_000, 3.0
"""The few runs with small batches, from a CPU, alone say what these gain."""
WEIGHT_OF_START = 0.02
"""Keeps constants that the runs do not determine near their start: errors of 1 % for a factor of e."""


def print_law(options: argparse.Namespace) -> None:
    """Print the fitted constants, and how far the law is off on runs that were and were not fitted."""
    rows = [row for row in rows_of(options.runs) if row["objective"] == "masked"]
    law = fitted_law(rows)
    print(law)
    left_out = np.zeros(len(rows))
    for part in range(PARTS):
        inside = [row for number, row in enumerate(rows) if number % PARTS != part]
        outside = [row for number, row in enumerate(rows) if number % PARTS == part]
        left_out[part::PARTS] = words_right(fitted_law(inside), outside)
    found = np.array([row["fixed_mlm_accuracy"] for row in rows])
    for name, right in (("fitted", words_right(law, rows)), ("left out", left_out)):
        off = np.abs(right / found - 1)
        told = f"masked words right off by {np.median(off):.1%} (median)"
        print(f"{name}: {told}, {(off < 0.1).mean():.0%} of runs within 10 %")
    for number in np.argsort(-np.abs(left_out / found - 1))[:8]:
        print(f"  {rows[number]['name']}: {left_out[number]:.3f}, found {found[number]:.3f}")


def words_right(law: Any, rows: list[dict[str, Any]]) -> Any:
    """The fractions of masked words that a law predicts for runs."""
    from numpy.polynomial.polynomial import polyval

    return polyval(law.loss(*sizes_of(rows)), law.accuracy)


def sizes_of(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    """The sizes of runs as arrays, and their learning rates."""
    from bertsmith.pretraining.scaling_law import RunSize

    keys = ("layer_weights", "tokens_seen", "store_tokens", "batch_tokens", "peak_lr")
    weights, tokens, text, batch, rates = (np.array([row[key] for row in rows], float) for key in keys)
    widths = np.array([float(row["shape"].partition("x")[2]) for row in rows])
    return RunSize(weights, widths, tokens, text, batch), rates  # type: ignore[arg-type]


def fitted_law(rows: list[dict[str, Any]]) -> Any:
    """The law with the smallest robust relative errors; all constants stay positive."""
    from dataclasses import fields, replace

    from scipy.optimize import least_squares

    from bertsmith.pretraining.scaling_law import MASKED as START

    names = [
        each.name for each in fields(START) if each.name not in ("frequencies", "accuracy", "rate_steps")
    ]
    start = np.log([getattr(START, name) for name in names])
    size, rates = sizes_of(rows)
    losses = np.array([row["fixed_mlm_loss"] for row in rows])
    weights = np.where(size.batch_tokens < SMALL_BATCH, SMALL_BATCH_WEIGHT, 1.0)

    def law_at(point: Any) -> Any:
        return replace(
            START, **dict(zip(names, np.exp(point[:-1]).tolist(), strict=True)), rate_steps=float(point[-1])
        )

    def errors(point: Any) -> Any:
        off = law_at(point).loss(size, rates) / losses - 1
        return np.concatenate([100 * off * weights, WEIGHT_OF_START * (point[:-1] - start)])

    best = None
    for trial in range(TRIALS):
        moved = np.random.default_rng(trial).normal(0, 0.2 * bool(trial), len(names) + 1)
        found = least_squares(
            errors, np.append(start, START.rate_steps) + moved, loss="soft_l1", max_nfev=2000
        )
        best = found if best is None or found.cost < best.cost else best
    right = np.array([row["fixed_mlm_accuracy"] for row in rows])
    accuracy = np.polynomial.polynomial.polyfit(losses, right, 3, w=1 / right)
    return replace(law_at(best.x), accuracy=tuple(accuracy.tolist()))


if __name__ == "__main__":
    main()
