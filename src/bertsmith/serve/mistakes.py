"""What is wrong with a body, in one line: the field, what is expected there, and what came instead.

What is expected is said by the schema that the OpenAPI document shows, so the two cannot disagree. What was
sent is named by its kind, never quoted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

Schema = Mapping[str, Any]
Place = tuple[str | int, ...]
LONGEST_NAME = 60

ONE = {
    "string": "a string",
    "integer": "a whole number",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
}
MANY = {
    "string": "strings",
    "integer": "whole numbers",
    "boolean": "true or false",
    "null": "null",
    "array": "lists",
}


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value that is not what its place takes."""

    place: Place
    schema: Schema
    value: Any

    def line(self) -> str:
        """What is expected there, and what is there."""
        wanted, given = expected(self.schema), kind_of(self.value)
        if "enum" in self.schema and isinstance(self.value, str):
            given = "another string"
        told = f"{written(self.place)}: expected {wanted}"
        return told if wanted.startswith(given) else f"{told}, got {given}"


def mistake(schema: Schema, body: Any) -> str | None:
    """What is wrong with a body, by the first thing that is; nothing where it fits the schema."""
    fields: Schema = schema["properties"]
    required = schema.get("required", ())
    if not isinstance(body, dict):
        return f"the body: expected a JSON object with {_listed(required, 'and')}, got {kind_of(body)}"
    if schema.get("additionalProperties") is False and (
        extra := [name for name in body if name not in fields]
    ):
        return f"{extra[0][:LONGEST_NAME]}: there is no such field; there are {_listed(fields, 'and')}"
    for name in required:
        if name not in body:
            return f"{name}: is missing; expected {expected(fields[name])}"
    found = (misfit(fields[name], body[name], (name,)) for name in fields if name in body)
    return next((each.line() for each in found if each), None)


def complaint(error: ValidationError) -> str:
    """What a check of ours found beyond the schema."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = written(first["loc"][:1])
    own = first.get("ctx", {}).get("error")
    return f"{place}: {own}" if isinstance(own, ValueError) else f"{place}: is nothing that can be read here"


def misfit(schema: Schema, value: Any, place: Place) -> Misfit | None:
    """The first place in a value that does not fit, or nothing."""
    if "anyOf" in schema:
        return _misfit_of_all(schema, value, place)
    if schema.get("type") == "array" and isinstance(value, list) and _has_size(schema, value):
        items = schema["items"]
        odd = ((number, each) for number, each in enumerate(value) if not _fits(items, each))
        found = (misfit(items, each, (*place, number)) for number, each in odd)
        return next((each for each in found if each), None)
    return None if _fits(schema, value) else Misfit(place, schema, value)


def _misfit_of_all(schema: Schema, value: Any, place: Place) -> Misfit | None:
    """The misfit of the option that is kept to the furthest, or nearest in kind: that one was meant."""
    furthest: Misfit | None = None
    for option in schema["anyOf"]:
        found = misfit(option, value, place)
        if found is None:
            return None
        if furthest is None or _nearness(found) > _nearness(furthest):
            furthest = found
    return furthest if furthest and furthest.place != place else Misfit(place, schema, value)


def _nearness(found: Misfit) -> tuple[tuple[int, ...], bool]:
    reached = tuple(part for part in found.place if isinstance(part, int))
    return reached, expected(found.schema).startswith(kind_of(found.value))


def _fits(schema: Schema, value: Any) -> bool:
    """Whether a value is a single one that fits; `True` is no whole number here."""
    match schema.get("type"):
        case "string":
            return isinstance(value, str) and value in schema.get("enum", (value,))
        case "integer":
            return type(value) is int and _is_in_range(schema, value)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
    return False


def _is_in_range(schema: Schema, value: int) -> bool:
    least, most = _range(schema)
    return (least is None or value >= least) and (most is None or value <= most)


def _range(schema: Schema) -> tuple[int | None, int | None]:
    most = schema.get("maximum")
    if "exclusiveMaximum" in schema:
        most = schema["exclusiveMaximum"] - 1
    return schema.get("minimum"), most


def _has_size(schema: Schema, value: Sequence[Any]) -> bool:
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
    return bool(least <= len(value) <= most)


# ---- words


def written(place: Sequence[str | int]) -> str:
    """A place as programs write it, such as `texts[3]`."""
    steps = (f"[{part}]" if isinstance(part, int) else str(part)[:LONGEST_NAME] for part in place)
    return "".join(steps) or "the body"


def expected(schema: Schema, names: Mapping[str, str] = ONE) -> str:
    """What a place takes, in words; for many of it, with the other names."""
    if "anyOf" in schema:
        return _listed([expected(option, names) for option in schema["anyOf"]], "or")
    if "enum" in schema:
        return _listed([f'"{word}"' for word in schema["enum"]], "or")
    name = names[schema["type"]]
    if schema["type"] == "array":
        return f"{name} of {_size(schema)}{expected(schema['items'], MANY)}"
    return name + _bounds(schema)


def kind_of(value: Any) -> str:
    """What a value is, without what it says."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return "an object"
        case str():
            return "a string"
        case int():
            return "a whole number"
    return "a decimal number"


def _size(schema: Schema) -> str:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if most is None:
        return f"{least} or more " if least > 1 else ""
    return f"{least} or {most} " if most == least + 1 else f"{most} "


def _bounds(schema: Schema) -> str:
    match _range(schema):
        case (None, None):
            return ""
        case (least, None):
            return f" of at least {least}"
        case (least, most):
            return f" from {least} to {most}"


def _listed(words: Iterable[str], last: str) -> str:
    *before, end = words
    return f"{', '.join(before)} {last} {end}" if before else end
