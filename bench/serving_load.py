"""Load on a server from a second process, over loopback, bounded in count and time.

    python bench/serving_load.py                                        # the own model, next sentences
    python bench/serving_load.py --model runs/sst2 --route classify --seconds 60 --clients 500
    python bench/serving_load.py --src ../old/src                       # the server of another checkout

Texts have log-normal lengths, 5 to 256 tokens, mean 40. First the capacity is measured: clients ask again as
soon as they are answered. Then requests come at random moments at a share of that capacity, whether the
server keeps up or not, and latency counts from the moment at which a request was due. The same with batching
turned off, and at last SIGTERM in the middle of it. CPU ms is what the server's process spent on an answer,
which tells two versions apart on a machine that others use, too. Every answer is compared with what the
model says offline. Exit status 1 if a target is missed: at 70 % at least 99.5 % are answered, all as offline;
at 200 % the answered ones keep above 90 % of the capacity and the rest get 429; no 5xx; SIGTERM loses no
accepted request.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import bertsmith
from bertsmith.core.files import write_json
from bertsmith.inference.embedded_models import default_model

DISTINCT = 400
TOLERANCE = 1e-3
"""Of an answer, beside the same one offline: batches of other shapes round differently."""
ENOUGH_ANSWERED, ENOUGH_THROUGHPUT = 0.995, 0.90
MAX_NOT_SENT = 0.05
"""Of a load that was really offered."""
LONGEST_WAIT = 90.0
"""Seconds for a reply; the server gives up a request long before."""
NO_REPLY = 0
"""Status of a request whose connection ended before any of a reply came."""
WORDS = (
    *("the", "a", "of", "and", "to", "in", "is", "was", "for", "on", "with", "as", "by"),
    *("at", "from", "it", "an", "be", "this", "that", "are", "city", "river", "king", "year", "war"),
)


@dataclass(frozen=True)
class Route:
    """How a text is asked about, and which numbers answer it."""

    path: str
    body: Callable[[str], dict[str, Any]]
    numbers: Callable[[Any], list[float]]
    offline: Callable[[bertsmith.Bert, list[str]], list[list[float]]]


SECOND = "It is cold."
ROUTES = {
    "next": Route(
        "/next",
        lambda text: {"first": text, "second": SECOND},
        lambda reply: [reply["probability"]],
        lambda bert, texts: [
            [each.probability] for each in bert.next_sentences((text, SECOND) for text in texts)
        ],
    ),
    "classify": Route(
        "/classify",
        lambda text: {"texts": [text]},
        lambda reply: list(reply["results"][0]["probabilities"].values()),
        lambda bert, texts: [list(each.probabilities.values()) for each in bert.classify(texts)],
    ),
    "embed": Route(
        "/embed",
        lambda text: {"inputs": text, "normalize": False},
        lambda reply: reply[0],
        lambda bert, texts: bert.embed(texts, normalize=False).tolist(),
    ),
}


@dataclass
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
    cpu_seconds: float = 0.0
    """Of the server's process meanwhile."""

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


def main() -> None:
    options = parse()
    route = ROUTES[options.route]
    bert = bertsmith.load(options.model, device=options.device, precision=options.precision)
    texts = list(texts_of(bert, DISTINCT))
    expected = route.offline(bert, texts)
    requests = [request_bytes(route.path, route.body(text)) for text in texts]
    del bert
    bench = Bench(options, route, requests, expected)
    rounds: list[tuple[str, Round]] = []
    capacities = {}
    for batching, tokens in (("on", options.batch_tokens), ("off", 1)):
        with server(options, tokens) as served:
            address = served.address
            asyncio.run(bench.saturate(address, "warm-up", min(5, options.seconds)))
            before = served.charged(bench.saturate(address, "capacity", options.seconds))
            offered = [
                served.charged(bench.offer(address, share, share * before.rate)) for share in options.shares
            ]
            after = served.charged(bench.saturate(address, "capacity again", options.seconds))
        # Before and after, since other work on the machine comes and goes.
        capacities[batching] = (before.rate + after.rate) / 2
        rounds += [(batching, made) for made in (before, *offered, after)]
    print_table(rounds, capacities, bench)
    held = [judged(batching, each, capacities, bench) for batching, each in rounds]
    held.append(drained(options, bench, capacities["on"]))
    if options.out:
        write_json(options.out, {"capacity": capacities, "rounds": [told(*each) for each in rounds]})
    sys.exit(0 if all(held) else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=default_model())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", help="in bf16, batches of other shapes differ by more")
    parser.add_argument("--route", default="next", choices=ROUTES)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.7, 2.0], help="of the capacity")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--queue-requests", type=int, help="that may wait; without it a third of the clients")
    parser.add_argument("--src", type=Path, help="of the checkout whose server is asked; else this one's")
    parser.add_argument("--out", type=Path, help="write what was measured as JSON")
    options = parser.parse_args()
    if options.queue_requests is None:
        # As many may be at work as wait, and somebody must be left to be refused.
        options.queue_requests = max(1, options.clients // 3)
    return options


# ---- texts and requests


def texts_of(bert: bertsmith.Bert, count: int) -> Iterator[str]:
    """Texts of 5 to 256 tokens, log-normal with a mean of 40."""
    chance = random.Random(0)
    pieces = {word: len(bert.tokenizer.encode(word)) - 2 for word in WORDS}
    longest = min(256, bert.model.network.config.positions - 32)  # the second text of a pair needs room
    for _ in range(count):
        length = min(longest, max(5, round(chance.lognormvariate(math.log(40) - 0.32, 0.8))))
        words = [chance.choice(WORDS)]
        while sum(pieces[word] for word in words) < length - 2:
            words.append(chance.choice(WORDS))
        yield " ".join(words)


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """A whole request."""
    content = json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


@dataclass
class Served:
    """A server at work, and its log."""

    address: tuple[str, int]
    process: subprocess.Popen[bytes]
    log: Path

    def charged(self, load: Coroutine[Any, Any, Round]) -> Round:
        """A round of load, with what it cost the server."""
        before = self._cpu_seconds()
        made = asyncio.run(load)
        made.cpu_seconds = self._cpu_seconds() - before
        return made

    def _cpu_seconds(self) -> float:
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@contextmanager
def server(options: argparse.Namespace, batch_tokens: int) -> Iterator[Served]:
    """A server whose log goes to a file: nobody has to wake for it meanwhile."""
    command = [sys.executable, "-m", "bertsmith", "serve", "--port", "0", "--device", options.device]
    command += ["--precision", options.precision]
    command += ["--model", f"m={options.model}", "--batch-tokens", str(batch_tokens)]
    command += ["--queue-requests", str(options.queue_requests)]
    other = {} if options.src is None else {"PYTHONPATH": str(options.src.resolve())}
    environment = {**os.environ, **other}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as written, subprocess.Popen(command, stderr=written, env=environment) as process:
            try:
                yield Served(("127.0.0.1", port_of(process, log)), process, log)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(90)


def port_of(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port that a server says it listens on."""
    while "\n" not in (text := log.read_text()) and process.poll() is None:
        time.sleep(0.1)
    first = text.partition("\n")[0]
    if not first.startswith("http"):
        sys.exit(log.read_text())
    return int(first.split()[0].rsplit(":", 1)[1])


# ---- load


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
        assert isinstance(transport, asyncio.Transport)
        self._line = transport

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


@dataclass
class Bench:
    """Rounds of load, all with the same requests."""

    options: argparse.Namespace
    route: Route
    requests: Sequence[bytes]
    expected: Sequence[Sequence[float]]

    async def saturate(self, address: tuple[str, int], name: str, seconds: float) -> Round:
        """As many clients as may wait ask again as soon as they are answered."""
        made = Round(name, seconds)
        end = time.monotonic() + seconds
        # Few enough to be let in, more than enough for full batches.
        clients = [Client(address) for _ in range(min(self.options.clients, self.options.queue_requests))]

        async def work(client: Client, first: int) -> None:
            number = first
            while time.monotonic() < end:
                await self._one(made, client, number, time.monotonic())
                number += len(clients)
            client.close()

        begin = time.monotonic()
        await asyncio.gather(*(work(client, number) for number, client in enumerate(clients)))
        made.seconds = time.monotonic() - begin
        return made

    async def offer(
        self, address: tuple[str, int], share: float, rate: float, act: Callable[[], None] | None = None
    ) -> Round:
        """Requests at random moments, so many a second on average, whatever becomes of them."""
        made = Round(f"{share:.0%}", self.options.seconds)
        free = [Client(address) for _ in range(self.options.clients)]
        begin = due = time.monotonic()
        chance, tasks, number = random.Random(1), set[asyncio.Task[None]](), 0
        while due < begin + self.options.seconds:
            due += chance.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if act and due > begin + self.options.seconds / 2:
                act()
                act = None
            if not free:
                made.not_sent += 1
                continue
            task = asyncio.create_task(self._borrowed(made, free, number, due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
        await asyncio.gather(*tasks)
        made.seconds = time.monotonic() - begin  # the last ones are answered after the last was sent
        for client in free:
            client.close()
        return made

    async def _borrowed(self, made: Round, free: list[Client], number: int, due: float) -> None:
        client = free.pop()
        await self._one(made, client, number, due)
        free.append(client)

    async def _one(self, made: Round, client: Client, number: int, due: float) -> None:
        which = number % len(self.requests)
        status, body = await client.ask(self.requests[which])
        made.outcomes.append(Outcome(which, status, time.monotonic() - due, body))

    def wrong(self, made: Round) -> int:
        """How many answers are not those that the model gives offline."""
        return sum(not self._is_right(outcome) for outcome in made.outcomes if outcome.status == 200)

    def _is_right(self, outcome: Outcome) -> bool:
        found = self.route.numbers(json.loads(outcome.body))
        wanted = self.expected[outcome.number]
        near = (math.isclose(a, b, abs_tol=TOLERANCE) for a, b in zip(found, wanted, strict=True))
        return len(found) == len(wanted) and all(near)


# ---- what came of it


def print_table(rounds: list[tuple[str, Round]], capacities: dict[str, float], bench: Bench) -> None:
    times = "CPU ms | p50 ms | p95 ms | p99 ms"
    print(
        f"| batching | load | sent | not sent | 200 | 429 | other | 200/s | of capacity | {times} | wrong |"
    )
    print("|---" * 14 + "|")
    for batching, made in rounds:
        sent = len(made.outcomes)
        good, crowded = made.count(200), made.count(429)
        times = " | ".join(f"{1000 * made.percentile(share):.0f}" for share in (0.5, 0.95, 0.99))
        part = made.rate / capacities[batching]
        print(
            f"| {batching} | {made.name} | {sent} | {made.not_sent} "
            f"| {good / sent:.2%} | {crowded / sent:.2%} | {sent - good - crowded} "
            f"| {made.rate:.0f} | {part:.0%} | {made.cpu_ms:.2f} | {times} | {bench.wrong(made)} |"
        )
    print(f"batching on / off: {capacities['on'] / capacities['off']:.2f} times the capacity", flush=True)


def told(batching: str, made: Round) -> dict[str, Any]:
    """The measures of a round as plain data."""
    statuses = Counter(outcome.status for outcome in made.outcomes)
    latencies = {f"p{share:g}": made.percentile(share / 100) for share in (50, 95, 99)}
    return {
        "batching": batching,
        "load": made.name,
        "not_sent": made.not_sent,
        "rate": made.rate,
        "cpu_ms": made.cpu_ms,
        **latencies,
        "statuses": dict(statuses),
    }


def judged(batching: str, made: Round, capacities: dict[str, float], bench: Bench) -> bool:
    """Whether a round kept what is promised of it."""
    statuses = {outcome.status for outcome in made.outcomes}
    held = statuses <= {200, 429} and bench.wrong(made) == 0
    if batching == "on" and made.name == "70%":
        held &= made.count(200) >= ENOUGH_ANSWERED * (len(made.outcomes) + made.not_sent)
    if batching == "on" and made.name == "200%":
        held &= made.rate >= ENOUGH_THROUGHPUT * capacities[batching] and made.count(429) > 0
        held &= made.not_sent <= MAX_NOT_SENT * len(made.outcomes)
    if not held:
        counts = dict(Counter(outcome.status for outcome in made.outcomes))
        print(f"MISSED: batching {batching}, load {made.name}: {counts}, not sent {made.not_sent}")
    return held


def drained(options: argparse.Namespace, bench: Bench, capacity: float) -> bool:
    """Whether SIGTERM in the middle of the load loses nothing that was accepted."""
    with server(options, options.batch_tokens) as served:
        stop = partial(served.process.send_signal, signal.SIGTERM)
        made = asyncio.run(bench.offer(served.address, 0.7, 0.7 * capacity, stop))
        code = served.process.wait(90)
        lines = served.lines()
    logged = Counter(line["status"] for line in lines if line.get("route") == bench.route.path)
    held = code == 0 and logged[200] == made.count(200) and set(logged) <= {200, 429, 503}
    held &= bench.wrong(made) == 0
    print(
        f"SIGTERM under load: {made.count(200)} answered (by the server's log {logged[200]}), "
        f"{made.count(503)} told to go elsewhere, {made.count(NO_REPLY)} found nobody, exit status {code}: "
        f"{'nothing accepted was lost' if held else 'MISSED'}"
    )
    return held


if __name__ == "__main__":
    main()
