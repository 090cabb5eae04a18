"""Probe how much of a dependency tree all heads together contain (Clark et al. 2019, section 5).

With attention alone: p(i is the head of j) ~ exp(sum over heads k of w_k a_ji + u_k a_ij). With static
vectors the weights depend on both words: w_k + W_k v_j + W'_k v_i. Static vectors are the averaged embeddings
of a word's pieces in the model; the paper uses GloVe. The root is scored by the attention to and from [CLS]
and [SEP].

Shapes: A = layers x heads, G sentences of similar length, N tokens of the longest of these, W words, E width
of static vectors, 4 directions to and from the first and the last token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bertsmith.core.progress import progress_bar
from bertsmith.core.seeds import key_of, stream
from bertsmith.inference.loaded_model import Bert
from bertsmith.insight.attention_pass import Analysis, attention_pass
from bertsmith.insight.bootstrap import bootstrap_intervals
from bertsmith.insight.relations import OFFSETS
from bertsmith.insight.treebank import ROOT, ParsedSentence
from bertsmith.insight.word_attention import EncodedWords, WordMaps, encode_words
from bertsmith.model.transformer.transformer_config import with_heads
from bertsmith.packed import moved_to_device

LEARNING_RATE = 0.002
"""Learning rate of Adam, with one sentence per step and one epoch, as published."""
WINDOW = 256
"""Number of sentences that have their attention in memory at once."""
PROBES = ("attention", "attention and static vectors")


@dataclass(frozen=True, slots=True)
class TreeFeatures:
    """The input of a probe for one sentence, and the targets."""

    words_AWW: Tensor
    """Attention from the row's word to the column's."""
    root_A4W: Tensor
    """Attention of each word to the first token, from the first, to the last, and from the last."""
    static_WE: Tensor
    heads_W: Tensor
    """Index of each word's head; W for the root."""
    counted_W: Tensor
    """True for words that are scored, which excludes punctuation."""


@dataclass(frozen=True, slots=True)
class ProbeScore:
    """Unlabelled attachment score of one probe, without punctuation."""

    probe: str
    accuracy: float
    low: float
    high: float


class DependencyProbe(nn.Module):
    """A probe that scores all words and the root as the head of each word."""

    def __init__(self, heads: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(2, heads))
        self.root = nn.Parameter(torch.zeros(4, heads))
        # For the dependent and for the head, in either direction; width 0 leaves attention alone.
        self.static = nn.Parameter(torch.randn(2, 2, heads, width, generator=generator) * 0.01)

    def forward(self, features: TreeFeatures) -> Tensor:
        """Return the scores of every word's possible heads [W, W + 1]; the last column is the root."""
        dependent_2WA, head_2WA = torch.einsum("dsae,we->sdwa", self.static, features.static_WE)
        weights_2WWA = self.both[:, None, None] + dependent_2WA[:, :, None] + head_2WA[:, None]
        both_2AWW = torch.stack([features.words_AWW, features.words_AWW.mT])
        scores_WW = torch.einsum("dwva,dawv->wv", weights_2WWA, both_2AWW)
        own_WW = torch.eye(len(scores_WW), dtype=torch.bool, device=scores_WW.device)
        root_W = torch.einsum("fa,afw->w", self.root, features.root_A4W)
        return torch.cat([scores_WW.masked_fill(own_WW, -torch.inf), root_W[:, None]], 1)


def study_dependency_probes(
    bert: Bert, scored: Sequence[ParsedSentence], train: Sequence[ParsedSentence], *, seed: int
) -> list[ProbeScore]:
    """Train both probes on one treebank and score them on another; the first score is the best offset's."""
    config = with_heads(bert.model.network.config)
    generator = torch.Generator().manual_seed(key_of(seed, "dependency probe") % 2**63)
    widths = (0, config.embedding_width)
    probes = [DependencyProbe(config.layers * config.heads, width, generator) for width in widths]
    order = stream(seed, "dependency probe").permutation(len(train)).tolist()
    steps = [torch.optim.Adam(probe.parameters(), LEARNING_RATE) for probe in probes]
    for features in tree_features(bert, [train[number] for number in order]):
        for probe, step in zip(probes, steps, strict=True):
            loss = functional.cross_entropy(probe(_for(probe, features)), features.heads_W)
            step.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            step.step()
    right, total = [], []
    with torch.no_grad():
        for features in tree_features(bert, scored):
            hits = [probe(_for(probe, features)).argmax(1) == features.heads_W for probe in probes]
            right.append([float(hit[features.counted_W].sum()) for hit in hits])
            total.append([float(features.counted_W.sum())] * len(probes))
    right_SP, total_SP = np.array(right), np.array(total)
    low_P, high_P = bootstrap_intervals(right_SP, total_SP, seed=seed)
    rates = right_SP.sum(0) / total_SP.sum(0)
    return [_offset_score(scored, train)] + [
        ProbeScore(name, float(rates[at]), float(low_P[at]), float(high_P[at]))
        for at, name in enumerate(PROBES)
    ]


def _for(probe: DependencyProbe, features: TreeFeatures) -> TreeFeatures:
    """Cut the static vectors to the width that the probe reads (0: none)."""
    width = probe.static.shape[-1]
    static_WE = features.static_WE[:, :width]
    return TreeFeatures(
        features.words_AWW, features.root_A4W, static_WE, features.heads_W, features.counted_W
    )


def _offset_score(scored: Sequence[ParsedSentence], train: Sequence[ParsedSentence]) -> ProbeScore:
    """Score the offset that is right most often in training."""

    def rate(sentences: Sequence[ParsedSentence], offset: int) -> float:
        words = [
            (word + offset, head)
            for sentence in sentences
            for word, (head, kind) in enumerate(zip(sentence.heads, sentence.relations, strict=True))
            if kind != "punct"
        ]
        return sum(guess == head for guess, head in words) / len(words)

    offset = max(OFFSETS, key=lambda each: rate(train, each))
    fraction = rate(scored, offset)
    return ProbeScore(f"offset {offset:+d}", fraction, fraction, fraction)


def tree_features(bert: Bert, sentences: Sequence[ParsedSentence]) -> Iterator[TreeFeatures]:
    """Yield the features of each sentence that the model can read, in order."""
    table_VE = bert.model.network.encoder.words.weight.detach().float().cpu()
    with progress_bar("sentences", len(sentences)) as advance:
        for first in range(0, len(sentences), WINDOW):
            window = sentences[first : first + WINDOW]
            encoded = encode_words(bert, [each.words for each in window])
            kept = [(each, text) for each, text in zip(window, encoded, strict=True) if text is not None]
            maps = _attention_maps(bert, [text for _, text in kept])
            for number, (sentence, text) in enumerate(kept):
                yield _features(sentence, text, maps[number], table_VE)
            advance(len(window))


def _attention_maps(bert: Bert, texts: Sequence[EncodedWords]) -> dict[int, Tensor]:
    """Return each text's attention between words, then to and from its first and last token [A, W + 4, W]."""

    device = bert.engine.device

    def prepare(numbers: Sequence[int]) -> tuple[WordMaps, Tensor, Tensor]:
        chosen = [texts[number] for number in numbers]
        last_G = moved_to_device(torch.tensor([len(text.encoded) - 1 for text in chosen]), device)
        return WordMaps.of(chosen, "mean", device), torch.arange(len(chosen), device=device), last_G

    def reduce(prepared: tuple[WordMaps, Tensor, Tensor], weights_GHNN: Tensor) -> Tensor:
        maps, text_G, last_G = prepared
        from_words_GHWN = maps.rows_GWN[:, None] @ weights_GHNN.float()
        to_words_GHNW = weights_GHNN.float() @ maps.columns_GNW[:, None]
        ends = [
            from_words_GHWN[..., 0],
            to_words_GHNW[:, :, 0],
            from_words_GHWN[text_G, :, :, last_G],
            to_words_GHNW[text_G, :, last_G],
        ]
        return torch.cat([maps.between_words(weights_GHNN), torch.stack(ends, 2)], 2)

    found: dict[int, Tensor] = {}
    analysis = Analysis(prepare, reduce)
    for numbers, layers in attention_pass(bert, [text.encoded for text in texts], analysis, what="attention"):
        whole_GAXW = torch.cat(layers, 1).cpu()
        found |= dict(zip(numbers, whole_GAXW, strict=True))
    return found


def _features(
    sentence: ParsedSentence, text: EncodedWords, map_AXW: Tensor, table_VE: Tensor
) -> TreeFeatures:
    words = len(sentence.words)
    ids = [[text.encoded.ids[row] for row in pieces] for pieces in text.pieces]
    zero_E = torch.zeros(table_VE.shape[1])
    return TreeFeatures(
        words_AWW=map_AXW[:, :words, :words],
        root_A4W=map_AXW[:, -4:, :words],
        static_WE=torch.stack([table_VE[each].mean(0) if each else zero_E for each in ids]),
        heads_W=torch.tensor([words if head == ROOT else head for head in sentence.heads]),
        counted_W=torch.tensor([relation != "punct" for relation in sentence.relations]),
    )
