"""Recipes from presets, files and `--set`, validated by one tree, with the origin of every value."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_text
from bertsmith.recipe.mistakes import explained
from bertsmith.recipe.schema import Recipe
from bertsmith.recipe.toml_text import toml_text, value_text

Tree = dict[str, Any]

_PRESETS = files("bertsmith.recipe") / "presets"
_SET = "--set"


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe and where its values came from."""

    recipe: Recipe
    origins: Mapping[str, str]
    """Dotted key -> "preset NAME", a file's path or "--set", in order of writing; the rest are defaults."""

    def origin(self, key: str) -> str:
        """Where the value of a dotted key came from."""
        return self.origins.get(key, "default")


@dataclass(frozen=True, slots=True)
class _Layer:
    """Some values and where they stand."""

    origin: str
    values: Tree


# ---- reading


def load_recipe(name_or_file: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a preset's name or a TOML file, with `key=value` overrides on top."""
    return load_recipe_with_origins(name_or_file, overrides).recipe


def load_recipe_with_origins(name_or_file: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe together with the origin of every value that is not a default."""
    values: Tree = {}
    origins: dict[str, str] = {}
    for layer in [*_layers_of(name_or_file), *map(layer_of_override, overrides)]:
        merge(values, layer.values)
        fresh = dict.fromkeys(leaves(layer.values), layer.origin)
        origins = {key: origin for key, origin in origins.items() if not _is_replaced(key, fresh)} | fresh
    try:
        return LoadedRecipe(Recipe.model_validate(values), origins)
    except ValidationError as error:
        raise explained(error, values, origins) from error


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(file.name.removesuffix(".toml") for file in _PRESETS.iterdir())


def preset_text(name: str) -> str:
    """A preset's file as it is written; its first line says in a comment what it is."""
    return (_PRESETS / f"{name}.toml").read_text("utf-8")


def _layers_of(name_or_file: str | Path) -> list[_Layer]:
    """The recipe's values behind those of its parents, farthest first."""
    name = str(name_or_file)
    if name in preset_names():
        return _layers_of_preset(name)
    file = Path(name_or_file).expanduser()
    if not file.exists():
        raise UserError("is neither a preset nor a file", where=name, remedy=_preset_advice(name))
    values = _parsed(read_text(file, remedy="name a recipe in TOML or a preset"), where=str(file))
    base = values.pop("base", None)
    return [*_layers_of_base(base, where=str(file)), _Layer(str(file), values)]


def _layers_of_base(base: Any, *, where: str) -> list[_Layer]:
    if base is None:
        return []
    if base not in preset_names():
        advice = _preset_advice(str(base))
        raise UserError(f"base = {base!r} is no preset, and only a preset can be", where=where, remedy=advice)
    return _layers_of_preset(base)


def _layers_of_preset(name: str) -> list[_Layer]:
    values = tomllib.loads(preset_text(name))
    base = values.pop("base", None)
    own = _Layer(f"preset {name}", values)
    if base is None:
        return [own]
    [parent] = _layers_of_preset(base)  # our own presets stand on one other at most
    return [parent, own]


def _preset_advice(name: str) -> str:
    known = preset_names()
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"presets are {', '.join(known)}"


def _parsed(text: str, *, where: str) -> Tree:
    try:
        return tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # not TOML, a number of thousands of digits, endless nesting
        raise UserError(f"is not valid TOML ({error})", where=where, remedy="mend that place") from error


def layer_of_override(override: str) -> _Layer:
    """The values of one `a.b=c`."""
    key, equals, text = override.partition("=")
    if not (equals and key.strip()):
        remedy = f"write it as in {_SET} optim.peak_lr=3e-5"
        raise UserError(f"{override!r} is not key=value", where=_SET, remedy=remedy)
    *path, last = key.strip().split(".")
    values: Tree = {last: _override_value(text.strip())}
    for part in reversed(path):
        values = {part: values}
    return _Layer(_SET, values)


def _override_value(text: str) -> Any:
    """The text as a TOML value, or as it is where it is a bare word."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:
        if text.startswith(("[", "{", '"', "'")):
            remedy = "write a list as [1, 2] and a table as { a = 1 }, in quotes for the shell"
            raise UserError(f"{text} is not valid TOML ({error})", where=_SET, remedy=remedy) from error
        return text
    return document["value"] if len(document) == 1 else text


def merge(values: Tree, more: Mapping[str, Any]) -> None:
    """Put values over others, table by table."""
    for key, value in more.items():
        held = values.get(key)
        if isinstance(held, dict) and isinstance(value, Mapping):
            merge(held, value)
        else:
            values[key] = value


def _is_replaced(key: str, fresh: Mapping[str, str]) -> bool:
    return any(f"{new}.".startswith(f"{key}.") for new in fresh)


def leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Every value that is no table, under its dotted key."""
    return dict(_leaves(tree, ""))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---- writing and comparing


def recipe_text(recipe: Recipe) -> str:
    """The recipe as complete TOML, every default written out; loading it gives an equal recipe."""
    return toml_text(recipe.model_dump())


def differences(a: Recipe, b: Recipe) -> list[str]:
    """For each dotted key on which the recipes differ, one line with the value in `a` and in `b`."""
    ours, theirs = leaves(a.model_dump()), leaves(b.model_dump())
    return [
        f"{key}: {value_text(ours[key])} against {value_text(theirs[key])}"
        for key in ours
        if ours[key] != theirs[key]
    ]
