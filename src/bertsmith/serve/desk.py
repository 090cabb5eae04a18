"""The way of a question: from its body straight to its route.

The framework describes the routes, and answers all else; but what it does around each request costs several
times what the route itself does, and on a small machine that time is missing for the model. What it does with
a body that is wrong in a million places, which is to tell of each, takes many seconds and a gigabyte.
"""

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, get_type_hints

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from bertsmith.serve.mistakes import Schema, complaint, mistake
from bertsmith.serve.plain import RawHeaders
from bertsmith.serve.refusals import Refusal, error_reply, too_many

REQUEST_ID = "bertsmith.request_id"
"""Where the id stands in a request's scope."""
JSON_BODY = (b"content-type", b"application/json")
LONG_BODY = 2**16
"""Bytes from which on a body is looked through before it is checked: the check notes every single mistake."""
NOT_JSON = 'the body is not sent as JSON; add -H "Content-Type: application/json"'


@dataclass(frozen=True, slots=True)
class Errand:
    """A route that takes one JSON object, and how its reply is written."""

    run: Callable[[Any], Awaitable[Any]]
    ask: type[BaseModel]
    schema: Schema
    """Of what is asked, as the OpenAPI document shows it."""
    reply: TypeAdapter[Any]
    skips_none: bool

    def question(self, body: bytes, *, most_texts: int) -> BaseModel:
        """What a body asks."""
        content = parsed(body)
        if len(body) > LONG_BODY:
            refuse_many(content, most_texts)
            if wrong := mistake(self.schema, content):
                raise Refusal(422, wrong)
        try:
            return self.ask.model_validate(content)
        except ValidationError as error:
            raise Refusal(422, mistake(self.schema, content) or complaint(error)) from error

    def written(self, reply: Any) -> bytes:
        """The body of a reply."""
        return self.reply.dump_json(reply, by_alias=True, exclude_none=self.skips_none)


class Desk:
    """An app, and a short way to those of its routes that take a JSON object."""

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter], *, most_texts: int) -> None:
        self._app, self._most_texts = app, most_texts
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        self._errands = {route.path: errand_of(route) for route in routes if route.methods == {"POST"}}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose body comes in one piece."""
        errand = self._errand(scope)
        if errand is None:
            # So load balancers ask whether a server is there; what writes to the line leaves the body out.
            is_head = scope["type"] == "http" and scope["method"] == "HEAD"
            await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)
            return
        body = (await receive())["body"]
        try:
            refuse_other_kinds(scope["headers"])
            question = errand.question(body, most_texts=self._most_texts)
            reply = errand.written(await errand.run(question))
        except Refusal as refusal:
            await error_reply(refusal, scope[REQUEST_ID])(scope, receive, send)
            return
        headers = [(b"content-length", b"%d" % len(reply)), JSON_BODY]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    def _errand(self, scope: Scope) -> Errand | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        return self._errands.get(scope["path"])


def errand_of(route: APIRoute) -> Errand:
    """A route, as its function's annotations describe it."""
    kinds = get_type_hints(route.endpoint)
    reply = TypeAdapter(kinds.pop("return"))
    (ask,) = kinds.values()
    return Errand(route.endpoint, ask, ask.model_json_schema(), reply, route.response_model_exclude_none)


def refuse_other_kinds(headers: RawHeaders) -> None:
    """Stop at a body that is not said to be JSON."""
    # A page of another site can have its visitors' browsers send forms and plain texts, JSON only with leave.
    if JSON_BODY in headers:  # as nearly always
        return
    given = next((value for name, value in headers if name == b"content-type"), b"")
    kind = given.partition(b";")[0].strip().lower()
    if kind != JSON_BODY[1] and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise Refusal(415, NOT_JSON)


def refuse_many(content: Any, most: int) -> None:
    """Stop at more texts than are taken before any of them is looked at: it would hold up everybody else."""
    lists = [each for each in content.values() if isinstance(each, list)] if isinstance(content, dict) else []
    for values in lists:
        if len(values) > most and not isinstance(values[0], int):  # whole numbers are the tokens of one text
            raise too_many(len(values), most=most)


def parsed(body: bytes) -> Any:
    """What a body holds, if it is JSON."""
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        _refuse_broken(body, f"it breaks at line {error.lineno}, column {error.colno}")
    except UnicodeDecodeError:
        _refuse_broken(body, "it is not UTF-8")
    except ValueError:
        _refuse_broken(body, "a number in it is too long")
    except RecursionError:
        _refuse_broken(body, "its brackets are nested too deeply")


def _refuse_broken(body: bytes, reason: str) -> NoReturn:
    raise Refusal(422, f"the body is not JSON: {reason}" if body else "the body is empty; send a JSON object")
