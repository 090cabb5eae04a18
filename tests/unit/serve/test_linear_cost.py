"""What a request costs grows with its size and no faster, whatever is sent to whichever route and field."""

import gc
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.linear_growth import slow_growth
from tests.unit.serve.hostile import ROUTES
from tests.unit.serve.serving import talk

BODY_SIZES = [15_000 * 2**power for power in range(8)]
TEXT_SIZES = [1000 * 2**power for power in range(6)]
MANY = b"," * 150_001
"""More values than a body may have: what counts them looks twice."""

UNITS = {
    "letters": "a",
    "words": "a ",
    "marks": "!",
    "spaces": " ",
    "accents": "e\u0301",
    "marks alone": "\u0301",
    "unseen": "\u200b",
    "ideographs": "\u4e2d",
    "flags": "\U0001f1e6",
    "masks": "[MASK] ",
    "halves of masks": "[MASK",
    "separators": ",[{:",
}
ESCAPES = {
    "quotes": b'\\"',
    "backslashes": b"\\\\",
    "quotes and separators": b'\\",[',
    "letters as escapes": b"\\u0041",
    "halves of characters": b"\\ud83d",
    "controls": b"\\u0000",
    "broken escapes": b"\\x",
    "no UTF-8": b"\xff",
}
STRINGS = {name: unit.encode() for name, unit in UNITS.items()} | ESCAPES
REPEATED = {
    "a list of strings": (b'["a"', b',"a"', b"]"),
    "an unclosed list of strings": (b'["a"', b',"a"', b""),
    "quotes": (b"", b'"', b""),
    "numbers": (b"[1", b",1", b"]"),
    "numbers and a string": (b"[1", b",1", b',"a"]'),
    "one long number": (b"1", b"1", b""),
    "long numbers": (b"[1", b"," + b"1" * 4000, b"]"),
    "a long fraction": (b"0.1", b"1", b""),
    "null": (b"[null", b",null", b"]"),
    "lists": (b"[[]", b",[]", b"]"),
    "pairs": (b'[["a","b"]', b',["a","b"]', b"]"),
    "lists of numbers": (b"[[1]", b",[1]", b"]"),
    "objects": (b"[{}", b",{}", b"]"),
    "one name": (b'{"a":1', b',"a":1', b"}"),
    "nested lists": (b"", b"[", b""),
    "nested objects": (b"", b'{"a":', b""),
    "alternating": (b"[", b'[{"a":', b""),
    "colons": (b"", b":", b""),
    "white space": (b"", b" \n", b'"a"'),
}


@dataclass(frozen=True)
class Case:
    """A field of a route, and what is put there as often as it takes to reach a size."""

    path: str
    field: str
    what: str
    begin: bytes
    unit: bytes
    end: bytes

    def body(self, size: int) -> bytes:
        others = {name: value for name, value in ROUTES[self.path].items() if name != self.field}
        head = json.dumps({**others, self.field: 0}).encode()[:-2] + self.begin
        return head + self.unit * (size // len(self.unit)) + self.end


def fields_of(application: Any) -> Iterator[tuple[str, str]]:
    """Each field of each route that takes one JSON object, by the document that clients read."""
    document = application._api.openapi()
    for path, operations in document["paths"].items():
        if "post" in operations:
            content = operations["post"]["requestBody"]["content"]["application/json"]
            name = content["schema"]["$ref"].rpartition("/")[2]
            yield from ((path, field) for field in document["components"]["schemas"][name]["properties"])


def body_cases(application: Any) -> list[Case]:
    """Every field, with strings that end and that do not, and with other values of every form."""
    forms = [(name, b'"', unit, b'"}') for name, unit in STRINGS.items()]
    forms += [(f"{name}, unclosed", b'"', unit, b"") for name, unit in STRINGS.items()]
    forms += [(f"{name} behind many values", b"[" + MANY + b'"', unit, b"") for name, unit in STRINGS.items()]
    forms += [(name, begin, unit, end + b"}") for name, (begin, unit, end) in REPEATED.items()]
    return [Case(path, field, *form) for path, field in fields_of(application) for form in forms]


def text_cases(application: Any) -> list[Case]:
    """Every field that holds a text or texts, with a text of each kind."""
    return [
        Case(path, field, name, around[0], unit.encode(), around[1])
        for path, field in fields_of(application)
        for around in [(b'["', b'"]}') if isinstance(ROUTES[path].get(field), list) else (b'"', b'"}')]
        for name, unit in UNITS.items()
        if field in ROUTES[path] and not isinstance(ROUTES[path][field], int)
    ]


async def slow_field(client: httpx.AsyncClient, case: Case, sizes: list[int]) -> str:
    """The costs of a case where they grow faster than its size; else nothing."""

    async def seconds(size):
        body, headers = case.body(size), {"content-type": "application/json"}
        begin = time.process_time()
        reply = await client.post(case.path, content=body, headers=headers)
        assert reply.status_code not in (400, 401, 415, 421, 500), reply.text
        return time.process_time() - begin

    costs = await slow_growth(seconds, sizes)
    return f"{case.path} {case.field}: {case.what}: {costs}" if costs else ""


def slow_case(application: Any, cases: list[Case], sizes: list[int]) -> str:
    """The first case whose cost grows faster than its size, if there is one."""

    async def say(client):
        for case in cases:
            gc.collect()  # the client leaves cycles behind, with bodies in them
            if told := await slow_field(client, case, sizes):
                return told
        return ""

    return talk(application, say)


def assert_linear(application: Any, cases: list[Case], sizes: list[int], *, known: list[Case], full: bool):
    """Of cases that were quadratic once, all sizes are measured each time; of others some, of some."""
    assert slow_case(application, known, sizes) == ""
    others = cases if full else random.Random(0).sample(cases, 20)
    assert slow_case(application, others, sizes if full else sizes[:-2]) == ""


def test_there_is_an_example_for_every_route(application):
    assert {path for path, _ in fields_of(application)} == set(ROUTES)


@pytest.mark.usefixtures("one_thread")
def test_a_body_of_twice_the_size_costs_twice_the_time(application, full):
    cases = body_cases(application)
    known = [case for case in cases if case.path == "/fill" and case.what == "quotes behind many values"][:1]
    assert_linear(application, cases, BODY_SIZES, known=known, full=full)


@pytest.mark.usefixtures("one_thread")
def test_a_text_of_twice_the_length_costs_twice_the_time(application, full):
    cases = text_cases(application)
    known = [case for case in cases if case.path == "/look/words" and case.what == "marks"]
    assert_linear(application, cases, TEXT_SIZES, known=known, full=full)
