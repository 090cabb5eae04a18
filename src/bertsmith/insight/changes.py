"""Compare a model before and after fine-tuning, layer by layer: weights, and states for the same texts.

Shapes: L1 = layers + 1 states of a token (the first are the embeddings), T packed tokens, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.features.layer_states import layer_name
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import Sequences, TextInput
from bertsmith.insight.layer_distances import moved_by
from bertsmith.insight.pictures import BLUE, GREEN, RED
from bertsmith.insight.report import Report, Table
from bertsmith.insight.surface import shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("attention", "feed-forward", "norms")
BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class WeightChange:
    """The change of one block's weights: the norm of the difference over the norm before."""

    name: str
    parts: dict[str, float]
    """Relative change of each of PARTS, and of "all" weights of the block."""


@dataclass(frozen=True, slots=True)
class StateChange:
    """The change of one layer's states, as means over tokens."""

    name: str
    angle: float
    """Angle between the states before and after, in degrees."""
    relative_distance: float
    """L2 distance of the states before and after, over the norm of the state before."""
    cka: float
    """Linear centred kernel alignment (Kornblith et al. 2019): 1 if only a rotation changed."""


def check_same_shape(before: Bert, after: Bert) -> None:
    """Raise if two models cannot be compared weight by weight."""
    one, other = before.model.network, after.model.network
    shapes = [{n: t.shape for n, t in each.encoder.state_dict().items()} for each in (one, other)]
    if shapes[0].keys() != shapes[1].keys():
        remedy = "give a model, and one that was fine-tuned from it"
        raise UserError("the two models have different shapes", remedy=remedy)
    for name, shape in shapes[0].items():
        if shape != shapes[1][name]:
            what = f"the two models differ in {name}: {list(shape)} and {list(shapes[1][name])}"
            raise UserError(what, remedy="give a model, and one that was fine-tuned from it")


def weight_changes(before: Bert, after: Bert) -> list[WeightChange]:
    """Return the changes of the embeddings and of each block, from the first to the last."""
    check_same_shape(before, after)
    one, other = (each.model.network.encoder.state_dict() for each in (before, after))
    encoder = before.model.network.encoder
    names = {module: f"{name}." for name, module in encoder.named_modules()}
    found = []
    for number, depth in enumerate(reversed(encoder.depths())):
        own = [name for name in one if name.startswith(names[depth.layer])]
        parts = {} if number == 0 else {part: _relative(one, other, _of_part(own, part)) for part in PARTS}
        found.append(WeightChange(layer_name(number), {"all": _relative(one, other, own), **parts}))
    return found


def _of_part(names: Sequence[str], part: str) -> list[str]:
    matches = {
        "attention": lambda name: ".attention." in name,
        "feed-forward": lambda name: ".feed_forward." in name,
        "norms": lambda name: "_norm." in name,
    }
    return [name for name in names if matches[part](name)]


def _relative(one: dict[str, Tensor], other: dict[str, Tensor], names: Sequence[str]) -> float:
    difference = sum(float((other[n].double() - one[n].double()).square().sum()) for n in names)
    whole = sum(float(one[n].double().square().sum()) for n in names)
    return (difference / whole) ** 0.5 if whole else 0.0


def state_changes(
    before: Bert, after: Bert, texts: Sequence[TextInput], *, longest: int
) -> list[StateChange]:
    """Return the change of each layer's states for these texts."""
    check_same_shape(before, after)
    encoded = shortened(before, texts, longest)
    sums: list[_StateSums] = []
    with torch.no_grad():
        for _, batch in Sequences.of(encoded).batches(BATCH_TOKENS):
            given = batch.to(before.engine.device)
            states = [each.engine.network.encoder.hidden_states(given) for each in (before, after)]
            sums = sums or [_StateSums.empty(states[0][0].shape[-1]) for _ in states[0]]
            for each, one_TD, other_TD in zip(sums, *states, strict=True):
                each.add(one_TD.double().cpu(), other_TD.double().cpu())
    return [each.change(layer_name(number)) for number, each in enumerate(sums)]


@dataclass(slots=True)
class _StateSums:
    """Sums over tokens that give means and centred products without storing the states."""

    count: int
    angle: float
    distance: float
    ones_D: Tensor
    others_D: Tensor
    products: dict[str, Tensor]

    @classmethod
    def empty(cls, width: int) -> "_StateSums":
        zeros = torch.zeros(width, dtype=torch.float64)
        products = {name: torch.zeros(width, width, dtype=torch.float64) for name in ("xx", "yy", "xy")}
        return cls(0, 0.0, 0.0, zeros.clone(), zeros.clone(), products)

    def add(self, one_TD: Tensor, other_TD: Tensor) -> None:
        distance_T, angle_T = moved_by(one_TD, other_TD)
        self.count += len(one_TD)
        self.angle += float(angle_T.sum())
        self.distance += float((distance_T / one_TD.norm(dim=-1).clamp(min=1e-12)).sum())
        self.ones_D += one_TD.sum(0)
        self.others_D += other_TD.sum(0)
        for name, (left, right) in {
            "xx": (one_TD, one_TD),
            "yy": (other_TD, other_TD),
            "xy": (one_TD, other_TD),
        }.items():
            self.products[name] += left.T @ right

    def change(self, name: str) -> StateChange:
        mean = {"x": self.ones_D / self.count, "y": self.others_D / self.count}
        centred = {
            pair: product - self.count * torch.outer(mean[pair[0]], mean[pair[1]])
            for pair, product in self.products.items()
        }
        norms = {pair: float(matrix.norm()) for pair, matrix in centred.items()}
        cka = norms["xy"] ** 2 / max(norms["xx"] * norms["yy"], 1e-300)
        return StateChange(name, self.angle / self.count, self.distance / self.count, cka)


def changes_report(
    weights: Sequence[WeightChange], states: Sequence[StateChange], *, names: Sequence[str]
) -> Report:
    """Return the changes as tables and a picture; states only if there were texts."""
    title = f"From {names[0]} to {names[1]}"
    rows = [(each.name, *(each.parts.get(part) for part in ("all", *PARTS))) for each in weights]
    notes = ("The norm of the difference, divided by the norm before.",)
    tables = [Table(f"{title}: weights", ("", "all", *PARTS), rows, notes)]
    if states:
        lines = [(each.name, each.angle, each.relative_distance, each.cka) for each in states]
        notes = ("Means over tokens; CKA is 1 if only a rotation changed.",)
        tables.append(Table("States", ("", "angle", "relative L2", "CKA"), lines, notes))
    values = {
        "before": names[0],
        "after": names[1],
        "weights": {each.name: each.parts for each in weights},
        "states": {
            each.name: {"angle": each.angle, "relative_l2": each.relative_distance, "cka": each.cka}
            for each in states
        },
    }
    return Report(
        "changes", tuple(tables), values, lambda figure: _draw(figure, weights, states, title), (10, 4.2)
    )


def _draw(
    figure: "Figure", weights: Sequence[WeightChange], states: Sequence[StateChange], title: str
) -> None:
    places = figure.subplots(1, 2 if states else 1, squeeze=False)[0]
    for part, colour in zip(PARTS, (BLUE, RED, GREEN), strict=True):
        known = [(number, each.parts[part]) for number, each in enumerate(weights) if part in each.parts]
        places[0].plot(*zip(*known, strict=True), color=colour, marker="o", label=part)
    places[0].set(title="Weights: relative change", xlabel="layer", ylim=(0, None))
    places[0].legend(frameon=False)
    if states:
        places[1].plot(range(len(states)), [each.angle for each in states], color=BLUE, marker="o")
        places[1].set(
            title="States: angle to the state before (degrees)",
            xlabel="layer (0: embeddings)",
            ylim=(0, None),
        )
    for axes in places:
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", parse_math=False)
    figure.tight_layout()
