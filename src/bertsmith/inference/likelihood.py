"""The likelihood of texts: the log-probability of each token, given its context.

A masked model gives the pseudo-log-likelihood (Salazar et al. 2020): each token is masked once and predicted
from all others, so a text of n tokens is read n times. A one-sided model reads a text once and predicts each
token from the tokens on its side (the chain rule). Special tokens are context and are not scored.

Shapes: T tokens of all texts, P predicted tokens, D model width.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.progress import progress_bar
from bertsmith.inference.engine import WINDOW_TEXTS, Advance, Engine, batching_for, in_streams
from bertsmith.inference.fill_mask import MASKS_AT_ONCE, scores_of_tokens
from bertsmith.inference.outputs import Likelihood, WordLikelihood
from bertsmith.inference.text_reader import Integers, Reader, Sequences, TokenizedText, as_list
from bertsmith.packed import PackedBatch
from bertsmith.text.tokenizer import Encoded, read_templates

Doubles = NDArray[np.float64]

GPU_ROWS_AT_ONCE = 2048
"""Rows to score at once over the whole vocabulary on a GPU: 250 MB with 30,000 tokens."""


@dataclass(frozen=True, slots=True)
class _Predictions:
    """A batch, the rows of the predicted tokens, these tokens, and their indices among all texts' tokens."""

    batch: PackedBatch
    rows_P: Integers
    tokens_P: Integers
    places_P: Integers
    ended: int
    """Number of texts that end in this batch."""


def likelihoods(engine: Engine, texts: Iterable[str], *, truncate: bool) -> list[Likelihood]:
    """Return the likelihood of each text and of its words."""
    several, found = as_list(texts), []
    for number, text in enumerate(several):
        if not isinstance(text, str):
            what = f"is {type(text).__name__}, not a text"
            raise UserError(what, index=number, remedy="a text with a likelihood is a str")
    with progress_bar("reading texts", len(several)) as advance:
        for first in range(0, len(several), WINDOW_TEXTS):
            some = several[first : first + WINDOW_TEXTS]
            whole = read_texts(engine, some, truncate=truncate, first=first)
            scores = token_log_probabilities(engine, [each.encoded for each in whole], advance)
            found += [
                _likelihood(*each, is_pseudo=is_pseudo(engine)) for each in zip(whole, scores, strict=True)
            ]
    return found


def read_texts(
    engine: Engine, texts: Sequence[str], *, truncate: bool, first: int = 0
) -> list[TokenizedText]:
    """Return the tokens of texts between the special tokens that predict the outermost ones.

    GPT-2 lacks a template, but its documents continue with such a token between them.
    """
    tokenizer, offsets = engine.tokenizer, [view.offset for view in engine.network.encoder.word_views()]
    ends = [Encoded([], [], [], [], [])] * 2
    if any(offsets):
        template = read_templates(tokenizer).single
        lacking = (min(offsets) < 0 and not len(template.lead), max(offsets) > 0 and not len(template.tail))
        for side, id in enumerate(tokenizer.ends):
            ends[side] = Encoded([id], [0], [(0, 0)], [-1], [None]) if lacking[side] else ends[side]
    reader = Reader(tokenizer, engine.reader.longest - sum(len(each.ids) for each in ends))
    read = reader.tokenize(texts, first=first)
    reader.check(read, truncate=truncate, first=first)
    whole = [reader.truncated(each) for each in read]
    return [replace(each, encoded=_joined(ends[0], each.encoded, ends[1])) for each in whole]


def _joined(*parts: Encoded) -> Encoded:
    lists = (chain.from_iterable(getattr(part, field.name) for part in parts) for field in fields(Encoded))
    return Encoded(*map(list, lists))


def is_pseudo(engine: Engine) -> bool:
    """Return True if each token is predicted from both sides."""
    sides = {np.sign(view.offset) for view in engine.network.encoder.word_views()}
    return sides not in ({-1}, {1})


def token_log_probabilities(
    engine: Engine, encoded: Sequence[Encoded], advance: Advance = lambda _texts: None
) -> list[Doubles]:
    """Return the log-probability of each token of each text, in nats; NaN for tokens that are not predicted.

    Masked copies are made a batch at a time, the longest texts first: they are never all in memory.
    """
    if not encoded:
        return []
    sequences, encoder = Sequences.of(encoded), engine.network.encoder
    is_text_T = np.fromiter((own >= 0 for each in encoded for own in each.sequence), bool, sequences.tokens)
    offsets = [view.offset for view in encoder.word_views()]
    copies_S = np.diff(sequences.starts_S1) if 0 in offsets else 1
    cut = batching_for(int((copies_S * np.diff(sequences.starts_S1)).sum()), engine.device)
    if 0 in offsets:
        asked = _masked(sequences, is_text_T, mask=engine.tokenizer.mask_id, budget=cut.tokens)
    else:
        asked = _one_sided(sequences, is_text_T, offsets=offsets, budget=cut.tokens)

    def computed(given: _Predictions) -> tuple[_Predictions, Tensor]:
        with torch.no_grad():
            rows_R = encoder.predicting_rows(torch.from_numpy(given.rows_P).to(engine.device))
            views = encoder.by_view(encoder(given.batch.to(engine.device), rows=rows_R))
            return given, _log_probabilities(engine, views, torch.from_numpy(given.tokens_P))

    places, values = [], []
    for given, values_P in in_streams(computed, asked, streams=cut.streams):
        places.append(given.places_P)
        values.append(values_P)
        advance(given.ended)
    found_T = np.full(sequences.tokens, np.nan)
    found_T[np.concatenate(places)] = torch.cat(values).double().cpu().numpy()  # wait for a GPU only once
    return np.split(found_T, sequences.starts_S1[1:-1])


def _masked(
    sequences: Sequences, is_text_T: NDArray[np.bool_], *, mask: int, budget: int
) -> Iterator[_Predictions]:
    """Yield batches of copies of the texts, each with another token masked; the longest texts come first."""
    lengths_S = np.diff(sequences.starts_S1)
    text_T = np.repeat(np.arange(len(lengths_S)), lengths_S)
    places = np.flatnonzero(is_text_T)
    places = places[np.argsort(-lengths_S[text_T[places]], kind="stable")]
    texts = text_T[places]
    is_last = np.diff(texts, append=-1) != 0
    first = 0
    while first < len(places):
        some = slice(first, first + max(1, budget // int(lengths_S[texts[first]])))
        places_P, texts_P = places[some], texts[some]
        batch = sequences.packed(texts_P)
        rows_P = batch.layout.starts_S1[:-1].numpy() + places_P - sequences.starts_S1[texts_P]
        batch.tokens_T[torch.from_numpy(rows_P)] = mask
        yield _Predictions(batch, rows_P, sequences.tokens_T[places_P], places_P, int(is_last[some].sum()))
        first = some.stop


def _one_sided(
    sequences: Sequences, is_text_T: NDArray[np.bool_], *, offsets: list[int], budget: int
) -> Iterator[_Predictions]:
    """Yield batches of the texts; a token is predicted by its neighbours, if it has them on these sides."""
    for numbers, batch in sequences.batches(budget):
        starts = batch.layout.starts_S1.numpy().astype(np.int64)
        text_T = np.repeat(np.arange(len(numbers)), np.diff(starts))
        places_T = sequences.starts_S1[numbers][text_T] + batch.positions_T.numpy()
        rows_T = np.arange(len(text_T))
        has_first_T = starts[text_T] <= rows_T + min(offsets)
        has_last_T = rows_T + max(offsets) < starts[text_T + 1]
        rows_P = np.flatnonzero(is_text_T[places_T] & has_first_T & has_last_T)
        places_P = places_T[rows_P]
        yield _Predictions(batch, rows_P, sequences.tokens_T[places_P], places_P, len(numbers))


def _log_probabilities(engine: Engine, views: Sequence[Tensor], tokens_P: Tensor) -> Tensor:
    """Return the log-probability of each token [P], given the states that each view reads [P, D]."""
    at_once = MASKS_AT_ONCE if engine.device.type == "cpu" else GPU_ROWS_AT_ONCE
    found = []
    for first in range(0, len(tokens_P), at_once):
        some = slice(first, first + at_once)
        scores_PV = engine.network.scores_of_views([states_PD[some] for states_PD in views])
        scores_PV = scores_of_tokens(engine, scores_PV)
        ids_P1 = tokens_P[some, None].to(engine.device)
        found.append(scores_PV.gather(1, ids_P1)[:, 0] - scores_PV.logsumexp(-1))
    return torch.cat(found) if found else views[0].new_empty(0)


def _likelihood(text: TokenizedText, scores_T: Doubles, *, is_pseudo: bool) -> Likelihood:
    end = max(end for _, end in text.encoded.offsets)  # of the part read, if truncated
    return Likelihood(
        log_likelihood=float(np.nansum(scores_T)),
        tokens=int(np.isfinite(scores_T).sum()),
        characters=sum(not each.isspace() for each in str(text.text)[:end]),
        words=_words(text, scores_T),
        is_pseudo=is_pseudo,
    )


def _words(text: TokenizedText, scores_T: Doubles) -> tuple[WordLikelihood, ...]:
    """Return the words of a text, each with the sum over its pieces."""
    from bertsmith.inference.text_words import TextWords  # it imports modules that only words need

    cut = TextWords.of(text)
    sums, number = [0.0] * len(cut.words), len(cut.words) - 1
    pieces = zip(cut.word_of_token, text.encoded.sequence, scores_T.tolist(), strict=True)
    for word, own, score in reversed([*pieces]):
        number = word if word >= 0 else number  # a piece of white space belongs to the word after it
        if own >= 0 and number >= 0 and not math.isnan(score):
            sums[number] += score
    words = zip(cut.words, sums, strict=True)
    return tuple(WordLikelihood(word.text, word.start, word.end, score) for (_, word), score in words)
