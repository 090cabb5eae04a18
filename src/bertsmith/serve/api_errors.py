"""Errors of the API: a status, a type for programs, and a one-line message for people."""

from starlette.responses import JSONResponse, Response

MAX_MESSAGE = 400
INTERNAL_ERROR = "the server failed; its log has the details under this request id"

ERROR_TYPES = {
    400: "invalid_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_too_slow",
    413: "too_large",
    415: "unsupported_media_type",
    421: "misdirected",
    422: "invalid_request",
    429: "overloaded",
    500: "internal",
    503: "unavailable",
    504: "timeout",
}


class ApiError(Exception):
    """An error for the client: raised anywhere below the middleware, which turns it into a response."""

    def __init__(
        self, status: int, message: str, *, error_type: str = "", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.error_type = error_type or ERROR_TYPES[status]
        self.headers = headers or {}


def too_many_texts(count: int, *, limit: int) -> ApiError:
    """Return the error for a request with more texts than the server allows."""
    message = f"{count} texts in one request; this server accepts {limit}; send the rest in further requests"
    return ApiError(413, message)


def overloaded(retry_seconds: int) -> ApiError:
    """Return the error for a full queue, with the seconds after which to try again."""
    message = f"too many requests are waiting; try again in {retry_seconds} s"
    return ApiError(429, message, headers={"Retry-After": str(retry_seconds)})


def error_response(error: ApiError, request_id: str) -> Response:
    """Return the JSON response for an error."""
    content = {"message": one_line(error.message), "type": error.error_type, "request_id": request_id}
    return JSONResponse({"error": content}, error.status, headers=error.headers)


def one_line(text: str) -> str:
    """Return `text` on one line, shortened, so that every client can decode it."""
    # A JSON string may contain a lone surrogate, which UTF-8 cannot encode.
    plain = " ".join(text[: 2 * MAX_MESSAGE].encode("utf-8", "replace").decode("utf-8").split())
    return plain if len(plain) <= MAX_MESSAGE else f"{plain[:MAX_MESSAGE]} ..."
