"""How far examples are from the published procedure, in standard deviations of the sample.

Each check draws examples by a recipe and compares them with what the papers and the released code say, by a
formula or a plain simulation with constants of its own: no value of the recipe serves as the expectation.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from bertsmith.core.seeds import sub_keys
from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.batch_inspection import batch_statistics
from bertsmith.data.data_loader import PretrainingDataset, StepBatches, StepIndex
from bertsmith.data.epoch_index import make_epoch_index
from bertsmith.data.example_index import WalkRules, walk_documents
from bertsmith.data.masking import Masker, Text
from bertsmith.recipe.data_sections import MaskingSection
from bertsmith.recipe.schema import Recipe
from bertsmith.text.lexicon import UNIT_KINDS
from tests.example_stores import random_store, sentences_of, source_of, two_pieces
from tests.plain_examples import FreeWalk, free, plain_ngrams, plain_walk, plain_whole_units

SIGMAS = 4.0
"""What is further off than this is called wrong."""

LENGTH, PREDICTIONS = 64, 10
SPECIALS = 3


@dataclass(frozen=True)
class Sample:
    """Where examples come from, and how many."""

    store: TokenStore
    cache: Path
    examples: int


def published(**sections) -> Recipe:
    """BERT's recipe at a length that suits small documents, with some values changed."""
    stages = [{"fraction": 1.0, "length": LENGTH, "predictions": PREDICTIONS}]
    examples = {"stages": stages} | sections.pop("examples", {})
    return Recipe.model_validate({"examples": examples, **sections})


def make_store(folder: Path) -> TokenStore:
    """Documents of a few sentences each: some shorter than a sequence, some with single long sentences."""
    return random_store(folder, documents=1500, sentences=(1, 14), words=(1, 30), seed=7)


# ---- measuring distance


def off_share(hits: int, count: int, expected: float) -> float:
    """How far a share is from the expected one."""
    return abs(hits / count - expected) / math.sqrt(expected * (1 - expected) / count)


def off_shares(one: tuple[int, int], other: tuple[int, int]) -> float:
    """How far two shares, given as hits and counts, are from each other."""
    pooled = (one[0] + other[0]) / (one[1] + other[1])
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / one[1] + 1 / other[1]))
    return abs(one[0] / one[1] - other[0] / other[1]) / deviation


def off_histograms(one: Iterable[int], other: Iterable[int]) -> float:
    """How far two samples are from one distribution: chi-square, as deviations from its mean."""
    first, second = Counter(one), Counter(other)
    bins = _pooled(sorted(first.keys() | second.keys()), first + second)
    ones = np.array([sum(first[value] for value in each) for each in bins])
    others = np.array([sum(second[value] for value in each) for each in bins])
    expected = (ones + others) * ones.sum() / (ones.sum() + others.sum())
    expected_other = ones + others - expected
    chi2 = ((ones - expected) ** 2 / expected + (others - expected_other) ** 2 / expected_other).sum()
    freedom = len(bins) - 1
    return max(0.0, float(chi2 - freedom) / math.sqrt(2 * freedom))


def _pooled(values: list[int], counts: Counter[int], least: int = 40) -> list[list[int]]:
    """Neighbouring values together, so that no bin is too rare for the approximation."""
    bins: list[list[int]] = [[]]
    for value in values:
        if sum(counts[each] for each in bins[-1]) >= least:
            bins.append([])
        bins[-1].append(value)
    if len(bins) > 1 and sum(counts[each] for each in bins[-1]) < least:
        last = bins.pop()
        bins[-1] += last
    return bins


# ---- whole batches


def steps(recipe: Recipe, sample: Sample) -> Iterator[StepBatches]:
    """Steps that together have the wanted number of examples."""
    dataset = PretrainingDataset(sample.store, recipe, micro_tokens=1 << 16, cache=sample.cache)
    for number in range(-(-sample.examples // recipe.batch.sequences)):
        yield dataset[StepIndex(0, number)]


def masked_counts(recipe: Recipe, sample: Sample) -> float:
    """Not one sequence may have another number of predictions than min(most, max(1, round(0.15 length)))."""
    wrong = 0
    for step in steps(recipe, sample):
        for micro in step.micros:
            starts = micro.inputs.layout.starts_S1.numpy()[:-1]
            rows = micro["masked_rows_P"].numpy()[micro["masked_weights_P"].numpy() > 0]
            found = np.diff(np.searchsorted(rows, starts)).tolist()
            lengths = np.diff(starts).tolist()
            wrong += sum(
                count != min(PREDICTIONS, max(1, int(round(length * 0.15))))
                for count, length in zip(found, lengths, strict=True)
            )
    return math.inf if wrong else 0.0


def fates(recipe: Recipe, sample: Sample) -> float:
    """80 % shown as the mask, 10 % as a random token, 10 % as they are; the largest of these distances."""
    tokenizer = sample.store.tokenizer()
    shares = batch_statistics(steps(recipe, sample), mask_id=tokenizer.mask_id)
    by_chance = 0.1 / tokenizer.vocabulary_size  # a random token is the mask, or the right one, by chance
    return max(
        off_share(shares.as_mask, shares.predicted, 0.8 + by_chance),
        off_share(shares.as_random, shares.predicted, 0.1 - 2 * by_chance),
        off_share(shares.unchanged, shares.predicted, 0.1 + by_chance),
    )


# ---- pairs and lengths


def random_pairs(recipe: Recipe, sample: Sample) -> float:
    """Random second segments: half of the pairs, and all where the chunk is one sentence; by simulation."""
    labels = [label for labels, _ in walked(recipe, sample) for label in labels]
    simulated = [label for labels, _ in simulation(sample) for label in labels]
    return off_shares((sum(labels), len(labels)), (sum(simulated), len(simulated)))


def lengths(recipe: Recipe, sample: Sample) -> float:
    """The final length of the first example of every document (they are independent); by simulation."""
    found = [lengths[0] for _, lengths in walked(recipe, sample)]
    return off_histograms(found, [lengths[0] for _, lengths in simulation(sample)])


def walked(recipe: Recipe, sample: Sample) -> list[tuple[list[int], list[int]]]:
    """Labels and final lengths of the examples of each document, over epochs."""
    source, found, epoch = source_of(sample.store, recipe), [], 0
    begins = sample.store.sentence_starts[sample.store.document_starts[source.sentences.documents]]
    while sum(len(labels) for labels, _ in found) < sample.examples:
        index = make_epoch_index(source, epoch).examples
        cuts = np.searchsorted(index.first_start, begins[1:])
        labels, whole = np.split(index.label, cuts), np.split(index.length, cuts)
        found += [(one.tolist(), other.tolist()) for one, other in zip(labels, whole, strict=True)]
        epoch += 1
    return found


PUBLISHED_WALK = WalkRules(
    kind="nsp",
    capacity=LENGTH - SPECIALS,
    specials=SPECIALS,
    negative_probability=0.5,
    short_probability=0.1,
    seed=0,
    purpose=(),
)


@lru_cache(maxsize=2)
def simulation(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """Labels and final lengths by the plain walk, with published constants and independent draws."""
    source = source_of(sample.store, published())
    bounds = sample.store.sentence_starts
    documents = {
        number: [range(bounds[at], bounds[at + 1]) for at in range(*_bounds(sample.store, number))]
        for number in source.sentences.documents.tolist()
    }
    draws, found = FreeWalk(random.Random(5)), []
    while sum(len(labels) for labels, _ in found) < sample.examples:
        for pairs in plain_walk(documents, PUBLISHED_WALK, draws):
            whole = [
                min(len(first) + len(second), LENGTH - SPECIALS) + SPECIALS for first, second, _ in pairs
            ]
            found.append(([label for *_, label in pairs], whole))
    return found


def _bounds(store: TokenStore, document: int) -> tuple[int, int]:
    return int(store.document_starts[document]), int(store.document_starts[document + 1])


def short_targets(recipe: Recipe, sample: Sample) -> float:
    """One document in ten aims at randint(2, most) tokens.

    Where every sentence has one token, the first example of a document, if B follows A, is the target itself.
    """
    most, documents = 16, 10_000
    sentences = sentences_of([[1] * most] * documents)
    targets: list[int] = []
    while len(targets) < max(40_000, sample.examples):
        purpose = (len(targets),)
        rules = replace(
            PUBLISHED_WALK,
            capacity=most,
            short_probability=recipe.examples.short_probability,
            purpose=purpose,
        )
        index = walk_documents(sentences, rules)
        is_whole = (index.first_start % most == 0) & (index.label == 0)
        targets += (index.length[is_whole] - SPECIALS).tolist()
    short = [target for target in targets if target < most]
    expected = 0.1 * (most - 2) / (most - 1)  # randint may well give the full length
    evenly = off_histograms(short, random.Random(3).choices(range(2, most), k=len(short)))
    return max(off_share(len(short), len(targets), expected), evenly)


# ---- units

WORD, GOES_ON = 5, 6
WORD_SIZES = [1, 2, 1, 3, 1, 1, 2, 1, 1, 4] * 5
SINGLE_WORDS = [1] * 60


def whole_words(recipe: Recipe, sample: Sample) -> float:
    """How many of the chosen words have several pieces, by sequence; by simulation."""
    chance, budget = random.Random(11), round(sum(WORD_SIZES) * 0.15)
    words, found = _words(WORD_SIZES), []
    for places in _masked_places(recipe.masking, "word", WORD_SIZES, sample.examples):
        found.append(_several(words, places))
    simulated = (
        _several(words, plain_whole_units(words, budget, chance.sample(range(len(words)), len(words))))
        for _ in range(sample.examples)
    )
    return off_histograms(found, simulated)


def _several(words: list[list[int]], places: set[int]) -> int:
    chosen = [word for word in words if places & set(word)]
    assert all(set(word) <= places for word in chosen), "a word was chosen in part"
    return sum(len(word) > 1 for word in chosen)


def ngrams(recipe: Recipe, sample: Sample) -> float:
    """Into how many runs the chosen words fall, by sequence; n words have a weight of 1/n; by simulation."""
    chance, budget = random.Random(13), round(len(SINGLE_WORDS) * 0.15)
    words = _words(SINGLE_WORDS)
    found = map(_runs, _masked_places(recipe.masking, "ngram", SINGLE_WORDS, sample.examples))
    simulated = (
        _runs(plain_ngrams(words, budget, chance.sample(range(60), 60), longest=3, draw=free(chance)))
        for _ in range(sample.examples)
    )
    return off_histograms(found, simulated)


def _runs(places: set[int]) -> int:
    return sum(1 for place in places if place - 1 not in places)


def _words(sizes: list[int]) -> list[list[int]]:
    ends = np.cumsum(sizes).tolist()
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def _masked_places(masking: MaskingSection, unit: str, sizes: list[int], count: int) -> Iterator[set[int]]:
    """The chosen places in each of so many sequences of words of these sizes."""
    pieces = [piece for size in sizes for piece in [WORD] + [GOES_ON] * (size - 1)]
    lengths_S = np.full(count, len(pieces))
    keys_S = sub_keys(17, np.arange(count))
    text = Text(np.tile(pieces, count), lengths_S, lengths_S, lengths_S, keys_S)
    masker = Masker(masking.model_copy(update={"unit": unit}), two_pieces(), max_predictions=len(pieces))
    indices_P = masker.masks(text, progress=0.0).indices_P
    by_sequence = np.split(indices_P % len(pieces), np.searchsorted(indices_P, np.cumsum(lengths_S)[:-1]))
    return (set(places.tolist()) for places in by_sequence)


def whole_entities(recipe: Recipe, sample: Sample) -> float:
    """Not one entity may be masked in part, whatever windows are cut out of a row of units."""
    chance, window = np.random.default_rng(19), 40
    kinds, sizes = chance.integers(0, 3, 50_000), chance.integers(1, 6, 50_000)
    unit_T = np.repeat(np.arange(len(sizes)), sizes)
    codes_T = (2 * kinds[unit_T] + (np.diff(unit_T, prepend=-1) == 0)).astype(np.uint8)
    starts = chance.integers(0, len(codes_T) - window, sample.examples)
    rows = (starts[:, None] + np.arange(window)).ravel()
    lengths_S = np.full(sample.examples, window)
    text = Text(
        *(np.full(len(rows), WORD), lengths_S, lengths_S, lengths_S, sub_keys(23, starts)),
        codes_X=codes_T[rows],
        next_codes_N=codes_T[starts + window],
    )
    masker = Masker(
        recipe.masking.model_copy(update={"unit": "entity"}), two_pieces(), max_predictions=window
    )
    indices_P = masker.masks(text, progress=0.0).indices_P
    indices_P = indices_P[kinds[unit_T[rows[indices_P]]] == UNIT_KINDS.index("entity")]
    units, counts = np.unique(indices_P // window * len(sizes) + unit_T[rows[indices_P]], return_counts=True)
    is_whole = counts == sizes[units % len(sizes)]
    return 0.0 if is_whole.all() and len(units) > sample.examples / 4 else math.inf


CHECKS: dict[str, Callable[[Recipe, Sample], float]] = {
    "predictions in each sequence": masked_counts,
    "80/10/10": fates,
    "share of random pairs": random_pairs,
    "lengths": lengths,
    "short targets": short_targets,
    "whole words": whole_words,
    "n-grams": ngrams,
    "entities": whole_entities,
}
