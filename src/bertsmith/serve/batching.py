"""Batching across requests: waiting requests for one model are computed together, within a token budget.

All state is on the event loop, so that locks are not needed; only the model itself runs in a thread. No timer
collects a batch: requests gather while the model computes, and a request that finds the model idle is
computed at once. So batches grow with the load, and a single request does not wait.

A long request is computed in short parts, one in the queue at a time. The queue is fair between connections
(fair queueing, Demers, Keshav and Shenker 1989). The next item is the one that would end first if all
connections were served at once, with the same number of tokens a second each. So a small request waits for at
most one part of a large one, however many parts or connections the other client has. A single text that is
longer than a part is computed in steps, and waits for its turn again after each.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.core.steps import Steps
from bertsmith.serve.api_errors import ApiError, overloaded
from bertsmith.serve.server_config import Limits

MAX_WAIT_FRACTION = 0.5
"""Fraction of a request's time that it may wait; if it would wait longer, it is rejected at once."""
MAX_RETRY_SECONDS = 60
SPEED_DECAY = 0.8
"""Weight of the past in the measured speed."""
MIN_MEASURES = 8
"""Parts to measure before a request is rejected because of their speed: the first parts are slow."""
SPEED_SECONDS = 60.0
"""Seconds that a measured speed is valid: a model that was slow a while ago may be fast now."""
LATEST_FRACTION = 0.9
"""Fraction of a request's time for computing a long request; the rest is for its response."""
PART_SECONDS = 0.05
"""Seconds of one part of a long request: the longest delay that it causes for other requests."""
MIN_PART_TOKENS = 512
"""Minimum tokens of a part: smaller ones would leave the device idle."""
MAX_CONNECTIONS = 4096
"""Maximum number of connections to remember; beyond it, those without waiting requests are forgotten."""

CONNECTION: ContextVar[object] = ContextVar("connection", default=None)
"""Connection of the current request; without one, each request counts as a connection."""


@dataclass(frozen=True, slots=True)
class BatchKey:
    """An operation and its options: only requests with the same key can share a batch."""

    operation: str
    """Name of an operation in `serve.operations`."""
    options: tuple[object, ...] = ()


Predict = Callable[[BatchKey, Sequence[Any]], Sequence[Any]]
"""Function that returns a result for each input."""
InSteps = Callable[[BatchKey, Sequence[Any]], Steps[Sequence[Any]] | None]
"""Function that returns the results a step at a time, or None if that is not possible."""
Outcome = Sequence[Any] | float | BaseException
"""Results of a work item, the fraction of it that remains, or its exception."""


@dataclass(slots=True, eq=False)
class WorkItem:
    """A request, or a part of a long one, that is computed in one batch."""

    key: BatchKey
    inputs: Sequence[Any]
    first: int
    """Index of the first input in its request."""
    size: int
    """Number of tokens of all inputs."""
    is_long: bool
    """True for a part of a long request, or an item as large as one: it is computed alone."""
    request: object
    """Identity of the request: the same object for all of its parts."""
    end: float
    """Virtual finish time of fair queueing: tokens that each connection would have received by then."""
    results: asyncio.Future[Sequence[Any]]
    arrived: float = field(default_factory=time.monotonic)
    remaining: float = 1.0
    """Fraction that is not computed yet."""
    steps: Steps[Sequence[Any]] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens that are not computed yet."""
        return math.ceil(self.size * self.remaining)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Size and time of a computed batch, for the metrics."""

    key: BatchKey
    requests: int
    tokens: int
    seconds: float
    waited: tuple[float, ...]
    """Seconds that each work item waited."""


class BatchQueue:
    """The queue of requests for one model."""

    def __init__(
        self,
        predict: Predict,
        executor: Executor,
        *,
        limits: Limits,
        on_batch: Callable[[BatchReport], None],
        in_steps: InSteps = lambda _key, _inputs: None,
    ) -> None:
        self._predict, self._executor, self._limits, self._on_batch = predict, executor, limits, on_batch
        self._in_steps = in_steps
        self._waiting: dict[WorkItem, None] = {}  # in order of arrival
        self._waiting_tokens = 0
        self._not_begun: dict[object, int] = {}  # tokens by request, including its later parts
        self._tokens = 0  # the sum of these
        self._ends: dict[object, float] = {}  # the end of the last item of each connection
        self._served = 0.0  # virtual time: tokens that a connection that always waits has received
        self._worker: asyncio.Task[None] | None = None
        self._tokens_per_second = 0.0
        self._part_speed = self._part_measured = 0.0
        self._parts_measured = 0

    @property
    def requests(self) -> int:
        """Number of waiting requests, whole or in part."""
        return len(self._not_begun)

    @property
    def tokens(self) -> int:
        """Number of waiting tokens."""
        return self._tokens

    @property
    def is_full(self) -> bool:
        """True if a request as long as the average waiting item would be rejected."""
        return self.free <= 0

    @property
    def free(self) -> float:
        """Number of requests as long as the average waiting item that would be accepted."""
        # With less room, a shorter request might still fit. But finding out takes parsing and tokenizing it,
        # and most such requests would then be rejected at full cost.
        average = self._waiting_tokens / len(self._waiting) if self._waiting else 0.0
        by_tokens = (self._room() - average) / max(average, 1.0)
        return min(by_tokens, self._limits.queue_requests - self.requests)

    def retry_seconds(self) -> int:
        """Return the seconds until there should be room again, by the measured speed."""
        speed = self._tokens_per_second or math.inf
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(self.tokens / speed)))

    async def check_in_time(self, wanted: int, *, since: float) -> None:
        """Reject a request, begun at `since`, if `wanted` more tokens cannot be computed in time."""
        self._check_in_time(wanted, since=since)

    def _check_in_time(self, wanted: int, *, since: float | None = None, request: object = None) -> None:
        now = time.monotonic()
        if self._parts_measured < MIN_MEASURES or now - self._part_measured > SPEED_SECONDS:
            return
        seconds = LATEST_FRACTION * self._limits.request_seconds - (0.0 if since is None else now - since)
        in_time = max(0.0, self._part_speed * seconds)
        if wanted > in_time:
            message = f"the request has {wanted} more tokens; this server computes {in_time:.0f} in its time"
            raise ApiError(413, f"{message}; send fewer texts at once")
        # Requests take turns: each other one computes at most `wanted` tokens before this one ends.
        others = sum(min(each, wanted) for of, each in self._not_begun.items() if of is not request)
        if others + wanted > in_time:
            raise overloaded(self.retry_seconds())

    async def predict(
        self, key: BatchKey, inputs: Sequence[Any], tokens: Sequence[int], *, admitted: bool = False
    ) -> list[Any]:
        """Return the result of each input; cancellation removes inputs that have not begun.

        The rest of an admitted request is not rejected for lack of room: its results so far would be lost,
        and under load a long request would never end.
        """
        wanted = sum(tokens)
        if not admitted:
            self._admit(wanted)
        request, began = object(), time.monotonic()
        self._not_begun[request] = wanted
        self._tokens += wanted
        found: list[Any] = []
        try:
            while len(found) < len(inputs):
                if found:
                    self._check_in_time(self._not_begun[request], since=began, request=request)
                found += await self._next_part(key, inputs, tokens, first=len(found), request=request)
        finally:
            self._tokens -= self._not_begun.pop(request, 0)
        return found

    async def _next_part(
        self, key: BatchKey, inputs: Sequence[Any], tokens: Sequence[int], *, first: int, request: object
    ) -> Sequence[Any]:
        """Return the results of the next part: the inputs from `first` on that fit into it."""
        budget = self._part_tokens()
        end, size = first + 1, tokens[first]
        while end < len(inputs) and size + tokens[end] <= budget:
            size += tokens[end]
            end += 1
        is_long = size > budget or end - first < len(inputs)
        connection = CONNECTION.get() or request
        finish = self._ends[connection] = max(self._served, self._ends.get(connection, 0.0)) + size
        results: asyncio.Future[Sequence[Any]] = asyncio.get_running_loop().create_future()
        item = WorkItem(key, inputs[first:end], first, size, is_long, request, finish, results)
        self._waiting[item] = None
        self._waiting_tokens += size
        self._start_worker()
        try:
            return await results
        finally:
            self._remove(item)

    def _part_tokens(self) -> int:
        """Return the maximum number of tokens of a part."""
        by_speed = int(self._tokens_per_second * PART_SECONDS)
        return min(self._limits.batch_tokens, max(MIN_PART_TOKENS, by_speed))

    def _admit(self, wanted: int) -> None:
        check_size(wanted, self._limits)
        part = min(wanted, self._part_tokens())
        room = self._room()
        # If no request waits, accept this one, however slow the last batch made the model look.
        if room <= 0 or (self._waiting and part > room):
            raise overloaded(self.retry_seconds())
        if wanted > part:
            self._check_in_time(wanted)
            if self._tokens and self._tokens + wanted > self._limits.queue_tokens:
                raise overloaded(self.retry_seconds())

    def _room(self) -> float:
        """Return the tokens that may still be queued: rejecting a request now beats a timeout later."""
        if self.requests >= self._limits.queue_requests:
            return 0
        in_time = self._tokens_per_second * self._limits.request_seconds * MAX_WAIT_FRACTION or math.inf
        # One batch may always wait: otherwise there would be nothing to measure.
        bound = max(min(self._limits.queue_tokens, in_time), self._limits.batch_tokens)
        return bound - self._waiting_tokens

    def _start_worker(self) -> None:
        if self._waiting and (self._worker is None or self._worker.done()):
            self._worker = asyncio.create_task(self._work())
            self._worker.add_done_callback(self._worker_ended)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        # Otherwise a failure would be logged only when the task is garbage-collected.
        if not worker.cancelled() and (failure := worker.exception()):
            context = {"message": "a batch worker failed", "exception": failure}
            worker.get_loop().call_exception_handler(context)
        # Whatever ended a worker early, the requests that still wait get another one.
        self._start_worker()

    async def _work(self) -> None:
        """Compute batches until the queue is empty."""
        while batch := self._next_batch():
            try:
                await self._compute(batch)
            finally:
                # No request may wait for an item that was taken from the queue and will not be computed.
                for item in batch:
                    if item not in self._waiting and not item.results.done():
                        item.results.set_exception(RuntimeError("the batch was not finished"))

    def _next_batch(self) -> list[WorkItem]:
        """Take the next work item from the queue, with all others of its key that fit into the batch."""
        if not self._waiting:  # an empty queue: it does not need to be fair
            self._ends.clear()
            self._served = 0.0
            return []
        waiting = len(self._not_begun)
        first, *others = sorted(self._waiting, key=attrgetter("end"))
        batch, room = [first], self._limits.batch_tokens - first.tokens
        for item in others if not first.is_long else ():
            if item.key == first.key and item.tokens <= room and not item.is_long:
                batch.append(item)
                room -= item.tokens
        for item in batch:
            self._remove(item)
        # A text that is computed in steps takes only one step now.
        tokens = min(first.tokens, self._part_tokens()) if first.is_long else sum(map(_tokens, batch))
        self._served += tokens / waiting
        if len(self._ends) > MAX_CONNECTIONS:
            self._ends = {each: end for each, end in self._ends.items() if end > self._served}
        return batch

    async def _compute(self, batch: Sequence[WorkItem]) -> None:
        begin, before = time.monotonic(), sum(map(_tokens, batch))
        waited = tuple(begin - item.arrived for item in batch)
        outcomes = await self._outcomes(batch)
        seconds = time.monotonic() - begin
        for item, outcome in zip(batch, outcomes, strict=True):
            item.remaining = outcome if isinstance(outcome, float) else 0.0
            if item.results.done():  # its request was cancelled meanwhile
                continue
            if isinstance(outcome, float):
                self._wait_again(item)
            elif isinstance(outcome, BaseException):
                item.results.set_exception(outcome)
            else:
                item.results.set_result(outcome)
        tokens = before - sum(map(_tokens, batch))
        if not any(isinstance(outcome, BaseException) for outcome in outcomes):  # rejecting takes no time
            speed = tokens / max(seconds, 1e-6)
            self._measure_speed(speed)
            if batch[0].is_long:
                # The higher of both: a single slow part must not cause rejections.
                self._part_speed = max(speed, _weighed(self._part_speed, speed))
                self._part_measured, self._parts_measured = time.monotonic(), self._parts_measured + 1
        self._on_batch(BatchReport(batch[0].key, len(batch), tokens, seconds, waited))

    async def _outcomes(self, batch: Sequence[WorkItem]) -> list[Outcome]:
        """Return the results of each work item, or its exception."""
        future: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().run_in_executor(
            self._executor, self._computed, batch
        )
        await asyncio.wait({future})  # not `await future`: its exception belongs to the requests
        failure = future.exception()
        if failure is None:
            found = zip(batch, future.result(), strict=True)
            return [
                _with_request_index(each, item.first) if isinstance(each, UserError) else each
                for item, each in found
            ]
        if len(batch) == 1:
            return [failure]
        # A failure does not show which request caused it. Compute each alone, so that the others succeed.
        return [outcome for item in batch for outcome in await self._outcomes([item])]

    def _computed(self, batch: Sequence[WorkItem]) -> list[Outcome]:
        """Compute a batch in the model's thread; compute only one step of a single long text."""
        first = batch[0]
        if first.is_long and len(first.inputs) == 1 and first.steps is None:
            first.steps = self._in_steps(first.key, first.inputs)
        if first.steps is None:
            return [*predict_parts(self._predict, first.key, [item.inputs for item in batch])]
        try:
            return [next(first.steps)]
        except StopIteration as end:
            return [end.value]
        except UserError as error:
            return [error]

    def _wait_again(self, item: WorkItem) -> None:
        """Queue the rest of a text that is computed in steps, so that smaller requests can go first."""
        item.arrived = time.monotonic()
        self._waiting[item] = None
        self._waiting_tokens += item.tokens
        self._tokens += item.tokens
        self._not_begun[item.request] = self._not_begun.get(item.request, 0) + item.tokens

    def _measure_speed(self, speed: float) -> None:
        self._tokens_per_second = _weighed(self._tokens_per_second, speed)

    def _remove(self, item: WorkItem) -> None:
        if item in self._waiting:
            del self._waiting[item]
            self._waiting_tokens -= item.tokens
            self._tokens -= item.tokens
            self._not_begun[item.request] -= item.tokens
            if not self._not_begun[item.request]:
                del self._not_begun[item.request]


def check_size(tokens: int, limits: Limits) -> None:
    """Reject a request with more tokens than may ever wait."""
    if tokens > limits.queue_tokens:
        raise ApiError(413, f"the request has {tokens} tokens; this server accepts {limits.queue_tokens}")


def _tokens(item: WorkItem) -> int:
    return item.tokens


def _weighed(before: float, speed: float) -> float:
    """Return the measured speed, updated with one more measurement."""
    return SPEED_DECAY * (before or speed) + (1 - SPEED_DECAY) * speed


def predict_parts(
    predict: Predict, key: BatchKey, parts: Sequence[Sequence[Any]]
) -> list[Sequence[Any] | UserError]:
    """Return the results of each part, computed together; a rejected part gets its own error."""
    try:
        results = predict(key, [each for part in parts for each in part])
    except UserError as error:
        if len(parts) == 1:
            return [error]
        # One part is at fault: halving finds it with few extra computations.
        middle = len(parts) // 2
        return [*predict_parts(predict, key, parts[:middle]), *predict_parts(predict, key, parts[middle:])]
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    return [results[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


def _with_request_index(error: UserError, first: int) -> UserError:
    """Return the error with the input's index in its request."""
    return error if error.index is None else replace(error, index=error.index + first)
