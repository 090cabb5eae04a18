"""How often each word stands in a corpus, counted by several processes and yet always the same.

Documents come in batches; a fixed number of batches makes a task, and the counts of tasks are added in the
order of the input. So neither the number of workers nor their speed has a say in the result.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeVar

import numpy as np

from bertsmith.ground.processes import Job, results_of_processes
from bertsmith.ground.seeds import key_of, uniforms
from bertsmith.text.words import WordCutter

Batch = TypeVar("Batch")

# About 350 MB as a Python dictionary. 1 GB of English has about a million distinct words, most of them rare.
DISTINCT_WORDS = 2_000_000
# From so many documents on, one at least is held out: of fewer, one would be too much of the text.
ENOUGH_TO_SPARE_ONE = 20


@dataclass(frozen=True, slots=True)
class Counting(Generic[Batch]):
    """How to count: opening a batch, cutting its documents, and what is kept apart."""

    documents_of: Callable[[Batch], Iterable[str]]  # a function that the workers can import
    cutter: WordCutter
    held_out: float = 0.01  # share of documents not learned from
    batches_per_task: int = 32  # of a megabyte: the larger, the fewer chunks are cut into words again
    distinct_words: int = DISTINCT_WORDS


@dataclass(slots=True)
class WordCounts:
    """The words of the documents to learn from, those of the documents held out, and how many there were."""

    learned: dict[str, int]
    held_out: dict[str, int]
    documents: int = 0
    held_out_documents: int = 0


@dataclass(frozen=True, slots=True)
class _Task(Generic[Batch]):
    first_batch: int
    batches: list[Batch]


def count_words(batches: Iterable[Batch], counting: Counting[Batch], *, workers: int = 1) -> WordCounts:
    """The words of all batches; past the limit of distinct words the rarest so far are forgotten."""
    total = WordCounts({}, {})
    with closing(_counts_of_tasks(batches, counting, workers=workers)) as parts:
        for part in parts:
            total.documents += part.documents
            total.held_out_documents += part.held_out_documents
            total.learned = without_rarest(_added(total.learned, part.learned), limit=counting.distinct_words)
            if len(total.held_out) < counting.distinct_words:  # enough to judge by
                total.held_out = _added(total.held_out, part.held_out)
    return total


def without_rarest(words: dict[str, int], *, limit: int) -> dict[str, int]:
    """The words as they are, or if they are more than the limit, at most half of it: the most frequent."""
    # Half, so that it does not happen with every task; by count alone, so that no word is preferred.
    least = 1
    kept = words
    while len(words) > limit and len(kept) > limit // 2:
        least += 1
        kept = {word: count for word, count in kept.items() if count >= least}
    return kept


def held_out_of(batch: int, documents: int, *, share: float, least: int = 0) -> list[bool]:
    """Which documents of a batch are held out: a draw by their number, the same in every run."""
    draws = uniforms(np.uint64(key_of(0, "held out", batch)), np.arange(documents, dtype=np.uint64))
    is_chosen = draws < share
    is_chosen[np.argsort(draws)[:least]] = True
    chosen: list[bool] = is_chosen.tolist()
    return chosen


def _added(words: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    for word, count in more.items():
        words[word] = words.get(word, 0) + count
    return words


def _counts_of_tasks(
    batches: Iterable[Batch], counting: Counting[Batch], *, workers: int
) -> Generator[WordCounts, None, None]:
    """The counts of each task in order; only as many tasks as there are workers are held in memory."""
    tasks = _tasks(batches, counting.batches_per_task)
    start = list(islice(tasks, 2))
    tasks = chain(start, tasks)
    if workers == 1 or len(start) < 2:  # starting processes would take longer
        return (_count(task, counting) for task in tasks)
    job: Job[_Task[Batch], WordCounts] = Job(_as_it_came, counting, _count)
    return results_of_processes(tasks, job, workers=workers, at_once=workers + 1)


def _tasks(batches: Iterable[Batch], batches_per_task: int) -> Iterator[_Task[Batch]]:
    supply = iter(batches)
    first = 0
    while taken := list(islice(supply, batches_per_task)):
        yield _Task(first, taken)
        first += len(taken)


def _as_it_came(counting: Counting[Batch]) -> Counting[Batch]:
    return counting


def _count(task: _Task[Batch], counting: Counting[Batch]) -> WordCounts:
    learned, held_out = Counter[str](), Counter[str]()
    documents = held_out_documents = 0
    for number, batch in enumerate(task.batches, task.first_batch):
        listed = list(counting.documents_of(batch))
        # Only in the first task, which knows that no other came before: tasks are counted apart.
        is_due = task.first_batch == 0 and not held_out_documents and counting.held_out > 0
        least = int(is_due and documents + len(listed) >= ENOUGH_TO_SPARE_ONE)
        apart = held_out_of(number, len(listed), share=counting.held_out, least=least)
        for text, is_apart in zip(listed, apart, strict=True):
            (held_out if is_apart else learned).update(counting.cutter.chunks(text))
        documents, held_out_documents = documents + len(listed), held_out_documents + sum(apart)
    words, held_out_words = (_words_of(chunks, counting.cutter) for chunks in (learned, held_out))
    return WordCounts(words, held_out_words, documents, held_out_documents)


def _words_of(chunks: Counter[str], cutter: WordCutter) -> dict[str, int]:
    words: dict[str, int] = {}
    for chunk, count in chunks.items():
        for word in cutter.words(chunk):
            words[word] = words.get(word, 0) + count
    return words
