"""HTTP connections that slow or silent clients cannot hold open."""

import asyncio
from collections.abc import Iterable
from typing import ClassVar, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

FLUSH_SECONDS = 60.0
"""For a reply to be read, once its connection is to be closed."""


class Door(Protocol):
    """Where requests may be refused before they are parsed."""

    def turn_away(self, data: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """The refusal of a whole request, with these headers too; nothing where it is to be parsed."""


def impatient(head_seconds: float, door: Door) -> type[H11Protocol]:
    """A protocol for which the line and the headers of a request must be there in this time."""
    return type("Impatient", (TimedProtocol,), {"head_seconds": head_seconds, "door": door})


class TimedProtocol(H11Protocol):
    """HTTP/1.1 with a clock that runs while no request is at work and something of one may have come."""

    head_seconds: ClassVar[float]
    door: ClassVar[Door]
    _deadline: asyncio.TimerHandle | None = None
    _flushing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        """Take what has come; a request whose head is complete stops the clock."""
        if self._is_between_requests():
            if self._has_turned_away(data):
                return
            self._start_clock()
        super().data_received(data)
        if not self._is_between_requests():
            self._stop_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._stop_clock()
        if self._flushing is not None:
            self._flushing.cancel()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, and cut it off where the last reply is never read."""
        super().timeout_keep_alive_handler()
        # Otherwise it would stay for ever, closing, with the reply in memory.
        self._flushing = self.loop.call_later(FLUSH_SECONDS, self.transport.abort)

    def _has_turned_away(self, data: bytes) -> bool:
        """Whether it was a whole request, and is refused."""
        # Whoever does not read the refusals goes the long way, which waits for its reader.
        if not self._is_blank() or self.flow.write_paused or self.transport.is_closing():
            return False
        reply = self.door.turn_away(data, self.server_state.default_headers)
        if reply is None:
            return False
        self._stop_clock()
        self.transport.write(reply)
        self.on_response_complete()
        return True

    def _is_blank(self) -> bool:
        """Whether nothing of a request has come yet."""
        waits = self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE
        return waits and not self.conn.trailing_data[0]

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
