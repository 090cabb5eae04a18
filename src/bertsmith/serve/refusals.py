"""Every way a request can fail: a status, a kind for programs, and one line for people."""

from starlette.responses import JSONResponse, Response

from bertsmith.ground.errors import UserError

LONGEST_MESSAGE = 400
OUR_FAULT = "something went wrong here; the log has it under this request id"

KINDS = {
    400: "invalid_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_too_slow",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    429: "overloaded",
    500: "internal",
    503: "unavailable",
    504: "timeout",
}


class Refusal(Exception):
    """A request that is not answered, and why."""

    error: UserError | None = None
    """What the model said, whose words for the place are not those of the request."""

    def __init__(
        self, status: int, message: str, *, kind: str = "", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.kind = kind or KINDS[status]
        self.headers = headers or {}


def refusal_of(error: UserError) -> Refusal:
    """A mistake in what was sent, as the caller is told of it."""
    refusal = Refusal(422, error.line())
    refusal.error = error
    return refusal


def too_many(count: int, *, most: int) -> Refusal:
    """The refusal of more texts than a request may hold."""
    message = f"{count} texts in one request; this server takes {most}; send the rest in further requests"
    return Refusal(413, message)


def crowded(seconds: int) -> Refusal:
    """That too much is waiting, and when to try again."""
    message = f"too many requests are waiting; try again in {seconds} s"
    return Refusal(429, message, headers={"Retry-After": str(seconds)})


def error_reply(refusal: Refusal, request_id: str) -> Response:
    """The reply to a request that failed."""
    message = one_line(refusal.message)
    content = {"message": message, "type": refusal.kind, "request_id": request_id}
    return JSONResponse({"error": content}, refusal.status, headers=refusal.headers)


def one_line(text: str) -> str:
    """A message of one line that every client can decode, whatever was sent in it."""
    # A JSON string may hold half a surrogate pair, which has no UTF-8 form.
    plain = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    return plain if len(plain) <= LONGEST_MESSAGE else f"{plain[:LONGEST_MESSAGE]} ..."
