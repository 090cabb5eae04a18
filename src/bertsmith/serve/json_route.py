"""Routes that take one JSON object and return one: how a body is checked, and what is said of a wrong one.

A body is checked by pydantic alone, straight from its bytes. Only where it fails is it looked through again,
by the schema that the OpenAPI document shows, to say in one line what is expected where, and what came
instead; what was sent is named by its type, never quoted. pydantic's own list of errors names each option of
a union and, for a body that is wrong in a million places, each of them.
"""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from bertsmith.serve.api_errors import ApiError

JSON = b"application/json"
NOT_JSON = 'the body is not sent as JSON; add -H "Content-Type: application/json"'

LARGE_BODY = 2**16
"""Bytes; beyond them a body is checked in a thread, while others are answered."""
MAX_ITEMS = 150_000
"""Values in a body: 256 texts of 512 token ids are 131,072."""
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

Schema = Mapping[str, Any]
Location = tuple[str | int, ...]
MAX_NAME = 60

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


class JsonRoutes:
    """The FastAPI routes that take one JSON object, called by their paths; all else goes to the application.

    FastAPI describes these routes and answers for wrong methods and paths. Its own way from a request to a
    function (patterns tried one after the other, layers of middleware, requests and responses as objects)
    takes a quarter of the server's CPU time for a small request: `/next` with a toy model and 64 clients
    costs 1240 µs through it and 900 µs through this table, `/embed` 1560 and 1150.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[APIRoute]) -> None:
        self._app = app
        self._handlers = {route.path: json_handler(route) for route in routes if route.methods == {"POST"}}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose body comes in one message."""
        handler = self._handlers.get(scope["path"]) if scope["method"] == "POST" else None
        await (handler or self._app)(scope, receive, send)


def json_handler(route: APIRoute) -> ASGIApp:
    """A route as an ASGI application, by the annotations of its function."""
    endpoint, exclude_none = route.endpoint, route.response_model_exclude_none
    types = get_type_hints(endpoint)
    response_type = TypeAdapter(types.pop("return"))
    (request_type,) = types.values()

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        check_content_type(scope["headers"])
        content = (await receive())["body"]
        if len(content) <= LARGE_BODY:
            request = validated(request_type, content)
        else:
            check_items(content)
            request = await asyncio.to_thread(validated, request_type, content)
        result = await endpoint(request)
        body = response_type.dump_json(result, by_alias=True, exclude_none=exclude_none)
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", JSON)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return handle


def check_content_type(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Reject a body that is not declared as JSON."""
    # A page of another site can have its visitors' browsers send forms and plain texts, JSON only with leave.
    given = next((value for name, value in headers if name == b"content-type"), b"")
    kind = given.partition(b";")[0].strip().lower()
    if kind != JSON and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise ApiError(415, NOT_JSON)


def check_items(body: bytes) -> None:
    """Reject a body of more values than any request has; to parse and check each of them takes seconds."""
    if _separators(body) <= MAX_ITEMS:
        return
    quotes = body.count(b'"') - body.count(b'\\"')
    if quotes > 2 * MAX_ITEMS or _separators(STRING.sub(b"", body)) > MAX_ITEMS:
        raise ApiError(413, f"the body holds more than {MAX_ITEMS} values; send fewer texts at a time")


def _separators(body: bytes) -> int:
    return sum(map(body.count, (b",", b"[", b"{")))


def validated(request_type: type[BaseModel], body: bytes) -> BaseModel:
    """The request that a body holds."""
    try:
        return request_type.model_validate_json(body)
    except ValidationError:
        pass  # rare: it may look for reasons as long as it likes
    content = parsed(body)
    if message := error_in(request_type.model_json_schema(), content):
        raise ApiError(422, message)
    try:
        # Python's parser takes what pydantic's does not: lone surrogates, a byte-order mark, UTF-16.
        return request_type.model_validate(content)
    except ValidationError as error:
        raise ApiError(422, validator_message(error)) from error


def parsed(body: bytes) -> Any:
    """What a body holds, if it is JSON."""
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        _reject_broken(body, f"it breaks at line {error.lineno}, column {error.colno}")
    except UnicodeDecodeError:
        _reject_broken(body, "it is not UTF-8")
    except ValueError:
        _reject_broken(body, "a number in it is too long")
    except RecursionError:
        _reject_broken(body, "its brackets are nested too deeply")


def _reject_broken(body: bytes, reason: str) -> NoReturn:
    raise ApiError(
        422, f"the body is not JSON: {reason}" if body else "the body is empty; send a JSON object"
    )


# ---- what is wrong with a body, by its schema


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A value that is not what its location takes."""

    location: Location
    schema: Schema
    value: Any

    def line(self) -> str:
        """What is expected there, and what is there."""
        wanted, given = expected(self.schema), type_name(self.value)
        if "enum" in self.schema and isinstance(self.value, str):
            given = "another string"
        told = f"{format_location(self.location)}: expected {wanted}"
        return told if wanted.startswith(given) else f"{told}, got {given}"


def error_in(schema: Schema, body: Any) -> str | None:
    """What is wrong with a body, by the first thing that is; nothing where it fits the schema."""
    fields: Schema = schema["properties"]
    required = schema.get("required", ())
    if not isinstance(body, dict):
        return f"the body: expected a JSON object with {_join(required, 'and')}, got {type_name(body)}"
    if schema.get("additionalProperties") is False and (
        extra := [name for name in body if name not in fields]
    ):
        return f"{extra[0][:MAX_NAME]}: there is no such field; there are {_join(fields, 'and')}"
    for name in required:
        if name not in body:
            return f"{name}: is missing; expected {expected(fields[name])}"
    found = (mismatch(fields[name], body[name], (name,)) for name in fields if name in body)
    return next((each.line() for each in found if each), None)


def validator_message(error: ValidationError) -> str:
    """What pydantic found beyond the schema: where it is, for its own words are for programmers."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{format_location(first['loc'][:1])}: is nothing that can be read here"


def mismatch(schema: Schema, value: Any, location: Location) -> Mismatch | None:
    """The first location in a value that does not fit, or nothing."""
    if "anyOf" in schema:
        return _mismatch_of_all(schema, value, location)
    if schema.get("type") == "array" and isinstance(value, list) and _has_size(schema, value):
        items = schema["items"]
        unfit = ((number, each) for number, each in enumerate(value) if not _fits(items, each))
        found = (mismatch(items, each, (*location, number)) for number, each in unfit)
        return next((each for each in found if each), None)
    return None if _fits(schema, value) else Mismatch(location, schema, value)


def _mismatch_of_all(schema: Schema, value: Any, location: Location) -> Mismatch | None:
    """The mismatch of the option that is kept to the furthest, or nearest in kind: that one was meant."""
    furthest: Mismatch | None = None
    for option in schema["anyOf"]:
        found = mismatch(option, value, location)
        if found is None:
            return None
        if furthest is None or _nearness(found) > _nearness(furthest):
            furthest = found
    return furthest if furthest and furthest.location != location else Mismatch(location, schema, value)


def _nearness(found: Mismatch) -> tuple[tuple[int, ...], bool]:
    reached = tuple(part for part in found.location if isinstance(part, int))
    return reached, expected(found.schema).startswith(type_name(found.value))


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
    minimum, maximum = _range(schema)
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def _range(schema: Schema) -> tuple[int | None, int | None]:
    maximum = schema.get("maximum")
    if "exclusiveMaximum" in schema:
        maximum = schema["exclusiveMaximum"] - 1
    return schema.get("minimum"), maximum


def _has_size(schema: Schema, value: Sequence[Any]) -> bool:
    minimum, maximum = schema.get("minItems", 0), schema.get("maxItems", len(value))
    return bool(minimum <= len(value) <= maximum)


# ---- words


def format_location(location: Sequence[str | int]) -> str:
    """A location as programs write it, such as `texts[3]`."""
    steps = (f"[{part}]" if isinstance(part, int) else str(part)[:MAX_NAME] for part in location)
    return "".join(steps) or "the body"


def expected(schema: Schema, names: Mapping[str, str] = ONE) -> str:
    """What a location takes, in words; for many of it, with the other names."""
    if "anyOf" in schema:
        return _join([expected(option, names) for option in schema["anyOf"]], "or")
    if "enum" in schema:
        return _join([f'"{word}"' for word in schema["enum"]], "or")
    name = names[schema["type"]]
    if schema["type"] == "array":
        return f"{name} of {_size(schema)}{expected(schema['items'], MANY)}"
    return name + _bounds(schema)


def type_name(value: Any) -> str:
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
    minimum, maximum = schema.get("minItems", 0), schema.get("maxItems")
    if maximum is None:
        return f"{minimum} or more " if minimum > 1 else ""
    return f"{minimum} or {maximum} " if maximum == minimum + 1 else f"{maximum} "


def _bounds(schema: Schema) -> str:
    match _range(schema):
        case (None, None):
            return ""
        case (minimum, None):
            return f" of at least {minimum}"
        case (minimum, maximum):
            return f" from {minimum} to {maximum}"


def _join(words: Iterable[str], last: str) -> str:
    *before, end = words
    return f"{', '.join(before)} {last} {end}" if before else end
