"""What a recipe says, for people: every value with its origin and meaning, and the list of presets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.recipe.load import LoadedRecipe, load_recipe, preset_names, preset_text
from bertsmith.recipe.schema import ModelSection, Section
from bertsmith.recipe.toml_text import toml_text


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
    """Of the encoder and its pooler with the published vocabulary."""
    vocabulary: int
    summary: str


def settings_of(loaded: LoadedRecipe) -> list[Setting]:
    """Every value of a recipe with its origin and description, in the order of the schema."""
    return [
        Setting(key, value, loaded.origin(key), description)
        for key, value, description in _described(loaded.recipe, "")
    ]


def annotated_text(loaded: LoadedRecipe) -> str:
    """The complete recipe as TOML that can be loaded again, each value with its origin and description."""
    # A path may hold a line end; a comment must not.
    comments = {
        each.key: " ".join(f"{each.origin}: {each.description}".split()) for each in settings_of(loaded)
    }
    return toml_text(loaded.recipe.model_dump(), comments)


def preset_summaries() -> list[PresetSummary]:
    """All presets, smallest first within a family."""
    families: dict[str, list[PresetSummary]] = {model_type: [] for model_type in ARCHITECTURES}
    for name in preset_names():
        model = load_recipe(name).model
        vocabulary = published_vocabulary(model.type)
        first_line = preset_text(name).partition("\n")[0].removeprefix("# ")
        summary = PresetSummary(name, encoder_parameters(model, vocabulary), vocabulary, first_line)
        families[model.type].append(summary)
    return [each for of in families.values() for each in sorted(of, key=lambda each: each.parameters)]


def published_vocabulary(model_type: str) -> int:
    """Entries of the vocabulary that an architecture was published with."""
    pretraining = ARCHITECTURES[model_type].pretraining
    assert pretraining is not None, "presets start from scratch"
    return pretraining.vocabulary


def encoder_parameters(model: ModelSection, vocabulary: int) -> int:
    """The weights of the encoder and its pooler, by arithmetic alone: nothing is built."""
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
