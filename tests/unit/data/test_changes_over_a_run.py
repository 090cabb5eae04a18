"""What the model is shown changes over a run: the masking rate, short sequences, the size of steps."""

from pathlib import Path

import numpy as np
import pytest

from bertsmith.data.batch_inspection import sequences_of
from bertsmith.data.data_loader import PretrainingDataset, StepIndex
from bertsmith.data.epoch_index import StageIndex, cut_steps, make_epoch_index
from bertsmith.recipe.data_sections import BatchSection, MaskingSection
from tests.example_stores import random_store, small_recipe, source_of


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory):
    return random_store(tmp_path_factory.mktemp("changes"))


def filled(**settings) -> dict:
    stages = [{"fraction": 1.0, "length": 48, "predictions": 40}]
    return {"pairs": "full-sentences", "held_out_fraction": 0.2, "stages": stages, **settings}


# ---- the masking rate


def test_the_masking_rate_moves_on_a_line():
    masking = MaskingSection(rate=0.3, final_rate=0.15)
    assert [round(masking.rate_at(progress), 6) for progress in (0.0, 0.5, 1.0)] == [0.3, 0.225, 0.15]
    assert masking.largest_rate == 0.3
    assert {MaskingSection().rate_at(progress) for progress in (0.0, 0.7, 1.0)} == {0.15}


@pytest.mark.parametrize("rate", [0.15, 0.3])
def test_a_step_masks_exactly_the_rate_it_is_asked_for(store, tmp_path: Path, rate):
    recipe = small_recipe(examples=filled(), masking={"rate": 0.3, "final_rate": 0.15})
    dataset = PretrainingDataset(store, recipe, cache=tmp_path, micro_tokens=512)
    for each in sequences_of(dataset[StepIndex(0, 0, masking_rate=rate)]):
        assert len(each.targets) == max(1, round(rate * len(each.tokens)))


def test_a_lower_rate_masks_some_of_the_same_tokens(store, tmp_path: Path):
    recipe = small_recipe(examples=filled())
    dataset = PretrainingDataset(store, recipe, cache=tmp_path, micro_tokens=512)
    many, few = (list(sequences_of(dataset[StepIndex(0, 0, masking_rate=rate)])) for rate in (0.3, 0.15))
    for more, fewer in zip(many, few, strict=True):
        assert fewer.targets.items() <= more.targets.items()


# ---- short sequences


@pytest.mark.parametrize("pairs", ["full-sentences", "doc-sentences"])
def test_a_fraction_of_the_sequences_is_short_and_nothing_is_lost(store, pairs):
    settings = filled(pairs=pairs, short_fraction=0.5, short_length=6)
    sources = [source_of(store, small_recipe(examples=each)) for each in (filled(pairs=pairs), settings)]
    plain, mixed = (make_epoch_index(source, 0).examples for source in sources)
    assert mixed.first_length.sum() == plain.first_length.sum()
    ends = mixed.first_start + mixed.first_length
    # The first sentences of short sequences alone may be longer than the six tokens.
    sentences = sources[0].store.sentence_starts
    alone = np.isin(mixed.first_start, sentences) & np.isin(ends, sentences)
    short = (mixed.first_length <= 6) | (alone & (mixed.first_length < 24))
    assert short.mean() > 0.4 and len(mixed) > 1.3 * len(plain)


def test_short_sequences_are_others_in_every_epoch_and_the_same_again(store):
    source = source_of(store, small_recipe(examples=filled(short_fraction=0.5)))
    lengths = [make_epoch_index(source, epoch).examples.first_length.tolist() for epoch in (0, 1, 0)]
    assert lengths[0] == lengths[2] != lengths[1]


# ---- single segments among pairs


def document_of(store, starts) -> np.ndarray:
    """Where each stretch of the store lies, looked up one by one."""
    begins = [int(store.sentence_starts[first]) for first in store.document_starts[:-1]]
    return np.array([max(number for number, begin in enumerate(begins) if begin <= at) for at in starts])


@pytest.mark.parametrize("pairs", ["nsp", "sop", "sentence-pair"])
def test_a_fraction_of_the_documents_is_shown_without_pairs(store, tmp_path: Path, pairs):
    recipe = small_recipe(examples=filled(pairs=pairs, single_fraction=0.5, short_fraction=0.3))
    source = source_of(store, recipe)
    examples = make_epoch_index(source, 0).examples
    is_single = examples.second_length == 0
    single = document_of(store, examples.first_start[is_single])
    paired = document_of(store, examples.first_start[~is_single & (examples.label == 0)])
    assert not set(single) & set(paired)
    assert 0.3 < len(set(single)) / len(source.sentences.documents) < 0.7
    # All of a document is shown, and none of it twice.
    tokens = np.diff(store.sentence_starts[store.document_starts])
    shown = np.bincount(single, weights=examples.first_length[is_single], minlength=len(tokens))
    assert (shown[list(set(single))] == tokens[list(set(single))]).all()
    dataset = PretrainingDataset(store, recipe, cache=tmp_path, micro_tokens=512)
    step = dataset[StepIndex(0, 0)]
    labels = [each.pair_label for each in sequences_of(step)]
    assert 0 < step.counts["pairs"] == len(labels) - labels.count(None) < len(labels)
    for each in sequences_of(step):
        assert len(each.tokens) <= 48 and (each.pair_label is None) == (each.segments.count(1) == 0)


def test_other_documents_are_without_pairs_in_every_epoch(store):
    source = source_of(store, small_recipe(examples=filled(pairs="nsp", single_fraction=0.5)))
    starts = [make_epoch_index(source, epoch).examples.first_start.tolist() for epoch in (0, 1, 0)]
    assert starts[0] == starts[2] != starts[1]


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_a_store_whose_documents_are_all_of_one_kind_has_examples(store, fraction):
    source = source_of(store, small_recipe(examples=filled(pairs="nsp", single_fraction=fraction)))
    is_single = make_epoch_index(source, 0).examples.second_length == 0
    assert is_single.all() if fraction > 0.5 else not is_single.any()


# ---- the size of steps


def test_a_ramp_rises_in_multiples_to_the_full_size():
    batch = BatchSection(sequences=10, ramp_from=4, ramp_steps=6)
    assert [batch.size_at(step) for step in range(8)] == [4, 4, 8, 8, 10, 10, 10, 10]
    assert {BatchSection(sequences=10).size_at(step) for step in range(8)} == {10}


@pytest.mark.parametrize("by", ["sequences", "tokens"])
@pytest.mark.parametrize("steps_before", [0, 3, 50])
def test_steps_are_cut_by_the_size_that_each_of_them_has(by, steps_before):
    batch = BatchSection(by=by, sequences=10, tokens=10, ramp_from=2, ramp_steps=9)
    starts = cut_steps(np.ones(75, np.int64), batch, steps_before=steps_before)
    sizes = [batch.size_at(steps_before + number) for number in range(len(starts) - 1)]
    assert np.diff(starts).tolist() == sizes and 75 - starts[-1] < batch.size_at(steps_before + len(sizes))


def test_a_ramp_that_is_longer_than_an_epoch_goes_on_in_the_next(store, tmp_path: Path):
    recipe = small_recipe(batch={"sequences": 8, "ramp_from": 1, "ramp_steps": 400})
    index = StageIndex(source_of(store, recipe), cache=tmp_path)
    first = index.steps_in(0)
    assert first < 400
    for step in (0, first - 1, first, first + 5):
        assert len(index.examples(step).numbers) == recipe.batch.size_at(step)


def test_what_is_off_leaves_the_names_of_indexes_as_they_were(store, tmp_path: Path):
    for recipe in (
        small_recipe(),
        small_recipe(batch={**small_recipe().batch.model_dump(), "ramp_steps": 7}),
    ):
        StageIndex(source_of(store, recipe), cache=tmp_path).steps_in(0)
    assert len(list(tmp_path.iterdir())) == 1
