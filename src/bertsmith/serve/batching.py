"""Requests wait in one line and are asked together: as many of one kind as fit the token budget.

All of it lives on the event loop, so that nothing needs a lock; only the model's own work runs in a thread.
"""

import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from bertsmith.ground.errors import UserError
from bertsmith.packed import split_by_budget
from bertsmith.serve.refusals import Refusal, crowded, refusal_of
from bertsmith.serve.settings import Limits

LONGEST_WAIT = 0.5
"""Share of a request's time that it may spend waiting: one that would wait longer is refused at once."""
MOST_RETRY_SECONDS = 60
MEMORY = 0.8
"""Weight of the past in the measured speed."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is asked: requests of one kind can be asked together."""

    question: str
    """An ability that a `Bert` names; of "look" there are several, as in "look/tokens"."""
    options: tuple[object, ...] = ()

    @property
    def ability(self) -> str:
        """What a model must be able to do."""
        return self.question.partition("/")[0]


Ask = Callable[[Kind, Sequence[Any]], list[Any]]
"""The answer to each input."""
Result = list[Any] | BaseException
"""The answers to a piece, or what went wrong with it."""


@dataclass(slots=True, eq=False)
class Piece:
    """A request, or a part of a long one, that is asked as a whole."""

    kind: Kind
    inputs: Sequence[Any]
    first: int
    """The number of the first input in its request."""
    tokens: int
    answers: asyncio.Future[list[Any]]
    request: object
    """The same for all parts of one request."""
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Batch:
    """What was asked together, for those who measure."""

    kind: Kind
    requests: int
    tokens: int
    seconds: float
    waited: tuple[float, ...]
    """Of each piece, in seconds."""


class BatchQueue:
    """What waits for one model."""

    def __init__(
        self, ask: Ask, executor: Executor, *, limits: Limits, watch: Callable[[Batch], None]
    ) -> None:
        self._ask, self._executor, self._limits, self._watch = ask, executor, limits, watch
        self._waiting: dict[Piece, None] = {}  # in the order of their arrival
        self._parts: Counter[object] = Counter()  # how many pieces wait, by their requests
        self._tokens = 0
        self._worker: asyncio.Task[None] | None = None
        self._tokens_per_second = 0.0

    @property
    def requests(self) -> int:
        """How many requests wait, with all of them or with parts."""
        return len(self._parts)

    @property
    def tokens(self) -> int:
        """How many tokens wait."""
        return self._tokens

    @property
    def is_full(self) -> bool:
        """Whether a request as long as the pieces that wait would not be taken."""
        # Where less room is left, a shorter one might still slip in; but to find out it must be parsed and
        # encoded, and most are then refused at the full price of it.
        usual = self.tokens / len(self._waiting) if self._waiting else 0.0
        return self._room() <= usual

    def retry_seconds(self) -> int:
        """When there should be room again, by the measured speed."""
        speed = self._tokens_per_second or math.inf
        return min(MOST_RETRY_SECONDS, max(1, math.ceil(self.tokens / speed)))

    async def answers(self, kind: Kind, inputs: Sequence[Any], tokens: Sequence[int]) -> list[Any]:
        """The answer to each input; cancelling it takes what was not begun out of the line."""
        pieces = self._pieces(kind, inputs, tokens)
        self._admit(pieces)
        for piece in pieces:
            self._waiting[piece] = None
            self._parts[piece.request] += 1
            self._tokens += piece.tokens
        self._wake()
        try:
            if len(pieces) == 1:  # as nearly always
                return await pieces[0].answers
            found = await asyncio.gather(*(piece.answers for piece in pieces))
        finally:
            for piece in pieces:
                self._take_out(piece)
        return [answer for part in found for answer in part]

    def _pieces(self, kind: Kind, inputs: Sequence[Any], tokens: Sequence[int]) -> list[Piece]:
        """A long request goes in parts, so that others are not kept waiting for all of it."""
        loop, request = asyncio.get_running_loop(), object()
        return [
            Piece(
                kind,
                inputs[group[0] : group[-1] + 1],
                group[0],
                sum(tokens[number] for number in group),
                loop.create_future(),
                request,
            )
            for group in split_by_budget(tokens, self._limits.batch_tokens)
        ]

    def _admit(self, pieces: Sequence[Piece]) -> None:
        wanted = sum(piece.tokens for piece in pieces)
        if wanted > self._limits.queue_tokens:
            message = f"the request has {wanted} tokens; this server takes {self._limits.queue_tokens}"
            raise Refusal(413, message)
        room = self._room()
        # Whoever finds nobody waiting is taken, however slow the last batch made the model look.
        if room <= 0 or (self._waiting and wanted > room):
            raise crowded(self.retry_seconds())

    def _room(self) -> float:
        """Tokens that may still come."""
        if self.requests >= self._limits.queue_requests:
            return 0
        in_time = self._tokens_per_second * self._limits.request_seconds * LONGEST_WAIT or math.inf
        # One batch may always wait: there would be nothing to measure otherwise.
        bound = max(min(self._limits.queue_tokens, in_time), self._limits.batch_tokens)
        return bound - self.tokens

    def _wake(self) -> None:
        if self._waiting and (self._worker is None or self._worker.done()):
            self._worker = asyncio.create_task(self._work())
            self._worker.add_done_callback(self._go_on)

    def _go_on(self, _: asyncio.Task[None]) -> None:
        """Whatever ended a worker before its time, those who still wait get another."""
        self._wake()

    async def _work(self) -> None:
        """Ask until nothing waits."""
        while batch := self._next_batch():
            try:
                await self._answer(batch)
            finally:
                _drop(batch)

    async def _answer(self, batch: Sequence[Piece]) -> None:
        begin = time.monotonic()
        waited = tuple(begin - piece.arrived for piece in batch)
        results = await self._results(batch)
        seconds = time.monotonic() - begin
        _hand_over(batch, results)
        tokens = sum(piece.tokens for piece in batch)
        if all(isinstance(result, list) for result in results):  # what is refused takes no time at all
            self._measure(tokens / max(seconds, 1e-6))
        requests = len({piece.request for piece in batch})
        self._watch(Batch(batch[0].kind, requests, tokens, seconds, waited))

    async def _results(self, batch: Sequence[Piece]) -> list[Result]:
        """The answers to each piece, or what went wrong with it."""
        asked = await self._asked(batch)
        failure = asked.exception()
        if failure is None:
            return [*asked.result()]
        if len(batch) == 1:
            return [failure]
        # A fault does not tell whose it is, and the others must not suffer for it.
        return [result for piece in batch for result in await self._results([piece])]

    async def _asked(self, batch: Sequence[Piece]) -> asyncio.Future[list[list[Any] | UserError]]:
        """What became of asking for these together; whatever it raises is for those who asked."""
        parts = [piece.inputs for piece in batch]
        asked = asyncio.get_running_loop().run_in_executor(
            self._executor, ask_parts, self._ask, batch[0].kind, parts
        )
        await asyncio.wait({asked})
        return asked

    def _next_batch(self) -> list[Piece]:
        """The oldest piece and all others of its kind that fit beside it; those left keep their places."""
        batch: list[Piece] = []
        room = self._limits.batch_tokens
        for piece in self._waiting:
            if not batch or (piece.kind == batch[0].kind and piece.tokens <= room):
                batch.append(piece)
                room -= piece.tokens
        for piece in batch:
            self._take_out(piece)
        return batch

    def _take_out(self, piece: Piece) -> None:
        if piece in self._waiting:
            del self._waiting[piece]
            self._tokens -= piece.tokens
            self._parts[piece.request] -= 1
            if not self._parts[piece.request]:
                del self._parts[piece.request]

    def _measure(self, speed: float) -> None:
        before = self._tokens_per_second or speed
        self._tokens_per_second = MEMORY * before + (1 - MEMORY) * speed


def ask_parts(ask: Ask, kind: Kind, parts: Sequence[Sequence[Any]]) -> list[list[Any] | UserError]:
    """The answers to each part, asked together; a part that the model refuses gets its own complaint."""
    try:
        answers = ask(kind, [each for part in parts for each in part])
    except UserError as error:
        if len(parts) == 1:
            return [error]
        # One of them is at fault: halving finds it with few questions more.
        middle = len(parts) // 2
        return [*ask_parts(ask, kind, parts[:middle]), *ask_parts(ask, kind, parts[middle:])]
    given = iter(answers)
    return [[next(given) for _ in part] for part in parts]


def _hand_over(batch: Sequence[Piece], results: Sequence[Result]) -> None:
    for piece, result in zip(batch, results, strict=True):
        if piece.answers.done():  # nobody waits any more
            continue
        if isinstance(result, UserError):
            piece.answers.set_exception(refusal_of(_numbered(result, piece.first)))
        elif isinstance(result, BaseException):
            piece.answers.set_exception(result)
        else:
            piece.answers.set_result(result)


def _drop(batch: Sequence[Piece]) -> None:
    """Let nobody wait for what was taken out of the line and will not be answered any more."""
    for piece in batch:
        if not piece.answers.done():
            piece.answers.set_exception(RuntimeError("the batch came to no end"))


def _numbered(error: UserError, first: int) -> UserError:
    """The complaint with the number that the text has in its request."""
    found = re.fullmatch(r"text (\d+)", error.where)
    where = f"text {int(found[1]) + first}" if found else error.where
    return UserError(error.what, where=where, remedy=error.remedy)
