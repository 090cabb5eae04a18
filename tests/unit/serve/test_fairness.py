"""Turns are fair: whoever asks for little does not wait for whoever asks for much."""

import asyncio
import threading

import pytest

from bertsmith.core.errors import UserError
from bertsmith.serve import batching
from bertsmith.serve.batching import CONNECTION
from bertsmith.serve.server_config import Limits
from tests.unit.serve.queueing import ONE, Model, run


def test_whoever_asks_for_little_waits_for_one_part_of_whoever_asks_for_much():
    async def say(queue):
        much = asyncio.create_task(queue.predict(ONE, list(range(6)), [10] * 6))
        await asyncio.sleep(0)
        little = [asyncio.create_task(queue.predict(ONE, [number], [2])) for number in (100, 200)]
        return await asyncio.gather(much, *little)

    found, asked = run(say, limits=Limits(batch_tokens=10, queue_tokens=1000))
    assert found == [[2 * number for number in range(6)], [200], [400]]
    assert [inputs for _, inputs in asked] == [[0], [100, 200], [1], [2], [3], [4], [5]]


class Stepping(Model):
    """Computes a long input in four steps."""

    def in_steps(self, kind, inputs):
        for number in range(4):
            self.asked.append((kind, [f"step {number}"]))
            yield 0.75 - number / 4
        return self(kind, inputs)


def test_whoever_asks_for_little_waits_for_one_step_of_a_text_that_is_long_by_itself():
    seen = []

    async def say(queue):
        long = asyncio.create_task(queue.predict(ONE, [7], [40]))
        await asyncio.sleep(0)
        little = [asyncio.create_task(queue.predict(ONE, [number], [2])) for number in (100, 200)]
        found = await asyncio.gather(long, *little)
        return found, queue.tokens, queue.requests

    found, asked = run(
        say, limits=Limits(batch_tokens=10, queue_tokens=1000), model=Stepping(), on_batch=seen.append
    )
    assert found == ([[14], [200], [400]], 0, 0)
    order = [inputs for _, inputs in asked]
    assert order == [["step 0"], [100, 200], ["step 1"], ["step 2"], ["step 3"], [7]]
    assert [batch.tokens for batch in seen] == [10, 4, 10, 10, 10, 0]


def test_a_long_text_whose_client_hangs_up_is_computed_no_further():
    begun, free = threading.Event(), threading.Event()

    class Waiting(Stepping):
        def in_steps(self, kind, inputs):
            for number, remaining in enumerate(super().in_steps(kind, inputs)):
                if number == 1:
                    begun.set()
                    free.wait(30)
                yield remaining

    async def say(queue):
        long = asyncio.create_task(queue.predict(ONE, [7], [40]))
        await asyncio.to_thread(begun.wait, 30)
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        free.set()
        return await queue.predict(ONE, [1], [2]), queue.tokens, queue.requests

    found, asked = run(say, limits=Limits(batch_tokens=10, queue_tokens=1000), model=Waiting())
    assert found == ([2], 0, 0)
    assert [inputs for _, inputs in asked] == [["step 0"], ["step 1"], [1]]


def test_a_long_text_that_the_model_rejects_amid_its_steps_is_called_by_its_index():
    class Rejecting(Stepping):
        def in_steps(self, kind, inputs):
            yield 0.5
            raise UserError("is negative", index=0)

    async def say(queue):
        await queue.predict(ONE, [1, 2, -3], [2, 2, 40])

    with pytest.raises(UserError) as told:
        run(say, limits=Limits(batch_tokens=10, queue_tokens=1000), model=Rejecting())
    assert told.value.index == 2


def test_whoever_asks_for_little_goes_before_the_parts_of_many_that_came_earlier():
    free = threading.Event()

    async def say(queue):
        queue._executor.submit(free.wait, 30)
        tasks = [asyncio.create_task(queue.predict(ONE, [number] * 3, [10] * 3)) for number in range(1, 5)]
        await asyncio.sleep(0.01)  # the first part of the first is begun
        tasks.append(asyncio.create_task(queue.predict(ONE, [50], [2])))
        await asyncio.sleep(0.01)
        free.set()
        await asyncio.gather(*tasks)

    _, asked = run(say, limits=Limits(batch_tokens=10, queue_tokens=1000))
    order = [inputs[0] for _, inputs in asked]
    assert order[:2] == [1, 50]
    assert [order.index(number) for number in (2, 3, 4)] == [2, 3, 4]  # then in turns


def test_a_long_request_gets_its_turn_however_many_short_ones_come():
    async def say(queue):
        done = []

        async def short():
            while len(done) < 1000 and "long" not in done:
                done.append(await queue.predict(ONE, [1], [2]))

        async def long():
            await queue.predict(ONE, [7] * 2, [10] * 2)
            done.append("long")

        await asyncio.gather(*(short() for _ in range(15)), long())  # three batches of short ones at a time
        return done.index("long")

    # In the time of its twenty tokens, each of the fifteen others has twenty, in ten requests.
    limits = Limits(batch_tokens=10, queue_tokens=1000, queue_requests=100)
    assert 100 < run(say, limits=limits)[0] < 250


def test_a_connection_that_has_had_much_stands_behind_those_that_had_little():
    free = threading.Event()

    async def say(queue):
        async def one(connection, number, tokens):
            CONNECTION.set(connection)
            return await queue.predict(ONE, [number], [tokens])

        queue._executor.submit(free.wait, 30)
        tasks = [asyncio.create_task(one("greedy", number, 9)) for number in range(1, 4)]
        await asyncio.sleep(0.01)  # the first of them is begun
        tasks.append(asyncio.create_task(one("modest", 50, 9)))
        await asyncio.sleep(0.01)
        free.set()
        await asyncio.gather(*tasks)

    _, asked = run(say, limits=Limits(batch_tokens=10, queue_tokens=1000))
    assert [inputs for _, inputs in asked] == [[1], [50], [2], [3]]


def test_connections_that_ended_are_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(batching, "MAX_CONNECTIONS", 3)

    async def say(queue):
        sizes = []
        queue._on_batch = lambda _: sizes.append(len(queue._ends))
        await asyncio.gather(*(queue.predict(ONE, [number], [9]) for number in range(12)))
        return max(sizes[2:]), len(queue._ends)

    seen, _ = run(say, limits=Limits(batch_tokens=10, queue_tokens=1000))
    assert seen == (12, 0)  # nobody is forgotten who still waits
