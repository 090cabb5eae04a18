"""The table and the picture of heads and dependency relations."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from bertsmith.insight.pictures import BLUE, COLOURS, RED
from bertsmith.insight.relations import HeadRelations, RelationScore
from bertsmith.insight.report import UNTRAINED_TOO, Report, Table, head_name
from bertsmith.insight.report_views import relations_view
from bertsmith.insight.stanford_names import PUBLISHED, STANFORD_OF_UD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ARROWS = {"to the head": "->", "from the head": "<-"}


def relations_report(
    found: HeadRelations, untrained: Sequence[HeadRelations], *, model: str, how: str
) -> Report:
    """Report the best head for each relation, compared with the baseline and untrained networks.

    `how` describes the data.
    """
    title = f"{model}: which head finds which relation, {found.sentences:,} sentences"
    rows = [_row(score, [each.scores[at] for each in untrained]) for at, score in enumerate(found.scores)]
    columns = ("relation", "Stanford", "count", "head", "", "right", "95 %", "offset", "baseline", "beats",
               "untrained", "", "paper")  # fmt: skip
    notes = (
        how,
        "-> the dependent attends to its head; <- the head attends to its dependent.",
        "beats: the whole interval (resampled sentences) is above the baseline.",
        f"untrained: the best of {len(untrained)} random initialisations, chosen and scored the same way; "
        f"{UNTRAINED_TOO} if one of them also beats the baseline.",
        "paper: best head and baseline of BERT-base on the Wall Street Journal (Clark et al. 2019).",
        *((f"{found.skipped} sentences were too long for the model.",) if found.skipped else ()),
    )
    values = {
        "model": model,
        "how": how,
        "sentences": found.sentences,
        "relations": [asdict(score) | {"beats": score.beats} for score in found.scores],
        "untrained": [
            [asdict(score) | {"beats": score.beats} for score in each.scores] for each in untrained
        ],
        "accuracy_of_heads": found.accuracy_L2HR,
    }
    height = 1.6 + 0.28 * len(rows)
    return Report(
        "heads",
        (Table(title, columns, rows, notes),),
        values,
        lambda figure: _draw(figure, title, found, untrained),
        (13, height),
        relations_view(found, untrained, how=how),
    )


def _row(score: RelationScore, untrained: Sequence[RelationScore]) -> tuple[str | int | float, ...]:
    stanford = STANFORD_OF_UD.get(score.relation, "all" if score.relation == "all" else "")
    published = PUBLISHED.get(stanford)
    return (
        score.relation,
        stanford,
        score.count,
        head_name(score.layer, score.head),
        ARROWS[score.direction],
        f"{100 * score.accuracy:.1f}",
        f"{100 * score.low:.1f} - {100 * score.high:.1f}",
        f"{score.offset:+d}",
        f"{100 * score.baseline:.1f}",
        "yes" if score.beats else "no",
        f"{100 * max(each.accuracy for each in untrained):.1f}",
        UNTRAINED_TOO if any(each.beats for each in untrained) else "",
        f"{published[0]} ({published[1]})" if published else "",
    )


def _draw(figure: "Figure", title: str, found: HeadRelations, untrained: Sequence[HeadRelations]) -> None:
    bars, grid = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": [3, 2]})
    _draw_bars(bars, found, untrained)
    best_RL = found.accuracy_L2HR.max((1, 2)).T
    grid.imshow(best_RL, cmap=COLOURS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    layers = range(best_RL.shape[1])
    grid.set_xticks(layers, [str(layer + 1) for layer in layers], fontsize=8)
    grid.set_title("best head of each layer (white 0 %, dark 100 %)", fontsize=9)
    grid.set_xlabel("layer", fontsize=9)
    height = figure.get_figheight()  # with few relations, a fraction of it is too small for the labels
    figure.subplots_adjust(left=0.1, right=0.99, bottom=0.55 / height, top=1 - 0.6 / height, wspace=0.03)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", parse_math=False)


def _draw_bars(axes: "Axes", found: HeadRelations, untrained: Sequence[HeadRelations]) -> None:
    places = range(len(found.scores))
    right = [100 * score.accuracy for score in found.scores]
    ends = [
        [100 * (score.accuracy - score.low) for score in found.scores],
        [100 * (score.high - score.accuracy) for score in found.scores],
    ]
    axes.barh(places, right, color=BLUE, height=0.6, xerr=ends, ecolor="black", label="chosen head")
    axes.plot([100 * s.baseline for s in found.scores], places, "|", color=RED, ms=12, mew=2.5,
              label="fixed offset")  # fmt: skip
    for number, each in enumerate(untrained):
        label = "untrained" if number == 0 else None
        axes.plot(
            [100 * s.accuracy for s in each.scores], places, "o", ms=4, mfc="white", mec="black", label=label
        )
    names = [f"{s.relation}  {head_name(s.layer, s.head)}" for s in found.scores]
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    axes.set_xlabel("heads found, per cent", fontsize=9)
    axes.legend(fontsize=8, loc="lower right")
