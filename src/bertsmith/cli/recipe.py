"""`bertsmith recipe`: list the presets, and show every setting of a recipe with its origin."""

from dataclasses import asdict, replace
from typing import Annotated, Any

from typer import Argument, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json
from bertsmith.cli.request import lines_of
from bertsmith.cli.spelling import as_now
from bertsmith.cli.verb import App

recipe = App(help="Show presets and recipe files.")


@recipe.command("show")
def show(
    name: Annotated[
        str, Argument(metavar="NAME_OR_FILE", help="A preset, a task, or a recipe file in TOML.")
    ],
    settings: options.Settings = None,
    as_json: options.Json = False,
) -> None:
    """Print every value of a recipe, its origin and its meaning.

    The output is a complete recipe file: save it, change it, train with it. Your own file needs only the
    differences: it may begin with base = "bert-base" and continue with a few keys.

    For a task, it is the recipe of its fine-tuning, with the published settings, as --set of finetune takes.

    Example: bertsmith recipe show bert-tiny --set run.steps=500

    Example: bertsmith recipe show sst2
    """
    from bertsmith.recipe.load import (  # the schema takes a moment to build
        LoadedRecipe,
        annotated_text,
        load_recipe_with_origins,
        settings_of,
    )
    from bertsmith.tasks.catalogue import OWN, TASKS
    from bertsmith.tasks.custom import CustomSpec, custom_task
    from bertsmith.tasks.task_recipe import finetuning_recipe_with_origins

    loaded: LoadedRecipe[Any]
    if task := ({task.name: task for task in TASKS} | {OWN: custom_task(CustomSpec("", ""))}).get(name):
        loaded = finetuning_recipe_with_origins(task, lines_of(settings))
    else:
        loaded = load_recipe_with_origins(name, lines_of(settings))
    if as_json:
        shown = (asdict(replace(each, origin=as_now(each.origin))) for each in settings_of(loaded))
        print_json({each.pop("key"): each for each in shown})
    else:
        echo(as_now(annotated_text(loaded)), nl=False)


@recipe.command("list")
def list_presets(as_json: options.Json = False) -> None:
    """List the presets with their sizes.

    Parameters count the encoder and its pooler, with the published vocabulary.

    Example: bertsmith recipe list
    """
    from bertsmith.recipe.load import preset_summaries

    summaries = preset_summaries()
    if as_json:
        plain = (asdict(summary) for summary in summaries)
        print_json({each.pop("name"): each for each in plain})
        return
    widest = max(len(each.name) for each in summaries)
    for each in summaries:
        echo(f"{each.name:<{widest}}  {each.parameters / 1e6:6.1f}M  {each.summary}")
    echo(f"{'auto':<{widest}}     any    Chosen by `bertsmith pretrain` for budget, text and machine")
