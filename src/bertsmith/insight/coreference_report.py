"""The table and the picture of heads and antecedents."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from bertsmith.insight.bootstrap import Counts
from bertsmith.insight.coreference import ALL, TOWARDS, AntecedentScore, Coreference, QuestionSet
from bertsmith.insight.pictures import BLUE, COLOURS, RED
from bertsmith.insight.report import Report, Table, head_name
from bertsmith.insight.report_views import measures_view

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def coreference_report(
    found: Coreference, untrained: Sequence[Coreference], asked: QuestionSet, *, model: str, how: str
) -> Report:
    """Report the accuracy of the chosen head, compared with the baselines and untrained networks."""
    title = f"{model}: which head finds the antecedent"
    name = f"head {head_name(found.layer, found.head)} {found.direction}"
    shown = [(name if each.answered_by == "head" else each.answered_by, each) for each in found.scores]
    best = max((_of(found, who, ALL) for who in asked.baselines), key=lambda score: score.accuracy)
    control = [_of(each, "head", ALL) for each in untrained]
    rows: list[tuple[str | int, ...]] = [_row(who, each) for who, each in shown]
    for number, each in enumerate(untrained, start=1):
        where = head_name(each.layer, each.head)
        rows += [
            _row(f"untrained {number}: {where}", score)
            for score in each.scores
            if score.answered_by == "head"
        ]
    lies = "is" if _of(found, "head", ALL).low > best.accuracy else "is not"
    above = sum(each.low > best.accuracy for each in control)
    notes = (
        how,
        f"Kind all: the interval of the head {lies} above the best baseline "
        f"({best.answered_by}, {100 * best.accuracy:.1f}).",
        f"Untrained networks with an interval above it: {above} of {len(control)}.",
        *((f"Left out: {asked.left_out}.",) if asked.left_out else ()),
    )
    columns = ("answered by", "kind", "count", "right", "95 %")
    values = {
        "model": model,
        "how": how,
        "head": {"layer": found.layer, "head": found.head, "direction": found.direction},
        "scores": [asdict(each) for each in found.scores],
        "untrained": [
            [asdict(each) for each in one.scores if each.answered_by == "head"] for one in untrained
        ],
        "accuracy_of_heads": found.accuracy_L2H,
    }
    lead = "Each square is a head: how many antecedents of all mentions it finds, in either direction."
    view = measures_view(_by_direction(found), [_by_direction(each) for each in untrained], lead=lead)
    return Report(
        "coref",
        (Table(title, columns, rows, notes),),
        values,
        lambda figure: _draw(figure, title, found, untrained),
        (11, 4.5),
        view,
    )


def _by_direction(found: Coreference) -> dict[str, Counts]:
    return {name: found.accuracy_L2H[:, at] for at, name in enumerate(TOWARDS)}


def _of(found: Coreference, who: str, kind: str) -> AntecedentScore:
    return next(each for each in found.scores if (each.answered_by, each.kind) == (who, kind))


def _row(who: str, score: AntecedentScore) -> tuple[str | int, ...]:
    interval = f"{100 * score.low:.1f} - {100 * score.high:.1f}"
    return who, score.kind, score.count, f"{100 * score.accuracy:.1f}", interval


def _draw(figure: "Figure", title: str, found: Coreference, untrained: Sequence[Coreference]) -> None:
    bars, grid = figure.subplots(1, 2, gridspec_kw={"width_ratios": [3, 2]})
    kinds = list(dict.fromkeys(each.kind for each in found.scores))
    who = list(dict.fromkeys(each.answered_by for each in found.scores))
    colours = dict(zip(who, (BLUE, RED, "#e9c46a", "#8d6a9f"), strict=False))
    width = 0.8 / (len(who) + 1)
    for at, name in enumerate(who):
        scores = [_of(found, name, kind) for kind in kinds]
        places = [number + at * width for number in range(len(kinds))]
        ends = [[100 * (s.accuracy - s.low) for s in scores], [100 * (s.high - s.accuracy) for s in scores]]
        right = [100 * s.accuracy for s in scores]
        bars.bar(places, right, width, yerr=ends, color=colours[name], label=name)
    for number, each in enumerate(untrained):
        places = [place + len(who) * width for place in range(len(kinds))]
        right = [100 * _of(each, "head", kind).accuracy for kind in kinds]
        bars.plot(
            places, right, "o", ms=4, mfc="white", mec="black", label="untrained" if number == 0 else None
        )
    bars.set_xticks([place + 0.3 for place in range(len(kinds))], kinds)
    bars.set_ylabel("antecedents found, per cent")
    bars.set_ylim(0, 118)
    bars.legend(fontsize=8, loc="upper left", ncols=len(who) + 1)
    best_LH = found.accuracy_L2H.max(1)
    image = grid.imshow(best_LH, cmap=COLOURS, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=grid)
    grid.set_title("every head, better direction", fontsize=9)
    layers, heads = best_LH.shape
    grid.set_xticks(range(heads), [str(head + 1) for head in range(heads)], fontsize=7)
    grid.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)], fontsize=7)
    grid.set_xlabel("head", fontsize=9)
    grid.set_ylabel("layer", fontsize=9)
    figure.subplots_adjust(left=0.07, right=0.97, bottom=0.12, top=0.86, wspace=0.2)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", parse_math=False)
