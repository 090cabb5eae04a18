"""How a server is configured: its models, who may use it, and the limits of a request and of the queues."""

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
"""Origins that any site can bring about: a page in a sandbox says null."""
ANY_HOST = "*"
HOST = re.compile(r"[A-Za-z0-9._-]+")
EVERY_ADDRESS = ("0.0.0.0", "::", "")
"""Bound to one of these, a server listens at all addresses of its machine."""
UNSENDABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
"""Characters that an HTTP header cannot contain (RFC 9110, section 5.5), and bytes that are not UTF-8."""
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")
"""As browsers write it (RFC 6454, section 6.2), with * for all."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one request may hold, and how much may wait."""

    body_bytes: int = 2 * 2**20
    texts: int = 256
    """Of one request; OpenAI takes 2,048 and text-embeddings-inference 32."""
    characters: int = 50_000
    """Of one text: some thirty pages, for questions about long passages."""
    batch_tokens: int = 8192
    """So many tokens of several requests go through a model together; 1 turns batching off."""
    queue_tokens: int = 262_144
    """So many may wait for a model; beyond them, and beyond what can be answered in time, comes a 429."""
    queue_requests: int = 1024
    """So many may wait for a model."""
    connections: int = 4096
    """So many are open at a time, or as many as the system allows; the oldest idle one makes room."""
    open_requests: int = 4096
    """So many may be anywhere between their first byte and their last, slow senders among them."""
    held_bytes: int = 256 * 2**20
    """So many of unanswered requests are in memory at a time: usual ones are a few thousand each."""
    request_seconds: float = 30.0
    body_seconds: float = 10.0
    """For a request's body to arrive."""
    head_seconds: float = 10.0
    """For a request's line and headers to arrive."""
    drain_seconds: float = 60.0
    """For accepted requests to finish after SIGTERM."""


def share_of(limits: Limits, processes: int) -> Limits:
    """The limits of one of several HTTP processes, between which connections are spread evenly."""
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
        raise UserError("the key is blank", where=where, remedy="give a key, or unset it to serve anyone")
    if UNSENDABLE.search(key):
        what = "no HTTP header can carry this key"
        raise UserError(what, where=where, remedy="remove its line breaks and other control characters")
    return key


def allowed_hosts(bound: str, named: Sequence[str]) -> tuple[str, ...]:
    """The names in a Host header that mean a server which is bound to this address; none for any."""
    for name in named:
        if name != ANY_HOST and not HOST.fullmatch(name):
            remedy = "write the name alone, such as bert.example.org; * stands for any"
            raise UserError("is no name of a host", where=f"--allow-host {name}", remedy=remedy)
    if ANY_HOST in named:
        return ()
    own = socket.gethostname() if bound in EVERY_ADDRESS else bound
    return ("localhost", own, *named)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What to serve, and to whom."""

    models: dict[str, Path]
    """Folders by name; a request without a model goes to the first that can do what it asks for."""
    device: str = "auto"
    precision: "Precision" = "auto"
    base: Path | None = None
    """What the adapters among the models stand on, where it is not what they name."""
    api_key: str = field(default="", repr=False)
    """Empty: whoever reaches the port may use it."""
    allow_origins: tuple[str, ...] = ()
    """Web sites whose pages may send requests; none but the server's own by default."""
    allow_hosts: tuple[str, ...] = ()
    """Names by which requests may call this server in their Host header, beside addresses; none: any."""
    truncates: bool = False
    """Whether every text that is too long loses its end, for clients that cannot ask for it."""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not self.models:
            raise UserError("there is no model to serve", remedy="give --model FOLDER")
        for origin in self.allow_origins:
            self._check_origin(origin)

    def _check_origin(self, origin: str) -> None:
        where = f"--allow-origin {origin}"
        if not ORIGIN.fullmatch(origin):
            remedy = "write scheme and host in small letters and nothing behind: https://site.example"
            raise UserError("no browser names a site like this", where=where, remedy=remedy)
        if origin in FOR_ALL and not self.api_key:
            what = "every web site could ask this server through its visitors' browsers"
            raise UserError(what, where=where, remedy="name the sites, or set an API key")
