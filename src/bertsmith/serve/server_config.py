"""Configuration of a server: its models, its users, and the limits of requests and queues."""

import math
import re
import socket
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Precision

FOR_ALL = ("*", "null")
"""Origins that any site can have: a sandboxed page sends null."""
ANY_HOST = "*"
HOST = re.compile(r"[A-Za-z0-9._-]+")
EVERY_ADDRESS = ("0.0.0.0", "::", "")
"""Addresses that make a server listen at all addresses of its machine."""
UNSENDABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
"""Characters that an HTTP header cannot contain (RFC 9110, section 5.5), and bytes that are not UTF-8."""
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")
"""An origin as browsers write it (RFC 6454, section 6.2), or * for all."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a single request, and of everything that waits."""

    body_bytes: int = 2 * 2**20
    texts: int = 256
    """Maximum texts of one request; OpenAI allows 2,048 and text-embeddings-inference 32."""
    characters: int = 50_000
    """Maximum characters of one text: some thirty pages, for questions about long passages."""
    batch_tokens: int = 8192
    """Maximum tokens of several requests that go through a model together; 1 turns batching off."""
    queue_tokens: int = 262_144
    """Maximum tokens that wait for a model; beyond them, or beyond what can be answered in time, reply
    429."""
    queue_requests: int = 1024
    """Maximum requests that wait for a model."""
    connections: int = 4096
    """Maximum open connections, or as many as the system allows; the longest idle one makes room."""
    open_requests: int = 4096
    """Maximum requests between their first byte and their last, including slow senders."""
    held_bytes: int = 256 * 2**20
    """Maximum bytes of unanswered requests in memory; usual requests have a few thousand each."""
    request_seconds: float = 30.0
    body_seconds: float = 10.0
    """Seconds for a request's body to arrive."""
    head_seconds: float = 10.0
    """Seconds for a request's line and headers to arrive."""
    drain_seconds: float = 60.0
    """Seconds for accepted requests to finish after SIGTERM."""


def share_of(limits: Limits, processes: int) -> Limits:
    """Return the limits of one of several HTTP processes, between which connections are spread evenly."""
    return replace(
        limits,
        connections=math.ceil(limits.connections / processes),
        open_requests=math.ceil(limits.open_requests / processes),
        held_bytes=limits.held_bytes // processes,
    )


def usable_key(given: str) -> str:
    """Return an API key without surrounding white space, which secret files add and headers drop."""
    key = given.strip(string.whitespace)
    where = "--api-key or BERTSMITH_API_KEY"
    if not key.strip():
        raise UserError("the key is blank", where=where, remedy="give a key, or unset it to serve everyone")
    if UNSENDABLE.search(key):
        what = "an HTTP header cannot contain this key"
        raise UserError(what, where=where, remedy="remove its line breaks and other control characters")
    return key


def allowed_hosts(bound: str, named: Sequence[str]) -> tuple[str, ...]:
    """Return the valid names in the Host header of a server that is bound to this address; () for any."""
    for name in named:
        if name != ANY_HOST and not HOST.fullmatch(name):
            remedy = "write only the name, for example bert.example.org; * means any"
            raise UserError("is not a host name", where=f"--allow-host {name}", remedy=remedy)
    if ANY_HOST in named:
        return ()
    own = socket.gethostname() if bound in EVERY_ADDRESS else bound
    return ("localhost", own, *named)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Models to serve, their users and limits."""

    models: dict[str, Path]
    """Folders by name; a request without a model uses the first one with the required ability."""
    device: str = "auto"
    precision: "Precision" = "auto"
    base: Path | None = None
    """Base model of the adapters, if it is not the one that they name."""
    api_key: str = field(default="", repr=False)
    """Key that requests must contain; if empty, everyone who reaches the port may use the server."""
    allow_origins: tuple[str, ...] = ()
    """Origins of other web sites that may send requests; by default only the server's own may."""
    allow_hosts: tuple[str, ...] = ()
    """Valid names in the Host header, besides addresses; if empty, any name."""
    truncates: bool = False
    """True to truncate every long text, for clients that cannot ask for it."""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not self.models:
            raise UserError("there are no models to serve", remedy="give --model FOLDER")
        for origin in self.allow_origins:
            self._check_origin(origin)

    def _check_origin(self, origin: str) -> None:
        where = f"--allow-origin {origin}"
        if not ORIGIN.fullmatch(origin):
            remedy = "write only scheme and host, in lower case: https://site.example"
            raise UserError("is not an origin as browsers send it", where=where, remedy=remedy)
        if origin in FOR_ALL and not self.api_key:
            what = "every web site could use this server through its visitors' browsers"
            raise UserError(what, where=where, remedy="name the sites, or set an API key")
