"""Early rejection of prediction requests while no model has room, before any other work.

Time spent on rejected requests is missing for accepted ones. So most of them do not even reach
`LoadShedding`: the HTTP protocol writes an almost complete, prepared response instead of starting the
application.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from bertsmith.serve import middleware
from bertsmith.serve.api_errors import error_response, overloaded

ID_BLANK = b"~"
"""Placeholder for each letter of the request id in a prepared response, used nowhere else in it."""


class EarlyRejection:
    """Decides which requests to reject, and how; counts all of them, and logs one per second and route."""

    def __init__(
        self,
        load_shedding: middleware.LoadShedding,
        request_log: middleware.RequestLog,
        cors: middleware.Cors | None,
    ) -> None:
        self._load_shedding, self._request_log, self._cors = load_shedding, request_log, cors

    def of(self, scope: Mapping[str, Any]) -> bytes | None:
        """Return the response that rejects a request, from the headers on, or None if there may be room."""
        if not self._load_shedding.rejects(scope["method"]):
            return None
        headers: middleware.RawHeaders = scope["headers"]
        route = self._request_log.route_of(scope["path"])
        context = middleware.RequestContext(middleware.request_id_of(headers), route, status=429)
        head, body = prepared_rejection(self._load_shedding.retry_seconds(), len(context.request_id))
        request_id = context.request_id.encode()
        added = header_lines(self._cors.headers_for(headers)) if self._cors else b""
        self._request_log.record_early_rejection(context, scope["method"])
        return (head + added + b"\r\n" + body).replace(ID_BLANK * len(request_id), request_id)


@cache
def prepared_rejection(retry_seconds: int, id_length: int) -> tuple[bytes, bytes]:
    """Return the headers and body of a rejection, with placeholders for an id of this length."""
    blanks = ID_BLANK.decode() * id_length
    response = error_response(overloaded(retry_seconds), blanks)
    return header_lines(middleware.with_common_headers(response.raw_headers, blanks)), bytes(response.body)


def header_lines(headers: middleware.RawHeaders) -> bytes:
    """Return headers as they are sent."""
    return b"".join(b"%b: %b\r\n" % each for each in headers)
