"""What the schema refuses, as one line for people: the key, the value, what is allowed, where it stands."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bertsmith.ground.errors import UserError
from bertsmith.recipe.schema import Recipe, Section
from bertsmith.recipe.toml_text import value_text

KeyPath = tuple[int | str, ...]

_LONGEST_VALUE = 80
_IN_WORDS = {
    "a valid string": "text",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
    "a valid dictionary": "a table",
}
_PYDANTICS_REASON = re.compile(r"(, (unable to|got a) | or instance of ).*")


def explained(
    error: ValidationError,
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    schema: type[BaseModel] = Recipe,
) -> UserError:
    """The first mistake; a key that does not exist comes first, because it often explains the others."""
    found = error.errors(include_url=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    path = _path_in(values, first)
    if first["type"] == "extra_forbidden":
        return _unknown(path, origins, schema)
    if first["type"] == "value_error":  # a rule between keys
        rule, _, remedy = first["msg"].removeprefix("Value error, ").partition("; ")
        where = _origins_of_rule(rule, origins) or _origin(path, origins)
        return UserError(rule, where=where, remedy=remedy)
    if first["type"] == "missing":
        return UserError(f"{_dotted(path)} is missing", where=_origin(path, origins), remedy="say its value")
    # A key of several types (a number, or a word) has one complaint for each.
    complaints = [each["msg"] for each in found if _path_in(values, each) == path]
    what = f"{_dotted(path)} = {_shown(first['input'])} is refused"
    allowed = _allowed(complaints)
    remedy = f"it should be {allowed}{_example(path, allowed, schema)}"
    return UserError(what, where=_origin(path, origins), remedy=remedy)


def _path_in(values: Any, error: ErrorDetails) -> KeyPath:
    """Where in the values the mistake is; pydantic adds a word for each type of a key that has several."""
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


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _allowed(complaints: list[str]) -> str:
    plain = (_PYDANTICS_REASON.sub("", each.removeprefix("Input should be ")) for each in complaints)
    return " or ".join(dict.fromkeys(_IN_WORDS.get(each, each) for each in plain))


def _example(path: KeyPath, allowed: str, schema: type[BaseModel]) -> str:
    """How a table of a list, or the whole list, is written, where the value should be one."""
    fields = _section_at(path, schema).model_fields.items()
    table = {name: field.examples[0] for name, field in fields if field.examples}
    if not table or allowed not in ("a table", "a list"):
        return ""
    return f" such as {value_text(table)}" if allowed == "a table" else f" such as [{value_text(table)}, ...]"


def _origin(path: KeyPath, origins: Mapping[str, str]) -> str:
    """Where the key was written: itself, the list around it, or the last of the keys inside it."""
    names = [str(part) for part in path]
    around = [".".join(names[:length]) for length in range(len(names), 0, -1)]
    inside = [key for key in origins if key.startswith(".".join([*names, ""]))]
    return next((origins[key] for key in (*around, *reversed(inside)) if key in origins), "")


def _origins_of_rule(rule: str, origins: Mapping[str, str]) -> str:
    """Where the keys that a broken rule names were written."""
    named = [key for key in origins if re.search(rf"\b{re.escape(key)}\b", rule)]
    return ", ".join(dict.fromkeys(origins[key] for key in named))


# ---- keys that do not exist


def _unknown(path: KeyPath, origins: Mapping[str, str], schema: type[BaseModel]) -> UserError:
    near = _nearest(path, schema)
    remedy = f"did you mean {near}?" if near else f"keys there are {', '.join(_fields_around(path, schema))}"
    return UserError(f"unknown key {_dotted(path)}", where=_origin(path, origins), remedy=remedy)


def _nearest(path: KeyPath, schema: type[BaseModel]) -> str:
    """The valid key that was probably meant, or nothing."""
    last = str(path[-1])
    if siblings := get_close_matches(last, _fields_around(path, schema), n=1):
        return _dotted((*path[:-1], siblings[0]))
    by_name = {key.rpartition(".")[2]: key for key in _all_keys(schema, "")}
    elsewhere = get_close_matches(last, by_name, n=1)
    return by_name[elsewhere[0]] if elsewhere else ""


def _fields_around(path: KeyPath, schema: type[BaseModel]) -> list[str]:
    """The keys that are valid where the path's last part stands."""
    return list(_section_at(path[:-1], schema).model_fields)


def _section_at(path: KeyPath, schema: type[BaseModel]) -> type[BaseModel]:
    """The section that a path leads into."""
    model = schema
    for part in path:
        if isinstance(part, str):
            model = _section_of(model, part) or model
    return model


def _section_of(model: type[BaseModel], field: str) -> type[Section] | None:
    """The section that a field holds, alone or in a list."""
    annotation = model.model_fields[field].annotation
    types = (annotation, *getattr(annotation, "__args__", ()))
    return next((each for each in types if isinstance(each, type) and issubclass(each, Section)), None)


def _all_keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _all_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
