"""Load on a server from other processes, over loopback, bounded in count and time.

    python bench/serving_load.py                                        # the own model, next sentences
    python bench/serving_load.py --model runs/sst2 --route classify --seconds 60 --clients 500
    python bench/serving_load.py --src ../old/src                       # the server of another checkout
    python bench/serving_load.py --device cuda --shape minilm --vocab minilm-l6 --route embed --batching on \\
        --http-processes 1 4 8 --generators 5 --clients 1500 --seconds 12   # how it grows, on 16 cores

Texts have log-normal lengths, 5 to 256 tokens, mean 40. First the capacity is measured: clients ask again as
soon as they are answered. Then requests come at random moments at a share of that capacity, whether the
server keeps up or not, and latency counts from the moment at which a request was due. The same with batching
turned off, and at last SIGTERM in the middle of it. CPU ms is what the server's processes spent on an answer,
which tells two versions apart on a machine that others use, too. Every answer is compared with what the
model says offline. Exit status 1 if a target is missed: at 70 % at least 99.5 % are answered, all as offline;
at 200 % the answered ones keep above 90 % of the capacity and the rest get 429; no 5xx; SIGTERM loses no
accepted request.
"""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from threading import Timer
from typing import Any

from load_generator import NO_REPLY, Generators, Load, Round

import bertsmith
from bertsmith.core.files import write_json
from bertsmith.inference.embedded_models import default_model

DISTINCT = 400
ENOUGH_ANSWERED, ENOUGH_THROUGHPUT = 0.995, 0.90
MAX_NOT_SENT = 0.05
"""Of a load that was really offered."""
WORDS = (
    *("the", "a", "of", "and", "to", "in", "is", "was", "for", "on", "with", "as", "by"),
    *("at", "from", "it", "an", "be", "this", "that", "are", "city", "river", "king", "year", "war"),
)


@dataclass(frozen=True)
class Route:
    """How a text is asked about, and what the model says of it offline."""

    path: str
    body: Callable[[str], dict[str, Any]]
    offline: Callable[[bertsmith.Bert, list[str]], list[list[float]]]


SECOND = "It is cold."
ROUTES = {
    "next": Route(
        "/next",
        lambda text: {"first": text, "second": SECOND},
        lambda bert, texts: [
            [each.probability] for each in bert.next_sentences((text, SECOND) for text in texts)
        ],
    ),
    "classify": Route(
        "/classify",
        lambda text: {"texts": [text]},
        lambda bert, texts: [list(each.probabilities.values()) for each in bert.classify(texts)],
    ),
    "embed": Route(
        "/embed",
        lambda text: {"inputs": text, "normalize": False},
        lambda bert, texts: bert.embed(texts, normalize=False).tolist(),
    ),
}


@dataclass(frozen=True)
class Form:
    """How a server is started."""

    http_processes: int | None
    """Without a number, as many as it takes by itself."""
    batching: str

    def __str__(self) -> str:
        return f"{self.http_processes or 'its own'} | {self.batching}"


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        if options.shape is not None:
            from random_model import SHAPES, random_folder  # with transformers, which nothing else asks for

            if options.shape not in SHAPES:
                sys.exit(f"--shape {options.shape}: there are {', '.join(SHAPES)}")
            options.model = random_folder(Path(scratch) / options.shape, options.shape, options.vocab)
        sys.exit(0 if measure(options) else 1)


def measure(options: argparse.Namespace) -> bool:
    """Whether all targets were met."""
    route = ROUTES[options.route]
    bert = bertsmith.load(options.model, device=options.device, precision=options.precision)
    texts = list(texts_of(bert, DISTINCT))
    expected = route.offline(bert, texts)
    requests = [request_bytes(route.path, route.body(text)) for text in texts]
    del bert
    bench = Bench(options, Generators(Load(route.path, requests, expected), options.generators))
    forms = [Form(number, each) for number in options.http_processes for each in options.batching]
    rounds: list[tuple[Form, Round]] = []
    capacities: dict[Form, float] = {}
    for form in forms:
        made = bench.rounds_of(form)
        # Before and after, since other work on the machine comes and goes.
        capacities[form] = (made[0].rate + made[-1].rate) / 2
        rounds += [(form, each) for each in made]
        print_table([(form, each) for each in made], capacities)
    held = [judged(form, each, capacities) for form, each in rounds]
    held += [drained(form, bench, capacities[form], route.path) for form in forms if form.batching == "on"]
    if options.json:
        told = [measures(form, made) for form, made in rounds]
        capacity = {str(form): rate for form, rate in capacities.items()}
        write_json(options.json, {"capacity": capacity, "rounds": told})
    return all(held)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=default_model())
    parser.add_argument("--shape", help="minilm, base, ...: a random model in the place of --model")
    parser.add_argument("--vocab", type=Path, help="a folder with a tokenizer, for --shape")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", help="in bf16, batches of other shapes differ by more")
    parser.add_argument("--route", default="next", choices=ROUTES)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--generators", type=int, default=1, help="processes that make the load")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.7, 2.0], help="of the capacity")
    parser.add_argument("--batching", nargs="+", default=["on", "off"], choices=["on", "off"])
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--http-processes", type=int, nargs="+", default=[None], help="one server for each")
    parser.add_argument("--queue-requests", type=int, help="that may wait; without it a third of the clients")
    parser.add_argument("--src", type=Path, help="of the checkout whose server is asked; else this one's")
    parser.add_argument("--json", type=Path, help="write what was measured")
    options = parser.parse_args()
    if options.shape is not None and options.vocab is None:
        parser.error("--shape needs --vocab, a folder with a tokenizer")
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

    def charged(self, make: Callable[[], Round]) -> Round:
        """A round of load, with what it cost the server."""
        before = cpu_seconds(self.process.pid)
        made = make()
        made.cpu_seconds = cpu_seconds(self.process.pid) - before
        return made

    def wait_until_ready(self) -> None:
        """Wait for an answer: a port takes connections before the processes behind it are there."""
        host, port = self.address
        connection = HTTPConnection(host, port, timeout=120)
        connection.request("GET", "/ready")
        assert connection.getresponse().status == 200
        connection.close()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


def cpu_seconds(pid: int) -> float:
    """What a process and all that it has started have spent."""
    ticks, children = {}, defaultdict[int, list[int]](list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        ticks[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
        children[int(fields[1])].append(int(stat.parent.name))
    found, total = [pid], 0
    while found:
        each = found.pop()
        total += ticks.get(each, 0)
        found += children[each]
    return total / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(options: argparse.Namespace, form: Form) -> Iterator[Served]:
    """A server whose log goes to a file: nobody has to wake for it meanwhile."""
    command = [sys.executable, "-m", "bertsmith", "serve", "--port", "0", "--device", options.device]
    command += ["--precision", options.precision]
    command += ["--model", f"m={options.model}", "--queue-requests", str(options.queue_requests)]
    command += ["--batch-tokens", str(options.batch_tokens if form.batching == "on" else 1)]
    if form.http_processes is not None:
        command += ["--http-processes", str(form.http_processes)]
    other = {} if options.src is None else {"PYTHONPATH": str(options.src.resolve())}
    environment = {**os.environ, **other}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("ab") as written, subprocess.Popen(command, stderr=written, env=environment) as process:
            try:
                served = Served(("127.0.0.1", port_of(process, log)), process, log)
                served.wait_until_ready()
                yield served
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(90)


def port_of(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port that a server says it listens on."""
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("http"):
                return int(line.split()[0].rsplit(":", 1)[1])
        time.sleep(0.1)
    sys.exit(log.read_text())


@dataclass
class Bench:
    """Rounds of load, all with the same requests."""

    options: argparse.Namespace
    generators: Generators

    def rounds_of(self, form: Form) -> list[Round]:
        """Capacity, the shares of it, and capacity again."""
        options, generators = self.options, self.generators
        # Few enough to be let in, more than enough for full batches.
        clients = min(options.clients, options.queue_requests)
        with server(options, form) as served:
            address = served.address
            generators.saturate(address, "warm-up", min(5, options.seconds), clients)
            before = served.charged(
                lambda: generators.saturate(address, "capacity", options.seconds, clients)
            )
            offered = [
                served.charged(lambda share=share: self.offer(address, share, before.rate))  # type: ignore[misc]
                for share in options.shares
            ]
            after = served.charged(
                lambda: generators.saturate(address, "capacity again", options.seconds, clients)
            )
        return [before, *offered, after]

    def offer(self, address: tuple[str, int], share: float, capacity: float) -> Round:
        """This share of the capacity."""
        seconds, clients = self.options.seconds, self.options.clients
        return self.generators.offer(address, f"{share:.0%}", seconds, rate=share * capacity, clients=clients)


# ---- what came of it


def print_table(rounds: list[tuple[Form, Round]], capacities: dict[Form, float]) -> None:
    times = "CPU ms | p50 ms | p95 ms | p99 ms"
    print(
        "| HTTP processes | batching | load | sent | not sent | 200 | 429 | other | 200/s | of capacity "
        f"| {times} | wrong |"
    )
    print("|---" * 15 + "|")
    for form, made in rounds:
        sent = len(made.outcomes)
        good, crowded = made.count(200), made.count(429)
        times = " | ".join(f"{1000 * made.percentile(share):.0f}" for share in (0.5, 0.95, 0.99))
        part = made.rate / capacities[form]
        print(
            f"| {form} | {made.name} | {sent} | {made.not_sent} "
            f"| {good / sent:.2%} | {crowded / sent:.2%} | {sent - good - crowded} "
            f"| {made.rate:.0f} | {part:.0%} | {made.cpu_ms:.2f} | {times} | {made.wrong} |",
            flush=True,
        )


def measures(form: Form, made: Round) -> dict[str, Any]:
    """The measures of a round as plain data."""
    statuses = Counter(outcome.status for outcome in made.outcomes)
    latencies = {f"p{share:g}": made.percentile(share / 100) for share in (50, 95, 99)}
    return {
        "http_processes": form.http_processes,
        "batching": form.batching,
        "load": made.name,
        "not_sent": made.not_sent,
        "rate": made.rate,
        "cpu_ms": made.cpu_ms,
        **latencies,
        "statuses": dict(statuses),
        "wrong": made.wrong,
    }


def judged(form: Form, made: Round, capacities: dict[Form, float]) -> bool:
    """Whether a round kept what is promised of it."""
    statuses = {outcome.status for outcome in made.outcomes}
    held = statuses <= {200, 429} and made.wrong == 0
    if form.batching == "on" and made.name == "70%":
        held &= made.count(200) >= ENOUGH_ANSWERED * (len(made.outcomes) + made.not_sent)
    if form.batching == "on" and made.name == "200%":
        held &= made.rate >= ENOUGH_THROUGHPUT * capacities[form] and made.count(429) > 0
        held &= made.not_sent <= MAX_NOT_SENT * len(made.outcomes)
    if not held:
        counts = dict(Counter(outcome.status for outcome in made.outcomes))
        print(f"MISSED: {form}, load {made.name}: {counts}, not sent {made.not_sent}, wrong {made.wrong}")
    return held


def drained(form: Form, bench: Bench, capacity: float, path: str) -> bool:
    """Whether SIGTERM in the middle of the load loses nothing that was accepted."""
    with server(bench.options, form) as served:
        stop = Timer(bench.options.seconds / 2, served.process.send_signal, (signal.SIGTERM,))
        stop.start()
        made = bench.offer(served.address, 0.7, capacity)
        code = served.process.wait(90)
        lines = served.lines()
    logged = Counter(line["status"] for line in lines if line.get("route") == path)
    held = code == 0 and logged[200] == made.count(200) and set(logged) <= {200, 429, 503}
    held &= made.wrong == 0
    print(
        f"SIGTERM under load: {made.count(200)} answered (by the server's log {logged[200]}), "
        f"{made.count(503)} told to go elsewhere, {made.count(NO_REPLY)} found nobody, exit status {code}: "
        f"{'nothing accepted was lost' if held else 'MISSED'}"
    )
    return held


if __name__ == "__main__":
    main()
