"""Bodies are bounded: each by itself, in what is taken in for nothing, and all together."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from bertsmith.serve.api_errors import ApiError
from bertsmith.serve.middleware import BodyLimit, ClientGone
from bertsmith.serve.server_config import Limits
from tests.unit.serve.serving import Slowly, application_of, error_of, talk, until

MEBIBYTE = bytes(2**20)
LIMITS = Limits(body_bytes=100, body_seconds=0.2)
JSON = {"content-type": "application/json"}


class Sender:
    """Sends parts, and counts those that were taken."""

    def __init__(self, *parts, then=None):
        self._parts, self._then = list(parts), then
        self.taken = 0

    async def __call__(self):
        if self.taken == len(self._parts):
            await (self._then or asyncio.Event()).wait()
            return {"type": "http.disconnect"}
        self.taken += 1
        more = self._then is not None or self.taken < len(self._parts)
        return {"type": "http.request", "body": self._parts[self.taken - 1], "more_body": more}


class Busy:
    """Models that tell whoever finds no room to come again."""

    def retry_seconds(self):
        return 1


def limit_of(limits):
    """The middleware, before an app that gets the scope's own function."""

    async def app(scope, receive, send):
        await scope["app"](receive)

    return BodyLimit(app, Busy(), limits)


@asynccontextmanager
async def reading(limit, sender, headers):
    """The body of a request that is being answered."""
    body, done = asyncio.get_running_loop().create_future(), asyncio.Event()

    async def app(receive):
        body.set_result((await receive())["body"])
        await done.wait()

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "headers": raw, "app": app}
    request = asyncio.create_task(limit(scope, sender, None))
    await asyncio.wait({body, request}, return_when=asyncio.FIRST_COMPLETED)
    if request.done():
        request.result()
    try:
        yield body.result()
    finally:
        done.set()
        await request


async def read(limit, sender, **headers):
    async with reading(limit, sender, headers) as body:
        return body


@pytest.fixture
def small():
    """Room for 250 bytes of bodies of 100."""
    return limit_of(replace(LIMITS, held_bytes=250))


def test_a_body_is_held_while_it_is_worked_on_and_no_longer(small):
    async def say():
        async with reading(small, Sender(b"ab", b"", b"c"), {}) as body:
            assert (body, small.held_bytes) == (b"abc", 3)
        assert small.held_bytes == 0

    asyncio.run(say())


def test_there_is_room_for_so_many_bytes_of_all_together_and_no_more(small):
    async def say():
        first, second, third = Sender(b"x" * 100), Sender(b"x" * 100), Sender(b"x" * 50)
        async with reading(small, first, {}), reading(small, second, {}), reading(small, third, {}):
            late = Sender(b"x")
            with pytest.raises(ApiError, match="too many requests are waiting"):
                await read(small, late)
            assert small.held_bytes == 250
        assert await read(small, Sender(b"x")) == b"x"

    asyncio.run(say())


def test_a_body_without_room_is_taken_in_to_its_end_but_not_kept(small):
    async def say():
        async with reading(small, Sender(b"x" * 100), {}), reading(small, Sender(b"x" * 90), {}):
            late = Sender(b"x" * 40, b"x" * 40, b"x")
            with pytest.raises(ApiError, match="too many requests are waiting"):
                await read(small, late)
            assert (late.taken, small.held_bytes) == (3, 190)

    asyncio.run(say())


@pytest.mark.parametrize("end", ["late", "gone", "long"])
def test_what_was_held_of_a_body_that_never_came_whole_is_let_go(end, small):
    async def say():
        gone = asyncio.Event()
        if end == "gone":
            gone.set()
        parts = [b"x" * 60] * (2 if end == "long" else 1)
        sender = Sender(*parts, then=None if end == "long" else gone)
        with pytest.raises((ApiError, ClientGone)):
            await read(small, sender)
        assert small.held_bytes == 0

    asyncio.run(say())


def test_a_body_as_long_as_one_may_be_always_has_room_by_itself():
    assert asyncio.run(read(limit_of(replace(LIMITS, held_bytes=10)), Sender(b"x" * 100))) == b"x" * 100


def test_64_mebibytes_of_a_body_that_is_too_long_are_taken_in_and_then_no_more():
    for sent, taken in ((64, 64), (80, 65)):
        sender = Sender(*[MEBIBYTE] * sent)
        with pytest.raises(ApiError, match="accepts 100 bytes"):
            asyncio.run(read(limit_of(LIMITS), sender))
        assert sender.taken == taken


def test_a_body_that_is_said_to_be_longer_than_that_is_not_taken_in_at_all():
    for announced, taken in ((64 * 2**20, 1), (64 * 2**20 + 1, 0)):
        sender = Sender(MEBIBYTE)
        with pytest.raises(ApiError, match="accepts 100 bytes"):
            asyncio.run(read(limit_of(LIMITS), sender, **{"content-length": str(announced)}))
        assert sender.taken == taken


def test_a_body_that_may_be_longer_than_that_comes_whole():
    store = limit_of(Limits(body_bytes=66 * 2**20))
    body = asyncio.run(read(store, Sender(*[MEBIBYTE] * 66)))
    assert len(body) == 66 * 2**20


def test_a_quarter_of_a_gibibyte_is_held_of_all_bodies_together():
    async def say():
        store, large = limit_of(Limits(body_bytes=2**26)), bytes(2**26)
        async with AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(reading(store, Sender(large), {}))
            with pytest.raises(ApiError, match="too many requests are waiting"):
                await read(store, Sender(b"x"))

    asyncio.run(say())


def test_whoever_finds_no_room_is_reported_to_come_again_and_may(folders):
    limits = Limits(body_bytes=1000, held_bytes=1000)
    application = application_of({"mood": folders["mood"]}, limits=limits)
    slow = Slowly(application, "mood")
    long = json.dumps({"texts": ["cat"], "model": "mood"}).encode().ljust(600)

    async def say(client):
        first = asyncio.create_task(client.post("/classify", content=long, headers=JSON))
        await until(lambda: slow.batches == [1])
        refused = await client.post("/classify", content=long, headers=JSON)
        slow.may_go.set()
        return [await first, refused, await client.post("/classify", content=long, headers=JSON)]

    replies = talk(application, say)
    assert [reply.status_code for reply in replies] == [200, 429, 200]
    assert int(replies[1].headers["retry-after"]) >= 1
    assert "try again in" in error_of(replies[1])
    assert application.body_limit.held_bytes == 0
