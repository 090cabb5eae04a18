"""Load on a server from several processes: each has its part of the clients, and compares its answers.

One process makes some thousands of requests a second at most; a server with a GPU answers more than that.
"""

import asyncio
import json
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop

TOLERANCE = 1e-3
"""Of an answer, beside the same one offline: batches of other shapes round differently."""
LONGEST_WAIT = 90.0
"""Seconds for a reply; the server gives up a request long before."""
NO_REPLY = 0
"""Status of a request whose connection ended before any of a reply came."""

NUMBERS: dict[str, Callable[[Any], list[float]]] = {
    "/next": lambda reply: [reply["probability"]],
    "/classify": lambda reply: list(reply["results"][0]["probabilities"].values()),
    "/embed": lambda reply: reply[0],
}
"""Which numbers of a reply answer a request, by its path."""


@dataclass(slots=True)
class Outcome:
    """How a request ended."""

    number: int
    status: int
    seconds: float
    body: bytes = b""


@dataclass
class Round:
    """What came of a stretch of load."""

    name: str
    seconds: float
    outcomes: list[Outcome] = field(default_factory=list)
    not_sent: int = 0
    """Due while every client was waiting."""
    wrong: int = 0
    """Answers that are not those that the model gives offline."""
    cpu_seconds: float = 0.0
    """Of the server's processes meanwhile."""

    def count(self, status: int) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def rate(self) -> float:
        return self.count(200) / self.seconds

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_seconds / max(1, self.count(200))

    def percentile(self, share: float) -> float:
        times = sorted(outcome.seconds for outcome in self.outcomes if outcome.status == 200)
        return times[min(len(times) - 1, int(share * len(times)))] if times else math.nan


@dataclass(frozen=True)
class Load:
    """What one process sends, and over how many connections."""

    path: str
    requests: Sequence[bytes]
    expected: Sequence[Sequence[float]]
    """The numbers that the model gives offline for each."""
    address: tuple[str, int] = ("", 0)
    clients: int = 1
    seed: int = 1

    def is_right(self, outcome: Outcome) -> bool:
        found, wanted = NUMBERS[self.path](json.loads(outcome.body)), self.expected[outcome.number]
        near = (math.isclose(a, b, abs_tol=TOLERANCE) for a, b in zip(found, wanted, strict=True))
        return len(found) == len(wanted) and all(near)


class Generators:
    """The processes that make the load."""

    def __init__(self, load: Load, count: int) -> None:
        self._load, self._count = load, count
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, mp_context=context)
        # Each is there before the first round: what they import takes longer than a round may.
        list(self._pool.map(time.sleep, [1.0] * count))

    def saturate(self, address: tuple[str, int], name: str, seconds: float, clients: int) -> Round:
        """So many clients ask again as soon as they are answered."""
        return self._together(saturate, address, clients, name, seconds)

    def offer(
        self, address: tuple[str, int], name: str, seconds: float, *, rate: float, clients: int
    ) -> Round:
        """Requests at random moments, so many a second on average, whatever becomes of them."""
        return self._together(offer, address, clients, name, seconds, rate / self._count)

    def _together(
        self, make: Callable[..., Round], address: tuple[str, int], clients: int, *rest: Any
    ) -> Round:
        parts = [
            replace(
                self._load,
                address=address,
                clients=clients // self._count + (number < clients % self._count),
                seed=number + 1,
            )
            for number in range(self._count)
        ]
        made = [each.result() for each in [self._pool.submit(make, part, *rest) for part in parts]]
        return Round(
            made[0].name,
            max(each.seconds for each in made),
            [outcome for each in made for outcome in each.outcomes],
            sum(each.not_sent for each in made),
            sum(each.wrong for each in made),
        )


def saturate(load: Load, name: str, seconds: float) -> Round:
    """A round in which all clients ask again as soon as they are answered."""
    return judged(load, _saturate(load, Round(name, seconds)))


def offer(load: Load, name: str, seconds: float, rate: float) -> Round:
    """A round of requests at random moments; latency counts from when a request was due."""
    return judged(load, _offer(load, Round(name, seconds), rate))


def judged(load: Load, making: Coroutine[Any, Any, Round]) -> Round:
    """A round with its answers compared, and without them."""
    made = uvloop.run(making)
    made.wrong = sum(not load.is_right(outcome) for outcome in made.outcomes if outcome.status == 200)
    for outcome in made.outcomes:
        outcome.body = b""
    return made


async def _saturate(load: Load, made: Round) -> Round:
    begin = time.monotonic()
    end = begin + made.seconds

    async def work(client: Client, first: int) -> None:
        number = first
        while time.monotonic() < end:
            await _one(load, made, client, number, time.monotonic())
            number += load.clients
        client.close()

    clients = [Client(load.address) for _ in range(load.clients)]
    await asyncio.gather(*(work(client, number) for number, client in enumerate(clients)))
    made.seconds = time.monotonic() - begin
    return made


async def _offer(load: Load, made: Round, rate: float) -> Round:
    free = [Client(load.address) for _ in range(load.clients)]
    begin = due = time.monotonic()
    chance, tasks, number = random.Random(load.seed), set[asyncio.Task[None]](), 0
    while due < begin + made.seconds:
        due += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if not free:
            made.not_sent += 1
            continue
        task = asyncio.create_task(_borrowed(load, made, free, number, due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
    await asyncio.gather(*tasks)
    made.seconds = time.monotonic() - begin  # the last ones are answered after the last was sent
    for client in free:
        client.close()
    return made


async def _borrowed(load: Load, made: Round, free: list["Client"], number: int, due: float) -> None:
    client = free.pop()
    await _one(load, made, client, number, due)
    free.append(client)


async def _one(load: Load, made: Round, client: "Client", number: int, due: float) -> None:
    which = (number + 7 * load.seed) % len(load.requests)
    status, body = await client.ask(load.requests[which])
    made.outcomes.append(Outcome(which, status, time.monotonic() - due, body))


class Client(asyncio.Protocol):
    """One connection, opened again when the server has closed it; it has one request at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._line: asyncio.Transport | None = None
        self._received = b""
        self._reply: asyncio.Future[tuple[int, bytes]] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the reply; no status where the connection ended without one."""
        loop = asyncio.get_running_loop()
        if self._line is None:
            try:
                await loop.create_connection(lambda: self, *self._address)
            except OSError:
                return NO_REPLY, b""
        assert self._line is not None, "set when the connection was made"
        self._reply = loop.create_future()
        self._line.write(request)
        try:
            return await asyncio.wait_for(self._reply, LONGEST_WAIT)
        except TimeoutError:
            self.close()
            return NO_REPLY, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._line = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        lowered = head.lower()
        if len(body) == int(lowered.split(b"content-length:")[1].split(b"\r\n")[0]):
            self._received = b""
            if b"connection: close" in lowered:
                self.close()
            self._end(int(head[9:12]), body)

    def connection_lost(self, _: Exception | None) -> None:
        self._line, self._received = None, b""
        self._end(NO_REPLY, b"")

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None

    def _end(self, status: int, body: bytes) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result((status, body))
