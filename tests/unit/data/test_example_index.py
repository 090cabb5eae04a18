"""Which sentences make examples, and which documents are never shown."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from bertsmith.core.errors import UserError
from bertsmith.data.epoch_index import make_epoch_index, split_documents
from bertsmith.data.example_index import WalkRules, target_lengths, walk_documents
from tests.example_stores import random_store, sentences_of, small_recipe, source_of

RULES = WalkRules(
    kind="nsp",
    capacity=20,
    specials=3,
    negative_probability=0.5,
    short_probability=0.1,
    seed=0,
    purpose=("train", 23, 0),
)


# ---- pairs


def test_a_document_of_one_sentence_always_has_a_random_second_segment() -> None:
    index = walk_documents(sentences_of([[7]] * 50), replace(RULES, negative_probability=0.0))
    assert index.label.tolist() == [1] * 50
    assert not (index.second_start == index.first_start).any()


def test_with_one_document_alone_the_random_segment_is_its_own() -> None:
    index = walk_documents(sentences_of([[5, 5, 5, 5]]), replace(RULES, negative_probability=1.0))
    assert index.label.all()
    assert (index.second_start + index.second_length <= 20).all()


def test_what_a_random_pair_leaves_unused_is_put_back() -> None:
    index = walk_documents(sentences_of([[5] * 40, [5] * 40]), replace(RULES, negative_probability=1.0))
    ends = index.first_start + index.first_length
    assert ends[:-1].tolist() == index.first_start[1:].tolist()


def test_where_b_follows_a_the_walk_continues_behind_b() -> None:
    rules = replace(RULES, negative_probability=0.0, short_probability=0.0)
    index = walk_documents(sentences_of([[5] * 40]), rules)
    assert (index.first_start + index.first_length == index.second_start).all()
    assert index.first_start.tolist() == list(range(0, 200, 20))
    assert index.label.sum() == 0


def test_a_sentence_pair_is_two_sentences_of_which_the_second_follows_or_is_any() -> None:
    lengths = [[3, 4, 5, 6, 7]] * 400
    sentences = sentences_of(lengths)
    index = walk_documents(sentences, replace(RULES, kind="sentence-pair", short_probability=1.0))
    starts = set(sentences.sentence_starts[:-1].tolist())
    assert set(index.first_start.tolist()) | set(index.second_start.tolist()) <= starts
    # Single sentences, whatever the length to aim at.
    for start, length in ((index.first_start, index.first_length), (index.second_start, index.second_length)):
        number = np.searchsorted(sentences.sentence_starts, start)
        assert length.tolist() == np.diff(sentences.sentence_starts)[number].tolist()
    follows = index.label == 0
    assert (index.second_start == index.first_start + index.first_length)[follows].all()
    assert (index.length == np.minimum(index.first_length + index.second_length, 20) + 3).all()
    # A random B leaves the next sentence to begin an example of its own; the last has nothing behind it.
    chance = 0.5
    at = [1.0]  # the probability that the walk begins an example at each sentence of a document
    for place in range(1, 5):
        at.append(at[place - 1] * chance + (at[place - 2] * chance if place > 1 else 0.0))
    expected = sum(at[:4]) * chance / sum(at)
    assert follows.mean() == pytest.approx(expected, abs=0.04)


def test_a_swapped_pair_shows_the_later_segment_first() -> None:
    rules = replace(RULES, kind="sop", negative_probability=1.0, short_probability=0.0)
    index = walk_documents(sentences_of([[5] * 40]), rules)
    assert (index.second_start + index.second_length == index.first_start).all()
    assert index.label.all()


def test_without_pairs_the_chunks_follow_each_other() -> None:
    index = walk_documents(sentences_of([[5] * 40]), replace(RULES, kind="none", short_probability=0.0))
    assert index.first_start.tolist() == list(range(0, 200, 20))
    assert index.second_length.sum() == index.label.sum() == 0


def test_short_targets_are_from_two_to_the_room_both_included() -> None:
    targets = target_lengths(replace(RULES, capacity=4, short_probability=1.0), np.arange(3000))
    counts = Counter(targets.tolist())
    assert sorted(counts) == [2, 3, 4]
    assert min(counts.values()) > 850


def test_every_epoch_walks_anew() -> None:
    sentences = sentences_of([[3, 8, 4, 6, 9, 2] * 5] * 20)
    one, other = (walk_documents(sentences, replace(RULES, purpose=("train", 23, epoch))) for epoch in (0, 1))
    assert one.first_length.tolist() != other.first_length.tolist()


def test_a_gigantic_document_takes_seconds() -> None:
    sentences = sentences_of([[7] * 400_000, [5, 5]])
    begin = time.process_time()
    index = walk_documents(sentences, replace(RULES, short_probability=1.0))
    assert time.process_time() - begin < 5
    assert len(index) > 100_000


# ---- held-out documents


def test_held_out_documents_are_a_share_and_the_rest_is_trained_on() -> None:
    held_out = split_documents("held-out", count=20_000, held_out_fraction=0.1)
    trained_on = split_documents("train", count=20_000, held_out_fraction=0.1)
    assert sorted([*held_out, *trained_on]) == list(range(20_000))
    assert 1800 < len(held_out) < 2200


def test_a_growing_store_keeps_its_held_out_documents() -> None:
    few = split_documents("held-out", count=1000, held_out_fraction=0.1)
    many = split_documents("held-out", count=2000, held_out_fraction=0.1)
    assert many[: len(few)].tolist() == few.tolist()


@pytest.mark.parametrize("share", [1e-9, 0.49])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_neither_side_is_empty_where_there_are_two_documents(count: int, share: float) -> None:
    sides = [split_documents(split, count=count, held_out_fraction=share) for split in ("train", "held-out")]
    assert all(len(side) for side in sides)


def test_a_single_document_is_trained_on_and_cannot_be_held_out() -> None:
    assert split_documents("train", count=1, held_out_fraction=0.4).tolist() == [0]
    with pytest.raises(UserError, match="two documents"):
        split_documents("held-out", count=1, held_out_fraction=0.4)


@pytest.mark.parametrize("pairs", ["nsp", "sop", "none", "full-sentences", "doc-sentences"])
def test_no_split_shows_a_token_of_the_other(pairs: str, tmp_path) -> None:
    store = random_store(tmp_path, documents=30)
    recipe = small_recipe(
        examples={"pairs": pairs, "held_out_fraction": 0.3, "stages": small_recipe().examples.stages}
    )
    shown = {}
    for split in ("train", "held-out"):
        source = source_of(store, recipe, split=split)
        epoch = make_epoch_index(source, 0)
        spans = source.spans(0, np.arange(len(epoch.examples)), epoch.examples)
        shown[split] = {
            place
            for start, length in zip(spans.starts_N.tolist(), spans.lengths_N.tolist(), strict=True)
            for place in range(start, start + length)
        }
    assert shown["train"] and shown["held-out"]
    assert not shown["train"] & shown["held-out"]
    documents = split_documents("held-out", count=30, held_out_fraction=0.3)
    held_out = {
        place
        for document in documents.tolist()
        for place in range(*store.sentence_starts[store.document_starts[document : document + 2]].tolist())
    }
    assert shown["held-out"] <= held_out


def test_held_out_examples_do_not_depend_on_the_seed(tmp_path) -> None:
    store = random_store(tmp_path, documents=30)
    one, other = (
        make_epoch_index(source_of(store, small_recipe(run={"seed": seed}), split="held-out"), 0)
        for seed in (1, 2)
    )
    assert one.order.tolist() == other.order.tolist()
    assert one.examples.second_start.tolist() == other.examples.second_start.tolist()
