"""Batching across requests: those that wait for one model are computed together, within a budget of tokens.

All state lives on the event loop, so that nothing needs a lock; only the model's own work runs in a thread.
No timer collects a batch: while the model computes, requests gather by themselves, and one that finds the
model idle is computed at once. So batches grow with the load, and a lone request waits for nobody.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.packed import split_by_budget
from bertsmith.serve.api_errors import ApiError, overloaded
from bertsmith.serve.server_config import Limits

MAX_WAIT_FRACTION = 0.5
"""Of a request's time that it may spend waiting: one that would wait longer is rejected at once."""
MAX_RETRY_SECONDS = 60
SPEED_DECAY = 0.8
"""Weight of the past in the measured speed."""


@dataclass(frozen=True, slots=True)
class BatchKey:
    """What is computed, and how: only requests with the same key can share a batch."""

    operation: str
    """The name of one (`serve.operations`)."""
    options: tuple[object, ...] = ()


Predict = Callable[[BatchKey, Sequence[Any]], Sequence[Any]]
"""A result for each input."""
Outcome = Sequence[Any] | BaseException
"""The results of a work item, or what went wrong with it."""


@dataclass(slots=True, eq=False)
class WorkItem:
    """A request, or a part of a long one, that is computed in one batch."""

    key: BatchKey
    inputs: Sequence[Any]
    first: int
    """The index of the first input in its request."""
    tokens: int
    results: asyncio.Future[Sequence[Any]]
    request: object
    """The same for all parts of one request."""
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What was computed together, for the metrics."""

    key: BatchKey
    requests: int
    tokens: int
    seconds: float
    waited: tuple[float, ...]
    """Of each work item, in seconds."""


class BatchQueue:
    """The requests that wait for one model."""

    def __init__(
        self, predict: Predict, executor: Executor, *, limits: Limits, on_batch: Callable[[BatchReport], None]
    ) -> None:
        self._predict, self._executor, self._limits, self._on_batch = predict, executor, limits, on_batch
        self._waiting: dict[WorkItem, None] = {}  # in the order of their arrival
        self._parts: Counter[object] = Counter()  # how many work items wait, by their requests
        self._tokens = 0
        self._worker: asyncio.Task[None] | None = None
        self._tokens_per_second = 0.0

    @property
    def requests(self) -> int:
        """How many requests wait, with all of their inputs or with parts."""
        return len(self._parts)

    @property
    def tokens(self) -> int:
        """How many tokens wait."""
        return self._tokens

    @property
    def is_full(self) -> bool:
        """Whether a request as long as the average work item that waits would be rejected."""
        # Where less room is left, a shorter one might still slip in; but to find out it must be parsed and
        # tokenised, and most are then rejected at the full price of it.
        average = self.tokens / len(self._waiting) if self._waiting else 0.0
        return self._room() <= average

    def retry_seconds(self) -> int:
        """When there should be room again, by the measured speed."""
        speed = self._tokens_per_second or math.inf
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(self.tokens / speed)))

    async def predict(self, key: BatchKey, inputs: Sequence[Any], tokens: Sequence[int]) -> list[Any]:
        """The result of each input; cancelling it removes what was not begun from the queue."""
        items = self._work_items(key, inputs, tokens)
        self._admit(items)
        for item in items:
            self._waiting[item] = None
            self._parts[item.request] += 1
            self._tokens += item.tokens
        self._start_worker()
        try:
            if len(items) == 1:  # as nearly always
                return list(await items[0].results)
            found = await asyncio.gather(*(item.results for item in items))
        finally:
            for item in items:
                self._remove(item)
        return [result for part in found for result in part]

    def _work_items(self, key: BatchKey, inputs: Sequence[Any], tokens: Sequence[int]) -> list[WorkItem]:
        """A long request goes in parts, so that others get their turn between them."""
        loop, request = asyncio.get_running_loop(), object()
        return [
            WorkItem(
                key,
                inputs[group[0] : group[-1] + 1],
                first=group[0],
                tokens=sum(tokens[index] for index in group),
                results=loop.create_future(),
                request=request,
            )
            for group in split_by_budget(tokens, self._limits.batch_tokens)
        ]

    def _admit(self, items: Sequence[WorkItem]) -> None:
        wanted = sum(item.tokens for item in items)
        if wanted > self._limits.queue_tokens:
            message = f"the request has {wanted} tokens; this server takes {self._limits.queue_tokens}"
            raise ApiError(413, message)
        room = self._room()
        # A request that finds nobody waiting is taken, however slow the last batch made the model look.
        if room <= 0 or (self._waiting and wanted > room):
            raise overloaded(self.retry_seconds())

    def _room(self) -> float:
        """Tokens that may still come: more would wait too long, and a rejection now beats a timeout later."""
        if self.requests >= self._limits.queue_requests:
            return 0
        in_time = self._tokens_per_second * self._limits.request_seconds * MAX_WAIT_FRACTION or math.inf
        # One batch may always wait: there would be nothing to measure otherwise.
        bound = max(min(self._limits.queue_tokens, in_time), self._limits.batch_tokens)
        return bound - self.tokens

    def _start_worker(self) -> None:
        if self._waiting and (self._worker is None or self._worker.done()):
            self._worker = asyncio.create_task(self._work())
            # Whatever ended a worker before its time, those who still wait get another.
            self._worker.add_done_callback(lambda _: self._start_worker())

    async def _work(self) -> None:
        """Compute batches until nothing waits."""
        while batch := self._next_batch():
            try:
                await self._compute(batch)
            finally:
                # Let nobody wait for what was taken out of the queue and will not be computed any more.
                for item in batch:
                    if not item.results.done():
                        item.results.set_exception(RuntimeError("the batch was not finished"))

    def _next_batch(self) -> list[WorkItem]:
        """The oldest work item and all others of its key that fit beside it; the rest keep their order."""
        batch: list[WorkItem] = []
        room = self._limits.batch_tokens
        for item in self._waiting:
            if not batch or (item.key == batch[0].key and item.tokens <= room):
                batch.append(item)
                room -= item.tokens
        for item in batch:
            self._remove(item)
        return batch

    async def _compute(self, batch: Sequence[WorkItem]) -> None:
        begin = time.monotonic()
        outcomes = await self._outcomes(batch)
        seconds = time.monotonic() - begin
        for item, outcome in zip(batch, outcomes, strict=True):
            if item.results.done():  # its request was cancelled meanwhile
                continue
            if isinstance(outcome, BaseException):
                item.results.set_exception(outcome)
            else:
                item.results.set_result(outcome)
        tokens = sum(item.tokens for item in batch)
        if not any(isinstance(outcome, BaseException) for outcome in outcomes):  # rejecting takes no time
            self._measure_speed(tokens / max(seconds, 1e-6))
        requests = len({item.request for item in batch})
        waited = tuple(begin - item.arrived for item in batch)
        self._on_batch(BatchReport(batch[0].key, requests, tokens, seconds, waited))

    async def _outcomes(self, batch: Sequence[WorkItem]) -> list[Outcome]:
        """The results of each work item, or what went wrong with it."""
        parts = [item.inputs for item in batch]
        future = asyncio.get_running_loop().run_in_executor(
            self._executor, predict_parts, self._predict, batch[0].key, parts
        )
        await asyncio.wait({future})  # not the future itself: what it raises belongs to the requests
        failure = future.exception()
        if failure is None:
            found = zip(batch, future.result(), strict=True)
            return [
                _with_request_index(each, item.first) if isinstance(each, UserError) else each
                for item, each in found
            ]
        if len(batch) == 1:
            return [failure]
        # A fault does not tell whose it is, and the others must not suffer for it.
        return [outcome for item in batch for outcome in await self._outcomes([item])]

    def _measure_speed(self, speed: float) -> None:
        before = self._tokens_per_second or speed
        self._tokens_per_second = SPEED_DECAY * before + (1 - SPEED_DECAY) * speed

    def _remove(self, item: WorkItem) -> None:
        if item in self._waiting:
            del self._waiting[item]
            self._tokens -= item.tokens
            self._parts[item.request] -= 1
            if not self._parts[item.request]:
                del self._parts[item.request]


def predict_parts(
    predict: Predict, key: BatchKey, parts: Sequence[Sequence[Any]]
) -> list[Sequence[Any] | UserError]:
    """The results of each part, computed together; a part that the model rejects gets its own error."""
    try:
        results = predict(key, [each for part in parts for each in part])
    except UserError as error:
        if len(parts) == 1:
            return [error]
        # One of them is at fault: halving finds it with few computations more.
        middle = len(parts) // 2
        return [*predict_parts(predict, key, parts[:middle]), *predict_parts(predict, key, parts[middle:])]
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    return [results[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


def _with_request_index(error: UserError, first: int) -> UserError:
    """The error with the index that the input has in its request."""
    return error if error.index is None else replace(error, index=error.index + first)
