"""The tables and the picture of probes on layers and on attention."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bertsmith.insight.dependency_probe import PROBES, ProbeScore
from bertsmith.insight.layer_probe import TASKS, LayerProbes, LayerScore
from bertsmith.insight.pictures import BLUE, GREY, RED
from bertsmith.insight.report import UNTRAINED_TOO, Report, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Probes:
    """Scores of all probes of one model."""

    layers: LayerProbes
    trees: Sequence[ProbeScore]


def probe_report(found: Probes, untrained: Sequence[Probes], *, model: str, how: str) -> Report:
    """Report the scores of probes on a model, compared with untrained networks."""
    title = f"{model}: what probes find"
    values = {
        "model": model,
        "how": how,
        "layers": [asdict(each) for each in found.layers.scores],
        "majority": found.layers.majority,
        "trees": [asdict(each) for each in found.trees],
        "untrained": [
            {"layers": [asdict(s) for s in each.layers.scores], "trees": [asdict(s) for s in each.trees]}
            for each in untrained
        ],
    }
    tables = (_layer_table(title, found, untrained, how), _tree_table(found, untrained))
    return Report("probe", tables, values, lambda figure: _draw(figure, title, found, untrained), (11, 4.2))


def _of(scores: Sequence[LayerScore], task: str) -> list[LayerScore]:
    return [each for each in scores if each.task == task]


def _layer_table(title: str, found: Probes, untrained: Sequence[Probes], how: str) -> Table:
    rows = []
    for task in TASKS:
        for at, score in enumerate(_of(found.layers.scores, task)):
            twins = [_of(each.layers.scores, task)[at] for each in untrained]
            best = max(each.accuracy for each in twins)
            name = "embeddings" if score.layer == 0 else f"layer {score.layer}"
            interval = f"{100 * score.low:.1f} - {100 * score.high:.1f}"
            marked = UNTRAINED_TOO if best >= score.low else ""
            figures = (score.accuracy, score.control, score.selectivity, best)
            right, control, selectivity, other = (f"{100 * each:.1f}" for each in figures)
            rows.append((f"{task}, {name}", right, interval, control, selectivity, other, marked))
    majorities = ", ".join(f"{task} {100 * value:.1f}" for task, value in found.layers.majority.items())
    notes = (
        how,
        "Per cent of words that a linear probe gets right; control: random labels of word forms, which can "
        "only be learned by heart; selectivity: the difference.",
        f"Always the most frequent label: {majorities}.",
        f"untrained: the best of {len(untrained)} random initialisations at this layer; {UNTRAINED_TOO} "
        "if it reaches the interval.",
    )
    columns = ("", "right", "95 %", "control", "selectivity", "untrained", "")
    return Table(title, columns, rows, notes)


def _tree_table(found: Probes, untrained: Sequence[Probes]) -> Table:
    rows = []
    for at, score in enumerate(found.trees):
        best = max(each.trees[at].accuracy for each in untrained)
        interval = f"{100 * score.low:.1f} - {100 * score.high:.1f}" if score.probe in PROBES else "-"
        marked = UNTRAINED_TOO if best >= score.low and score.probe in PROBES else ""
        rows.append((score.probe, f"{100 * score.accuracy:.1f}", interval, f"{100 * best:.1f}", marked))
    notes = (
        "Heads of words found (UAS without punctuation). Published, for BERT-base on the Wall Street "
        "Journal: right-branching 26, attention 61, attention and GloVe 77.",
    )
    return Table(
        "Dependency trees from all heads together", ("probe", "right", "95 %", "untrained", ""), rows, notes
    )


def _draw(figure: "Figure", title: str, found: Probes, untrained: Sequence[Probes]) -> None:
    for axes, task in zip(figure.subplots(1, len(TASKS), squeeze=False)[0], TASKS, strict=True):
        _draw_task(axes, task, found, untrained)
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.14, top=0.84, wspace=0.18)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", parse_math=False)


def _draw_task(axes: "Axes", task: str, found: Probes, untrained: Sequence[Probes]) -> None:
    scores = _of(found.layers.scores, task)
    layers = [each.layer for each in scores]
    axes.plot(layers, [100 * each.accuracy for each in scores], "o-", color=BLUE, label="probe")
    axes.plot(layers, [100 * each.control for each in scores], "s--", color=RED, label="control task")
    for number, twin in enumerate(untrained):
        right = [100 * each.accuracy for each in _of(twin.layers.scores, task)]
        axes.plot(layers, right, ":", color=GREY, label="untrained" if number == 0 else None)
    axes.axhline(100 * found.layers.majority[task], color="black", lw=0.8, label="most frequent label")
    axes.set_title(task, fontsize=10)
    axes.set_xlabel("layer (0: embeddings)", fontsize=9)
    axes.set_ylabel("per cent right", fontsize=9)
    axes.legend(fontsize=8)
