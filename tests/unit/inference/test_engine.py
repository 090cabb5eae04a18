import multiprocessing
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from bertsmith.inference import engine as engine_module
from bertsmith.inference import engine as engines
from bertsmith.packed import split_by_budget

CPU = torch.device("cpu")


@pytest.fixture
def no_workers():
    engine_module._workers.cache_clear()


def doubled(number):
    return 2 * number


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_what_comes_out_is_in_the_order_of_what_went_in(streams):
    def work(number):
        time.sleep(0.002 * (number % 3))
        return doubled(number)

    assert list(engines.in_streams(work, range(20), streams=streams)) == [2 * number for number in range(20)]


def test_batches_are_at_work_at_the_same_time(two_threads):
    both_at_work = threading.Barrier(2, timeout=20)
    assert len(list(engines.in_streams(lambda _: both_at_work.wait(), range(4), streams=2))) == 4


def test_a_batch_has_one_core(two_threads):
    assert set(engines.in_streams(lambda _: torch.get_num_threads(), range(8), streams=2)) == {1}


def test_a_batch_that_is_cut_again_waits_for_no_other(two_threads):
    def work(_):
        streams = engines.streams_for(10**6, CPU)
        return list(engines.in_streams(doubled, range(3), streams=streams))

    assert list(engines.in_streams(work, range(8), streams=2)) == [[0, 2, 4]] * 8


def test_no_more_batches_are_made_than_keep_the_streams_at_work():
    made = []

    def batches():
        for number in range(100):
            made.append(number)
            yield number

    found = engines.in_streams(doubled, batches(), streams=2)
    assert next(found) == 0
    assert len(made) <= 6
    found.close()


def test_a_fault_comes_out_and_the_threads_serve_on():
    def work(number):
        if number == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        list(engines.in_streams(work, range(100), streams=2))
    assert list(engines.in_streams(doubled, [5], streams=2)) == [10]


def count_of_a_new_thread():
    seen = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    return seen[0]


def test_threads_that_begin_later_have_as_many_cores_as_before(two_threads, no_workers):
    list(engines.in_streams(doubled, range(8), streams=2))
    assert (torch.get_num_threads(), count_of_a_new_thread()) == (2, 2)


def test_threads_that_begin_meanwhile_have_as_many_cores_as_before(two_threads, no_workers, monkeypatch):
    counts, asking = [], []

    def take_one_core():
        torch.get_num_threads()
        torch.set_num_threads(1)
        asking.append(threading.Thread(target=lambda: counts.append(engines.streams_for(10**6, CPU))))
        asking[-1].start()
        time.sleep(0.05)

    monkeypatch.setattr(engine_module, "_take_one_core", take_one_core)
    engines.make_ready(CPU)
    for each in asking:
        each.join()
    assert counts == [2, 2]


def test_a_machine_without_more_threads_gets_a_fault_and_not_a_hang(two_threads, no_workers, monkeypatch):
    start, started = threading.Thread.start, []

    def start_only_one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_only_one)
    with pytest.raises(RuntimeError, match="can't start"):
        engines.make_ready(CPU)
    monkeypatch.undo()
    started[0].join(20)
    assert not started[0].is_alive()
    assert count_of_a_new_thread() == 2


def learning(batch):
    return [torch.is_grad_enabled()] * batch.layout.sequences


@pytest.mark.parametrize("threads", ["one_thread", "two_threads"])
def test_nothing_is_kept_for_a_backward_pass(bert, threads, request):
    request.getfixturevalue(threads)
    texts = ["The boy plays in the snow under the tree."] * 120
    kept = bert.engine.predict_each(texts, learning, truncate=False)
    assert set(kept) == {False}


def test_a_forked_process_does_not_wait_for_the_threads_of_its_parent():
    list(engines.in_streams(doubled, range(8), streams=2))
    forked = multiprocessing.get_context("fork").Process(
        target=lambda: list(engines.in_streams(doubled, range(8), streams=2))
    )
    forked.start()
    forked.join(30)
    ended = forked.exitcode
    forked.kill()
    assert ended == 0


def test_too_few_tokens_stay_one_batch_that_all_cores_share(two_threads):
    assert engines.batching_for(2 * engines.MIN_STREAM_TOKENS - 1, CPU).streams == 1
    assert engines.batching_for(2 * engines.MIN_STREAM_TOKENS, CPU).streams == 2
    assert engines.batching_for(10**6, torch.device("cuda")).streams == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_gpu_is_given_batches_of_like_size(seed):
    rng = random.Random(seed)
    lengths = sorted((rng.randint(1, 256) for _ in range(rng.randint(1, 4096))), reverse=True)
    cut = engines.batching_for(sum(lengths), torch.device("cuda"))
    sizes = [sum(lengths[number] for number in group) for group in split_by_budget(lengths, cut.tokens)]
    assert len(sizes) == -(-sum(lengths) // (engines.BATCH_TOKENS["cuda"] - engines.SPARE_TOKENS))
    assert (
        max(sizes) <= engines.BATCH_TOKENS["cuda"]
        and max(sizes) - min(sizes) <= len(sizes) * engines.SPARE_TOKENS
    )


def test_where_products_take_all_cores_many_cores_share_one_batch(two_threads, monkeypatch):
    monkeypatch.setattr(engine_module, "MAX_STREAMS", 1)
    assert engines.batching_for(10**6, CPU).streams == 1


@pytest.mark.parametrize("tokens", [1100, 4000, 4097, 5000, 123_456])
def test_every_stream_has_as_much_to_do(tokens, two_threads):
    cut = engines.batching_for(tokens, CPU)
    assert cut.tokens <= engines.BATCH_TOKENS["cpu"]
    batches = -(-tokens // cut.tokens)
    assert batches % 2 == 0
    assert batches * cut.tokens - tokens < batches


@pytest.mark.parametrize(("longest", "lengths"), [(8192, [32, 64, 128, 512]), (100, [32, 64, 100])])
def test_a_warm_up_passes_a_text_of_each_class_of_lengths(longest, lengths):
    passed = []

    def note(batch):
        passed.append((batch.layout.longest, batch.layout.sequences))

    engines.Engine(note, SimpleNamespace(longest=longest), CPU).warm_up()
    assert passed == [
        (length, texts) for length in lengths for texts in (1, 3)
    ]  # alone, and among short ones
