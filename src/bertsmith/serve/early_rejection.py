"""While no model has room, requests for predictions are rejected at once, before anything is done for them.

What is spent on rejected requests is missing for the accepted ones. So most of them do not come as far as
`LoadShedding`: the HTTP protocol writes a response that is all but prepared, in place of starting the
application for a request.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from bertsmith.serve.api_errors import error_response, overloaded
from bertsmith.serve.middleware import (
    Cors,
    LoadShedding,
    RawHeaders,
    RequestContext,
    RequestLog,
    request_id_of,
    with_common_headers,
)

ID_BLANK = b"~"
"""Stands for each letter of the request id in a prepared response; nothing else in it is one."""


class EarlyRejection:
    """Says which requests are rejected, and how; counts all of them, and logs one in a second."""

    def __init__(self, load_shedding: LoadShedding, request_log: RequestLog, cors: Cors | None) -> None:
        self._load_shedding, self._request_log, self._cors = load_shedding, request_log, cors

    def of(self, scope: Mapping[str, Any]) -> bytes | None:
        """The response to a request, from the headers on, or none where there may be room for it."""
        if not self._load_shedding.rejects(scope["method"]):
            return None
        headers: RawHeaders = scope["headers"]
        route = self._request_log.route_of(scope["path"])
        context = RequestContext(request_id_of(headers), route, status=429)
        head, body = prepared_rejection(self._load_shedding.retry_seconds(), len(context.request_id))
        request_id = context.request_id.encode()
        added = header_lines(self._cors.headers_for(headers)) if self._cors else b""
        self._request_log.record_early_rejection(context, scope["method"])
        return (head + added + b"\r\n" + body).replace(ID_BLANK * len(request_id), request_id)


@cache
def prepared_rejection(retry_seconds: int, id_length: int) -> tuple[bytes, bytes]:
    """Headers and body of a rejection, with blanks for an id of this length."""
    blanks = ID_BLANK.decode() * id_length
    response = error_response(overloaded(retry_seconds), blanks)
    return header_lines(with_common_headers(response.raw_headers, blanks)), bytes(response.body)


def header_lines(headers: RawHeaders) -> bytes:
    """Headers as they are sent."""
    return b"".join(b"%b: %b\r\n" % each for each in headers)
