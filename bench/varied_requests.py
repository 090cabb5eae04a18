"""Requests of all routes, lengths and models, some of them wrong, for the attack on memory (`attack.py`)."""

import math
import random
from typing import Any

WORDS = (
    "the",
    "a",
    "of",
    "film",
    "was",
    "not",
    "king",
    "river",
    "house",
    "bank",
    "paris",
    "water",
    "1911",
    "said",
)
ODD_BODIES: tuple[Any, ...] = (b"", b"{", b"\xff\xfe", b"[" * 5000, 1, [], {}, {"x" * 500: 1}, {"model": "x"})
ODD_VALUES: tuple[Any, ...] = (
    None,
    "",
    " ",
    -1,
    10**30,
    0.5,
    [],
    [""],
    [[]],
    {},
    "\u200b",
    "\ud800",
    "w " * 900,
)
PAGES = ("/", "/health", "/ready", "/models", "/metrics", "/openapi.json", "/v1/models/own", "/page/app.js")
OF_TINY_PAIRS = ("/predict", "/rerank")
NOT_OF_TINY = ("/classify", "/tag", "/answer", "/choose", "/look/words")


def text_of(chance: random.Random, longest: float) -> str:
    """Return a text of up to `longest` words, more often a short one; one word in eight is unique."""
    count = int(2 ** chance.uniform(0, math.log2(longest)))
    words = (f"{chance.getrandbits(64):x}"[: chance.randint(1, 16)] for _ in range(count))
    return " ".join(word if chance.random() < 0.125 else chance.choice(WORDS) for word in words)


def varied_request(chance: random.Random) -> tuple[str, Any]:
    """Return a path and a body for it (None: GET); one in seven is wrong, one in twenty for a usual model."""
    is_tiny, number = chance.random() < 0.95, chance.randrange(12)
    longest = 450 if is_tiny else 60

    def text() -> str:
        return text_of(chance, longest)

    def texts() -> list[str]:
        return [text() for _ in range(chance.choice([2, 2, 2, 3]))]

    one, pair = {"first": text_of(chance, 60)}, {"first": text(), "second": text_of(chance, 40)}
    head, masked = {"layer": number % 2, "head": number % 2}, f"{text()} [MASK] {text_of(chance, 20)}"
    bodies: dict[str, dict[str, Any]] = {
        "/fill": {"text": masked, "top": number + 1},
        "/next": pair,
        "/classify": {"texts": [text_of(chance, 40)]},
        "/tag": {"texts": [text_of(chance, 40)]},
        "/answer": {"question": "who was the king", "passage": text_of(chance, 60), "best": number + 1},
        "/choose": {"context": text(), "options": texts()},
        "/compare": {"texts": texts()},
        "/look/tokens": {**one, "seed": number},
        "/look/attention": {"first": text_of(chance, 20)},
        "/look/embedding": {**pair, "token": number},
        "/look/heads": one,
        "/look/head": one | head,
        "/look/head-steps": {**pair, **head, "token": number},
        "/look/senses": {"word": chance.choice(WORDS), "sentences": texts()},
        "/look/similarity": {"texts": texts()},
        "/look/guesses": {"text": masked[-100:], "top": number + 1},
        "/look/words": {"first": text_of(chance, 8)},
        "/v1/embeddings": {"input": chance.choice([texts(), [chance.randrange(9000) for _ in range(50)]])},
        "/embed": {"inputs": texts()},
        "/predict": {"inputs": [[text(), text_of(chance, 40)]]},
        "/rerank": {"query": text_of(chance, 20), "texts": texts()},
    }
    path = chance.choice([path for path in bodies if not (is_tiny and path in NOT_OF_TINY)])
    body, kind = bodies[path], chance.random()
    if is_tiny:
        body["model"] = "tiny-pairs" if path in OF_TINY_PAIRS else "tiny"
    elif path in OF_TINY_PAIRS:
        body["model"] = "pairs"
    if kind < 0.05:
        return path, chance.choice(ODD_BODIES)
    if kind < 0.1:
        return path, body | {chance.choice([*body, "model", "truncate", "odd"]): chance.choice(ODD_VALUES)}
    if kind < 0.15:
        return chance.choice([*PAGES, f"/nowhere/{chance.getrandbits(64):x}"]), None
    return path, body
