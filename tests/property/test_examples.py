"""Examples against a plain transcription of the published procedures, and what never changes them."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bertsmith
from bertsmith.core.seeds import sub_keys
from bertsmith.data import example_index
from bertsmith.data.batch_inspection import sequences_of
from bertsmith.data.collate import Multiples
from bertsmith.data.data_loader import PretrainingDataset, StepBatches, StepIndex, load_steps
from bertsmith.data.epoch_index import cut_steps, make_epoch_index
from bertsmith.data.example_index import (
    FillRules,
    SplitText,
    WalkRules,
    fill_across_documents,
    fill_within_documents,
    truncated_spans,
    walk_documents,
)
from bertsmith.data.masking import Units, choose_runs, choose_units
from bertsmith.recipe.data_sections import BatchSection
from tests.example_stores import (
    RECIPES,
    digest,
    indexed_documents,
    random_store,
    recipe_named,
    sentences_of,
    source_of,
)
from tests.plain_examples import (
    KeyedWalk,
    keyed,
    plain_fill,
    plain_ngrams,
    plain_order,
    plain_truncate,
    plain_walk,
    plain_whole_units,
)

SHARES = st.sampled_from([0.0, 0.1, 0.5, 1.0])
documents_lengths = st.lists(
    st.lists(st.integers(1, 9) | st.integers(1, 90), min_size=1, max_size=9), min_size=1, max_size=8
)


@st.composite
def walks(draw):
    """Sentence lengths by document, the documents of the split, and rules."""
    lengths = draw(documents_lengths)
    everything = list(range(len(lengths)))
    members = draw(st.lists(st.sampled_from(everything), min_size=1, unique=True).map(sorted))
    rules = WalkRules(
        kind=draw(st.sampled_from(["nsp", "sop", "sentence-pair", "none"])),
        capacity=draw(st.integers(4, 30)),
        specials=3,
        negative_probability=draw(SHARES),
        short_probability=draw(SHARES),
        seed=draw(st.integers(0, 1000)),
        purpose=("train", 128, draw(st.integers(0, 3))),
    )
    return lengths, members, rules


def span(start, length) -> list[int]:
    return list(range(start, start + length))


# ---- agreement with the plain transcription


@given(walks())
def test_the_walk_and_its_truncation_are_the_published_ones(walk) -> None:
    lengths, members, rules = walk
    index = walk_documents(sentences_of(lengths, members), rules)
    firsts = map(span, index.first_start.tolist(), index.first_length.tolist())
    seconds = map(span, index.second_start.tolist(), index.second_length.tolist())
    documents = {number: indexed_documents(lengths)[number] for number in members}
    expected = [pair for found in plain_walk(documents, rules, KeyedWalk(rules)) for pair in found]
    assert list(zip(firsts, seconds, index.label.tolist(), strict=True)) == expected

    keys = sub_keys(rules.seed, np.arange(len(index)))
    spans = truncated_spans(index, capacity=rules.capacity, keys_S=keys)
    cut = [
        plain_truncate(pair, capacity=rules.capacity, key=int(key))
        for pair, key in zip(expected, keys, strict=True)
    ]
    kept = [part for first, second, _ in cut for part in (first, second) if part]
    assert list(map(span, spans.starts_N.tolist(), spans.lengths_N.tolist())) == kept
    assert spans.counts_S.tolist() == [1 + bool(second) for _, second, _ in cut]
    assert index.length.tolist() == [len(first) + len(second) + 3 for first, second, _ in cut]


@given(walks(), st.integers(1, 20))
def test_the_size_of_blocks_changes_no_walk(walk, block: int) -> None:
    lengths, members, rules = walk
    whole = walk_documents(sentences_of(lengths, members), rules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example_index, "BLOCK_SENTENCES", block)
        blockwise = walk_documents(sentences_of(lengths, members), rules)
    for field in dataclasses.fields(whole):
        assert np.array_equal(getattr(whole, field.name), getattr(blockwise, field.name))


@given(walks(), st.booleans())
def test_filling_is_the_plain_one(walk, across: bool) -> None:
    lengths, members, rules = walk
    sentences, fill = sentences_of(lengths, members), FillRules(rules.capacity, 2)
    index = (fill_across_documents if across else fill_within_documents)(sentences, fill)
    counts, starts, part_lengths = SplitText(sentences).parts(
        index.first_start, index.first_length.astype(np.int64)
    )
    parts = iter(map(span, starts.tolist(), part_lengths.tolist()))
    sequences = [[next(parts) for _ in range(count)] for count in counts.tolist()]
    documents = indexed_documents(lengths)
    assert sequences == plain_fill(
        [documents[number] for number in members], capacity=rules.capacity, across=across
    )
    assert index.length.tolist() == [sum(map(len, each)) + len(each) - 1 + 2 for each in sequences]
    assert max(index.length.tolist()) <= rules.capacity + 2


@st.composite
def unit_tables(draw):
    """Unit sizes of several sequences, whether a unit is barred, and budgets."""
    unit = st.tuples(st.integers(1, 4) | st.just(1), st.sampled_from([False, False, False, True]))
    table = draw(st.lists(st.lists(unit, min_size=1, max_size=60), min_size=1, max_size=5))
    budgets = draw(st.lists(st.integers(0, 12), min_size=len(table), max_size=len(table)))
    return table, budgets, draw(st.integers(0, 1 << 40))


def units_of(table, keys) -> tuple[Units, list[list[list[int]]]]:
    """The table as arrays, and as lists of places; a barred unit has more places than any budget."""
    places, everything = 0, []
    for sequence in table:
        everything.append([])
        for size, _ in sequence:
            everything[-1].append(list(range(places, places + size)))
            places += size
    units = Units(
        sizes_U=np.array([size for sequence in table for size, _ in sequence]),
        barred_U=np.array([barred for sequence in table for _, barred in sequence]),
        counts_S=np.array([len(sequence) for sequence in table]),
        keys_S=keys,
    )
    return units, everything


def chosen_places(units: Units, chosen: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.repeat(chosen, units.sizes_U)).tolist())


@given(unit_tables())
def test_whole_units_are_chosen_as_published(case) -> None:
    table, budgets, seed = case
    units, places = units_of(table, sub_keys(seed, np.arange(len(table))))
    chosen = choose_units(units, np.array(budgets))
    expected: set[int] = set()
    for sequence, rows, budget, key in zip(table, places, budgets, units.keys_S, strict=True):
        passable = [[] if barred else unit for unit, (_, barred) in zip(rows, sequence, strict=True)]
        expected |= plain_whole_units(passable, budget, plain_order(len(rows), int(key)))
    assert chosen_places(units, chosen) == expected


@given(unit_tables(), st.integers(1, 4))
def test_ngrams_are_chosen_as_published(case, longest: int) -> None:
    table, budgets, seed = case
    units, places = units_of(table, sub_keys(seed, np.arange(len(table))))
    units = dataclasses.replace(units, barred_U=np.zeros_like(units.barred_U))
    runs = np.where(np.arange(len(table)) % 2, 1, longest)  # every other sequence takes single units
    chosen = choose_runs(units, np.array(budgets), max_run_S=runs)
    expected: set[int] = set()
    for rows, budget, key, run in zip(places, budgets, units.keys_S, runs.tolist(), strict=True):
        order, draw = plain_order(len(rows), int(key)), keyed(int(key))
        expected |= plain_ngrams(rows, budget, order, longest=run, draw=draw)
    assert chosen_places(units, chosen) == expected


# ---- the plan


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), size=st.integers(1, 90), by=st.booleans()
)
def test_steps_are_whole_contiguous_and_within_their_budget(lengths, size: int, by: bool) -> None:
    batch = BatchSection(by="tokens" if by else "sequences", sequences=size, tokens=size)
    bounds = cut_steps(np.array(lengths), batch).tolist()
    steps = [lengths[first:last] for first, last in zip(bounds, bounds[1:], strict=False)]
    left = lengths[bounds[-1] :]
    assert bounds[0] == 0 and all(steps)
    if by:
        assert all(sum(step) <= size or len(step) == 1 for step in steps)
        assert sum(left) < size
        # Each step was full: the next example would not have fitted.
        following = [lengths[last] for last in bounds[1:] if last < len(lengths)]
        assert all(sum(step) + more > size for step, more in zip(steps, following, strict=False))
    else:
        assert all(len(step) == size for step in steps) and len(left) < size


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory):
    return random_store(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


every_recipe = pytest.mark.parametrize("name", RECIPES)


def dataset_of(store, cache: Path, name: str, **choices) -> PretrainingDataset:
    return PretrainingDataset(store, recipe_named(name), cache=cache, **{"micro_tokens": 256, **choices})


def content(step: StepBatches) -> list:
    """All that the step shows, sequence by sequence."""
    return [dataclasses.astuple(sequence) for sequence in sequences_of(step)]


@every_recipe
def test_an_epoch_shows_each_example_once(store, cache, name: str) -> None:
    index = dataset_of(store, cache, name).stage_index(0)
    for epoch in range(2):
        first = sum(index.steps_in(earlier) for earlier in range(epoch))
        steps = [index.examples(first + step) for step in range(index.steps_in(epoch))]
        assert all(step.epoch == epoch for step in steps)
        shown = np.concatenate([step.numbers for step in steps])
        order = index.epoch(epoch).order
        assert shown.tolist() == order[: len(shown)].tolist()
        assert sorted(order.tolist()) == list(range(len(index.epoch(epoch).examples)))


@every_recipe
@settings(max_examples=8)
@given(
    world=st.integers(1, 5),
    micro_tokens=st.integers(128, 700),
    multiples=st.sampled_from([Multiples(1, 1), Multiples(8, 8), Multiples(64, 64), Multiples(128, 8, 4)]),
    address=st.builds(StepIndex, st.integers(0, 1), st.integers(0, 40)),
)
def test_ranks_and_micro_batches_only_divide_what_is_shown(
    store, cache, name: str, world, micro_tokens, multiples, address
) -> None:
    whole = dataset_of(store, cache, name, micro_tokens=1 << 20)[address]
    choices = {"micro_tokens": micro_tokens, "multiples": multiples, "world": world}
    parts = [dataset_of(store, cache, name, rank=rank, **choices)[address] for rank in range(world)]
    assert [sequence for part in parts for sequence in content(part)] == content(whole)
    assert sum(part.counts["masked"] for part in parts) == whole.counts["masked"]
    assert len({len(part.micros) for part in parts}) == 1
    for micro in (micro for part in parts for micro in part.micros):
        assert len(micro.inputs.tokens_T) <= micro_tokens
        assert len(micro.inputs.tokens_T) % multiples.tokens == 0
        assert len(micro["masked_rows_P"]) % multiples.predicted == 0
        assert micro.inputs.layout.sequences % multiples.sequences == 0


@every_recipe
def test_a_resume_at_any_step_shows_what_a_straight_run_shows(store, tmp_path, name: str) -> None:
    straight = dataset_of(store, tmp_path / "straight", name)
    steps = 2 * straight.stage_index(0).steps_in(0) + 2
    shown = [content(straight[StepIndex(0, step)]) for step in range(steps)]
    for step in (0, 1, steps // 2, steps - 1):
        resumed = dataset_of(store, tmp_path / f"resumed at {step}", name)
        assert content(resumed[StepIndex(0, step)]) == shown[step]


def test_workers_only_share_the_work(store, cache) -> None:
    dataset = dataset_of(store, cache, "bert")
    indices = [StepIndex(0, step) for step in (3, 0, 1, 7, 30)]
    alone = list(load_steps(dataset, iter(indices), workers=0, pin=False))
    helped = list(load_steps(dataset, iter(indices), workers=2, pin=False))
    assert [step.index for step in helped] == indices
    assert [digest(step) for step in helped] == [digest(step) for step in alone]


def test_starting_the_workers_draws_nothing_from_torch(store, cache) -> None:
    before = torch.get_rng_state()
    list(load_steps(dataset_of(store, cache, "bert"), [StepIndex(0, 0)], workers=0, pin=False))
    assert torch.equal(torch.get_rng_state(), before)


def test_another_process_with_another_hash_seed_shows_the_same(store, cache, tmp_path) -> None:
    program = (
        "from pathlib import Path\n"
        "from bertsmith.data.data_loader import PretrainingDataset, StepIndex\n"
        "from tests.example_stores import digest, recipe_named\n"
        f"dataset = PretrainingDataset(Path({str(store.folder)!r}), recipe_named('albert'), "
        f"micro_tokens=256, cache=Path({str(tmp_path)!r}))\n"
        "print(digest(dataset[StepIndex(0, 5)]))\n"
    )
    roots = [str(Path(bertsmith.__file__).parents[1]), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "PYTHONHASHSEED": "12345"}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    here = dataset_of(store, cache, "albert")[StepIndex(0, 5)]
    assert answer.stdout.strip() == digest(here)


def test_the_index_is_the_same_whenever_it_is_made(store) -> None:
    one, other = (make_epoch_index(source_of(store, recipe_named("bert")), 3) for _ in range(2))
    assert np.array_equal(one.order, other.order)
    assert np.array_equal(one.examples.second_start, other.examples.second_start)
