"""HTTP connections that slow or silent clients cannot hold open."""

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from bertsmith.serve.gate import CUT
from bertsmith.serve.plain import Plain, PlainCycle, RawHeaders, plain_request

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope

FLUSH_SECONDS = 60.0
"""For a reply to be read, once its connection is to be closed."""


class Door(Protocol):
    """Where requests may be refused before anybody wakes for them."""

    def turn_away(self, asked: Plain, headers: RawHeaders) -> bytes | None:
        """The refusal of a request, with these headers too; nothing where it is to be looked at."""


def impatient(head_seconds: float, door: Door) -> type[H11Protocol]:
    """A protocol for which the line and the headers of a request must be there in this time."""
    return type("Impatient", (TimedProtocol,), {"head_seconds": head_seconds, "door": door})


class TimedProtocol(H11Protocol):
    """HTTP/1.1 with a clock that runs while no request is at work and something of one may have come."""

    head_seconds: ClassVar[float]
    door: ClassVar[Door]
    _deadline: asyncio.TimerHandle | None = None
    _flushing: asyncio.TimerHandle | None = None
    _held: bytes = b""
    """What came while a plain request was at work."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, CUT: transport.abort}
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        """Take what has come; a request whose head is complete stops the clock."""
        if isinstance(self.cycle, PlainCycle) and not self.cycle.response_complete:
            self._held += data  # the next request has to wait
            self.flow.pause_reading()
            return
        asked = plain_request(data) if self._is_blank() else None
        if asked is None:
            super().data_received(data)
        elif not self._has_turned_away(asked):
            self._begin(asked)
        if asked is None and self._is_blank():  # it was the rest of a request that is answered
            self._stop_clock()
            self._wait_for_another()
        elif asked is None and self._is_between_requests():
            self._start_clock()
        else:
            self._stop_clock()

    def on_response_complete(self) -> None:
        """Go on with what has come meanwhile."""
        super().on_response_complete()
        self._watch_closing()
        held, self._held = self._held, b""
        if held and not self.transport.is_closing():
            self.data_received(held)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._stop_clock()
        if self._flushing is not None:
            self._flushing.cancel()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, and close."""
        super().send_400_response(msg)
        self._watch_closing()

    def shutdown(self) -> None:
        """Close, once a request that is at work is answered."""
        super().shutdown()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """Cut off a line that is to be closed, where its last reply is never read."""
        # Otherwise it would stay for ever, closing, with the reply in memory.
        if self.transport.is_closing() and self._flushing is None:
            self._flushing = self.loop.call_later(FLUSH_SECONDS, self.transport.abort)

    def _wait_for_another(self) -> None:
        """Leave an idle line open for as long as after any reply."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _has_turned_away(self, asked: Plain) -> bool:
        """Whether a request is refused."""
        if self.flow.write_paused:  # whoever does not read refusals goes the long way, which waits for them
            return False
        reply = self.door.turn_away(asked, self.server_state.default_headers)
        if reply is None:
            return False
        self.transport.write(reply)
        self.on_response_complete()
        return True

    def _begin(self, asked: Plain) -> None:
        """Let the app answer, as the parent class does with a request that it has parsed."""
        self._unset_keepalive_if_required()
        self.scope = cast(
            "HTTPScope", {**asked.scope(), **self._line_scope(), "state": self.app_state.copy()}
        )
        cycle = PlainCycle(
            scope=self.scope,
            conn=self.conn,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            on_response=self.on_response_complete,
        )
        cycle.begin(asked.body)
        self.cycle = cycle
        task = self.loop.create_task(cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _line_scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
        }

    def _is_blank(self) -> bool:
        """Whether nothing of a request has come yet, and one may come."""
        # Behind a refusal the body may still be to come: then their side is not idle, whatever it looks like.
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_clock(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_seconds, self._hang_up)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _hang_up(self) -> None:
        self._deadline = None
        if self._is_between_requests():
            self.transport.abort()
