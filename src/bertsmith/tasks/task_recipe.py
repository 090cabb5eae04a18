"""The recipe of a fine-tuning run: the defaults, the task's published settings, and the user's settings."""

from collections.abc import Sequence

from pydantic import ValidationError

from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.recipe.load import LoadedRecipe, Tree, layer_of_override, leaves, merge
from bertsmith.recipe.toml_text import value_text
from bertsmith.recipe.validation_errors import user_error
from bertsmith.tasks.task import Task

RATE_OF_FRESH_WEIGHTS = 1e-3
"""Adam's usual learning rate, for new weights on a frozen encoder (the paper does not give its own) and for
those of a BiLSTM."""
FROZEN = ("frozen-features", "frozen-linear")


def finetuning_recipe(
    task: Task, overrides: Sequence[str] = (), *, options: Sequence[tuple[str, str]] = ()
) -> FinetuningRecipe:
    """Return the recipe for a task, with `key=value` overrides on top of its published settings.

    Each option is a pair: the user's option, for error messages, and the `key=value` that it means.
    """
    return finetuning_recipe_with_origins(task, overrides, options=options).recipe


def finetuning_recipe_with_origins(
    task: Task, overrides: Sequence[str] = (), *, options: Sequence[tuple[str, str]] = ()
) -> LoadedRecipe[FinetuningRecipe]:
    """Return the recipe together with the origin of every value that is not a default."""
    published = [f"{key}={value_text(value)}" for key, value in task.settings.items()]
    values: Tree = {"task": task.name}
    origins: dict[str, str] = {}
    of_task = f"task {task.name}"
    lines = [
        *((of_task, line) for line in published),
        *options,
        *(("`settings`", line) for line in overrides),
    ]
    for origin, line in lines:
        layer = layer_of_override(line, origin)
        merge(values, layer.values)
        origins |= dict.fromkeys(leaves(layer.values), origin)
    asked = any(origins.get(key, of_task) != of_task for key in ("optim", "optim.peak_lr"))
    if leaves(values).get("head.encoder") in FROZEN and not asked:
        # A task's published rate is for fine-tuning; at this rate new weights learn next to nothing.
        merge(values, {"optim": {"peak_lr": RATE_OF_FRESH_WEIGHTS}})
        origins["optim.peak_lr"] = "head.encoder"
    try:
        recipe = FinetuningRecipe.model_validate(values)
        if recipe.head.reader == "bilstm" and "optim.head_lr_factor" not in origins:
            # The rate of an encoder that was trained before is too small for a BiLSTM that was not.
            factor = float(f"{RATE_OF_FRESH_WEIGHTS / recipe.optim.peak_lr:.3g}")
            merge(values, {"optim": {"head_lr_factor": factor}})
            origins["optim.head_lr_factor"] = "head.reader"
            recipe = FinetuningRecipe.model_validate(values)
        return LoadedRecipe(recipe, origins)
    except ValidationError as error:
        raise user_error(error, values, origins, FinetuningRecipe) from error
