"""Words are cut as the library cuts them, and their counts never depend on who counted."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from bertsmith.core.errors import UserError
from bertsmith.text import word_counts
from bertsmith.text.unigram_pipeline import albert_pipeline
from tests.scripts import started
from tests.tokenizer_makers import ALBERT_SPECIAL
from tests.worker_jobs import MANY, open_slowly, refuse, split_at_blank_lines

any_text = st.lists(
    st.sampled_from(
        [" ", "  ", "\t", "\n", "\xa0", "\u3000", "\x1c", "\x85", "'s", "'ll", "don't", "3.14", "É"]
    )
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6),
    max_size=12,
).map("".join)


def cut(cutter: word_counts.WordCutter, text: str) -> list[str]:
    return [word for chunk in cutter.chunks(text) for word in cutter.words(chunk)]


@given(text=any_text)
def test_words_of_bert_are_those_of_the_library(text: str) -> None:
    for case in ("uncased", "cased"):
        normal = normalizers.BertNormalizer(lowercase=case == "uncased").normalize_str(text)
        expected = [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normal)]
        assert cut(word_counts.BertWords(case), text) == expected


@given(text=any_text)
def test_words_of_bytes_are_those_of_the_library_line_by_line(text: str) -> None:
    library = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected = [word for line in text.split("\n") for word, _ in library.pre_tokenize_str(line)]
    assert cut(word_counts.ByteWords(), text) == expected


@given(text=any_text)
def test_words_of_a_unigram_model_are_those_of_alberts_pipeline(text: str) -> None:
    for case in ("uncased", "cased"):
        pipeline = albert_pipeline([(each, 0.0) for each in ALBERT_SPECIAL], cased=case == "cased")
        normal = pipeline.normalizer.normalize_str(text)
        expected = [word for word, _ in pipeline.pre_tokenizer.pre_tokenize_str(normal)]
        assert cut(word_counts.UnigramWords(case), text) == expected


def counts_of(batches: list[str], *, workers: int, distinct_words: int = 1000) -> word_counts.WordCounts:
    counting = word_counts.Counting(
        split_at_blank_lines,
        word_counts.BertWords("uncased"),
        held_out=0.3,
        batches_per_task=2,
        distinct_words=distinct_words,
    )
    return word_counts.count_words(batches, counting, workers=workers)


def test_two_processes_count_as_one_does_even_when_rare_words_are_forgotten() -> None:
    alone, together = (counts_of(MANY, workers=workers, distinct_words=60) for workers in (1, 2))
    assert alone == together
    assert list(alone.learned) == list(together.learned)
    assert len(alone.learned) <= 60


def test_every_document_is_either_learned_from_or_held_out() -> None:
    counts = counts_of(MANY, workers=1)
    everything = [word for batch in MANY for word in cut(word_counts.BertWords("uncased"), batch)]
    assert sum(counts.learned.values()) + sum(counts.held_out.values()) == len(everything)
    assert (counts.documents, 0 < counts.held_out_documents < 33) == (33, True)


def test_about_the_share_asked_for_is_held_out_and_always_the_same_documents() -> None:
    chosen = [it for batch in range(50) for it in word_counts.held_out_of(batch, 100, fraction=0.1)]
    assert 400 < sum(chosen) < 600
    assert word_counts.held_out_of(3, 100, fraction=0.1) == chosen[300:400]
    assert not any(word_counts.held_out_of(3, 100, fraction=0.0))


def test_at_least_as_many_as_asked_for_are_held_out() -> None:
    assert sum(word_counts.held_out_of(3, 100, fraction=0.0, minimum=1)) == 1
    assert word_counts.held_out_of(3, 100, fraction=0.1, minimum=1) == word_counts.held_out_of(
        3, 100, fraction=0.1
    )


@pytest.mark.parametrize(("documents", "held_out"), [(19, 0), (20, 1), (40, 1)])
def test_one_of_twenty_documents_is_held_out_whatever_the_draw(documents: int, held_out: int) -> None:
    counting = word_counts.Counting(
        split_at_blank_lines, word_counts.BertWords("uncased"), held_out=1e-9, batches_per_task=30
    )
    batches = [f"word{number}" for number in range(documents)]
    for cut in (batches, ["\n\n".join(batches)]):
        assert word_counts.count_words(cut, counting).held_out_documents == held_out
    counting = replace(counting, held_out=0.0)
    assert word_counts.count_words(batches, counting).held_out_documents == 0


def test_past_the_limit_the_rarest_words_are_forgotten() -> None:
    words = {"a": 9, "b": 1, "c": 5, "d": 2, "e": 2}
    assert word_counts.without_rarest(words, limit=5) == words
    assert word_counts.without_rarest(words, limit=4) == {"a": 9, "c": 5}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_complaint_about_a_batch_arrives_whole(workers: int) -> None:
    counting = word_counts.Counting(refuse, word_counts.ByteWords(), batches_per_task=1)
    with pytest.raises(UserError, match="a.txt: is no text; give text") as caught:
        word_counts.count_words(["a.txt", "b.txt"], counting, workers=workers)
    assert caught.value.remedy == "give text"


def test_a_worker_that_is_killed_is_reported() -> None:
    def batches() -> Iterator[str]:
        yield from MANY
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        yield from itertools.cycle(MANY)

    counting = word_counts.Counting(
        split_at_blank_lines, word_counts.BertWords("uncased"), batches_per_task=1
    )
    with pytest.raises(UserError, match="a worker process died; use fewer `workers` if memory ran out"):
        word_counts.count_words(batches(), counting, workers=2)


def test_no_more_tasks_than_workers_and_one_are_held(tmp_path) -> None:
    def batches() -> Iterator[Path]:
        for number in range(6):
            assert number < 3 or (tmp_path / str(number - 3)).exists()
            yield tmp_path / str(number)

    counting = word_counts.Counting(open_slowly, word_counts.BertWords("uncased"), batches_per_task=1)
    assert word_counts.count_words(batches(), counting, workers=2).documents == 6


ENDLESS = """
import itertools
from bertsmith.text.word_counts import Counting, count_words
from bertsmith.text.word_counts import BertWords
from tests.worker_jobs import MANY, split_at_blank_lines
def batches():
    yield from MANY
    print("begun", flush=True)
    yield from itertools.cycle(MANY)
if __name__ == "__main__":
    counting = Counting(split_at_blank_lines, BertWords("uncased"), batches_per_task=1)
    try:
        count_words(batches(), counting, workers=2)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_an_interrupt_of_the_whole_group_is_the_parents_business(tmp_path) -> None:
    running = started(tmp_path, ENDLESS, stderr=subprocess.PIPE, start_new_session=True)
    assert running.stdout
    assert running.stdout.readline() == b"begun\n"
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    assert running.communicate(timeout=30) == (b"interrupted\n", b"")


SCRIPT = """
from bertsmith.text.learn_vocabulary import VocabularySettings, learn_vocabulary
from bertsmith.text.word_counts import Counting, count_words
from tests.worker_jobs import MANY, split_at_blank_lines
for kind in ("wordpiece", "wordpiece-frequency", "byte-bpe"):
    settings = VocabularySettings(400, kind)
    counts = count_words(MANY, Counting(split_at_blank_lines, settings.cutter(), batches_per_task=2))
    learned = learn_vocabulary(counts, settings)
    print([learned.tokenizer.token(number) for number in range(learned.report.pieces)], learned.report)
"""


def test_the_hash_seed_of_a_process_does_not_matter() -> None:
    path = os.pathsep.join(it for it in sys.path if it)
    environments = [os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path} for seed in ("1", "2")]
    command = [sys.executable, "-c", SCRIPT]
    printed = [subprocess.check_output(command, env=each, text=True) for each in environments]
    assert printed[0] == printed[1]
    assert printed[0].count("VocabularyReport(") == 3
