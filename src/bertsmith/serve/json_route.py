"""Routes that exchange one JSON object for another: checks of the body, and messages about an invalid one.

A body is parsed once, and pydantic checks its content. If that fails, the content is compared with the schema
of the OpenAPI document. The message names in one line the place, the expected value and the sent one. A sent
value is named by its type, never quoted. pydantic's own errors name each option of a union.

Every step is linear in the size of the body. A call into C blocks all other threads, even the event loop's.
So values are counted before they are parsed, and a large reply is written in pieces.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, get_type_hints

import numpy as np
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json
from starlette.types import ASGIApp, Receive, Scope, Send

from bertsmith.serve.api_errors import ApiError

JSON = b"application/json"
NOT_JSON = 'the body is not sent as JSON; add -H "Content-Type: application/json"'

LARGE_BODY = 2**16
"""Bytes of a body above which it is read in a thread, while the event loop answers other requests."""
MAX_ITEMS = 150_000
"""Maximum number of values in a body: 256 texts of 512 token ids are 131,072."""
MAX_FIELDS = 10_000
"""Maximum number of fields in a body; the name of a field costs ten times as much as a number."""
PIECE_VALUES = 2**12
"""Number of values that are written as JSON by one call, in about a millisecond."""

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
    """FastAPI routes that take one JSON object, called by path; other requests go to the application.

    FastAPI describes these routes and answers for wrong methods and paths. Its own dispatch (patterns tried
    one after the other, layers of middleware, requests and responses as objects) takes a quarter of the
    server's CPU time for a small request. `/next` with a toy model and 64 clients costs 1240 µs through it
    and 900 µs through this table; `/embed` costs 1560 and 1150.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[APIRoute]) -> None:
        self._app = app
        # One thread for all requests: several would take the GIL from the event loop in turn.
        thread = ThreadPoolExecutor(1, thread_name_prefix="json")
        posts = [route for route in routes if route.methods == {"POST"}]
        self._handlers = {route.path: json_handler(route, thread) for route in posts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; its body must arrive in one message."""
        handler = self._handlers.get(scope["path"]) if scope["method"] == "POST" else None
        await (handler or self._app)(scope, receive, send)


def json_handler(route: APIRoute, thread: Executor) -> ASGIApp:
    """Return a route as an ASGI application, by the annotations of its function."""
    endpoint = route.endpoint
    types = {name: kind for name, kind in get_type_hints(endpoint).items() if name != "return"}
    assert len(types) == 1, f"{route.path}: {endpoint.__name__}() must take only the body, not {[*types]}"
    (request_type,) = types.values()
    write = partial(
        to_json,
        exclude_none=route.response_model_exclude_none,
        inf_nan_mode="null",
        fallback=lambda value: value.tolist(),  # numpy arrays and numbers
    )

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        check_content_type(scope["headers"])
        content, loop = (await receive())["body"], asyncio.get_running_loop()
        if len(content) <= LARGE_BODY:
            request = read_request(request_type, content)
        else:
            request = await loop.run_in_executor(thread, read_request, request_type, content)
        result = await endpoint(request)
        pieces = json_pieces(result, write)
        if is_large(result):
            body = await loop.run_in_executor(thread, b"".join, pieces)
        else:
            body = b"".join(pieces)
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", JSON)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return handle


def check_content_type(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Reject a body that is not declared as JSON."""
    # A page of another site can make its visitors' browsers send forms and plain text, but JSON only if
    # allowed.
    given = next((value for name, value in headers if name == b"content-type"), b"")
    kind = given.partition(b";")[0].strip().lower()
    if kind != JSON and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise ApiError(415, NOT_JSON)


# ---- from the bytes of a body to a request


def read_request(request_type: type[BaseModel], body: bytes) -> BaseModel:
    """Return the request that a body contains."""
    content = parsed(body)
    try:
        return request_type.model_validate(content)
    except ValidationError as error:
        message = error_in(schema_of(request_type), content) or validator_message(error)
        raise ApiError(422, message) from error


def parsed(body: bytes) -> Any:
    """Return the content of a body; reject it if it is not JSON or has too many values."""
    try:
        encoding = json.detect_encoding(body)
        text = body if encoding == "utf-8" else body.decode(encoding).encode()
        check_items(text)
        return from_json(text)
    except ValueError as error:
        if len(body) <= LARGE_BODY:
            # This parser accepts lone surrogates; texts that contain them are rejected later.
            with suppress(ValueError, RecursionError):
                return json.loads(body)
        reason = f"the body is not JSON: {error}" if body else "the body is empty; send a JSON object"
        raise ApiError(422, reason) from error


def check_items(body: bytes) -> None:
    """Reject a body with more values or fields than any request has, before parsing it."""
    if _has_few_items(body):
        return
    # Without escapes, every other piece between quotes is outside of strings. Each step is one linear call.
    # The count is exact as far as the body is valid JSON, and the parser stops after that.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    has_few_strings = plain.count(b'"') <= 2 * (MAX_ITEMS + MAX_FIELDS)
    if not (has_few_strings and _has_few_items(b"".join(plain.split(b'"')[::2]))):
        what = f"the body contains more than {MAX_ITEMS} values or {MAX_FIELDS} fields"
        raise ApiError(413, f"{what}; send fewer texts at a time")


def _has_few_items(text: bytes) -> bool:
    return sum(map(text.count, (b",", b"[", b"{"))) <= MAX_ITEMS and text.count(b":") <= MAX_FIELDS


@cache
def schema_of(request_type: type[BaseModel]) -> Schema:
    """Return the schema of a request, as the OpenAPI document shows it."""
    return request_type.model_json_schema()


# ---- from a result to the bytes of a reply


def json_pieces(value: Any, write: Callable[..., bytes]) -> Iterator[bytes]:
    """Yield the JSON of a result in pieces of about PIECE_VALUES values."""
    value = _opened(value)
    if not is_large(value):
        yield write(value)
    elif isinstance(value, dict):
        for number, (name, each) in enumerate(value.items()):
            yield (b"," if number else b"{") + to_json(name) + b":"
            yield from json_pieces(each, write)
        yield b"}"
    else:
        yield b"["
        yield from _item_pieces(value, write)
        yield b"]"


def _item_pieces(items: Sequence[Any], write: Callable[..., bytes]) -> Iterator[bytes]:
    if len(items) == 1:
        yield from json_pieces(items[0], write)
    elif is_large(items):
        middle = len(items) // 2
        yield from _item_pieces(items[:middle], write)
        yield b","
        yield from _item_pieces(items[middle:], write)
    else:
        yield write(items)[1:-1]


def is_large(value: Any) -> bool:
    """True if a result has more values than a piece; counting stops there."""
    waiting, room = [value], PIECE_VALUES
    while waiting and room >= 0:
        each = _opened(waiting.pop())
        if isinstance(each, np.ndarray):
            room -= each.size
        elif isinstance(each, dict | list | tuple):
            room -= len(each)
            inner = each.values() if isinstance(each, dict) else each
            waiting += [one for one in inner if not isinstance(one, str | float | int)] if room >= 0 else []
    return room < 0


def _opened(value: Any) -> Any:
    """Return the fields of an object as a dict, and anything else as it is."""
    if isinstance(value, BaseModel):
        return vars(value)
    names = getattr(value, "__dataclass_fields__", None)
    return value if names is None else {name: getattr(value, name) for name in names}


# ---- comparing a body with its schema


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A value that does not match the schema at its location."""

    location: Location
    schema: Schema
    value: Any

    def line(self) -> str:
        """Return a message: the expected type, and the sent one."""
        wanted, given = expected(self.schema), type_name(self.value)
        if "enum" in self.schema and isinstance(self.value, str):
            given = "another string"
        told = f"{format_location(self.location)}: expected {wanted}"
        return told if wanted.startswith(given) else f"{told}, got {given}"


def error_in(schema: Schema, body: Any) -> str | None:
    """Return a message about the first error in a body, or None if it matches the schema."""
    fields: Schema = schema["properties"]
    required = schema.get("required", ())
    if not isinstance(body, dict):
        return f"the body: expected a JSON object with {_join(required, 'and')}, got {type_name(body)}"
    if schema.get("additionalProperties") is False and (
        extra := [name for name in body if name not in fields]
    ):
        return f"{extra[0][:MAX_NAME]}: unknown field; the fields are {_join(fields, 'and')}"
    for name in required:
        if name not in body:
            return f"{name}: is missing; expected {expected(fields[name])}"
    found = (mismatch(fields[name], body[name], (name,)) for name in fields if name in body)
    return next((each.line() for each in found if each), None)


def validator_message(error: ValidationError) -> str:
    """Return only the location of an error beyond the schema: pydantic's own text is for programmers."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{format_location(first['loc'][:1])}: is not valid"


def mismatch(schema: Schema, value: Any, location: Location) -> Mismatch | None:
    """Return the first mismatch in a value, or None."""
    if "anyOf" in schema:
        return _mismatch_of_all(schema, value, location)
    if schema.get("type") == "array" and isinstance(value, list) and _has_size(schema, value):
        items = schema["items"]
        unfit = ((number, each) for number, each in enumerate(value) if not _fits(items, each))
        found = (mismatch(items, each, (*location, number)) for number, each in unfit)
        return next((each for each in found if each), None)
    return None if _fits(schema, value) else Mismatch(location, schema, value)


def _mismatch_of_all(schema: Schema, value: Any, location: Location) -> Mismatch | None:
    """Return the mismatch of the likeliest option: the one that matches furthest, or has the nearest type."""
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
    """True if a scalar matches the schema; `True` is not a whole number here."""
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
    """Return a location as in a program, for example `texts[3]`."""
    steps = (f"[{part}]" if isinstance(part, int) else str(part)[:MAX_NAME] for part in location)
    return "".join(steps) or "the body"


def expected(schema: Schema, names: Mapping[str, str] = ONE) -> str:
    """Return the expected type in words; `names` has them in singular or plural."""
    if "anyOf" in schema:
        return _join([expected(option, names) for option in schema["anyOf"]], "or")
    if "enum" in schema:
        return _join([f'"{word}"' for word in schema["enum"]], "or")
    name = names[schema["type"]]
    if schema["type"] == "array":
        return f"{name} of {_size(schema)}{expected(schema['items'], MANY)}"
    return name + _bounds(schema)


def type_name(value: Any) -> str:
    """Return the type of a value in words, without its content."""
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
