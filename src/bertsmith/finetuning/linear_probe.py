"""A linear head solved to its optimum on the vectors of a frozen encoder: logistic or ridge regression.

Shapes: N rows (items, or tagged words), D width of what the head's last layer reads, C outputs.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from bertsmith.core.progress import progress_bar
from bertsmith.core.seeds import stream
from bertsmith.inference.task_model import TaskModel
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.kinds.kind import LinearProblem
from bertsmith.training.distributed import World

PENALTIES = (1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4)
"""Weights of half the squared norm in the loss of standardised vectors, the strongest first."""
TUNING_PENALTY = 0.1
"""Smallest penalty of the solution that tuning starts from. The optimum itself may fit the training set so
well that no gradient is left for the encoder (Ren et al. 2023)."""
FOLDS = 4
MAX_ROWS_IN_FOLDS = 2_500
"""With more rows, only one fold is held out, which determines the penalty well enough."""
MAX_GROUPS_FOR_PENALTY = 5_000
MAX_ITERATIONS = 200
"""Maximum iterations of L-BFGS; most problems need about 50."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Vectors with targets: a class per row [N], 0 or 1 for each label [N, C], or a number per row [N, 1]."""

    vectors_ND: Tensor
    targets: Tensor
    weights_N: Tensor
    groups_N: NDArray[np.int64]
    """Group of each row; rows of one group (the words of a sentence) are held out together."""
    biased: bool = True
    """True if the layer has biases; GPT-2's classifier does not have them."""

    def subset(self, chosen_N: NDArray[np.bool_]) -> "Rows":
        """Return some of the rows."""
        rows = torch.from_numpy(np.flatnonzero(chosen_N)).to(self.targets.device)
        groups = self.groups_N[chosen_N]
        vectors_ND, targets, weights_N = (
            each[rows] for each in (self.vectors_ND, self.targets, self.weights_N)
        )
        return Rows(vectors_ND, targets, weights_N, groups, self.biased)


@dataclass(frozen=True, slots=True)
class Solution:
    """The solution of a head, which is the starting point of tuning."""

    tuning_start: tuple[Tensor, Tensor]
    """Weights and biases for tuning to start from, the optimum for `TUNING_PENALTY`."""

    def start_tuning(self, model: TaskModel, world: World) -> None:
        """Replace the head's optimal weights by the starting point of tuning, equal in all processes."""
        layer = model.scorer.last_layer()
        put(layer, self.tuning_start)
        if world.size > 1:
            for each in layer.parameters():
                torch.distributed.broadcast(each.data, src=0)


def solve_head(
    model: TaskModel,
    train: EncodedSet,
    vectors_ND: NDArray[np.float32],
    class_weights_C: NDArray[np.float32] | None = None,
) -> Solution:
    """Replace the weights of the head's last layer by the optimum; return the starting point of tuning."""
    layer, problem = model.scorer.last_layer(), model.config.kind.linear_problem
    assert problem is not None
    rows = _rows_of(model, train, vectors_ND, problem, class_weights_C)
    rows = replace(rows, biased=layer.bias is not None)
    mean_D, deviation_D = rows.vectors_ND.mean(0), rows.vectors_ND.std(0, correction=0)
    # A constant column contains no information, and must not be divided by 0.
    scale_D = torch.where(deviation_D > 1e-6, 1 / deviation_D.clamp(min=1e-6), 0.0)
    mean_D = mean_D if rows.biased else torch.zeros_like(mean_D)  # a bias makes up for the mean
    rows.vectors_ND.sub_(mean_D).mul_(scale_D)
    penalty = choose_penalty(rows, problem, layer.out_features)

    def unscaled(solution: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        weight_CD = solution[0] * scale_D
        return weight_CD, solution[1] - weight_CD @ mean_D

    soft = solve(rows, problem, max(penalty, TUNING_PENALTY), initial(rows, layer.out_features))
    put(layer, unscaled(solve(rows, problem, penalty, soft)))
    return Solution(unscaled(soft))


def put(layer: nn.Linear, weights: tuple[Tensor, Tensor]) -> None:
    """Copy weights and biases into a layer."""
    with torch.no_grad():
        layer.weight.copy_(weights[0])
        if layer.bias is not None:
            layer.bias.copy_(weights[1])


def choose_penalty(rows: Rows, problem: LinearProblem, outputs: int) -> float:
    """Return the penalty with the smallest loss on held-out rows."""
    groups = np.unique(rows.groups_N)
    if len(groups) < 2 * FOLDS:
        return PENALTIES[len(PENALTIES) // 2]  # too few to hold any out
    shuffled = stream(0, "linear probe").permutation(groups)
    parts = np.array_split(shuffled[:MAX_GROUPS_FOR_PENALTY], FOLDS)
    used = np.isin(rows.groups_N, np.concatenate(parts))
    chosen = parts if len(rows.groups_N) <= MAX_ROWS_IN_FOLDS else parts[:1]
    folds = [(used & ~(held := np.isin(rows.groups_N, part)), held) for part in chosen]
    fitted = [(rows.subset(train), rows.subset(held)) for train, held in folds]
    solutions = [initial(train, outputs) for train, _ in fitted]
    losses: list[float] = []
    with progress_bar("solving the head", len(PENALTIES)) as advance:
        for penalty in PENALTIES:
            # From strong to weak: each solution is close to the next.
            solutions = [
                solve(train, problem, penalty, start)
                for (train, _), start in zip(fitted, solutions, strict=True)
            ]
            held_out = zip(fitted, solutions, strict=True)
            losses.append(sum(float(mean_loss(held, problem, *found)) for (_, held), found in held_out))
            advance(1)
            if losses[-1] > min(losses):  # the loss has one minimum over the penalties
                break
    return PENALTIES[int(np.argmin(losses))]


def initial(rows: Rows, outputs: int) -> tuple[Tensor, Tensor]:
    """Return the initial weights and biases of the search: zeros."""
    return rows.vectors_ND.new_zeros(outputs, rows.vectors_ND.shape[1]), rows.vectors_ND.new_zeros(outputs)


def solve(
    rows: Rows, problem: LinearProblem, penalty: float, start: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the weights [C, D] and biases [C] with the smallest penalised loss, by L-BFGS."""
    weight_CD, bias_C = (each.clone().requires_grad_() for each in start)
    search = torch.optim.LBFGS(
        [weight_CD, bias_C] if rows.biased else [weight_CD],
        max_iter=MAX_ITERATIONS,
        tolerance_grad=1e-5,
        tolerance_change=1e-7,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        search.zero_grad()
        loss = mean_loss(rows, problem, weight_CD, bias_C) + penalty / 2 * weight_CD.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        search.step(closure)  # type: ignore[no-untyped-call]
    return weight_CD.detach(), bias_C.detach()


def mean_loss(rows: Rows, problem: LinearProblem, weight_CD: Tensor, bias_C: Tensor) -> Tensor:
    """Return the weighted mean loss of the rows."""
    scores_NC = functional.linear(rows.vectors_ND, weight_CD, bias_C)
    if problem == "classes":
        losses_N = functional.cross_entropy(scores_NC, rows.targets, reduction="none")
    elif problem == "labels":
        losses_N = functional.binary_cross_entropy_with_logits(
            scores_NC, rows.targets, reduction="none"
        ).mean(-1)
    else:
        losses_N = (scores_NC - rows.targets).square().mean(-1)
    return (losses_N * rows.weights_N).sum() / rows.weights_N.sum()


# ---- from a model and a split to rows


def _rows_of(
    model: TaskModel,
    train: EncodedSet,
    every_ND: NDArray[np.float32],
    problem: LinearProblem,
    class_weights_C: NDArray[np.float32] | None,
) -> Rows:
    known = ~np.isnan(train.targets) if problem == "numbers" else train.targets >= 0
    known_N = np.asarray(known.reshape(len(known), -1).all(-1))
    vectors_ND = torch.from_numpy(every_ND[known_N]).to(model.device)
    targets = torch.from_numpy(train.targets[known_N]).to(model.device)
    if problem == "numbers":
        targets = targets.float()[:, None]
    elif problem == "labels":
        targets = targets.float()
    weights_N = torch.ones(len(targets), device=model.device)
    if class_weights_C is not None:
        weights_N = torch.from_numpy(class_weights_C).to(model.device)[targets]
    groups_N = train.words_P2[:, 0] if train.unit == "word" else np.arange(train.items)
    return Rows(vectors_ND, targets, weights_N, groups_N[known_N])
