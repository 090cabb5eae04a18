"""What every request passes, whatever it asks: its id, the key, the crowd, its body, its time, the log."""

import asyncio
import re
import secrets
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertsmith.serve.bodies import CLOSE, Bodies, Gone, NoRoom, whole_body
from bertsmith.serve.desk import REQUEST_ID
from bertsmith.serve.journal import log_failure, log_request
from bertsmith.serve.metrics import Metrics
from bertsmith.serve.plain import RawHeaders
from bertsmith.serve.refusals import OUR_FAULT, Refusal, crowded, error_reply
from bertsmith.serve.service import NOTE, Service
from bertsmith.serve.settings import Settings

HUNG_UP = 499
"""Status, in log and counts only, of a request whose sender did not wait; the number is nginx's."""
GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
ALWAYS_OPEN = ("/health", "/ready", "/", "/page")
"""For the machinery that watches a server, and for the page, which holds nothing of anyone."""
WHILE_DRAINING = ("/health", "/ready", "/metrics")
LISTED = "/v1/models"
"""Behind it stands the name of a model, or whatever was taken for one."""
ELSEWHERE = "elsewhere"
CUT = "bertsmith.cut"
"""Where a request's state holds the way to cut its line off at once."""


@dataclass(slots=True)
class Visit:
    """A request on its way."""

    scope: Scope
    send: Send
    request_id: str
    route: str
    begin: float = field(default_factory=time.monotonic)
    note: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    """Of the reply, once its head is on its way."""
    is_sending: bool = False
    is_answered: bool = False

    async def pass_on(self, message: Message) -> None:
        """Send a part of the reply, with the request's id in its head."""
        is_start = message["type"] == "http.response.start"
        if is_start:
            message["headers"] = with_common_headers(message["headers"], self.request_id)
        self.is_sending = True  # and stays so where it is given up
        await self.send(message)
        self.is_sending = False
        if is_start:
            self.status = message["status"]
        self.is_answered = not is_start and not message.get("more_body", False)

    def ending(self) -> "Ending":
        """How it ended, now that it has."""
        seconds = time.monotonic() - self.begin
        return Ending(
            self.request_id, self.scope["method"], self.route, self.status, seconds=seconds, note=self.note
        )


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended, for log and counts."""

    request_id: str
    method: str
    route: str
    status: int
    seconds: float
    note: dict[str, Any] = field(default_factory=dict)


class Gate:
    """An app, and what stands before it."""

    def __init__(self, app: ASGIApp, service: Service, *, settings: Settings, metrics: Metrics) -> None:
        self._app, self._service, self._settings, self._metrics = app, service, settings, metrics
        self.bodies = Bodies(settings.limits)
        self.open_requests = 0
        self.is_draining = False
        self.routes: frozenset[str] = frozenset()
        """Those that are told apart in log and counts; whatever else is asked for is one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and leave a line in the log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given_id = headers.get("x-request-id", "")
        visit = Visit(scope, send, request_id_of(given_id), self.route_of(scope["path"]))
        scope[REQUEST_ID] = visit.request_id
        self.open_requests += 1
        try:
            await self._answer_or_refuse(visit, receive, headers)
        except Gone:
            visit.status = HUNG_UP
        finally:
            self.open_requests -= 1
            self.record(visit.ending())

    @property
    def is_crowded(self) -> bool:
        """Whether a question would be refused whatever it asks."""
        too_many = self.open_requests > self._settings.limits.open_requests
        return too_many or self._service.models.are_full

    def retry_seconds(self) -> int:
        """When there should be room again."""
        return self._service.models.retry_seconds()

    async def _answer_or_refuse(self, visit: Visit, receive: Receive, headers: Headers) -> None:
        try:
            await self._answer(visit, receive, headers)
        except Refusal as refusal:
            reply = error_reply(refusal, visit.request_id)
            try:
                async with asyncio.timeout(self._settings.limits.request_seconds):
                    await reply(visit.scope, receive, visit.pass_on)
            except TimeoutError:
                await _cut_off(visit, receive)

    async def _answer(self, visit: Visit, receive: Receive, headers: Headers) -> None:
        self._refuse_closed(visit)
        if visit.scope["method"] == "POST" and self.is_crowded:  # even before the key: it must cost little
            raise crowded(self.retry_seconds())
        self._refuse_unknown(visit, headers)
        if visit.scope["method"] != "POST":
            await self._let_answer(visit, whole_body(b""), receive)
            return
        try:
            async with self.bodies.reading(receive, headers) as body:
                await self._let_answer(visit, whole_body(body), receive)
        except NoRoom:
            raise crowded(self.retry_seconds()) from None

    async def _let_answer(self, visit: Visit, body: Receive, line: Receive) -> None:
        """Let the app answer while its time lasts and the line to whoever asked holds."""
        NOTE.set(visit.note)
        answer = asyncio.create_task(_run(self._app, visit, body))
        hung_up = asyncio.create_task(_until_hung_up(line))
        seconds = self._settings.limits.request_seconds
        try:
            await asyncio.wait({answer, hung_up}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if visit.is_answered:
                await _ended(answer)
        finally:
            has_gone = hung_up.done()
            for task in (answer, hung_up):
                task.cancel()
        await _ended(answer)
        if answer.cancelled():
            await self._give_up(visit, line, has_gone=has_gone)
        elif failure := answer.exception():
            log_failure(failure, visit.request_id)
            if not visit.status:
                raise Refusal(500, OUR_FAULT)

    async def _give_up(self, visit: Visit, line: Receive, *, has_gone: bool) -> None:
        if has_gone:
            raise Gone
        if visit.is_sending:
            await _cut_off(visit, line)
        if not visit.status:
            raise Refusal(504, f"no answer within {self._settings.limits.request_seconds:g} s")

    def _refuse_closed(self, visit: Visit) -> None:
        if self.is_draining and visit.route not in WHILE_DRAINING:
            raise Refusal(503, "this server is shutting down", headers={**CLOSE, "Retry-After": "1"})

    def _refuse_unknown(self, visit: Visit, headers: Headers) -> None:
        key = self._settings.api_key
        if not key or visit.route in ALWAYS_OPEN:
            return
        given = headers.get("authorization", "")
        # Compared in constant time: how long it takes must not tell how much of a key is right.
        if not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
            fault = "the API key is wrong" if given else "this server asks for an API key"
            message = f"{fault}; send it as Authorization: Bearer KEY"
            raise Refusal(401, message, headers={"WWW-Authenticate": "Bearer"})

    def route_of(self, path: str) -> str:
        """The route of a path, by the name it has in log and counts."""
        if path.startswith("/page/"):
            return "/page"
        if path.startswith(f"{LISTED}/"):
            return f"{LISTED}/{{name}}"
        return path if path in self.routes else ELSEWHERE

    def record(self, ending: Ending) -> None:
        """Count a request that has ended, and leave a line in the log."""
        self._metrics.request(ending.route, ending.status, ending.seconds)
        log_request(
            {
                "request_id": ending.request_id,
                "method": ending.method,
                "route": ending.route,
                "status": ending.status,
                "seconds": round(ending.seconds, 4),
                **ending.note,
            }
        )


def request_id_of(given: str) -> str:
    """The id that a request brought, if it is a harmless one, or a new one."""
    return given if GOOD_ID.fullmatch(given) else uuid.uuid4().hex


def with_common_headers(headers: RawHeaders, request_id: str) -> RawHeaders:
    """The headers of a reply, and those that every reply carries."""
    common = [*headers, (b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
    is_kept = any(name == b"cache-control" for name, _ in headers)
    return common if is_kept else [*common, (b"cache-control", b"no-store")]


async def _run(app: ASGIApp, visit: Visit, body: Receive) -> None:
    await app(visit.scope, body, visit.pass_on)


async def _cut_off(visit: Visit, line: Receive) -> None:
    """Give up a line on which nobody reads: it would hold its replies in memory for ever."""
    if cut := visit.scope.get("state", {}).get(CUT):
        cut()
        await _until_hung_up(line)
    raise Gone


async def _ended(task: asyncio.Task[None]) -> None:
    if not task.done():  # to wait costs a turn of the loop even for what is done
        await asyncio.wait({task})


async def _until_hung_up(line: Receive) -> None:
    while (await line())["type"] != "http.disconnect":
        pass
