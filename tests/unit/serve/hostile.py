"""Requests that nobody means well: wrong types, deep JSON, broken UTF-8, far too much, odd headers."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

ROUTES = {
    "/fill": {"text": "the [MASK] sits"},
    "/next": {"first": "a cat", "second": "a dog"},
    "/classify": {"texts": ["a cat", "a dog"]},
    "/tag": {"texts": ["a cat in london"]},
    "/answer": {"question": "who?", "passage": "the cat"},
    "/choose": {"context": "a cat", "options": ["it sits", "it runs"]},
    "/compare": {"texts": ["a cat", "a dog"]},
    "/look/tokens": {"first": "a cat", "seed": 1},
    "/look/attention": {"first": "a cat"},
    "/look/senses": {"word": "cat", "sentences": ["a cat", "the cat"]},
    "/look/embedding": {"first": "a cat", "token": 1},
    "/look/heads": {"first": "a cat"},
    "/look/head": {"first": "a cat", "layer": 0, "head": 0},
    "/look/head-steps": {"first": "a cat", "layer": 0, "head": 0, "token": 1},
    "/look/similarity": {"texts": ["a cat", "a dog"]},
    "/look/guesses": {"text": "the [MASK] sits"},
    "/look/words": {"first": "a cat"},
    "/v1/embeddings": {"input": "a cat", "model": "toy"},
    "/embed": {"inputs": "a cat"},
    "/predict": {"inputs": "a cat"},
    "/rerank": {"query": "cat", "texts": ["a cat", "a dog"]},
}

ODD = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "\x00", "\ud800", "[MASK]", "[CLS][SEP][PAD]", "\u200b", "\u202e\u0301" * 50, "a" * 10_000),
    *("\N{FIRE}" * 3000, "%s%n{}{0}", "'; --", "../../etc/passwd", "<script>", "\r\nX-Odd: 1", "a\n" * 500),
    *([], {}, [[]], [None], [1], [[1, -1]], ["a", 1], ["a", ["b"]], [["a", "b", "c"]], ["a"] * 500),
    *({"a": 1}, {"__class__": "x"}, [{}], {"$ref": "#/x"}),
)


@dataclass(frozen=True)
class Hostile:
    """A request."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    method: str = "POST"


def hostile_requests(count: int, *, seed: int) -> Iterator[Hostile]:
    """So many of them, always the same ones; a few are very large."""
    chance = random.Random(seed)
    makers = (_odd_field, _odd_field, _odd_field, _odd_body, _broken_bytes, _deep, _odd_headers, _odd_method)
    for number in range(count):
        if number % 100 == 50:
            yield _huge(chance)
        else:
            yield chance.choice(makers)(chance)


def _route(chance: random.Random) -> str:
    return chance.choice(sorted(ROUTES))


def _json(value: object) -> bytes:
    return json.dumps(value).encode()  # half surrogates stay escaped, not-a-number stays NaN


def _odd_field(chance: random.Random) -> Hostile:
    path = _route(chance)
    body = dict(ROUTES[path])
    name = chance.choice(
        [*body, "model", "top", "best", "seed", "dimensions", "truncate", "\ud800", "x" * 5000]
    )
    body[name] = chance.choice(ODD)
    if chance.random() < 0.2:
        body.pop(chance.choice(sorted(ROUTES[path])), None)
    return Hostile(path, _json(body))


def _odd_body(chance: random.Random) -> Hostile:
    return Hostile(_route(chance), _json(chance.choice(ODD)))


def _broken_bytes(chance: random.Random) -> Hostile:
    path = _route(chance)
    body = bytearray(_json(ROUTES[path]))
    for _ in range(chance.randint(1, 8)):
        body[chance.randrange(len(body))] = chance.randrange(256)
    cut = bytes(body[: chance.randint(0, len(body))])
    return Hostile(path, chance.choice([bytes(body), cut, b"\xff\xfe" + body, b"\xef\xbb\xbf" + body]))


def _deep(chance: random.Random) -> Hostile:
    depth = chance.choice([50, 500, 5000, 100_000])
    opening, closing = chance.choice([(b"[", b"]"), (b'{"texts":', b"}"), (b'{"a":[', b"]}")])
    inner = opening * depth + b"1" + closing * chance.choice([depth, depth - 1])
    return Hostile(_route(chance), chance.choice([inner, b'{"texts": ' + inner + b"}"]))


def _odd_headers(chance: random.Random) -> Hostile:
    path = _route(chance)
    kinds = (
        "text/plain",
        "application/xml",
        "multipart/form-data; boundary=x",
        "",
        "application/json; charset=utf-16",
    )
    headers = {
        "content-type": chance.choice(kinds),
        "x-request-id": chance.choice(["ok-1", "x" * 5000, "{}", "a b"]),
        "accept": chance.choice(["*/*", "text/html", "nothing/at-all"]),
        "authorization": chance.choice(["", "Bearer", "Basic eDp5", "Bearer " + "k" * 5000]),
        "content-encoding": chance.choice(["identity", "gzip", "br"]),
    }
    return Hostile(path, _json(ROUTES[path]), headers)


def _odd_method(chance: random.Random) -> Hostile:
    paths = [
        *ROUTES,
        "/",
        "/health",
        "/models",
        "/page/x",
        "/page/%00",
        "//",
        "/%2e%2e/",
        "/a?b=%ff",
        "/metrics",
    ]
    method = chance.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "ODD"])
    return Hostile(chance.choice(paths), chance.choice([b"", b"{}"]), method=method)


def _huge(chance: random.Random) -> Hostile:
    filling = chance.choice([b"a", b"[", b'{"a":', b"\xff", b" ", b"1"])
    return Hostile(_route(chance), (filling * 10_000_000)[:10_000_000])
