"""Surface measures of every head: attention to neighbours, special tokens, punctuation, the other sentence.

The measures of Clark et al. 2019, section 3, each a mean over all tokens of all texts. The paper averages
over texts; here a text counts in proportion to its length.

Shapes: L layers, H heads, G texts of similar length, N tokens of the longest of these, M measures, C kinds of
tokens, R kinds of rows, S all texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from bertsmith.core.progress import progress_bar
from bertsmith.inference.introspection import masked_tokens, token_masker
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import Sequences, TextInput
from bertsmith.insight.attention_pass import Analysis, attention_pass
from bertsmith.model.encoder_config import need
from bertsmith.model.importance import ImportanceGates, importance_gates
from bertsmith.model.transformer.transformer_config import with_heads
from bertsmith.packed import PackedBatch, moved_to_device, pack
from bertsmith.text.tokenizer import Encoded, truncate_longest_first

PerHead = NDArray[np.float64]
"""A number for each head [L, H]."""

SHARES = ("previous", "next", "itself", "[CLS]", "[SEP]", "punctuation")
"""Fractions of the attention of all tokens."""
MEASURES = (*SHARES, "[SEP] to [SEP]", "others to [SEP]", "A to B", "B to A", "entropy", "entropy of [CLS]")
GRADIENTS = ("gradient to [SEP]", "gradient to punctuation", "gradient to others")
IMPORTANCE = "importance"
"""Mean absolute change of a text's masked-LM loss with a gate on the head's output (Michel et al. 2019)."""
WITH_MASKED_LM = (*GRADIENTS, IMPORTANCE)
PUNCTUATION = frozenset(".,")
"""Periods and commas, which are the paper's "punctuation"."""
SMOOTHING = 1e-4
"""Weight of the uniform distribution in entropies, as published: .9999 a + .0001 / n."""
GRADIENT_BATCH_TOKENS = 1024
"""Tokens of a batch for gradients, which keep all layers in memory at once."""


@dataclass(frozen=True, slots=True)
class Surface:
    """The measures of every head [L, H].

    A measure is NaN if it requires pairs, [CLS] or [SEP] and the texts lack them. Gradients and importance
    are NaN if the model lacks a masked-LM head or a mask.
    """

    measures: dict[str, PerHead]
    texts: int
    tokens: int


@dataclass(slots=True)
class _Sums:
    """Sums over tokens and their number, for each measure."""

    sums: dict[str, PerHead] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, measure: str, sum_LH: PerHead, count: float) -> None:
        self.sums[measure] = self.sums.get(measure, 0.0) + sum_LH
        self.counts[measure] = self.counts.get(measure, 0.0) + count

    def mean(self, measure: str, shape: tuple[int, ...]) -> PerHead:
        count = self.counts.get(measure, 0.0)
        return self.sums[measure] / count if count else np.full(shape, np.nan)


def study_surface(bert: Bert, texts: Sequence[TextInput], *, longest: int, seed: int) -> Surface:
    """Return the surface measures of every head over these texts, each truncated to `longest` tokens."""
    surface = measure_attention(bert, texts, longest=longest)
    shape, sums = surface.measures["entropy"].shape, _Sums()
    if "mlm" in bert.heads and bert.tokenizer.has_mask:
        encoded = shortened(bert, texts, longest)
        kinds = [_kinds_of(bert, each, text) for each, text in zip(encoded, texts, strict=True)]
        _add_gradients(bert, encoded, kinds, sums, seed)
    gradients = {name: sums.mean(name, shape) for name in WITH_MASKED_LM}
    return replace(surface, measures=surface.measures | gradients)


def measure_attention(bert: Bert, texts: Sequence[TextInput], *, longest: int) -> Surface:
    """Return the surface measures of every head over these texts, except the gradients."""
    encoded = shortened(bert, texts, longest)
    config = with_heads(bert.model.network.config)
    kinds = [_kinds_of(bert, each, text) for each, text in zip(encoded, texts, strict=True)]
    device = bert.engine.device

    def prepare(numbers: Sequence[int]) -> _Prepared:
        chosen = [kinds[each] for each in numbers]
        kinds_GNC = moved_to_device(pad_sequence(chosen, batch_first=True), device)
        return _Prepared(kinds_GNC, smoothing_term([len(each) for each in chosen], SMOOTHING, device))

    shape = (config.layers, len(MEASURES), config.heads)
    sums_LMH = torch.zeros(shape, dtype=torch.float64, device=device)
    for _, layers in attention_pass(bert, encoded, Analysis(prepare, _measured), what="attention"):
        sums_LMH += torch.stack(layers)
    sums, counts = _Sums(), _counts(kinds)
    for measure, sums_LH in zip(MEASURES, sums_LMH.cpu().numpy().swapaxes(0, 1), strict=True):
        sums.add(measure, sums_LH, counts[measure])
    measures = {name: sums.mean(name, (config.layers, config.heads)) for name in MEASURES}
    return Surface(measures, len(encoded), sum(map(len, encoded)))


def shortened(bert: Bert, texts: Sequence[TextInput], longest: int) -> list[Encoded]:
    """Return the tokens of texts, truncated to `longest` or to the model's limit, whichever is shorter."""
    whole = bert.reader.encode(texts, truncate=True)
    return [each if len(each) <= longest else truncate_longest_first(each, longest) for each in whole]


# ---- kinds of tokens: the columns of kinds [N, C]

SEP, CLS, PUNCT, FIRST, SECOND = range(5)


def _kinds_of(bert: Bert, encoded: Encoded, text: TextInput) -> Tensor:
    """Mark each token that is [SEP], [CLS], punctuation, in the first text and in the second [N, C]."""
    whole = text if isinstance(text, str | tuple) else text.text
    parts = (whole,) if isinstance(whole, str) else whole
    sep, cls = map(bert.tokenizer.id_of_role, ("sep_token", "cls_token"))
    kinds = [[0.0] * 5 for _ in encoded.ids]
    for row, (number, sequence) in enumerate(zip(encoded.ids, encoded.sequence, strict=True)):
        if sequence < 0:
            kinds[row][SEP] = number == sep
            kinds[row][CLS] = number == cls
            continue
        start, end = encoded.offsets[row]
        kinds[row][PUNCT] = parts[sequence][start:end].strip() in PUNCTUATION
        kinds[row][FIRST + sequence] = 1
    return torch.tensor(kinds)


def _counts(kinds: Sequence[Tensor]) -> dict[str, float]:
    """Return the number of rows that each measure is averaged over."""
    tokens = float(sum(map(len, kinds)))
    of_kind_SC = torch.stack([each.sum(0) for each in kinds]).double()
    paired_S = of_kind_SC[:, SECOND] > 0
    separators, firsts = (float(of_kind_SC[:, kind].sum()) for kind in (SEP, CLS))
    return dict.fromkeys((*SHARES, "entropy"), tokens) | {
        "[CLS]": tokens if firsts else 0.0,
        "[SEP]": tokens if separators else 0.0,
        "[SEP] to [SEP]": separators,
        "others to [SEP]": tokens - separators if separators else 0.0,
        "A to B": float(of_kind_SC[paired_S, FIRST].sum()),
        "B to A": float(of_kind_SC[paired_S, SECOND].sum()),
        "entropy of [CLS]": firsts,
    }


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The kinds of all tokens of G texts, and the smoothing term of their attention."""

    kinds_GNC: Tensor
    smoothing_G1NN: Tensor


def _measured(prepared: _Prepared, weights_GHNN: Tensor) -> Tensor:
    """Return the sums of all measures over the rows of G texts [M, H]."""
    kinds_GNC, weights_GHNN = prepared.kinds_GNC, weights_GHNN.float()
    to_kind_GHNC = weights_GHNN @ kinds_GNC[:, None]
    # [G, H, R, C]: from the rows of a kind to the columns of a kind.
    between_HRC = (kinds_GNC.mT[:, None] @ to_kind_GHNC).sum(0)
    to_kind_HC = to_kind_GHNC.sum((0, 2))
    entropy_GHN = entropies((1 - SMOOTHING) * weights_GHNN + prepared.smoothing_G1NN)
    near = [weights_GHNN.diagonal(step, 2, 3).sum((0, 2)) for step in (-1, 1, 0)]
    found = {
        **dict(zip(("previous", "next", "itself"), near, strict=True)),
        "[CLS]": to_kind_HC[:, CLS],
        "[SEP]": to_kind_HC[:, SEP],
        "punctuation": to_kind_HC[:, PUNCT],
        "[SEP] to [SEP]": between_HRC[:, SEP, SEP],
        "others to [SEP]": to_kind_HC[:, SEP] - between_HRC[:, SEP, SEP],
        "A to B": between_HRC[:, FIRST, SECOND],
        "B to A": between_HRC[:, SECOND, FIRST],
        "entropy": entropy_GHN.sum((0, 2)),
        "entropy of [CLS]": torch.einsum("ghn,gn->h", entropy_GHN, kinds_GNC[:, :, CLS]),
    }
    return torch.stack([found[name] for name in MEASURES])


def smoothing_term(lengths: Sequence[int], amount: float, device: torch.device) -> Tensor:
    """Return the term amount / n that smooths the attention of texts of n tokens [G, 1, N, N].

    For padding the term is 1, so that its entropy is 0.
    """
    lengths_G = moved_to_device(torch.tensor(lengths), device)
    token_GN = torch.arange(max(lengths), device=device) < lengths_G[:, None]
    both_GNN = token_GN[:, :, None] & token_GN[:, None]
    return torch.where(both_GNN, amount / lengths_G[:, None, None], 1.0)[:, None]


def entropies(smooth_GHNN: Tensor) -> Tensor:
    """Return the entropy of each token's attention, in nats [G, H, N]."""
    return -(smooth_GHNN * smooth_GHNN.log()).sum(-1)


# ---- gradients


def _add_gradients(
    bert: Bert, encoded: Sequence[Encoded], kinds: Sequence[Tensor], sums: _Sums, seed: int
) -> None:
    """Add the absolute gradients of a text's masked-LM loss by attention weights, and head importance."""
    masker = token_masker(bert)
    with progress_bar("gradients", len(encoded)) as advance:
        for numbers, _ in Sequences.of(encoded).batches(GRADIENT_BATCH_TOKENS):
            chosen = [encoded[number] for number in numbers.tolist()]
            masks = [
                masked_tokens(masker, each, seed + int(n)) for each, n in zip(chosen, numbers, strict=True)
            ]
            with importance_gates(bert.model.network) as gates:
                found_LHC, count_C = _gradient_sums(bert, chosen, masks, [kinds[n] for n in numbers], gates)
            sums.add(IMPORTANCE, _importance_sums(gates), len(chosen))
            for at, measure in enumerate(GRADIENTS):
                sums.add(measure, found_LHC[:, :, at], float(count_C[at]))
            advance(len(chosen))


def _importance_sums(gates: ImportanceGates) -> PerHead:
    """Return the sums of the heads' gates by layer [L, H]; layers that share a block share its gates."""
    found = [heads_H for heads_H, _ in gates.sums]
    heads = need(gates.network.encoder.heads, "attention heads")
    return torch.stack([found[block] for block in heads.order]).numpy()


def _gradient_sums(
    bert: Bert,
    texts: Sequence[Encoded],
    masks: Sequence[dict[int, int]],
    kinds: Sequence[Tensor],
    gates: ImportanceGates,
) -> tuple[PerHead, PerHead]:
    """Return sums of absolute gradients to [SEP], punctuation and others [L, H, 3], and their counts [3]."""
    batch, rows_P, wanted_P, weights_P = _masked_batch(texts, masks)
    network, device = bert.model.network, bert.engine.device
    config = with_heads(network.config)
    seen: list[tuple[int, list[int], Tensor]] = []

    def watch(layer: int, numbers: list[int], weights_GHNN: Tensor) -> Tensor:
        kept = weights_GHNN if weights_GHNN.requires_grad else weights_GHNN.requires_grad_()
        seen.append((layer, numbers, kept))
        return kept

    hidden_TD = need(network.encoder.heads, "attention heads").watch(batch.to(device), watch)
    scores_PV = network.word_scores(hidden_TD, rows_P.to(device)).float()
    losses_P = functional.cross_entropy(scores_PV, wanted_P.to(device), reduction="none")
    loss = (losses_P * weights_P.to(device)).sum()
    gradients = torch.autograd.grad(loss, [each for *_, each in seen], retain_graph=True)
    gates.collect(loss)
    found_LHC = np.zeros((config.layers, config.heads, 3))
    count_C = np.zeros(3)
    for (layer, numbers, _), gradient_GHNN in zip(seen, gradients, strict=True):
        kind_GNC = torch.stack([_key_kinds(kinds[number]) for number in numbers]).to(device)
        found_LHC[layer] += (gradient_GHNN.abs().float() @ kind_GNC[:, None]).sum((0, 2)).cpu().numpy()
        if layer == 0:
            count_C += (kind_GNC.sum((0, 1)) * kind_GNC.shape[1]).cpu().numpy()
    return found_LHC, count_C


def _key_kinds(kinds_NC: Tensor) -> Tensor:
    """Mark each token that is [SEP], punctuation or neither [N, 3]."""
    named = kinds_NC[:, [SEP, PUNCT]]
    return torch.cat([named, 1 - named.sum(1, keepdim=True)], 1)


def _masked_batch(
    texts: Sequence[Encoded], masks: Sequence[dict[int, int]]
) -> tuple[PackedBatch, Tensor, Tensor, Tensor]:
    """Return the masked texts, and the rows, ids and loss weights of the tokens to predict.

    A text's loss is the mean over its predicted tokens.
    """
    shown = [
        [mask.get(row, id) for row, id in enumerate(each.ids)]
        for each, mask in zip(texts, masks, strict=True)
    ]
    batch = pack(shown, [each.segments for each in texts])
    rows, wanted, weights = [], [], []
    for (start, _), each, mask in zip(batch.layout.bounds(), texts, masks, strict=True):
        rows += [start + row for row in mask]
        wanted += [each.ids[row] for row in mask]
        weights += [1 / len(mask)] * len(mask)
    return batch, torch.tensor(rows), torch.tensor(wanted), torch.tensor(weights)
