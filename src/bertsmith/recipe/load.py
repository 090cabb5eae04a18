"""Recipes from presets, files and `--set`, with the origin and the meaning of every value."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_text
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.recipe.model_section import ModelSection
from bertsmith.recipe.schema import Recipe
from bertsmith.recipe.section import Section
from bertsmith.recipe.toml_text import toml_text, value_text
from bertsmith.recipe.validation_errors import user_error

Tree = dict[str, Any]

_PRESETS = files("bertsmith.recipe") / "presets"
_SET, _SWEEP = "`settings`", "`sweep`"

RecipeT = TypeVar("RecipeT", bound=Section)


@dataclass(frozen=True, slots=True)
class LoadedRecipe(Generic[RecipeT]):
    """A pre-training or fine-tuning recipe, with the origins of its values."""

    recipe: RecipeT
    origins: Mapping[str, str]
    """Dotted key -> "preset NAME", a file's path or an option, in order of writing; the rest are defaults."""

    def origin(self, key: str) -> str:
        """Return the origin of a dotted key's value."""
        return self.origins.get(key, "default")


@dataclass(frozen=True, slots=True)
class _Layer:
    """Values with a common origin."""

    origin: str
    values: Tree


# ---- reading


def load_recipe(
    name_or_file: str | Path,
    overrides: Sequence[str] = (),
    *,
    options: Sequence[tuple[str, str]] = (),
    swept: Sequence[str] = (),
) -> Recipe:
    """Return the recipe of a preset's name or a TOML file, with `key=value` overrides on top.

    Each option is a pair: the name of the user's option, for error messages, and its `key=value`. Values in
    `swept` override all others.
    """
    return load_recipe_with_origins(name_or_file, overrides, options=options, swept=swept).recipe


def load_recipe_with_origins(
    name_or_file: str | Path,
    overrides: Sequence[str] = (),
    *,
    options: Sequence[tuple[str, str]] = (),
    swept: Sequence[str] = (),
) -> LoadedRecipe[Recipe]:
    """Return the recipe together with the origin of every value that is not a default."""
    values: Tree = {}
    origins: dict[str, str] = {}
    given = [*options, *((_SET, line) for line in overrides), *((_SWEEP, line) for line in swept)]
    for layer in [*_layers_of(name_or_file), *(layer_of_override(line, origin) for origin, line in given)]:
        merge(values, layer.values)
        fresh = dict.fromkeys(leaves(layer.values), layer.origin)
        # If a table replaces a value, drop the value's own key with its origin.
        replaced = {key for key in origins if any(f"{new}.".startswith(f"{key}.") for new in fresh)}
        origins = {key: origin for key, origin in origins.items() if key not in replaced} | fresh
    try:
        return LoadedRecipe(Recipe.model_validate(values), origins)
    except ValidationError as error:
        raise user_error(error, values, origins) from error


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(file.name.removesuffix(".toml") for file in _PRESETS.iterdir())


def preset_text(name: str) -> str:
    """Return a preset's file as text; its first line is a comment with a summary."""
    return (_PRESETS / f"{name}.toml").read_text("utf-8")


def _layers_of(name_or_file: str | Path) -> list[_Layer]:
    """Return the layers of a recipe: its ancestors first, its own values last."""
    name = str(name_or_file)
    if name in preset_names():
        return _layers_of_preset(name)
    file = Path(name_or_file).expanduser()
    if not file.exists():
        raise UserError("is not a preset or a file", where=name, remedy=_preset_advice(name))
    text = read_text(file, remedy="give a preset, or a recipe in TOML")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Not TOML, a number of thousands of digits, or endless nesting.
        raise UserError(f"is not valid TOML ({error})", where=str(file), remedy="correct it there") from error
    base = values.pop("base", None)
    own = _Layer(str(file), values)
    if base is None:
        return [own]
    if base not in preset_names():
        what, advice = f"base = {base!r} is not a preset, as it must be", _preset_advice(str(base))
        raise UserError(what, where=str(file), remedy=advice)
    return [*_layers_of_preset(base), own]


def _layers_of_preset(name: str) -> list[_Layer]:
    values = tomllib.loads(preset_text(name))
    base = values.pop("base", None)
    own = _Layer(f"preset {name}", values)
    if base is None:
        return [own]
    [parent] = _layers_of_preset(base)  # each of our presets has at most one parent
    return [parent, own]


def _preset_advice(name: str) -> str:
    if name == "auto":
        return "only `bertsmith pretrain auto` chooses a recipe; its run folder then has it as recipe.toml"
    known = preset_names()
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"presets are {', '.join(known)}"


def layer_of_override(override: str, origin: str = _SET) -> _Layer:
    """Return the values of one `a.b=c` as a layer; the origin names the option."""
    key, equals, text = override.partition("=")
    if not (equals and key.strip()):
        remedy = "write it like optim.peak_lr=3e-5"
        raise UserError(f"{override!r} is not key=value", where=origin, remedy=remedy)
    text = text.strip()
    value: Any = text  # a bare word is text, so that the shell needs no second pair of quotes
    try:
        document = tomllib.loads(f"value = {text}")
        if len(document) == 1:  # otherwise the text contains a line end and more keys
            value = document["value"]
    except (ValueError, RecursionError) as error:
        if text.startswith(("[", "{", '"', "'")):
            remedy = "write a list as [1, 2] and a table as { a = 1 }, in quotes for the shell"
            raise UserError(f"{text} is not valid TOML ({error})", where=origin, remedy=remedy) from error
    *path, last = key.strip().split(".")
    values: Tree = {last: value}
    for part in reversed(path):
        values = {part: values}
    return _Layer(origin, values)


def merge(values: Tree, more: Mapping[str, Any]) -> None:
    """Merge `more` into `values` in place, table by table."""
    for key, value in more.items():
        held = values.get(key)
        if isinstance(held, dict) and isinstance(value, Mapping):
            merge(held, value)
        else:
            values[key] = value


def leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return every value that is not a table, by its dotted key."""
    return dict(_leaves(tree, ""))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---- writing and comparing


def recipe_text(recipe: Recipe) -> str:
    """Return the recipe as complete TOML, every default written out; loading it gives an equal recipe."""
    return toml_text(recipe.model_dump())


@dataclass(frozen=True, slots=True)
class Difference:
    """A dotted key with different values in two trees; None means that the key is missing."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = ("nothing" if each is None else value_text(each) for each in (self.before, self.now))
        return f"{self.key}: {before} there, {now} now"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the dotted keys with different values in two trees, in order."""
    old, new = leaves(before), leaves(now)
    return [Difference(key, old.get(key), new.get(key)) for key in new | old if old.get(key) != new.get(key)]


# ---- descriptions of recipes, for people


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of a recipe."""

    key: str
    value: Any
    origin: str
    description: str


@dataclass(frozen=True, slots=True)
class PresetSummary:
    """A preset in a line."""

    name: str
    parameters: int
    """Parameters of the encoder and its pooler, with the published vocabulary."""
    vocabulary: int
    summary: str


def settings_of(loaded: LoadedRecipe[Any]) -> list[Setting]:
    """Return every value of a recipe with its origin and description, in the order of the schema."""
    return [
        Setting(key, value, loaded.origin(key), description)
        for key, value, description in _described(loaded.recipe, "")
    ]


def annotated_text(loaded: LoadedRecipe[Any]) -> str:
    """Return the complete recipe as loadable TOML, with each value's origin and description in comments."""
    # A path may contain a line end, but a comment must not.
    comments = {
        each.key: " ".join(f"{each.origin}: {each.description}".split()) for each in settings_of(loaded)
    }
    return toml_text(loaded.recipe.model_dump(), comments)


def preset_summaries() -> list[PresetSummary]:
    """Return all presets, smallest first within each family."""
    families: dict[str, list[PresetSummary]] = {model_type: [] for model_type in ARCHITECTURES}
    for name in preset_names():
        model = load_recipe(name).model
        vocabulary = published_vocabulary(model.type)
        first_line = preset_text(name).partition("\n")[0].removeprefix("# ")
        summary = PresetSummary(name, encoder_parameters(model, vocabulary), vocabulary, first_line)
        families[model.type].append(summary)
    return [each for of in families.values() for each in sorted(of, key=lambda each: each.parameters)]


def published_vocabulary(model_type: str) -> int:
    """Return the number of entries in the vocabulary that an architecture was published with."""
    pretraining = ARCHITECTURES[model_type].pretraining
    assert pretraining is not None, "presets start from scratch"
    return pretraining.vocabulary


def encoder_parameters(model: ModelSection, vocabulary: int) -> int:
    """Count the weights of the encoder and its pooler by arithmetic, without building them."""
    pretraining = ARCHITECTURES[model.type].pretraining
    assert pretraining is not None, "presets start from scratch"
    return pretraining.count_parameters(model.encoder_config(vocabulary))


def _described(section: BaseModel, prefix: str) -> Iterator[tuple[str, Any, str]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _described(value, f"{prefix}{name}.")
        else:
            plain = section.model_dump(include={name}, mode="json")[name]
            yield f"{prefix}{name}", plain, " ".join((field.description or "").split())
