"""Find the head that predicts each dependency relation (Clark et al. 2019, section 4.2).

An attention head predicts a word's syntactic head: the word that it attends to most ("to the head"), or the
word that attends most to it ("from the head"). Attention head, direction and the offset of the baseline are
chosen on one treebank and scored on another.

Shapes: L layers, H heads, 2 directions, M = 2 x H, O offsets, G sentences of similar length, W words,
S sentences, T scored words of all sentences, R relations with "all" last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.core.arrays import ranges
from bertsmith.core.errors import UserError
from bertsmith.inference.loaded_model import Bert
from bertsmith.insight.attention_pass import Analysis, attention_pass
from bertsmith.insight.bootstrap import Counts, bootstrap_intervals
from bertsmith.insight.treebank import ParsedSentence
from bertsmith.insight.word_attention import EncodedWords, FromPieces, WordMaps, encode_words
from bertsmith.model.transformer.transformer_config import with_heads
from bertsmith.packed import moved_to_device

DIRECTIONS = ("to the head", "from the head")
OFFSETS = tuple(range(-3, 3))
"""Offsets to the right of the baseline "the head is the word at this offset", as published."""
LEAST = 100
"""Minimum number of occurrences of a relation, as published; rarer relations are left out."""
SKIPPED = frozenset({"root", "punct", "_"})
ALL = "all"
POSSESSIVES = frozenset({"'s", "s'", "'", "’s", "’"})
"""Marks that follow a possessor; the prediction of the mark counts for the possessor (section 4.2)."""


@dataclass(frozen=True, slots=True)
class Tree:
    """For each scored word: the word that predicts, the right head, and the index of the relation."""

    asked: NDArray[np.int64]
    gold: NDArray[np.int64]
    kinds: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Treebank:
    """The trees of the sentences that a model can read."""

    trees: tuple[Tree, ...]
    relations: tuple[str, ...]

    def totals(self) -> Counts:
        """Count the relations of each sentence [S, R]."""
        found_SR: Counts = self._counted(np.ones((1, sum(len(tree.kinds) for tree in self.trees))))[0]
        return found_SR

    def offset_hits(self) -> Counts:
        """Count the right answers of each offset in each sentence [S, O, R]."""
        asked_T = np.concatenate([tree.asked for tree in self.trees])
        gold_T = np.concatenate([tree.gold for tree in self.trees])
        right_OT = asked_T + np.array(OFFSETS)[:, None] == gold_T
        return self._counted(right_OT).swapaxes(0, 1)

    def _counted(self, weights_OT: NDArray[Any]) -> Counts:
        """Return sums over the words of each sentence and relation [O, S, R]."""
        shape = (len(weights_OT), len(self.trees), len(self.relations))
        sentence_T = np.repeat(np.arange(shape[1]), [len(tree.kinds) for tree in self.trees])
        cell_T = sentence_T * shape[2] + np.concatenate([tree.kinds for tree in self.trees])
        found_OSR: Counts = np.stack(
            [np.bincount(cell_T, each_T, shape[1] * shape[2]).reshape(shape[1:]) for each_T in weights_OT]
        )
        found_OSR[:, :, -1] = found_OSR.sum(2)
        return found_OSR


@dataclass(frozen=True, slots=True)
class RelationScore:
    """Accuracy of the chosen head for a relation, and of the chosen offset as its baseline."""

    relation: str
    count: int
    layer: int
    head: int
    direction: str
    accuracy: float
    low: float
    high: float
    offset: int
    baseline: float

    @property
    def beats(self) -> bool:
        """True if the whole interval is above the baseline."""
        return self.low > self.baseline


@dataclass(frozen=True, slots=True)
class HeadRelations:
    """The scores of all relations, and the accuracy of every head [L, 2, H, R] for the picture."""

    scores: tuple[RelationScore, ...]
    accuracy_L2HR: Counts
    sentences: int
    skipped: int


def relations_of(sentences: Sequence[ParsedSentence], least: int) -> tuple[str, ...]:
    """Return the relations with at least `least` occurrences, the most frequent first, then "all"."""
    names, counts = np.unique([name for each in sentences for name in each.relations], return_counts=True)
    frequent = [(-count, str(name)) for name, count in zip(names, counts, strict=True) if count >= least]
    return (*(name for _, name in sorted(frequent) if name not in SKIPPED), ALL)


def tree_of(sentence: ParsedSentence, relations: Sequence[str]) -> Tree:
    """Return the scored words of a sentence; words of rare relations count for "all" only."""
    number_of = {name: number for number, name in enumerate(relations)}
    counted = [word for word, name in enumerate(sentence.relations) if name not in SKIPPED]
    asked = [
        word + 1
        if sentence.relations[word] == "nmod:poss" and sentence.words[word + 1 : word + 2] in _MARKS
        else word
        for word in counted
    ]
    kinds = [number_of.get(sentence.relations[word], number_of[ALL]) for word in counted]
    gold = [sentence.heads[word] for word in counted]
    return Tree(np.array(asked, np.int64), np.array(gold, np.int64), np.array(kinds, np.int64))


_MARKS = tuple((mark,) for mark in POSSESSIVES)


def study_relations(
    bert: Bert,
    scored: Sequence[ParsedSentence],
    chosen_on: Sequence[ParsedSentence],
    *,
    mode: FromPieces,
    seed: int,
) -> HeadRelations:
    """Choose a head for each frequent relation on one treebank, and score it on another."""
    relations = relations_of(scored, LEAST)
    if len(relations) == 1:
        what = f"none of the relations occurs {LEAST} times in the treebank"
        raise UserError(what, remedy="use a larger treebank")
    texts, treebank = _readable(bert, scored, relations)
    chosen = hit_rates(bert, *_readable(bert, chosen_on, relations), mode=mode)
    heads = chosen.best_heads()
    totals_SR, right_SR = treebank.totals(), np.zeros((len(treebank.trees), len(relations)))
    sums_L2HR = torch.zeros(chosen.heads_L2HR.shape, dtype=torch.float64, device=bert.engine.device)
    of_groups: list[tuple[list[int], Tensor]] = []
    layer_R, direction_R, head_R = torch.tensor(heads, device=sums_L2HR.device).unbind(1)
    relation_R = torch.arange(len(relations), device=sums_L2HR.device)
    for numbers, hits_L2GHR in _hits(bert, texts, treebank, mode, what="scoring heads"):
        sums_L2HR += hits_L2GHR.sum(2)
        of_groups.append((numbers, hits_L2GHR[layer_R, direction_R, :, head_R, relation_R]))
    for numbers, right_RG in of_groups:
        right_SR[numbers] = right_RG.mT.cpu().numpy()
    offsets = chosen.best_offsets()
    baseline_R = treebank.offset_hits().sum(0)[offsets, np.arange(len(relations))] / totals_SR.sum(0)
    low_R, high_R = bootstrap_intervals(right_SR, totals_SR, seed=seed)
    accuracy_R = right_SR.sum(0) / totals_SR.sum(0)
    scores = [
        RelationScore(
            relation=name,
            count=int(totals_SR[:, at].sum()),
            layer=heads[at][0],
            head=heads[at][2],
            direction=DIRECTIONS[heads[at][1]],
            accuracy=float(accuracy_R[at]),
            low=float(low_R[at]),
            high=float(high_R[at]),
            offset=OFFSETS[offsets[at]],
            baseline=float(baseline_R[at]),
        )
        for at, name in enumerate(relations)
    ]
    skipped = len(scored) - len(texts)
    accuracy_L2HR = sums_L2HR.cpu().numpy() / totals_SR.sum(0)
    return HeadRelations(tuple(scores), accuracy_L2HR, len(texts), skipped)


@dataclass(frozen=True, slots=True)
class HitRates:
    """Fractions of right answers of every head [L, 2, H, R] and every offset [O, R]."""

    heads_L2HR: Counts
    offsets_OR: Counts

    def best_heads(self) -> list[tuple[int, int, int]]:
        """Return layer, direction and head for each relation; the first of equals."""
        layers, directions, heads, relations = self.heads_L2HR.shape
        best_R = self.heads_L2HR.reshape(-1, relations).argmax(0)
        layer, direction, head = np.unravel_index(best_R, (layers, directions, heads))
        return list(zip(layer.tolist(), direction.tolist(), head.tolist(), strict=True))

    def best_offsets(self) -> list[int]:
        """Return the index of the best offset for each relation; the first of equals."""
        return [int(number) for number in self.offsets_OR.argmax(0)]


def hit_rates(bert: Bert, texts: Sequence[EncodedWords], treebank: Treebank, *, mode: FromPieces) -> HitRates:
    """Measure all heads and offsets on a treebank."""
    config, device = with_heads(bert.model.network.config), bert.engine.device
    shape = (config.layers, 2, config.heads, len(treebank.relations))
    sums_L2HR = torch.zeros(shape, dtype=torch.float64, device=device)
    for _, hits_L2GHR in _hits(bert, texts, treebank, mode, what="choosing heads"):
        sums_L2HR += hits_L2GHR.sum(2)
    # For a relation that this treebank lacks, 0 of 1 chooses the first head.
    totals_R = np.maximum(treebank.totals().sum(0), 1)
    return HitRates(sums_L2HR.cpu().numpy() / totals_R, treebank.offset_hits().sum(0) / totals_R)


def _readable(
    bert: Bert, sentences: Sequence[ParsedSentence], relations: tuple[str, ...]
) -> tuple[list[EncodedWords], Treebank]:
    """Return the sentences that fit into the model, and their trees."""
    encoded = encode_words(bert, [each.words for each in sentences])
    kept = [(text, tree_of(each, relations)) for text, each in zip(encoded, sentences, strict=True) if text]
    return [text for text, _ in kept], Treebank(tuple(tree for _, tree in kept), relations)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The words of G sentences: the maps from pieces, the word that predicts, its head and its relations."""

    maps: WordMaps
    asked_GW: Tensor
    gold_GW: Tensor
    kinds_GWR: Tensor


def _hits(
    bert: Bert, texts: Sequence[EncodedWords], treebank: Treebank, mode: FromPieces, *, what: str
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield, for groups of sentences, the hits of each head by relation [L, 2, G, H, R].

    The hits stay on the model's device, so that the caller can wait for a GPU only once, after all groups.
    """
    device = bert.engine.device

    def prepare(numbers: Sequence[int]) -> _Prepared:
        maps = WordMaps.of([texts[number] for number in numbers], mode, device)
        trees = [treebank.trees[number] for number in numbers]
        counts_G = np.array([len(tree.asked) for tree in trees])
        # In shorter sentences the padding asks word 0 for head -2, which is never right.
        words_3GW = np.zeros((3, len(trees), max(1, counts_G.max())), np.int64)
        asked_GW, gold_GW, kinds_GW = words_3GW
        gold_GW[:] = -2
        at = np.repeat(np.arange(len(trees)), counts_G), ranges(np.zeros_like(counts_G), counts_G)
        asked_GW[at] = np.concatenate([tree.asked for tree in trees])
        gold_GW[at] = np.concatenate([tree.gold for tree in trees])
        kinds_GW[at] = np.concatenate([tree.kinds for tree in trees])
        asked, gold, kinds = moved_to_device(torch.from_numpy(words_3GW), device)
        kinds_GWR = torch.zeros(*kinds.shape, len(treebank.relations), device=device)
        kinds_GWR.scatter_(2, kinds[:, :, None], 1.0)[:, :, -1] = 1
        return _Prepared(maps, asked, gold, kinds_GWR)

    def reduce(prepared: _Prepared, weights_GHNN: Tensor) -> Tensor:
        words_GHWW = prepared.maps.between_words(weights_GHNN)
        predicted_G2HW = torch.stack([words_GHWW.argmax(-1), words_GHWW.argmax(-2)], 1)
        asked_G2HW = prepared.asked_GW[:, None, None].expand(-1, *predicted_G2HW.shape[1:3], -1)
        right_G2HW = predicted_G2HW.gather(-1, asked_G2HW) == prepared.gold_GW[:, None, None]
        hits_GMR = right_G2HW.flatten(1, 2).float() @ prepared.kinds_GWR
        return hits_GMR.view(*right_G2HW.shape[:3], -1).transpose(0, 1)

    analysis = Analysis(prepare, reduce)
    encoded = [text.encoded for text in texts]
    for numbers, layers in attention_pass(bert, encoded, analysis, what=what):
        yield numbers, torch.stack(layers)
