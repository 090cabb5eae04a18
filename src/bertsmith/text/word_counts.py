"""Count the words of a corpus with several processes; the result does not depend on them.

Documents arrive in batches; a fixed number of batches makes a task, and the counts of tasks are added in the
order of the input. So neither the number of workers nor their speed affects the result.

Words are cut exactly as the tokenizer will cut them, in two steps for speed: `chunks` cuts quickly at certain
word ends, and `words` does the rest, once for each distinct chunk.
"""

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

import numpy as np
from tokenizers import pre_tokenizers

from bertsmith.core.processes import Job, results_of_processes
from bertsmith.core.seeds import key_of, uniforms
from bertsmith.text.tokenizer_files import Case, bert_normalizer
from bertsmith.text.unigram_pipeline import SPACE, new_albert_normalizer, unigram_words

_BERT = pre_tokenizers.BertPreTokenizer()
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
_NORMALIZERS = {case: bert_normalizer(case) for case in ("uncased", "cased")}
_ALBERT_NORMALIZERS = {case: new_albert_normalizer(cased=case == "cased") for case in ("uncased", "cased")}
_UNIGRAM = unigram_words()
# Nearly all chunks are printable ASCII. For these both rules are short, and the library is ten times slower.
_PLAIN_BERT = re.compile("[0-9A-Za-z]+|[!-~]")
_PLAIN_BYTES = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[!-/:-@\[-`{-~]+| +(?!\S)| +")
# GPT-2's rule never looks back, and only white space can match across a space: so a word ends before a space
# that follows any other character.
_BEFORE_LONE_SPACE = re.compile(r"(?<=\S)(?= )")


class WordCutter(Protocol):
    """Cuts texts into chunks and chunks into words; the chunks' words are the text's words."""

    def chunks(self, text: str) -> list[str]:
        """Return parts of a text that can be cut into words one by one."""

    def words(self, chunk: str) -> list[str]:
        """Return the words of a chunk, as the tokenizer's model will receive them."""


@dataclass(frozen=True, slots=True)
class BertWords:
    """Words as BERT cuts them: at white space and around each punctuation mark and CJK character."""

    case: Case

    def chunks(self, text: str) -> list[str]:
        """Split a text at spaces and line ends."""
        return text.replace("\n", " ").split(" ")

    def words(self, chunk: str) -> list[str]:
        """Return the normalised words of a chunk."""
        if chunk.isascii() and chunk.isprintable():
            return _PLAIN_BERT.findall(chunk.lower() if self.case == "uncased" else chunk)
        normalised = _NORMALIZERS[self.case].normalize_str(chunk)
        return [word for word, _ in _BERT.pre_tokenize_str(normalised)]


@dataclass(frozen=True, slots=True)
class ByteWords:
    """Words as GPT-2 and RoBERTa cut them, with the space before a word, their bytes written as characters.

    Each line is a separate text: no word crosses a line end.
    """

    def chunks(self, text: str) -> list[str]:
        """Split a text before single spaces and at line ends."""
        return list(chain.from_iterable(map(_BEFORE_LONE_SPACE.split, text.split("\n"))))

    def words(self, chunk: str) -> list[str]:
        """Return the words of a chunk, with "Ġ" for a space and so on."""
        if chunk.isascii() and chunk.isprintable():
            return [word.replace(" ", "Ġ") for word in _PLAIN_BYTES.findall(chunk)]
        return [word for word, _ in _BYTE_LEVEL.pre_tokenize_str(chunk)]


@dataclass(frozen=True, slots=True)
class UnigramWords:
    """Words as ALBERT cuts them: at white space only, with a mark for the space before each."""

    case: Case

    def chunks(self, text: str) -> list[str]:
        """Split a text at spaces and line ends."""
        return text.replace("\n", " ").split(" ")

    def words(self, chunk: str) -> list[str]:
        """Return the normalised words of a chunk."""
        normalised = _ALBERT_NORMALIZERS[self.case].normalize_str(chunk)
        if normalised.isascii() and normalised.isprintable():
            return [SPACE + word for word in normalised.split(" ") if word]
        return [word for word, _ in _UNIGRAM.pre_tokenize_str(normalised)]


Batch = TypeVar("Batch")

# About 350 MB as a Python dictionary. 1 GB of English has about a million distinct words, most of them rare.
DISTINCT_WORDS = 2_000_000
# Minimum number of documents for holding out at least one: from fewer, one would be too much of the text.
ENOUGH_TO_SPARE_ONE = 20


@dataclass(frozen=True, slots=True)
class Counting(Generic[Batch]):
    """Settings for counting: how to open a batch and cut its documents, and how much to hold out."""

    documents_of: Callable[[Batch], Iterable[str]]  # must be importable by the workers
    cutter: WordCutter
    held_out: float = 0.01  # fraction of documents to hold out
    batches_per_task: int = 32  # of a megabyte each; more mean that fewer chunks are cut into words again
    distinct_words: int = DISTINCT_WORDS


@dataclass(slots=True)
class WordCounts:
    """Word counts of the documents to learn from and of held-out ones, and the numbers of both."""

    learned: dict[str, int]
    held_out: dict[str, int]
    documents: int = 0
    held_out_documents: int = 0


@dataclass(frozen=True, slots=True)
class _Task(Generic[Batch]):
    first_batch: int
    batches: list[Batch]


def count_words(batches: Iterable[Batch], counting: Counting[Batch], *, workers: int = 1) -> WordCounts:
    """Count the words of all batches; beyond the limit of distinct words the rarest so far are dropped."""
    supply, size = iter(batches), counting.batches_per_task
    groups = iter(lambda: list(islice(supply, size)), [])
    tasks: Iterator[_Task[Batch]] = (_Task(size * number, group) for number, group in enumerate(groups))
    start = list(islice(tasks, 2))
    tasks = chain(start, tasks)
    # Counts of each task in order; only about as many tasks as workers are in memory.
    counted: Generator[WordCounts, None, None]
    if workers == 1 or len(start) < 2:  # starting processes would take longer
        counted = (_count(task, counting) for task in tasks)
    else:
        job: Job[_Task[Batch], WordCounts] = Job(_as_it_came, counting, _count)
        counted = results_of_processes(tasks, job, workers=workers, at_once=workers + 1)
    total = WordCounts({}, {})
    with closing(counted) as parts:
        for part in parts:
            total.documents += part.documents
            total.held_out_documents += part.held_out_documents
            total.learned = without_rarest(_added(total.learned, part.learned), limit=counting.distinct_words)
            if len(total.held_out) < counting.distinct_words:  # enough for an evaluation
                total.held_out = _added(total.held_out, part.held_out)
    return total


def without_rarest(words: dict[str, int], *, limit: int) -> dict[str, int]:
    """Return the words unchanged, or, if they exceed the limit, the most frequent, at most half the limit."""
    # Half, so that not every task exceeds the limit again. By count alone, so that no word is preferred.
    min_count = 1
    kept = words
    while len(words) > limit and len(kept) > limit // 2:
        min_count += 1
        kept = {word: count for word, count in kept.items() if count >= min_count}
    return kept


def held_out_of(batch: int, documents: int, *, fraction: float, minimum: int = 0) -> list[bool]:
    """Return which documents of a batch are held out: a draw by their number, the same in every run."""
    draws = uniforms(np.uint64(key_of(0, "held out", batch)), np.arange(documents, dtype=np.uint64))
    is_chosen = draws < fraction
    is_chosen[np.argsort(draws)[:minimum]] = True
    chosen: list[bool] = is_chosen.tolist()
    return chosen


def _added(words: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    for word, count in more.items():
        words[word] = words.get(word, 0) + count
    return words


def _as_it_came(counting: Counting[Batch]) -> Counting[Batch]:
    return counting  # the state of a worker; a lambda could not be pickled


def _count(task: _Task[Batch], counting: Counting[Batch]) -> WordCounts:
    learned, held_out = Counter[str](), Counter[str]()
    documents = held_out_documents = 0
    for number, batch in enumerate(task.batches, task.first_batch):
        listed = list(counting.documents_of(batch))
        # Only in the first task: tasks are counted separately, and the first begins the corpus.
        is_due = task.first_batch == 0 and not held_out_documents and counting.held_out > 0
        minimum = int(is_due and documents + len(listed) >= ENOUGH_TO_SPARE_ONE)
        apart = held_out_of(number, len(listed), fraction=counting.held_out, minimum=minimum)
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
