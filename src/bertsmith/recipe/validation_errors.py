"""Turn a schema error into one line: the key, its value, the allowed values, and the origin."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bertsmith.core.errors import MENTION, UserError, in_file
from bertsmith.recipe.schema import Recipe
from bertsmith.recipe.section import RuleError, Section
from bertsmith.recipe.toml_text import value_text

KeyPath = tuple[int | str, ...]

_MAX_VALUE = 80
_TYPES_IN_WORDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
"""Expected kind of value, by pydantic's name for the error."""


def user_error(
    error: ValidationError,
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    schema: type[BaseModel] = Recipe,
) -> UserError:
    """Return the first error, or an unknown key if there is one, because it often explains the others.

    An error of a file names settings as the file does.
    """
    found = _first_error(error, values, origins, schema)
    return found if MENTION.search(found.where) else found.spelled(in_file)


def _first_error(
    error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str], schema: type[BaseModel]
) -> UserError:
    found = error.errors(include_url=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    path = _path_in(values, first)
    if first["type"] == "extra_forbidden":
        return _unknown(path, origins, schema)
    rule = first["ctx"]["error"] if first["type"] == "value_error" else None
    if isinstance(rule, RuleError):
        where = ", ".join(dict.fromkeys(origins[key] for key in origins if key in rule.keys))
        return UserError(rule.what, where=where or _origin(path, origins), remedy=rule.remedy)
    if rule is not None:
        return UserError(f"{_dotted(path)}: {rule}", where=_origin(path, origins), remedy="correct the value")
    if first["type"] == "missing":
        return UserError(f"{_dotted(path)} is missing", where=_origin(path, origins), remedy="set it")
    # A key that allows several types (a number or a word) has one error for each.
    of_key = [each for each in found if _path_in(values, each) == path]
    types = (
        _TYPES_IN_WORDS.get(each["type"], each["msg"].removeprefix("Input should be ")) for each in of_key
    )
    allowed = " or ".join(dict.fromkeys(types))
    given = json.dumps(first["input"], ensure_ascii=False, default=str)
    shown = given if len(given) <= _MAX_VALUE else f"{given[:_MAX_VALUE]}..."
    remedy = f"it should be {allowed}{_example(path, allowed, schema)}"
    return UserError(f"{_dotted(path)} = {shown} is invalid", where=_origin(path, origins), remedy=remedy)


def file_error(
    error: ValidationError, values: Mapping[str, Any], schema: type[BaseModel], *, where: str, remedy: str
) -> UserError:
    """Return the first error in a file that is not a recipe; the remedy is one for the whole file."""
    found = user_error(error, values, {}, schema)
    expected = f"; {found.remedy}" if " is invalid" in found.what else ""
    return replace(found, what=found.what + expected, where=where, remedy=remedy)


def _path_in(values: Any, error: ErrorDetails) -> KeyPath:
    """Return the error's path in the values, without the words that pydantic adds for a key's types."""
    path: list[int | str] = []
    for part in error["loc"]:
        if isinstance(values, Mapping) and (part in values or error["type"] == "missing"):
            values = values.get(str(part))
        elif isinstance(values, Sequence) and isinstance(part, int):
            values = values[part]
        else:
            break
        path.append(part)
    return tuple(path)


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _example(path: KeyPath, allowed: str, schema: type[BaseModel]) -> str:
    """Return an example of a table, or of a list of tables, if one is expected."""
    fields = _section_at(path, schema).model_fields.items()
    table = {name: field.examples[0] for name, field in fields if field.examples}
    if not table or allowed not in ("a table", "a list"):
        return ""
    example = value_text(table)
    return f", for example {example}" if allowed == "a table" else f", for example [{example}, ...]"


def _origin(path: KeyPath, origins: Mapping[str, str]) -> str:
    """Return the origin of the key: itself, a list around it, or the last of the keys inside it."""
    names = [str(part) for part in path]
    around = [".".join(names[:length]) for length in range(len(names), 0, -1)]
    inside = [key for key in origins if key.startswith(".".join([*names, ""]))]
    return next((origins[key] for key in (*around, *reversed(inside)) if key in origins), "")


# ---- keys that do not exist


def _unknown(path: KeyPath, origins: Mapping[str, str], schema: type[BaseModel]) -> UserError:
    """Return the error about an unknown key, with the key that was probably meant."""
    last, around = str(path[-1]), list(_section_at(path[:-1], schema).model_fields)
    # First a similarly spelled key in the section, then the same name in another section.
    by_name = {key.rpartition(".")[2]: key for key in _all_keys(schema, "")}
    if siblings := get_close_matches(last, around, n=1):
        remedy = f"did you mean {_dotted((*path[:-1], siblings[0]))}?"
    elif elsewhere := get_close_matches(last, by_name, n=1):
        remedy = f"did you mean {by_name[elsewhere[0]]}?"
    else:
        remedy = f"keys there are {', '.join(around)}"
    return UserError(f"unknown key {_dotted(path)}", where=_origin(path, origins), remedy=remedy)


def _section_at(path: KeyPath, schema: type[BaseModel]) -> type[BaseModel]:
    """Return the section that a path leads into."""
    model = schema
    for part in path:
        if part not in model.model_fields:
            continue  # the place in a list, or the name of one of several tables
        annotation = model.model_fields[str(part)].annotation
        types = (annotation, *getattr(annotation, "__args__", ()))  # a section, or a list of sections
        sections = (each for each in types if isinstance(each, type) and issubclass(each, Section))
        model = next(sections, model)
    return model


def _all_keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _all_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
