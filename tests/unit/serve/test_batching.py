"""Requests of many people go through a model together, and each gets its own answer."""

import asyncio
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.serve.api_errors import ApiError
from bertsmith.serve.batching import predict_parts
from bertsmith.serve.server_config import Limits
from tests.unit.serve.queueing import ONE, OTHER, Model, run


def test_those_that_wait_are_asked_together_within_the_budget():
    async def say(queue):
        return await asyncio.gather(*(queue.predict(ONE, [number], [3]) for number in range(7)))

    answers, asked = run(say)
    assert answers == [[2 * number] for number in range(7)]
    assert [inputs for _, inputs in asked] == [[0, 1, 2], [3, 4, 5], [6]]


def test_the_oldest_goes_first_and_takes_along_its_own_kind():
    async def say(queue):
        kinds = [ONE, OTHER, ONE, OTHER]
        waits = [queue.predict(kind, [number], [1]) for number, kind in enumerate(kinds)]
        return await asyncio.gather(*waits)

    _, asked = run(say)
    assert asked == [(ONE, [0, 2]), (OTHER, [1, 3])]


def test_a_small_request_slips_past_one_that_does_not_fit_any_more():
    async def say(queue):
        sizes = [6, 6, 4]
        return await asyncio.gather(*(queue.predict(ONE, [size], [size]) for size in sizes))

    _, asked = run(say)
    assert [inputs for _, inputs in asked] == [[4, 6], [6]]


def test_a_long_request_goes_in_parts():
    async def say(queue):
        return await queue.predict(ONE, list(range(9)), [4] * 9)

    answers, asked = run(say)
    assert answers == [2 * number for number in range(9)]
    assert [len(inputs) for _, inputs in asked] == [2, 2, 2, 2, 1]


def test_a_budget_of_one_token_asks_for_each_alone():
    async def say(queue):
        return await asyncio.gather(*(queue.predict(ONE, [number], [3]) for number in range(4)))

    _, asked = run(say, limits=Limits(batch_tokens=1))
    assert [inputs for _, inputs in asked] == [[0], [1], [2], [3]]


def test_one_bad_request_harms_no_other_and_is_reported_by_its_own_number():
    async def say(queue):
        waits = [queue.predict(ONE, inputs, [1] * len(inputs)) for inputs in ([1, 2], [3, -4], [5])]
        return await asyncio.gather(*waits, return_exceptions=True)

    (first, bad, last), _ = run(say)
    assert (first, last) == ([2, 4], [10])
    assert isinstance(bad, UserError)
    assert (bad.index, bad.what) == (1, "is negative")


def test_the_number_of_a_bad_text_counts_from_the_start_of_its_request():
    async def say(queue):
        return await queue.predict(ONE, [1, 2, 3, 4, -5], [5] * 5)

    with pytest.raises(UserError, match="text 4: is negative"):
        run(say)


@given(st.lists(st.lists(st.integers(-2, 20), min_size=1, max_size=4), min_size=1, max_size=12))
def test_halving_gives_every_part_what_it_would_get_alone(parts):
    model = Model()
    together = predict_parts(model, ONE, parts)
    alone = [predict_parts(model, ONE, [part])[0] for part in parts]
    assert [str(each) for each in together] == [str(each) for each in alone]


def test_a_fault_reaches_whoever_made_it_and_nobody_else():
    async def say(queue):
        waits = [queue.predict(ONE, inputs, [1]) for inputs in ([1], [666], [-2], [3])]
        return await asyncio.gather(*waits, return_exceptions=True), await queue.predict(ONE, [4], [1])

    ((first, fault, refused, last), after), asked = run(say)
    assert (first, last, after) == ([2], [6], [8])
    assert (type(fault), type(refused)) == (RuntimeError, UserError)
    assert [inputs for _, inputs in asked] == [[1, 666, -2, 3], [1], [666], [-2], [3], [4]]


@pytest.mark.parametrize("bad", [[-1], [666], [1, -1]])
def test_only_what_is_answered_tells_how_fast_a_model_is(bad):
    async def say(queue):
        queue._measure_speed(10.0)
        await asyncio.gather(queue.predict(ONE, bad, [3] * len(bad)), return_exceptions=True)
        return queue._tokens_per_second

    speed, _ = run(say)
    assert speed == 10.0


def test_the_measured_speed_follows_the_model_slowly():
    async def say(queue):
        for speed in (10.0, 20.0, 20.0):
            queue._measure_speed(speed)
        return queue._tokens_per_second

    speed, _ = run(say)
    assert speed == pytest.approx(0.8 * (0.8 * 10 + 0.2 * 20) + 0.2 * 20)


def test_those_in_line_are_served_though_whoever_measures_fails(caplog):
    def on_batch(report):
        raise ValueError(report)

    async def say(queue):
        waits = asyncio.gather(*(queue.predict(ONE, [number], [6]) for number in range(4)))
        return await asyncio.wait_for(waits, 5)

    answers, _ = run(say, on_batch=on_batch)
    assert answers == [[0], [2], [4], [6]]
    # At once: what is logged when garbage is collected comes at any moment, in whatever runs then.
    assert [each.exc_info[0] for each in caplog.records] == [ValueError] * 4


def test_nobody_waits_for_a_model_that_was_closed():
    free = threading.Event()

    async def say(queue):
        queue._executor.submit(free.wait, 30)
        waits = asyncio.gather(
            *(queue.predict(ONE, [number], [6]) for number in range(3)), return_exceptions=True
        )
        await asyncio.sleep(0.01)
        queue._executor.shutdown(wait=False, cancel_futures=True)
        try:
            return await asyncio.wait_for(waits, 5)
        finally:
            free.set()

    found, asked = run(say)
    assert [type(each) for each in found] == [RuntimeError] * 3
    assert not asked


def test_what_is_not_begun_is_taken_out_when_nobody_waits_any_more():
    async def say(queue):
        tasks = [asyncio.create_task(queue.predict(ONE, [number], [6])) for number in range(4)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return queue.tokens, queue.requests

    left, asked = run(say)
    assert left == (0, 0)
    assert [inputs for _, inputs in asked] == [[0], [1], [3]]


@pytest.mark.parametrize(("sizes", "taken"), [([10] * 9, 4), ([1] * 12, 8)])
def test_a_full_queue_rejects_and_says_when_to_come_again(sizes, taken):
    async def say(queue):
        waits = [queue.predict(ONE, [1], [size]) for size in sizes]
        return await asyncio.gather(*waits, return_exceptions=True)

    found, _ = run(say)
    refused = [each for each in found if isinstance(each, ApiError)]
    assert len(found) - len(refused) == taken
    assert {each.status for each in refused} == {429}
    assert all(int(each.headers["Retry-After"]) >= 1 for each in refused)


def test_a_request_in_many_parts_is_one_of_those_that_wait():
    async def say(queue):
        waits = [queue.predict(ONE, [1] * size, [10] * size) for size in (6, 6, 1)]
        tasks = [asyncio.create_task(each) for each in waits]
        await asyncio.sleep(0)
        counts = [queue.requests]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return [*counts, queue.requests], [isinstance(each, ApiError) for each in found]

    seen, _ = run(say, limits=Limits(batch_tokens=10, queue_tokens=1000, queue_requests=2))
    assert seen == ([2, 0], [False, False, True])


def test_a_request_waits_until_its_last_part_is_begun():
    counts = []

    async def say(queue):
        queue._on_batch = lambda batch: counts.append((queue.requests, batch.requests))
        await queue.predict(ONE, [1, 2, 3], [6, 9, 4])

    _, asked = run(say)
    assert [inputs for _, inputs in asked] == [[1], [2], [3]]
    assert counts == [(1, 1), (1, 1), (0, 1)]


def know_speed(queue, speed, age=0.0):
    """Let a queue have measured how many tokens of long requests a second takes."""
    queue._part_speed, queue._part_measured = speed, time.monotonic() - age
    queue._parts_measured = 8


@pytest.mark.parametrize(("texts", "status"), [(4, None), (7, 413)])
def test_what_cannot_be_computed_in_time_is_rejected_when_it_comes(texts, status):
    async def say(queue):
        know_speed(queue, 10.0)
        try:
            await queue.predict(ONE, [1] * texts, [10] * texts)
        except ApiError as error:
            return error.status, error.message
        return None, ""

    (found, message), asked = run(say, limits=Limits(batch_tokens=10, queue_tokens=1000, request_seconds=6))
    assert found == status
    assert len(asked) == (0 if status else texts)
    assert not status or "70 more tokens; this server computes 54 in its time" in message


def test_the_time_that_a_long_request_has_had_is_no_more_left_to_it():
    async def say(queue):
        know_speed(queue, 100.0)
        await queue.check_in_time(500, since=time.monotonic())
        await queue.check_in_time(200, since=time.monotonic() - 5)
        with pytest.raises(ApiError, match="the request has 500 more tokens"):
            await queue.check_in_time(500, since=time.monotonic() - 5)

    run(say, limits=Limits(request_seconds=10))


def test_a_long_request_that_would_take_too_long_beside_others_is_told_to_come_again():
    async def say(queue):
        know_speed(queue, 10.0)
        waits = [queue.predict(ONE, [1] * count, [10] * count) for count in (4, 4, 1)]
        return await asyncio.gather(*waits, return_exceptions=True)

    found, _ = run(say, limits=Limits(batch_tokens=10, queue_tokens=1000, request_seconds=6))
    assert [getattr(each, "status", 200) for each in found] == [200, 429, 200]


def test_how_slow_a_model_was_a_minute_ago_keeps_nobody_out():
    async def say(queue):
        know_speed(queue, 0.1, age=61)
        return await queue.predict(ONE, [1] * 4, [10] * 4)

    found, _ = run(say)
    assert found == [2] * 4


def test_a_long_request_that_turns_out_to_take_too_long_is_given_up_at_once():
    async def say(queue):
        try:
            await queue.predict(ONE, [1] * 40, [10] * 40)
        except ApiError as error:
            return error.status

    class Slow(Model):
        def __call__(self, kind, inputs):
            time.sleep(0.02)
            return super().__call__(kind, inputs)

    status, asked = run(
        say, limits=Limits(batch_tokens=10, queue_tokens=1000, request_seconds=0.5), model=Slow()
    )
    assert (status, len(asked)) == (413, 8)


def test_a_part_holds_what_is_computed_in_a_twentieth_of_a_second():
    async def say(queue):
        queue._measure_speed(40_000.0)
        await queue.predict(ONE, list(range(6)), [1000] * 6)

    _, asked = run(say, limits=Limits(batch_tokens=8192))
    assert len(asked[0][1]) == 2


def test_a_queue_without_room_for_a_usual_request_is_full_though_a_short_one_is_taken():
    async def say(queue):
        waits = [asyncio.create_task(queue.predict(ONE, [1], [size])) for size in (8, 8, 8, 8, 2)]
        await asyncio.sleep(0)
        was_full = queue.is_full
        await asyncio.gather(*waits)
        return was_full, queue.is_full

    seen, _ = run(say, limits=Limits(batch_tokens=10, queue_tokens=39))
    assert seen == (True, False)


def test_a_request_that_could_never_be_taken_is_too_large():
    async def say(queue):
        await queue.predict(ONE, [1] * 5, [10] * 5)

    with pytest.raises(ApiError, match="has 50 tokens; this server accepts 40") as told:
        run(say)
    assert told.value.status == 413


def test_what_could_not_be_answered_in_time_is_rejected_at_once():
    async def say(queue):
        queue._measure_speed(10.0)  # tokens a second; half of 4 s is room for 20
        waits = [queue.predict(ONE, [1], [10]) for _ in range(4)]
        return await asyncio.gather(*waits, return_exceptions=True)

    found, _ = run(say, limits=Limits(batch_tokens=10, queue_tokens=1000, request_seconds=4))
    assert [isinstance(each, ApiError) for each in found] == [False, False, True, True]
    assert found[2].headers["Retry-After"] == "2"


def test_every_batch_is_reported_to_those_who_measure():
    seen = []

    async def say(queue):
        await asyncio.gather(*(queue.predict(ONE, [number], [3]) for number in range(4)))

    run(say, on_batch=seen.append)
    assert [(batch.requests, batch.tokens) for batch in seen] == [(3, 9), (1, 3)]
    assert all(batch.seconds >= 0 and min(batch.waited) >= 0 for batch in seen)
