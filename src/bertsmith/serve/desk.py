"""The usual way of a question: from its body straight to its route.

The framework describes the routes, and looks at whatever is odd; but what it does around each request costs
several times what the route itself does, and on a small machine that time is missing for the model.
"""

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_type_hints

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from starlette.types import ASGIApp, Receive, Scope, Send

from bertsmith.serve.bodies import whole_body
from bertsmith.serve.refusals import Refusal, error_reply

REQUEST_ID = "bertsmith.request_id"
"""Where the id stands in a request's scope."""
JSON_BODY = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class Errand:
    """A route that takes one JSON object, and how its reply is written."""

    run: Callable[[Any], Awaitable[Any]]
    ask: type[BaseModel]
    reply: TypeAdapter[Any]
    skips_none: bool

    def question(self, body: bytes) -> BaseModel | None:
        """What a body asks; nothing where something is wrong with it."""
        try:
            return self.ask.model_validate(json.loads(body))
        except (ValueError, RecursionError):  # no JSON, no UTF-8, or not what the route takes
            return None

    def written(self, reply: Any) -> bytes:
        """The body of a reply."""
        return self.reply.dump_json(reply, by_alias=True, exclude_none=self.skips_none)


class Desk:
    """An app, and a short way to some of its routes for requests with nothing odd about them."""

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        self._app = app
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        self._errands = {route.path: errand_of(route) for route in routes if route.methods == {"POST"}}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose body comes in one piece."""
        errand = self._errand(scope)
        if errand is None:
            await self._app(scope, receive, send)
            return
        body = (await receive())["body"]
        question = errand.question(body)
        if question is None:  # the framework knows how to say why
            await self._app(scope, whole_body(body), send)
            return
        try:
            reply = errand.written(await errand.run(question))
        except Refusal as refusal:
            await error_reply(refusal, scope[REQUEST_ID])(scope, receive, send)
            return
        headers = [(b"content-length", b"%d" % len(reply)), JSON_BODY]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    def _errand(self, scope: Scope) -> Errand | None:
        if scope["type"] != "http" or scope["method"] != "POST" or JSON_BODY not in scope["headers"]:
            return None
        return self._errands.get(scope["path"])


def errand_of(route: APIRoute) -> Errand:
    """A route, as its function's annotations describe it."""
    kinds = get_type_hints(route.endpoint)
    reply = TypeAdapter(kinds.pop("return"))
    (ask,) = kinds.values()
    return Errand(route.endpoint, ask, reply, route.response_model_exclude_none)
