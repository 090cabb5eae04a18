"""Which tokens are chosen, in which units, and what stands in their place."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.core.seeds import sub_keys
from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.batch_inspection import sequences_of, unit_statistics
from bertsmith.data.data_loader import PretrainingDataset, StepBatches, StepIndex
from bertsmith.data.masking import SAMPLING_BITS, UNITS, Masker, Text, read_vocabulary
from bertsmith.objectives.masked_language_modelling import CHOSEN
from bertsmith.recipe.data_sections import MaskingSection, Unit
from bertsmith.text.tokenizer import Tokenizer
from tests.example_stores import random_store, small_recipe, two_pieces, wordpiece
from tests.plain_stores import write_store
from tests.tokenizer_makers import albert_unigram, byte_bpe, uncased_wordpiece

WORD, GOES_ON, MASK = 5, 6, 4
VOCABULARY = two_pieces()


def text_of(*sequences: list[int], seed: int = 0, codes: list[int] | None = None, behind: int = 0) -> Text:
    """Sequences of one span each, with as many special tokens as BERT puts around it."""
    lengths = np.array([len(sequence) for sequence in sequences])
    return Text(
        tokens_X=np.array([token for sequence in sequences for token in sequence]),
        span_lengths_N=lengths,
        lengths_S=lengths,
        whole_lengths_S=lengths + 2,
        keys_S=sub_keys(seed, np.arange(len(lengths))),
        codes_X=None if codes is None else np.array(codes, np.uint8),
        next_codes_N=None if codes is None else np.full(len(lengths), behind, np.uint8),
    )


def masker(most: int = 100, **settings) -> Masker:
    return Masker(MaskingSection(**settings), VOCABULARY, most)


def test_every_unit_of_the_recipe_can_be_masked_and_described_on_a_card() -> None:
    assert UNITS.keys() == CHOSEN.keys() == set(get_args(Unit))


# ---- words


def test_a_word_is_chosen_with_all_its_pieces() -> None:
    for seed in range(50):
        places = chosen(text_of([WORD, GOES_ON, GOES_ON] * 8, seed=seed), unit="word", rate=0.25)
        assert len(places) == 6  # what is left of the budget is too little for another word
        assert all({place - place % 3 + offset for offset in range(3)} <= places for place in places)


def test_a_segment_starts_a_word_even_in_the_middle_of_one() -> None:
    marks = UNITS["word"].mark(text_of([GOES_ON, WORD], [GOES_ON, GOES_ON]), VOCABULARY.boundaries)
    assert marks.starts_X.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    "make", [uncased_wordpiece, byte_bpe, albert_unigram], ids=lambda make: make.__name__
)
def test_every_vocabulary_has_words(make, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make(tmp_path))
    encoded = tokenizer.encode("the hammer heats the iron horseshoe")
    body = [number for number, part in zip(encoded.ids, encoded.sequence, strict=True) if part == 0]
    vocabulary = read_vocabulary(tokenizer, MaskingSection())
    marks = UNITS["word"].mark(text_of(body), vocabulary.boundaries)
    assert marks.starts_X.sum() == 6


def test_chinese_characters_are_words(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_bpe(tmp_path))
    encoded = tokenizer.encode("铁匠打铁")
    vocabulary = read_vocabulary(tokenizer, MaskingSection())
    marks = UNITS["word"].mark(text_of(encoded.ids[1:-1]), vocabulary.boundaries)
    assert marks.starts_X.sum() == 4 < len(encoded.ids) - 2


# ---- how many


@pytest.mark.parametrize("length", [1, 8, 14, 18, 28, 48, 98, 128])
def test_the_budget_is_googles_rounding_with_special_tokens_counted(length: int) -> None:
    masks = masker(most=15).masks(text_of([WORD] * length), progress=0.0)
    assert len(masks.indices_P) == min(15, max(1, int(round((length + 2) * 0.15))))


def test_stochastic_rounding_has_the_rate_on_average() -> None:
    texts = [[WORD] * 10] * 4000
    masks = masker(count="stochastic").masks(text_of(*texts), progress=0.0)
    counts = np.bincount(masks.indices_P // 10, minlength=4000)
    assert set(counts.tolist()) == {1, 2}
    assert abs(counts.mean() - 1.8) < 4 * np.sqrt(0.16 / 4000)


def test_the_stage_limits_stochastic_counts_too() -> None:
    masks = masker(most=3, count="stochastic").masks(text_of([WORD] * 100), progress=0.0)
    assert len(masks.indices_P) == 3


# ---- what is shown


def test_as_mask_1_shows_only_masks() -> None:
    masks = masker(as_mask=1.0, as_random=0.0).masks(text_of([WORD] * 100), progress=0.0)
    assert set(masks.shown_P.tolist()) == {MASK}


def test_as_random_1_shows_the_whole_vocabulary() -> None:
    masks = masker(as_mask=0.0, as_random=1.0).masks(text_of(*[[WORD] * 100] * 20), progress=0.0)
    assert set(masks.shown_P.tolist()) == set(range(7))


def test_the_rest_is_shown_as_it_is() -> None:
    masks = masker(as_mask=0.0, as_random=0.0).masks(text_of([WORD, GOES_ON] * 50), progress=0.0)
    assert masks.shown_P.tolist() == [[WORD, GOES_ON][place % 2] for place in masks.indices_P.tolist()]


def test_what_replaces_a_token_is_sampled_apart_from_how_the_token_is_shown() -> None:
    text, chooses = text_of(*[[WORD] * 40] * 100), masker(rate=0.5, as_mask=0.5, as_random=0.0)
    masks = chooses.masks(text, progress=0.0)
    draws_P = chooses.sampling_draws(text, masks.indices_P) / 2**SAMPLING_BITS
    for shown_P in (masks.shown_P == MASK, masks.shown_P == WORD):
        assert shown_P.sum() > 900
        assert np.histogram(draws_P[shown_P], bins=4, range=(0, 1))[0].min() > shown_P.sum() / 5


def test_random_tokens_may_leave_out_the_special_ones(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(uncased_wordpiece(tmp_path))
    whole = read_vocabulary(tokenizer, MaskingSection()).random_ids
    ordinary = read_vocabulary(tokenizer, MaskingSection(random_from="ordinary")).random_ids
    assert whole.tolist() == list(range(tokenizer.vocabulary_size))
    assert set(whole) - set(ordinary) == tokenizer.special_ids


# ---- phrases and entities


def test_a_chosen_entity_is_chosen_whole_and_its_parts_never_alone() -> None:
    codes = [0, 4, 5, 5, 0, 2, 3, 0] * 3
    for seed in range(200):
        places = chosen(text_of([WORD] * 24, seed=seed, codes=codes), unit="entity", rate=0.2)
        for begin in (1, 9, 17):
            assert len(places & {begin, begin + 1, begin + 2}) in (0, 3)


def test_at_the_entity_level_a_phrase_is_only_words() -> None:
    codes = [0, 4, 5, 5, 0, 2, 3, 0] * 3
    alone = [
        len(places & {5, 6}) == 1
        for seed in range(200)
        if (places := chosen(text_of([WORD] * 24, seed=seed, codes=codes), unit="entity"))
    ]
    assert any(alone)


def test_at_the_phrase_level_phrases_are_whole_and_entities_are_only_words() -> None:
    codes = [0, 4, 5, 5, 0, 2, 3, 0] * 3
    everything = [chosen(text_of([WORD] * 24, seed=seed, codes=codes), unit="phrase") for seed in range(200)]
    assert all(len(places & {5, 6}) in (0, 2) for places in everything)
    assert any(len(places & {1, 2, 3}) == 1 for places in everything)


def test_behind_an_entity_a_new_unit_starts_even_in_the_middle_of_a_word() -> None:
    text = text_of([WORD, GOES_ON, GOES_ON, WORD], codes=[4, 5, 1, 0])
    marks = UNITS["entity"].mark(text, VOCABULARY.boundaries)
    assert marks.starts_X.tolist() == [True, False, True, True]


def chosen(text: Text, **settings) -> set[int]:
    return set(masker(**settings).masks(text, progress=0.0).indices_P.tolist())


@st.composite
def coded_rows(draw):
    """A row of units of three kinds, and two windows that may cut them."""
    units = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=4, max_size=30))
    codes = [2 * kind + (place > 0) for kind, size in units for place in range(size)]
    bounds = [draw(st.lists(st.integers(0, len(codes)), min_size=2, max_size=2, unique=True)) for _ in "ab"]
    return codes, [sorted(each) for each in bounds], draw(st.integers(0, 1 << 30))


@given(coded_rows(), st.sampled_from(["phrase", "entity"]))
def test_a_unit_that_truncation_cut_is_never_chosen(case, unit: str) -> None:
    codes, windows, seed = case
    kind = {"phrase": 1, "entity": 2}[unit]
    lengths = np.array([end - begin for begin, end in windows])
    text = Text(
        tokens_X=np.full(lengths.sum(), WORD),
        span_lengths_N=lengths,
        lengths_S=lengths,
        whole_lengths_S=lengths * 3,
        keys_S=sub_keys(seed, np.arange(2)),
        codes_X=np.array([code for begin, end in windows for code in codes[begin:end]], np.uint8),
        next_codes_N=np.array([codes[end] if end < len(codes) else 0 for _, end in windows], np.uint8),
    )
    places = masker(unit=unit, rate=0.9).masks(text, progress=0.0).indices_P.tolist()
    in_row = [
        {
            place - lengths[:number].sum() + begin
            for place in places
            if lengths[:number].sum() <= place < lengths[: number + 1].sum()
        }
        for number, (begin, _) in enumerate(windows)
    ]
    for members in _units(codes, kind):
        assert all(len(members & masked) in (0, len(members)) for masked in in_row)


def _units(codes: list[int], kind: int) -> list[set[int]]:
    units: list[set[int]] = []
    for place, code in enumerate(codes):
        if code == 2 * kind:
            units.append({place})
        elif code == 2 * kind + 1:
            units[-1].add(place)
    return units


def test_harbin_is_masked_whole_or_not_at_all(tmp_path: Path) -> None:
    tokenizer = wordpiece(tmp_path / "vocabulary", words=list("哈尔滨是黑龙江的省会"))
    sentence = [tokenizer.id(character) for character in "哈尔滨是黑龙江的省会"]
    codes = [4, 5, 5, 0, 4, 5, 5, 0, 2, 3]
    write_store(tmp_path / "store", [[sentence] * 6] * 20, tokenizer, units=[[codes] * 6] * 20)
    recipe = small_recipe(masking={"unit": "entity", "as_random": 0.0, "as_mask": 1.0})
    dataset = PretrainingDataset(
        TokenStore.open(tmp_path / "store"), recipe, micro_tokens=4096, cache=tmp_path / "cache"
    )
    harbin, seen = [tokenizer.id(character) for character in "哈尔滨"], 0
    for step in range(12):
        for sequence in sequences_of(dataset[StepIndex(0, step)]):
            for place, target in sequence.targets.items():
                if target in harbin:
                    first = place - harbin.index(target)
                    assert [sequence.targets.get(first + offset) for offset in range(3)] == harbin
                    seen += 1
    assert seen > 30


LINE, LINE_CODES = [10, 11, 12, 13, 14, 15, 16], [0, 4, 5, 5, 0, 2, 3]
ENTITY, PHRASE = [11, 12, 13], [15, 16]
"""What the codes mark in every sentence of the store of lines."""


@pytest.fixture
def lines(tmp_path: Path) -> TokenStore:
    """A store in which truncation cuts many units."""
    tokenizer = wordpiece(tmp_path / "vocabulary")
    write_store(tmp_path / "store", [[LINE] * 9] * 30, tokenizer, units=[[LINE_CODES] * 9] * 30)
    return TokenStore.open(tmp_path / "store")


def plain_unit_counts(steps: list[StepBatches], unit: list[int]) -> tuple[int, int, int]:
    """How often these tokens stand in the sequences, predicted whole, and in part."""
    predicted = []
    for sequence in (sequence for step in steps for sequence in sequences_of(step)):
        tokens = [sequence.targets.get(place, token) for place, token in enumerate(sequence.tokens)]
        for start in range(len(tokens)):
            if tokens[start : start + len(unit)] == unit:
                predicted.append(sum(start + offset in sequence.targets for offset in range(len(unit))))
    whole = predicted.count(len(unit))
    return len(predicted), whole, len(predicted) - whole - predicted.count(0)


@pytest.mark.parametrize(
    ("masking", "kinds"),
    [
        ({"unit": "entity"}, {"entity": ENTITY}),
        ({"unit": "phrase"}, {"phrase": PHRASE}),
        (
            {"levels": [{"unit": unit, "fraction": 0.25} for unit in ("token", "phrase", "entity", "word")]},
            {"entity": ENTITY, "phrase": PHRASE},
        ),
        ({"unit": "word"}, {}),
    ],
)
def test_units_predicted_whole_and_in_part_are_counted(lines, tmp_path: Path, masking, kinds) -> None:
    dataset = PretrainingDataset(
        lines, small_recipe(masking=masking), micro_tokens=128, cache=tmp_path / "cache"
    )
    steps = [dataset[StepIndex(0, number)] for number in range(12)]
    counts = unit_statistics(dataset, steps)
    assert {unit: astuple(each) for unit, each in counts.items()} == {
        unit: plain_unit_counts(steps, tokens) for unit, tokens in kinds.items()
    }
    assert all(each.whole > 5 for each in counts.values())
    assert all(bool(each.in_part) == ("levels" in masking) for each in counts.values())


def test_nothing_is_masked_whole_where_the_objective_is_one_sided(lines, tmp_path: Path) -> None:
    examples = small_recipe().examples.model_dump() | {"objective": "left-to-right", "pairs": "none"}
    recipe = small_recipe(examples=examples, masking={"unit": "entity"})
    dataset = PretrainingDataset(lines, recipe, micro_tokens=128, cache=tmp_path / "cache")
    assert unit_statistics(dataset, [dataset[StepIndex(0, 0)]]) == {}


def test_a_store_without_units_is_rejected_where_entities_are_masked(tmp_path: Path) -> None:
    store = random_store(tmp_path, documents=3)
    with pytest.raises(UserError, match="bertsmith corpus --lexicon"):
        PretrainingDataset(store, small_recipe(masking={"unit": "entity"}), micro_tokens=4096, cache=tmp_path)


# ---- levels

LEVELS = [
    {"unit": "token", "fraction": 0.5},
    {"unit": "word", "fraction": 0.25},
    {"unit": "entity", "fraction": 0.25},
]
PAIRED = [WORD, GOES_ON] * 20  # 20 words of two pieces, 10 entities of two words
PAIRED_CODES = [4, 5, 5, 5] * 10


def levels_seen(**settings) -> list[str]:
    """By what unit each of many sequences was masked."""
    found = []
    for seed in range(120):
        places = chosen(text_of(PAIRED, seed=seed, codes=PAIRED_CODES), levels=LEVELS, rate=0.3, **settings)
        words = all({place, place ^ 1} <= places for place in places)
        entities = words and all({place ^ 2, place ^ 3} <= places for place in places)
        found.append("entity" if entities else "word" if words else "token")
    return found


def test_mixed_levels_are_drawn_by_sequence() -> None:
    found = levels_seen()
    assert 40 < found.count("token") < 80
    assert found.count("word") > 10 < found.count("entity")


@pytest.mark.parametrize(
    ("progress", "unit"), [(0.0, "token"), (0.49, "token"), (0.5, "word"), (0.75, "entity"), (1.0, "entity")]
)
def test_levels_by_stage_follow_the_run(progress: float, unit: str) -> None:
    section = MaskingSection(levels=LEVELS, levels_by="stage", rate=0.3)
    text = text_of(*[PAIRED] * 30, codes=PAIRED_CODES * 30)
    levels = Masker(section, VOCABULARY, 100).masks(text, progress=progress)
    alone = Masker(MaskingSection(unit=unit, rate=0.3), VOCABULARY, 100).masks(text, progress=0.0)
    assert levels.indices_P.tolist() == alone.indices_P.tolist()


# ---- rare tokens


def test_rare_tokens_are_chosen_as_often_as_a_draw_by_weight_without_putting_back() -> None:
    counts = np.ones(len(VOCABULARY.random_ids), np.int64)
    frequent, rare = 5, 6
    counts[frequent] = 1000
    weights = np.maximum(counts, 1) ** -0.7
    smoothed = Masker(MaskingSection(rate=0.2, smoothing=0.7), replace(VOCABULARY, weights_V=weights), 100)
    tokens = [frequent] * 8 + [rare] * 2
    text = text_of(*[tokens] * 4000)
    chosen_now = text.tokens_X[smoothed.masks(text, progress=0).indices_P]
    assert len(chosen_now) == 8000  # the budget is as before: two of twelve, special tokens counted
    simulated = np.random.default_rng(0)
    chances = weights[tokens] / weights[tokens].sum()
    drawn = [simulated.choice(10, size=2, replace=False, p=chances) for _ in range(4000)]
    expected = np.mean(np.array(tokens)[np.array(drawn)] == rare)
    assert abs(np.mean(chosen_now == rare) - expected) < 0.02


def test_weights_are_counts_to_the_power_of_the_smoothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(uncased_wordpiece(tmp_path))
    counts = np.arange(tokenizer.vocabulary_size)
    vocabulary = read_vocabulary(tokenizer, MaskingSection(smoothing=0.7), counts)
    assert vocabulary.weights_V is not None
    assert vocabulary.weights_V[[0, 1, 32]] == pytest.approx([1, 1, 32**-0.7])
    assert read_vocabulary(tokenizer, MaskingSection(), counts).weights_V is None
