"""The one list of objectives, by their names in recipes."""

from collections.abc import Callable
from typing import NamedTuple

from bertsmith.core.measures import Declaration
from bertsmith.model.network import Network
from bertsmith.objectives import distillation
from bertsmith.objectives import masked_language_modelling as mlm
from bertsmith.objectives import replaced_token_detection as rtd
from bertsmith.objectives.pretraining_objective import PretrainingObjective
from bertsmith.recipe.data_sections import Objective
from bertsmith.recipe.schema import Recipe


class ObjectiveSpec(NamedTuple):
    """Properties of an objective that the job needs before it is built."""

    build: Callable[[Network, Network | None, Recipe], PretrainingObjective]
    """Builds it from the network and, if the objective has one, its generator or teacher."""
    heads: Callable[[Recipe], dict[str, int]]
    """The heads of the network, with their numbers of outputs."""
    declared: Callable[[Recipe], Declaration]
    """Its batch fields, sums, loss terms and metrics."""
    summary: Callable[[Recipe], str]
    """Function that describes it, for the card."""
    choices: Callable[[Recipe], list[str]] = lambda _: []
    """Function that describes a run's own settings, printed before the first step."""


OBJECTIVES: dict[Objective, ObjectiveSpec] = {
    "masked": ObjectiveSpec(mlm.build, mlm.heads_of, mlm.declared, mlm.summary),
    "left-to-right": ObjectiveSpec(mlm.build, mlm.heads_of, mlm.declared, mlm.summary),
    "right-to-left": ObjectiveSpec(mlm.build, mlm.heads_of, mlm.declared, mlm.summary),
    "two-directions": ObjectiveSpec(mlm.build, mlm.heads_of, mlm.declared, mlm.summary),
    "replaced": ObjectiveSpec(rtd.build, rtd.heads_of, rtd.declared, rtd.summary, choices=rtd.choices),
    "distilled": ObjectiveSpec(
        distillation.build,
        distillation.heads_of,
        lambda recipe: distillation.measures(recipe.distill),
        distillation.summary,
        choices=distillation.choices,
    ),
}
"""A new objective is a file, an entry here and a name in the recipe's `Objective`."""


def declaration(recipe: Recipe) -> Declaration:
    """Return the batch fields, sums, loss terms and metrics of a recipe's objective."""
    return OBJECTIVES[recipe.examples.objective].declared(recipe)
