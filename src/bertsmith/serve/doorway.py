"""Requests that are sent away by their bytes alone: while all is full, a refusal must cost next to nothing.

Waking a task for a request and going through all that stands before an answer costs about as much as a small
request that is answered. What is spent on the refused is missing for the accepted.
"""

from functools import cache

from bertsmith.serve.gate import Ending, Gate, request_id_of, with_common_headers
from bertsmith.serve.plain import Plain, RawHeaders
from bertsmith.serve.refusals import crowded, error_reply

STATUS = 429
STATUS_LINE = b"HTTP/1.1 429 Too Many Requests\r\n"
BLANK = "~"
"""Stands for each letter of an id in a reply's form; nothing else in it is one."""


class Doorway:
    """Sends requests away while a gate would send away every one."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def turn_away(self, asked: Plain, headers: RawHeaders) -> bytes | None:
        """The reply, with these headers too; nothing where the request has to be looked at."""
        if not self._gate.is_crowded or self._gate.is_draining:
            return None
        request_id = request_id_of(asked.given_id)
        self._gate.record(Ending(request_id, "POST", self._gate.route_of(asked.path), STATUS, seconds=0.0))
        own = b"".join(b"%b: %b\r\n" % field for field in headers)
        form = reply_form(self._gate.retry_seconds(), len(request_id))
        return STATUS_LINE + own + form.replace(BLANK.encode() * len(request_id), request_id.encode())


@cache
def reply_form(seconds: int, id_length: int) -> bytes:
    """The refusal behind its status line, the same as the gate's, with blanks for the id."""
    request_id = BLANK * id_length
    reply = error_reply(crowded(seconds), request_id)
    head = b"".join(b"%b: %b\r\n" % field for field in with_common_headers(reply.raw_headers, request_id))
    return head + b"\r\n" + bytes(reply.body)
