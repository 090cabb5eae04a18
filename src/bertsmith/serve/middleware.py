"""The ASGI middleware that every request passes before its route, outermost first.
RequestLog      the request id, the log line, the metrics, and every ApiError as a response
HostCheck       400 without exactly one valid Host header; 421 for a name that is not this server's
Draining        503 while the server shuts down
LoadShedding    429 while no model has room
ApiKey          401
BodyLimit       408 and 413: the body is read whole, in time, within its limit
Deadline        504; 499 if the client has gone; the work is cancelled
HeadAsGet       HEAD answered as GET


Ordered by cost: cheap checks run before expensive work. Most requests without room do not even get here:
`early_rejection.py`. Only HTTP requests do; the application passes ASGI's lifespan messages to its routes
directly.
"""

import asyncio
import ipaddress
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertsmith.serve.api_errors import INTERNAL_ERROR, ApiError, error_response, overloaded
from bertsmith.serve.batching import CONNECTION
from bertsmith.serve.model_registry import ModelRegistry
from bertsmith.serve.monitoring import Metrics, Repeats, log_failure, log_request
from bertsmith.serve.server_config import Limits

CLIENT_CLOSED_REQUEST = 499
"""Status, in log and metrics only, if the client did not wait; the number is nginx's."""
REJECTION_SECONDS = 1.0
"""Seconds between two log lines on early rejections of one route."""
VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
OPEN_ROUTES = ("/health", "/ready", "/", "/page")
"""Routes that need no key: for load balancers, and for the playground, which contains no private data."""
ROUTES_WHILE_DRAINING = ("/health", "/ready", "/metrics")
MODEL_ROUTE = "/v1/models"
"""Parent path of single models; the rest of a path is the model's name, as the client sent it."""
UNKNOWN_ROUTE = "elsewhere"
CLOSE = {"Connection": "close"}

MAX_HOST = 60
"""Maximum length of a quoted host name."""
HOST_HEADER = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]*)?", re.IGNORECASE)
"""An IPv6 address in brackets, or a name or IPv4 address, with or without a port."""
WITHOUT_HOST = ("0.9", "1.0")
"""Versions of HTTP that do not require a Host header: no browser sends them, but simple health checks do."""
MAX_DISCARDED = 64 * 2**20
"""Bytes of an overlong body that are still read: many clients read no response before they have sent all."""

ABORT = "bertsmith.abort"
"""Key in a request's state: the function that drops its connection at once."""
REQUEST_CONTEXT = "bertsmith.request"
"""Key in a request's scope: its `RequestContext`."""
LOG_FIELDS: ContextVar[dict[str, Any]] = ContextVar("log_fields")
"""Additional fields of the current request's log line: numbers and names, never its texts."""

RawHeaders = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client has closed the connection."""


@dataclass(slots=True)
class ServerStatus:
    """State that all requests share."""

    open_requests: int = 0
    """Number of requests between their first byte and their last."""
    is_draining: bool = False
    """True while accepted requests finish and no others are accepted."""


@dataclass(slots=True)
class RequestContext:
    """A request and the state of its response."""

    request_id: str
    route: str
    began: float = field(default_factory=time.monotonic)
    log_fields: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    """Status of the response, once its head is sent."""
    is_sending: bool = False
    """True while a part of the response waits for the client to read."""
    is_answered: bool = False


class RequestLog:
    """Gives each request an id and a context, counts and logs it, and turns errors into responses."""

    def __init__(
        self, app: ASGIApp, status: ServerStatus, metrics: Metrics, *, limits: Limits, routes: frozenset[str]
    ) -> None:
        self._app, self._status, self._metrics = app, status, metrics
        self._seconds, self._routes = limits.request_seconds, routes
        self._rejections = Repeats(REJECTION_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log it."""
        context = RequestContext(request_id_of(scope["headers"]), self.route_of(scope["path"]))
        scope[REQUEST_CONTEXT] = context
        LOG_FIELDS.set(context.log_fields)
        CONNECTION.set(scope.get("client"))

        async def send_on(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start:
                message["headers"] = with_common_headers(message["headers"], context.request_id)
            context.is_sending = True  # and remains so if the send is cancelled
            await send(message)
            context.is_sending = False
            if is_start:
                context.status = message["status"]
            context.is_answered = not is_start and not message.get("more_body", False)

        self._status.open_requests += 1
        try:
            await self._respond(scope, receive, send_on)
        except ClientGone:
            context.status = CLIENT_CLOSED_REQUEST
        finally:
            self._status.open_requests -= 1
            self.record(context, scope["method"])

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ApiError as error:
            await self._send_error(error, scope, receive, send)
        except ClientGone:
            raise
        except Exception as failure:
            context: RequestContext = scope[REQUEST_CONTEXT]
            log_failure(failure, context.request_id)
            if not context.status:
                await self._send_error(ApiError(500, INTERNAL_ERROR), scope, receive, send)

    async def _send_error(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(error, scope[REQUEST_CONTEXT].request_id)
        await send_in_time(response, scope, receive, send, seconds=self._seconds)

    def route_of(self, path: str) -> str:
        """Return the route of a path as log and metrics name it: one of a fixed set."""
        if path in self._routes:
            return path
        if path.startswith("/page/"):
            return "/page"
        return f"{MODEL_ROUTE}/{{name}}" if path.startswith(f"{MODEL_ROUTE}/") else UNKNOWN_ROUTE

    def record(self, context: RequestContext, method: str) -> None:
        """Count and log a request that has ended."""
        seconds = self._count(context)
        log_request(
            {
                "request_id": context.request_id,
                "method": method,
                "route": context.route,
                "status": context.status,
                "seconds": round(seconds, 4),
                **context.log_fields,
            }
        )

    def record_early_rejection(self, context: RequestContext, method: str) -> None:
        """Count a request that was rejected at once; log few, as a line takes longer than the rest."""
        left_out = self._rejections.left_out(context.route)
        if left_out is None:
            self._count(context)
        else:
            context.log_fields["left_out"] = left_out
            self.record(context, method)

    def _count(self, context: RequestContext) -> float:
        seconds = time.monotonic() - context.began
        self._metrics.count_request(context.route, context.status, seconds)
        return seconds


class HostCheck:
    """Accepts requests that name this server as their host, or any one host if no names are given.

    Another site can point its name at this machine (DNS rebinding). Its visitors' browsers then treat the
    server as the same origin as the site's pages, but they still send that name.
    """

    def __init__(self, app: ASGIApp, allow_hosts: Sequence[str]) -> None:
        self._app, self._allowed = app, frozenset(name.lower() for name in allow_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it is meant for this server."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if hosts or scope["http_version"] not in WITHOUT_HOST:
            self._check(hosts)
        await self._app(scope, receive, send)

    def _check(self, hosts: Sequence[bytes]) -> None:
        if len(hosts) != 1:
            message = f"the request has {len(hosts)} Host headers; send exactly one"
            raise ApiError(400, message, headers=CLOSE)
        name = host_name(hosts[0].decode("latin-1"))
        if not name:
            raise ApiError(400, "the Host header is invalid; send NAME or NAME:PORT", headers=CLOSE)
        if self._allowed and name not in self._allowed and not is_address(name):
            message = (
                f"this server is not called {name[:MAX_HOST]!r}; --allow-host NAME adds a name at its start"
            )
            raise ApiError(421, message, headers=CLOSE)


class Draining:
    """Rejects requests while the server shuts down."""

    def __init__(self, app: ASGIApp, status: ServerStatus) -> None:
        self._app, self._status = app, status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on unless the server drains."""
        if self._status.is_draining and scope[REQUEST_CONTEXT].route not in ROUTES_WHILE_DRAINING:
            raise ApiError(503, "this server is shutting down", headers={**CLOSE, "Retry-After": "1"})
        await self._app(scope, receive, send)


class LoadShedding:
    """Rejects prediction requests while all models are full, before it reads key and body.

    Requests that arrive here during overload came in a burst, parsed before its first request is counted, or
    behind another request of their connection.
    """

    def __init__(self, app: ASGIApp, status: ServerStatus, models: ModelRegistry, limits: Limits) -> None:
        self._app, self._status, self._models, self._limits = app, status, models, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if a model may have room for it."""
        if self.rejects(scope["method"]):
            raise overloaded(self.retry_seconds())
        await self._app(scope, receive, send)

    def rejects(self, method: str) -> bool:
        """True if the server is too full for a request; while draining, False: `Draining` rejects it."""
        return method == "POST" and not self._status.is_draining and self.is_overloaded

    @property
    def is_overloaded(self) -> bool:
        """True if every prediction request would be rejected."""
        return self._status.open_requests > self._limits.open_requests or self._models.are_full

    def retry_seconds(self) -> int:
        """Return the seconds until there should be room again."""
        return self._models.retry_seconds()


class ApiKey:
    """Accepts requests that contain the API key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it has the key or needs none."""
        if scope[REQUEST_CONTEXT].route not in OPEN_ROUTES:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            scheme, _, key = given.partition(b" ")
            # Compare in constant time: the duration must not reveal how much of a key is right.
            if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self._key):
                fault = "the API key is wrong" if given else "this server asks for an API key"
                message = f"{fault}; send it as Authorization: Bearer KEY"
                raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads each body whole before any other work, within limits of length, time and memory."""

    def __init__(self, app: ASGIApp, models: ModelRegistry, limits: Limits) -> None:
        self._app, self._models, self._limits = app, models, limits
        self._max_held = max(limits.held_bytes, limits.body_bytes)
        self.held_bytes = 0
        """Bytes of the bodies of all unanswered requests, including bodies that are still arriving."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body in one message; after it, `receive` waits for a disconnect."""
        parts: list[bytes] = []
        try:
            if scope["method"] == "POST":
                await self._read(scope, receive, parts)
            body = parts[0] if parts else b""
            await self._app(scope, with_body(body, receive), send)
        finally:
            self._release(parts)

    async def _read(self, scope: Scope, receive: Receive, parts: list[bytes]) -> None:
        headers, limits = Headers(scope=scope), self._limits
        announced = headers.get("content-length", "")
        if announced.isdecimal() and _is_hopeless(int(announced), headers, limits):
            raise self._too_large()
        try:
            async with asyncio.timeout(limits.body_seconds):
                await self._read_parts(receive, parts)
        except TimeoutError:
            message = f"the body took longer than {limits.body_seconds:g} s"
            raise ApiError(408, message, headers=CLOSE) from None

    async def _read_parts(self, receive: Receive, parts: list[bytes]) -> None:
        max_bytes = self._limits.body_bytes
        size, more, has_room = 0, True, True
        while more and size <= max(MAX_DISCARDED, max_bytes):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            has_room = has_room and self.held_bytes + len(part) <= self._max_held
            if has_room and size <= max_bytes:
                parts.append(part)
                self.held_bytes += len(part)
            else:  # read on, so that the client gets to read the response, but keep nothing
                self._release(parts)
        if size > max_bytes:
            raise self._too_large()
        if not has_room:
            raise overloaded(self._models.retry_seconds())
        parts[:] = [b"".join(parts)]  # once in memory, not twice

    def _release(self, parts: list[bytes]) -> None:
        self.held_bytes -= sum(map(len, parts))
        parts.clear()

    def _too_large(self) -> ApiError:
        message = f"the body is too large; this server accepts {self._limits.body_bytes} bytes"
        return ApiError(413, message, headers=CLOSE)


class Deadline:
    """Runs the app until its time is over or the client has gone; then cancels it."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._seconds = app, limits.request_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; its work can be cancelled at any await."""
        context: RequestContext = scope[REQUEST_CONTEXT]
        body = (await receive())["body"]
        deadline = asyncio.timeout(self._seconds)

        def expire_now(watch: asyncio.Task[None]) -> None:
            # uvicorn reports a disconnect after a complete response, too
            if not (watch.cancelled() or context.is_answered or deadline.expired()):
                deadline.reschedule(0.0)

        # The app runs in the request's own task, without a break until it waits for the model: another task
        # would let a burst of requests pass LoadShedding before any of them is queued.
        watch = asyncio.create_task(wait_for_disconnect(receive))
        watch.add_done_callback(expire_now)
        try:
            async with deadline:
                await self._app(scope, with_body(body, receive), send)
        except ApiError:
            raise
        except Exception:
            if not deadline.expired():
                raise
            await self._give_up(scope, receive, has_gone=watch.done())
        finally:
            watch.cancel()

    async def _give_up(self, scope: Scope, receive: Receive, *, has_gone: bool) -> None:
        context: RequestContext = scope[REQUEST_CONTEXT]
        if has_gone:
            raise ClientGone
        if context.is_sending:
            await abort_connection(scope, receive)
        if not context.status:
            raise ApiError(504, f"no answer within {self._seconds:g} s")


class HeadAsGet:
    """Answers HEAD, which load balancers send, as GET; the HTTP protocol drops the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a HEAD request on as GET."""
        is_head = scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)


class Cors(CORSMiddleware):
    """Lets pages of other sites send requests; outermost, so that they can read errors too."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the response to a browser's preflight request, which no other middleware sees."""
        response = super().preflight_response(request_headers)
        response.headers["x-request-id"] = request_id_of(request_headers.raw)
        return response

    def headers_for(self, request_headers: RawHeaders) -> RawHeaders:
        """Return the headers to add to a response that does not pass this middleware."""
        origin = Headers(raw=request_headers).get("origin")
        added = MutableHeaders({} if origin is None else self.simple_headers)
        if origin is not None and not self.allow_all_origins and self.is_allowed_origin(origin):
            self.allow_explicit_origin(added, origin)
        else:
            added.add_vary_header("Origin")
        return added.raw


def host_name(host: str) -> str:
    """Return the name or address in a Host header without its port, or "" if the header is invalid."""
    found = HOST_HEADER.fullmatch(host)
    return (found[1] or found[2]).lower().rstrip(".") if found else ""


def is_address(name: str) -> bool:
    """True if a host is named by its address, which other sites cannot point at this machine."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def request_id_of(headers: RawHeaders) -> str:
    """Return the id that a request contains, if it is valid, or a new one."""
    given = next((value.decode("latin-1") for name, value in headers if name == b"x-request-id"), "")
    return given if VALID_ID.fullmatch(given) else new_request_id()


def new_request_id() -> str:
    """Return a unique request id."""
    return secrets.token_hex(16)


def with_common_headers(headers: RawHeaders, request_id: str) -> RawHeaders:
    """Add the headers that every response has."""
    common = [*headers, (b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
    is_kept = any(name == b"cache-control" for name, _ in headers)
    return common if is_kept else [*common, (b"cache-control", b"no-store")]


def with_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields a body which was read before, then the connection's messages."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_on() -> Message:
        return next(messages, None) or await receive()

    return receive_on


async def send_in_time(
    response: ASGIApp, scope: Scope, receive: Receive, send: Send, *, seconds: float
) -> None:
    """Send a response; drop the connection if the client does not read it in this time."""
    try:
        async with asyncio.timeout(seconds):
            await response(scope, receive, send)
    except TimeoutError:
        await abort_connection(scope, receive)


async def abort_connection(scope: Scope, receive: Receive) -> None:
    """Drop a connection that the client does not read: it would keep its responses in memory for ever."""
    if abort := scope.get("state", {}).get(ABORT):
        abort()
        await wait_for_disconnect(receive)
    raise ClientGone


async def wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has gone, or has received its whole response."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_hopeless(announced: int, headers: Mapping[str, str], limits: Limits) -> bool:
    """True if a body is too long, and either not sent yet (Expect) or far too long to read."""
    return announced > limits.body_bytes and ("expect" in headers or announced > MAX_DISCARDED)
