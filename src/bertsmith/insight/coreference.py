"""Find the head that links mentions to antecedents (Clark et al. 2019, section 4.3) or to GAP's candidates.

A head answers a mention with an earlier one. In one direction, the mention's head word attends most to the
head word of the answer; in the other direction, the answer's head word attends most to the mention's. One
head is chosen for all kinds of mentions on one set and scored on another.

Shapes: L layers, H heads, 2 directions, G texts of similar length, M mentions, S texts, K kinds with "all"
last, B baselines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.wording import counted
from bertsmith.inference.loaded_model import Bert
from bertsmith.insight.antecedents import BASELINES
from bertsmith.insight.attention_pass import Analysis, attention_pass
from bertsmith.insight.bootstrap import Counts, bootstrap_intervals
from bertsmith.insight.gap import GapExample
from bertsmith.insight.mentions import Mention, MentionDocument
from bertsmith.insight.relations import HitRates
from bertsmith.insight.word_attention import EncodedWords, WordMaps, encode_words
from bertsmith.packed import moved_to_device

TOWARDS = ("to the antecedent", "from the antecedent")
ALL = "all"
MENTION_KINDS = ("pronoun", "proper", "nominal", ALL)
GENDERS = ("masculine", "feminine", ALL)


@dataclass(frozen=True, slots=True)
class Question:
    """A mention, its candidate antecedents and the right ones, by their indices in the text."""

    mention: int
    candidates: tuple[int, ...]
    right: frozenset[int]
    kind: str
    baselines: tuple[bool, ...]
    """True for each baseline that answers right."""


@dataclass(frozen=True, slots=True)
class AskedText:
    """A text, the pieces of its mentions' head words, and the questions about them."""

    mentions: EncodedWords
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Texts with questions, the kinds of these questions, and the names of the baselines."""

    texts: tuple[AskedText, ...]
    kinds: tuple[str, ...]
    baselines: tuple[str, ...]
    left_out: str = ""
    """Number of texts or mentions that were too long to use, in words; empty if all were used."""


@dataclass(frozen=True, slots=True)
class AntecedentScore:
    """Accuracy of the chosen head, or of a baseline, on one kind of mention."""

    answered_by: str
    kind: str
    count: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Coreference:
    """The scores of one head and of the baselines."""

    layer: int
    head: int
    direction: str
    scores: tuple[AntecedentScore, ...]
    """Scores of the head, then of each baseline, for each kind."""
    accuracy_L2H: Counts
    """Accuracy of every head on all mentions."""


def study_coreference(bert: Bert, scored: QuestionSet, chosen_on: QuestionSet, *, seed: int) -> Coreference:
    """Choose a head on one set of questions, and score it on another."""
    for each in (scored, chosen_on):
        if not any(text.questions for text in each.texts):
            remedy = "give texts that mention entities repeatedly"
            raise UserError("none of the mentions has an antecedent in its text", remedy=remedy)
    sums_L2HK = sum(hits.sum(2) for _, hits in _hits(bert, chosen_on, what="choosing a head"))
    rates = HitRates(np.asarray(sums_L2HK), np.zeros((1, len(scored.kinds))))
    layer, direction, head = rates.best_heads()[-1]
    right_SK, total_SK = np.zeros((2, len(scored.texts), len(scored.kinds)))
    all_L2H: Counts = np.zeros(rates.heads_L2HR.shape[:3])
    for numbers, hits_L2GHK in _hits(bert, scored, what="scoring it"):
        right_SK[numbers] = hits_L2GHK[layer, direction, :, head]
        all_L2H += hits_L2GHK[..., -1].sum(2)
    by_baseline_BSK = np.zeros((len(scored.baselines), *right_SK.shape))
    for number, text in enumerate(scored.texts):
        for question in text.questions:
            places = [scored.kinds.index(question.kind), -1]
            total_SK[number, places] += 1
            for at, is_right in enumerate(question.baselines):
                by_baseline_BSK[at, number, places] += is_right
    scores = _scores("head", scored.kinds, right_SK, total_SK, seed)
    for name, baseline_SK in zip(scored.baselines, by_baseline_BSK, strict=True):
        scores += _scores(name, scored.kinds, baseline_SK, total_SK, seed)
    rate_L2H = all_L2H / total_SK[:, -1].sum()
    return Coreference(layer, head, TOWARDS[direction], tuple(scores), rate_L2H)


def _scores(
    name: str, kinds: Sequence[str], right_SK: Counts, total_SK: Counts, seed: int
) -> list[AntecedentScore]:
    # A kind without questions has neither a fraction nor an interval.
    known = np.flatnonzero(total_SK.sum(0))
    right_SK, total_SK = right_SK[:, known], total_SK[:, known]
    low_K, high_K = bootstrap_intervals(right_SK, total_SK, seed=seed)
    right_K, total_K = right_SK.sum(0), total_SK.sum(0)
    return [
        AntecedentScore(
            name,
            kinds[kind],
            int(total_K[at]),
            float(right_K[at] / total_K[at]),
            float(low_K[at]),
            float(high_K[at]),
        )
        for at, kind in enumerate(known.tolist())
    ]


# ---- questions from files


def gap_questions(bert: Bert, examples: Sequence[GapExample]) -> QuestionSet:
    """Ask which of GAP's two candidates is right; skip texts with a pronoun that refers to neither."""
    tokenized = bert.reader.tokenize([example.text for example in examples])
    asked, skipped = [], 0
    for example, each in zip(examples, tokenized, strict=True):
        if example.right is None:
            continue
        if len(each) > bert.reader.longest:
            skipped += 1
            continue
        spans = [example.pronoun, *(_last_word(example.text, name) for name in example.names)]
        pieces = tuple(_rows(each.encoded.offsets, each.encoded.sequence, span) for span in spans)
        baselines = (example.nearest() == example.right,)
        question = Question(0, (1, 2), frozenset({1 + example.right}), example.gender, baselines)
        asked.append(AskedText(EncodedWords(each.encoded, pieces), (question,)))
    left_out = f"{counted(skipped, 'text')} longer than the model takes" if skipped else ""
    return QuestionSet(tuple(asked), GENDERS, ("nearest mention",), left_out)


def _last_word(text: str, span: tuple[int, int]) -> tuple[int, int]:
    """Return the span of a name's head: its last word."""
    start, end = span
    return start + len(text[start:end].rpartition(" ")[0]) + (" " in text[start:end]), end


def _rows(
    offsets: Sequence[tuple[int, int]], sequence: Sequence[int], span: tuple[int, int]
) -> tuple[int, ...]:
    """Return the tokens that end inside a span of the text."""
    return tuple(
        row for row, (_, end) in enumerate(offsets) if sequence[row] >= 0 and span[0] < end <= span[1]
    )


def document_questions(bert: Bert, documents: Sequence[MentionDocument], *, longest: int) -> QuestionSet:
    """Ask for every mention with an antecedent in its window of consecutive sentences."""
    windows, skipped = [], 0
    for document in documents:
        kept = list(_windows(bert, document, min(longest, bert.reader.longest)))
        windows += kept
        skipped += len(document.mentions) - sum(len(mentions) for _, mentions in kept)
    encoded = encode_words(bert, [words for words, _ in windows])
    asked = [
        AskedText(
            EncodedWords(text.encoded, tuple(text.pieces[mention.head] for mention in mentions)),
            _questions(mentions, words),
        )
        for text, (words, mentions) in zip(encoded, windows, strict=True)
        if text is not None
    ]
    asked = [text for text in asked if text.questions]
    left_out = f"{counted(skipped, 'mention')} in sentences longer than a window" if skipped else ""
    return QuestionSet(tuple(asked), MENTION_KINDS, tuple(BASELINES), left_out)


def _windows(
    bert: Bert, document: MentionDocument, longest: int
) -> Iterator[tuple[tuple[str, ...], list[Mention]]]:
    """Yield the words and mentions of windows of consecutive sentences; skip sentences that are too long."""
    tokenized = bert.reader.tokenize([" ".join(sentence) for sentence in document.sentences])
    lengths = [len(each) - each.encoded.sequence.count(-1) for each in tokenized]
    firsts = np.cumsum([0, *map(len, document.sentences)]).tolist()
    room = longest - tokenized[0].encoded.sequence.count(-1)
    begin = 0
    while begin < len(lengths):
        end, used = begin, 0
        while end < len(lengths) and used + lengths[end] <= room:
            used, end = used + lengths[end], end + 1
        first, last = firsts[begin], firsts[max(end, begin)]
        if end > begin:
            inside = [m for m in document.mentions if first <= m.start and m.end <= last]
            moved = [
                Mention(m.start - first, m.end - first, m.head - first, m.entity, m.kind, m.plural)
                for m in inside
            ]
            yield document.words[first:last], moved
        begin = max(end, begin + 1)


def _questions(mentions: Sequence[Mention], words: Sequence[str]) -> tuple[Question, ...]:
    found = []
    for number, mention in enumerate(mentions):
        right = frozenset(at for at in range(number) if mentions[at].entity == mention.entity)
        if right:
            baselines = tuple(answer(number, mentions, words) in right for answer in BASELINES.values())
            found.append(Question(number, tuple(range(number)), right, mention.kind, baselines))
    return tuple(found)


# ---- answers of heads


@dataclass(frozen=True, slots=True)
class _Prepared:
    maps: WordMaps
    candidates_GMM: Tensor
    right_GMM: Tensor
    kinds_GMK: Tensor


def _hits(bert: Bert, asked: QuestionSet, *, what: str) -> Iterator[tuple[list[int], Counts]]:
    """Yield, for groups of texts, the right answers by head and kind of question [L, 2, G, H, K]."""
    device = bert.engine.device

    def prepare(numbers: Sequence[int]) -> _Prepared:
        texts = [asked.texts[number] for number in numbers]
        maps = WordMaps.of([text.mentions for text in texts], "mean", device)
        most = maps.rows_GWN.shape[1]
        candidates, right = torch.zeros(2, len(texts), most, most, dtype=torch.bool)
        kinds = torch.zeros(len(texts), most, len(asked.kinds))
        for row, text in enumerate(texts):
            for question in text.questions:
                candidates[row, question.mention, list(question.candidates)] = True
                right[row, question.mention, list(question.right)] = True
                kinds[row, question.mention, [asked.kinds.index(question.kind), -1]] = 1
        return _Prepared(maps, *(moved_to_device(each, device) for each in (candidates, right, kinds)))

    def reduce(prepared: _Prepared, weights_GHNN: Tensor) -> Tensor:
        words_GHMM = prepared.maps.words(weights_GHNN)
        both_2GHMM = torch.stack([words_GHMM, words_GHMM.mT])
        barred_GMM = ~prepared.candidates_GMM
        chosen_2GHM = both_2GHMM.masked_fill(barred_GMM[:, None], -1.0).argmax(-1, keepdim=True)
        right_2GHMM = prepared.right_GMM[:, None].expand_as(both_2GHMM)
        hits_2GHM = right_2GHMM.gather(-1, chosen_2GHM)[..., 0]
        return hits_2GHM.float() @ prepared.kinds_GMK

    encoded = [text.mentions.encoded for text in asked.texts]
    for numbers, layers in attention_pass(bert, encoded, Analysis(prepare, reduce), what=what):
        yield numbers, torch.stack(layers).double().cpu().numpy()
