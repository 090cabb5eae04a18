"""Log lines in JSON, on standard error: what was asked of whom and how it ended, never the texts."""

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("bertsmith.serve")

OURS, SERVERS = "bertsmith", "uvicorn"
INNERMOST = 8
"""Frames of a fault that are told; those further out are always the same."""


class JsonLines(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        facts: dict[str, Any] = getattr(record, "facts", {})
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **facts}
        if record.exc_info and record.exc_info[1] is not None:
            line |= failure_facts(record.exc_info[1])
        return json.dumps(line)


def log_request(facts: dict[str, Any]) -> None:
    """Note how a request ended."""
    # Not by `info`, which walks the stack for a caller that is always the same.
    if log.isEnabledFor(logging.INFO):
        where = (log.name, logging.INFO, __file__, 0)
        log.handle(log.makeRecord(*where, "request", (), None, extra={"facts": facts}))


def log_failure(failure: BaseException, request_id: str) -> None:
    """Note a fault of ours, where it happened, and in which request."""
    log.error("failure", extra={"facts": {"request_id": request_id, **failure_facts(failure)}})


def failure_facts(failure: BaseException) -> dict[str, Any]:
    """What a fault was and where; not its message, in which a text may be quoted."""
    frames = traceback.extract_tb(failure.__traceback__)[-INNERMOST:]
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return {"failure": type(failure).__name__, "places": places}


def write_json_lines() -> None:
    """Let everything that is logged come out as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in (OURS, SERVERS):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
