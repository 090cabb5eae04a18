"""The marker `clocks`: tests that touch clocks, processes, threads or sockets, found by what they name."""

import dis
import sys
from collections.abc import Iterator
from functools import cache
from inspect import unwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

TIMED = {"_thread", "asyncio", "concurrent", "http", "httpx", "multiprocessing", "openai", "playwright"}
TIMED |= {"queue", "select", "signal", "socket", "subprocess", "threading", "time", "urllib", "uvicorn"}
"""Modules whose results depend on the moment."""


def touches_clocks(item: pytest.Item) -> bool:
    """Whether the test, a fixture it uses or a helper of theirs names one of the modules above.

    Of the package itself it counts what a test names directly: a module that imports one of them.
    """
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    used = [each.func for definitions in fixtures for each in definitions]
    return any(_touches(each) for each in (item.function, *used))  # type: ignore[attr-defined]


@cache
def _touches(start: Any) -> bool:
    waiting, seen = [start], set[int]()
    while waiting:
        each = unwrap(waiting.pop())
        if id(each) in seen:
            continue
        seen.add(id(each))
        if _is_timed(each):
            return True
        if (getattr(each, "__module__", None) or "").partition(".")[0] == "tests":
            waiting += _named(each)
    return False


def _is_timed(each: Any) -> bool:
    name = each.__name__ if isinstance(each, ModuleType) else getattr(each, "__module__", None) or ""
    package = name.partition(".")[0]
    if package != "bertsmith" or isinstance(each, ModuleType):
        return package in TIMED
    # Nearly every module of the package tells how many seconds something took.
    inside = vars(sys.modules[name]).values()
    modules = {it.__name__.partition(".")[0] for it in inside if isinstance(it, ModuleType)}
    return bool(modules & (TIMED - {"time"}))


def _named(each: Any) -> Iterator[Any]:
    """Everything that a function, or the methods of a class, call by a name."""
    if isinstance(each, type):
        yield from vars(each).values()
    if isinstance(each, FunctionType):
        for code in _codes(each.__code__):
            known = each.__globals__
            yield from (known[name] for name in code.co_names if name in known)
            found = (it.argval for it in dis.get_instructions(code) if it.opname == "IMPORT_NAME")
            yield from (sys.modules[name] for name in found if name in sys.modules)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
