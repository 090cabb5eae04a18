"""The server under attack: what one hostile client can do to it, and to everybody else.

    python bench/attack.py                 # about a minute; exit status 1 where anything did not hold
    python bench/attack.py --rounds 5      # each attack five times on the same server: memory must stay flat
    python bench/attack.py --only starve   # one attack
    python bench/attack.py --only memory   # 50,000 varied requests, for some ten minutes; left out above
    python bench/attack.py --src ../old/src --key secret  # the server of another checkout

It starts `bertsmith serve` on loopback with 1,024 descriptors, the embedded models, the same encoder with an
untrained head that scores pairs, and two tiny untrained ones. During an attack, another process asks for
/health every PING_SECONDS; the longest of these requests is how deaf the server was. The column "machine"
shows the longest delay with which that process woke up from its sleep. Such delays come from other processes
on the same cores, torch's threads and the attacker among them, and may be part of the deafness. The row
`nothing` has both without an attack. Held: no 5xx, no traceback in the log, deaf for less than MAX_DEAF
seconds, and what each attack says of itself.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from varied_requests import varied_request

import bertsmith
from bertsmith.inference.embedded_models import default_model, embedded_models
from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.network import new_network

DESCRIPTORS = 1024
MAX_DEAF = 0.25
"""Seconds."""
PING_SECONDS = 0.015
MAX_GROWTH = 300
"""Megabytes over all attacks; torch and the allocator keep some of what was once used."""
MAX_LATE_GROWTH = 50
"""Megabytes over the second half of many varied requests."""
MAX_SLOWDOWN = 5.0
"""Of the victim's p99 beside a greedy client, in times of its p99 alone."""
KEY = "schl\u00fcssel"
SHORT = {"inputs": "a short text of a usual client"}
GREEDY = json.dumps({"inputs": ["word " * 398] * 256}).encode()
"""256 texts of 400 tokens."""


@dataclass
class Served:
    """A server under attack."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    key: str
    requests: int = 50_000
    """Of the attack on memory."""
    statuses: Counter[int] = field(default_factory=Counter)

    def memory(self) -> float:
        """Megabytes that the process has in memory now, and at most had."""
        return self._megabytes("VmRSS")

    def peak(self) -> float:
        return self._megabytes("VmHWM")

    def _megabytes(self, name: str) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

    async def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, float, str, bytes]:
        """Status, seconds, head and body of the reply; a body that is no bytes is sent as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        fields = {
            "Host": "localhost",
            "Authorization": f"Bearer {self.key}",
            "Content-Type": "application/json",
        }
        fields |= {name.replace("_", "-"): value for name, value in headers.items()} | {"Connection": "close"}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        if body is not None:
            lines.append(f"Content-Length: {len(content)}")
        begin = time.monotonic()
        raw = await self.send("\r\n".join([*lines, "", ""]).encode() + (content if body is not None else b""))
        head, _, reply = raw.partition(b"\r\n\r\n")
        status = int(head[9:12] or 0)
        self.statuses[status] += 1
        return status, time.monotonic() - begin, head.decode("latin-1"), reply

    async def send(self, data: bytes) -> bytes:
        """All that the server says to these bytes before it closes."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**26)
            writer.write(data)
            async with asyncio.timeout(60):  # wait_for may lose a wish to stop, and a client went on for ever
                found = await reader.read(-1)
            writer.close()
        except (OSError, TimeoutError):
            return b""
        return found


Attack = Callable[[Served], Awaitable[tuple[str, bool]]]
"""Says what came of it, and whether that is as it should be."""


async def long_word(served: Served) -> tuple[str, bool]:
    """A word of 150,000 letters to look for: steps of word times sentence, where one searches carelessly."""
    body = {"word": "a" * 150_000 + "b", "sentences": ["a" * 300_000]}
    status, seconds, *_ = await served.ask("/look/senses", body)
    return f"{status} after {seconds:.2f} s", status in (413, 422)


async def many_ids(served: Served) -> tuple[str, bool]:
    """A million token ids, valid ones and one that is none."""
    ids = b"1," * 999_000
    bodies = [b'{"input":[' + ids + b"1]}", b'{"input":[' + ids + b'"x"]}', b'{"input":[[' + ids + b"1]]}"]
    found = [await served.ask("/v1/embeddings", body) for body in bodies]
    told = ", ".join(f"{status} after {seconds:.2f} s" for status, seconds, *_ in found)
    return told, all(status in (413, 422) for status, *_ in found)


async def many_texts(served: Served) -> tuple[str, bool]:
    """Half a million texts of one letter, for each route that takes texts."""
    texts = b'"a",' * 500_000 + b'"a"]}'
    asked = {"/embed": "inputs", "/classify": "texts", "/compare": "texts", "/v1/embeddings": "input"}
    found = [await served.ask(path, b'{"%b":[' % name.encode() + texts) for path, name in asked.items()]
    told = ", ".join(f"{status} after {seconds:.2f} s" for status, seconds, *_ in found)
    return told, all(status == 413 for status, *_ in found)


async def starve(served: Served) -> tuple[str, bool]:
    """256 texts of 400 tokens, again and again on four connections, beside a client of short texts."""

    async def victim(count: int) -> list[float]:
        times = []
        for _ in range(count):
            status, seconds, *_ = await served.ask("/embed", SHORT)
            times.append(seconds if status == 200 else 60.0)
            await asyncio.sleep(0.01)
        return sorted(times)

    async def greedy() -> None:
        while True:
            await served.ask("/embed", GREEDY)

    await victim(50)
    alone = await victim(200)
    tasks = [asyncio.create_task(greedy()) for _ in range(4)]
    await asyncio.sleep(1)
    beside = await victim(100)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    first, second = alone[int(0.99 * len(alone))], beside[int(0.99 * len(beside))]
    answered = sum(seconds < 60 for seconds in beside)
    p99 = f"p99 {1000 * first:.0f} ms alone, {1000 * second:.0f} ms beside"
    told = f"{answered} of {len(beside)} answered, {p99}"
    return told, answered == len(beside) and second <= MAX_SLOWDOWN * first


async def long_query(served: Served) -> tuple[str, bool]:
    """24 requests at once to rank 256 texts by a query of 50,000 characters."""
    before = served.peak()
    body = {"query": "a " * 24_900, "texts": ["b"] * 256, "model": "pairs", "truncate": True}
    found = await asyncio.gather(*(served.ask("/rerank", body) for _ in range(24)))
    grown = served.peak() - before
    counts = dict(Counter(status for status, *_ in found))
    return f"{counts}, memory grew by {grown:.0f} MB", grown < MAX_GROWTH and set(counts) <= {
        200,
        413,
        422,
        429,
    }


async def hang_up(served: Served) -> tuple[str, bool]:
    """Forty long requests whose clients are gone as soon as they are sent."""
    head = f"POST /embed HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(GREEDY)}\r\n\r\n"
    for _ in range(40):
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(head.encode() + GREEDY)
        await writer.drain()
        writer.transport.abort()
    await asyncio.sleep(1)
    status, seconds, *_ = await served.ask("/embed", SHORT)
    return f"the next client: {status} after {seconds:.2f} s", status == 200 and seconds < MAX_DEAF


async def idle_lines(served: Served) -> tuple[str, bool]:
    """More idle connections than the server has descriptors."""
    size = served.log.stat().st_size
    lines = []
    for _ in range(DESCRIPTORS + 76):
        with suppress(OSError):
            lines.append(await asyncio.open_connection("127.0.0.1", served.port))
    status, seconds, *_ = await served.ask("/health")
    await asyncio.sleep(1)
    grown = served.log.stat().st_size - size
    for _, writer in lines:
        writer.transport.abort()
    told = f"the next client: {status} after {seconds:.2f} s; {grown / 1000:.0f} kB of log"
    return told, status == 200 and grown < 2**20


async def strangers(served: Served) -> tuple[str, bool]:
    """Another site's name, redirects to it, keys in other spellings, replies without an id."""
    rebound, *_ = await served.ask("/models", Host="evil.example")
    _, _, head, _ = await served.ask("/models/", Host="evil.example")
    spelled, *_ = await served.ask("/models", Authorization=f"bearer {served.key}")
    wrong, *_ = await served.ask("/models", Authorization="Bearer schlussel")
    broken = await served.send(b"\x00\x01 no HTTP\r\n\r\n")
    held = (rebound, spelled, wrong) == (421, 200, 401)
    held &= "evil.example/" not in head and b"x-request-id" in broken.lower()
    return f"host {rebound}, bearer {spelled}, wrong key {wrong}", held


async def nothing(served: Served) -> tuple[str, bool]:
    """No attack: how long a request for /health takes, and how late this machine wakes a process up."""
    status, *_ = await served.ask("/embed", SHORT)
    await asyncio.sleep(2)
    return "", status == 200


async def unclosed(served: Served) -> tuple[str, bool]:
    """More values than a body may have, and behind them a string of escapes that never ends."""
    head = b'{"text":[' + b"," * 150_001 + b'"'
    bodies = [head + b'\\"' * count for count in (20_000, 40_000, 900_000)]
    found = await asyncio.gather(*(served.ask("/fill", body) for body in bodies))
    told = ", ".join(f"{status} after {seconds:.2f} s" for status, seconds, *_ in found)
    return told, all(status == 413 for status, *_ in found)


async def look_words(served: Served) -> tuple[str, bool]:
    """Six clients that ask which of 4,000 words decided."""

    async def client() -> list[int]:
        body = {"first": "!" * 4000, "model": "pairs"}
        return [(await served.ask("/look/words", body))[0] for _ in range(5)]

    counts = Counter(
        status for each in await asyncio.gather(*(client() for _ in range(6))) for status in each
    )
    return f"{dict(counts)}", set(counts) <= {422, 429}


async def long_texts(served: Served) -> tuple[str, bool]:
    """Six clients with 400,000 punctuation marks each, and a token for each of them."""
    body = json.dumps({"inputs": ["!" * 49_000] * 8, "truncate": True}).encode()
    found = await asyncio.gather(*(served.ask("/embed", body) for _ in range(6)))
    counts = Counter(status for status, *_ in found)
    return f"{dict(counts)}", set(counts) <= {200, 413, 422, 429}


async def dear_bodies(served: Served) -> tuple[str, bool]:
    """The bodies that cost the most to read, each by four clients at once."""
    fields = b",".join(b'"%x":1' % number for number in range(200_000))
    bodies = {
        "/v1/embeddings": [
            b'{"input":[' + b"[1]," * 74_000 + b"[1]]}",
            b'{"input":[' + b"-" + b",-".join([b"1" * 4300] * 480) + b"]}",
            b'{"input":[' + b"[]," * 690_000 + b"[]]}",
            b'{"input":"a",' + fields + b"}",
        ],
        "/classify": [
            b'{"texts":[' + b'["a","b"],' * 49_000 + b'["a",1]]}',
            b'{"texts":["' + b'\\",[' * 500_000,
        ],
        "/fill": [b'{"text":"a",' + fields + b"}", b'{"text":"a","model":"' + b"a " * 1_000_000 + b'"}'],
    }
    asked = [(path, body) for path, several in bodies.items() for body in several]
    statuses: Counter[int] = Counter()
    for path, body in asked:
        found = await asyncio.gather(*(served.ask(path, body) for _ in range(4)))
        statuses.update(status for status, *_ in found)
    return f"{dict(statuses)}", set(statuses) <= {404, 413, 422, 429}


async def large_replies(served: Served) -> tuple[str, bool]:
    """Small requests with replies of megabytes."""
    asked = {
        "/look/similarity": {"texts": [f"text {number}" for number in range(256)]},
        "/look/guesses": {"text": "[MASK] " * 120, "top": 20},
        "/fill": {"text": "[MASK] " * 500, "top": 100},
        "/look/attention": {"first": "the cat " * 31},
    }
    found = [await served.ask(path, body) for path, body in asked.items()]
    told = ", ".join(f"{status} with {len(reply) / 1e6:.1f} MB" for status, _, _, reply in found)
    return told, all(status == 200 for status, *_ in found)


async def pipelined(served: Served) -> tuple[str, bool]:
    """Eight thousand requests in one piece, by six clients."""
    piece = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 8000
    replies = await asyncio.gather(*(served.send(piece) for _ in range(6)))
    told = ", ".join(str(reply.count(b"HTTP/1.1 200")) for reply in replies)
    return f"{told} of 8000 answered", True


async def fuzz(served: Served) -> tuple[str, bool]:
    """A thousand requests with something wrong in each, twenty at a time."""
    chance = random.Random(0)
    seeds = {
        "/fill": b'{"text": "the [MASK] sits"}',
        "/next": b'{"first": "a", "second": "b"}',
        "/embed": b'{"inputs": ["a", "b"]}',
        "/rerank": b'{"query": "a", "texts": ["a", "b"], "model": "pairs"}',
        "/look/senses": b'{"word": "a", "sentences": ["a b"]}',
        "/v1/embeddings": b'{"input": [[5, 6], [7]]}',
    }

    async def one() -> None:
        path, body = chance.choice(sorted(seeds.items()))
        mutated = bytearray(body)
        for _ in range(chance.randint(1, 6)):
            mutated[chance.randrange(len(mutated))] = chance.randrange(256)
        deep = b"[" * chance.choice([10, 100_000])
        await served.ask(path, chance.choice([bytes(mutated), bytes(mutated[: len(body) // 2]), deep]))

    before = served.statuses.copy()
    for _ in range(50):
        await asyncio.gather(*(one() for _ in range(20)))
    counts = dict(served.statuses - before)
    return f"{counts}", set(counts) <= {200, 404, 413, 422, 429}


async def memory(served: Served) -> tuple[str, bool]:
    """Many varied requests, four at a time, of all routes, models and lengths: memory must level off."""
    chance, sizes, asked = random.Random(0), [served.memory()], 0
    before = served.statuses.copy()

    async def client() -> None:
        nonlocal asked
        while asked < served.requests:
            asked += 1
            number = asked
            path, body = varied_request(chance)
            await served.ask(path, body)
            if number % max(1, served.requests // 20) == 0:
                sizes.append(served.memory())
                print(f"after {number} requests: {sizes[-1]:.0f} MB", flush=True)

    await asyncio.gather(*(client() for _ in range(4)))
    half, end = sizes[len(sizes) // 2], sizes[-1]
    counts = dict(served.statuses - before)
    told = f"{counts}, {sizes[0]:.0f} MB at the start, {half:.0f} after half, {end:.0f} at the end"
    return told, end - half < MAX_LATE_GROWTH and set(counts) <= {200, 404, 413, 422, 429}


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        nothing,
        unclosed,
        look_words,
        long_texts,
        dear_bodies,
        large_replies,
        pipelined,
        long_word,
        many_ids,
        many_texts,
        starve,
        long_query,
        hang_up,
        idle_lines,
        strangers,
        fuzz,
        memory,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--src", type=Path, help="of the checkout whose server is attacked; else this one's")
    parser.add_argument("--key", default=KEY, help="the API key; servers of old knew ASCII alone")
    usual = [name for name in ATTACKS if name != memory.__name__]
    parser.add_argument("--only", nargs="*", choices=ATTACKS, default=usual)
    parser.add_argument("--requests", type=int, default=50_000, help="of the attack on memory")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
    with tempfile.TemporaryDirectory() as folder, server(Path(folder), options.src, options.key) as served:
        served.requests = options.requests
        held = asyncio.run(attacked(served, options))
        served.process.send_signal(signal.SIGTERM)
        begin, code = time.monotonic(), None
        with suppress(subprocess.TimeoutExpired):  # then it heard nothing, and is killed below
            code = served.process.wait(90)
        print(f"SIGTERM: exit status {code} after {time.monotonic() - begin:.1f} s")
        tracebacks = served.log.read_text(errors="replace").count("Traceback")
    faults = sum(count for status, count in served.statuses.items() if status >= 500)
    print(f"replies: {dict(served.statuses)}; {faults} of 5xx; tracebacks in the log: {tracebacks}")
    sys.exit(0 if held and not faults and not tracebacks and code == 0 else 1)


async def attacked(served: Served, options: argparse.Namespace) -> bool:
    """Whether each attack held, in each round."""
    print("| attack | deaf for at most | machine | MB before | after | most | what came of it | held |")
    print("|---|---|---|---|---|---|---|---|")
    await served.ask("/embed", SHORT)
    await served.ask("/rerank", {"query": "a", "texts": ["b"], "model": "pairs"})
    ears = Ears(served.port)
    begin, held = served.memory(), True
    for _ in range(options.rounds):
        for name in options.only:
            before = served.memory()
            await asyncio.to_thread(ears.longest)
            told, as_it_should = await ATTACKS[name](served)
            deaf, late = await asyncio.to_thread(ears.longest)
            as_it_should &= deaf < MAX_DEAF
            held &= as_it_should
            sizes = f"{before:.0f} | {served.memory():.0f} | {served.peak():.0f}"
            figures = f"{deaf:.2f} s | {late:.2f} s | {sizes}"
            print(f"| {name} | {figures} | {told} | {'yes' if as_it_should else 'NO'} |", flush=True)
    grown = served.memory() - begin
    print(f"memory grew by {grown:.0f} MB")
    return held and grown < MAX_GROWTH


class Ears:
    """A process that asks for /health all the time."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        context.Process(target=listen, args=(port, far), daemon=True).start()

    def longest(self) -> tuple[float, float]:
        """Return the longest request and the longest delay of the process since the last call."""
        self._pipe.send(None)
        found: tuple[float, float] = self._pipe.recv()
        return found


def listen(port: int, pipe: Connection) -> None:
    """Ask for /health and tell how long that took, whenever the pipe wants to know."""
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    while True:
        longest = late = 0.0
        while not pipe.poll():
            begin = time.monotonic()
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as line:
                line.sendall(asked)
                while line.recv(2**16):
                    pass
            end = time.monotonic()
            longest = max(longest, end - begin)
            time.sleep(PING_SECONDS)
            late = max(late, time.monotonic() - end - PING_SECONDS)
        try:
            pipe.recv()
        except EOFError:  # the attacks are over
            return
        pipe.send((longest, late))


@contextmanager
def server(folder: Path, src: Path | None, key: str) -> Iterator[Served]:
    """A server with few descriptors, whose log goes to a file."""
    tiny: dict[str, Any] = {"width": 64, "embedding_width": 64, "layers": 2, "heads": 2, "inner": 128}
    tiny["global_layers"] = (0, 1)
    write_untrained(folder / "pairs", {"classify": 1})
    write_untrained(folder / "tiny", {"mlm": 0, "nsp": 2}, **tiny)
    write_untrained(folder / "tiny-pairs", {"classify": 1}, **tiny)
    command = [sys.executable, "-m", "bertsmith", "serve", "--port", "0", "--device", "cpu"]
    models = {"own": default_model(), **{name: folder / name for name in ("pairs", "tiny", "tiny-pairs")}}
    adapters = {name: each for name, each in embedded_models().items() if each != default_model()}
    command += ["--precision", "fp32"]
    for name, each in (models | adapters).items():
        command += ["--model", f"{name}={each}"]

    def with_few_descriptors() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

    log = folder / "server.log"
    other = {} if src is None else {"PYTHONPATH": str(src.resolve())}
    with (
        log.open("wb") as written,
        subprocess.Popen(
            command,
            stderr=written,
            env={**os.environ, "BERTSMITH_API_KEY": key, **other},
            preexec_fn=with_few_descriptors,
        ) as process,
    ):
        while b"\n" not in log.read_bytes() and process.poll() is None:
            time.sleep(0.1)
        first = log.read_text().partition("\n")[0]
        if not first.startswith("http"):
            sys.exit(log.read_text())
        try:
            yield Served(int(first.split()[0].rsplit(":", 1)[1]), process, log, key)
        finally:
            if process.poll() is None:
                process.kill()


def write_untrained(folder: Path, outputs: dict[str, int], **sizes: Any) -> None:
    """Write a model like the small own one, but with random weights, these heads and these sizes."""
    bert = bertsmith.load()
    config = replace(bert.model.network.config, **sizes)
    network = new_network(config, outputs, torch.Generator().manual_seed(0))
    bert.tokenizer.save(folder)
    write_model(folder, Model(network, {}))


if __name__ == "__main__":
    main()
