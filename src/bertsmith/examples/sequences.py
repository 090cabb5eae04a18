"""From examples to one flat row of tokens: truncate, put the special tokens around, number the positions.

Shapes: X tokens of text, T all tokens, N spans of text, S sequences, S1 = S + 1 boundaries.
"""

from dataclasses import dataclass

import numpy as np

from bertsmith.examples.pairs import ExampleIndex, Numbers, ranges
from bertsmith.examples.template import Inserted, Template
from bertsmith.ground.seeds import Words, bits


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of the store that become the text of sequences, in their order."""

    counts_S: Numbers
    """How many spans each sequence has."""
    starts_N: Numbers
    lengths_N: Numbers


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences laid out one after the other, and where their text stands."""

    tokens_T: Numbers
    segments_T: Numbers
    positions_T: Numbers
    starts_S1: Numbers
    text_rows_X: Numbers
    text_lengths_S: Numbers


def truncated_spans(examples: ExampleIndex, *, room: int, keys_S: Words) -> Spans:
    """The spans of the examples, cut down to `room` tokens of text each.

    As published: the longer segment, on a tie the second, loses its first or its last token, each with
    probability 1/2, until both fit.
    """
    first, second = examples.first_length.astype(np.int64), examples.second_length.astype(np.int64)
    kept_first = np.minimum(first, np.maximum(room - second, (room + 1) // 2))
    kept_second = np.minimum(second, room - kept_first)
    starts = [
        examples.first_start + _lost_in_front(keys_S, first - kept_first, segment=0),
        examples.second_start + _lost_in_front(keys_S, second - kept_second, segment=1),
    ]
    starts_S2, lengths_S2 = np.stack(starts, axis=1), np.stack([kept_first, kept_second], axis=1)
    exists_S2 = lengths_S2 > 0
    return Spans(exists_S2.sum(axis=1), starts_S2[exists_S2], lengths_S2[exists_S2])


def _lost_in_front(keys_S: Words, lost_S: Numbers, *, segment: int) -> Numbers:
    """How many of the lost tokens were the first at the time: one random bit for each loss."""
    words_S = -(-lost_S // 64)
    row, word = np.repeat(np.arange(len(lost_S)), words_S), ranges(np.zeros_like(words_S), words_S)
    drawn = bits(keys_S[row], (word + (segment << 32)).astype(np.uint64))
    unused = np.maximum(64 * (word + 1) - lost_S[row], 0).astype(np.uint64)
    heads = np.bitwise_count(drawn << unused)
    return np.bincount(row, weights=heads, minlength=len(lost_S)).astype(np.int64)


def lay_out(text_X: Numbers, spans: Spans, template: Template) -> Rows:
    """The sequences with their special tokens, segments and positions."""
    is_first_N = np.zeros(len(spans.starts_N), np.bool_)
    last_S = np.cumsum(spans.counts_S) - 1
    is_first_N[last_S - spans.counts_S + 1] = True
    gap_N = np.where(is_first_N, len(template.lead) + len(template.tail), len(template.between))
    gap_N[:1] = len(template.lead)
    begin_N = np.cumsum(gap_N) + np.cumsum(spans.lengths_N) - spans.lengths_N
    end_S = begin_N[last_S] + spans.lengths_N[last_S] + len(template.tail)
    starts_S1 = np.concatenate([[0], end_S])
    rows = _empty_rows(starts_S1, text_rows_X=ranges(begin_N, spans.lengths_N), spans=spans)
    rows.tokens_T[rows.text_rows_X] = text_X
    segment_N = np.where(is_first_N, *template.text_segments)
    rows.segments_T[rows.text_rows_X] = np.repeat(segment_N, spans.lengths_N)
    _insert(rows, template.lead, starts_S1[:-1])
    _insert(rows, template.between, begin_N[~is_first_N] - len(template.between))
    _insert(rows, template.tail, end_S - len(template.tail))
    return rows


def _empty_rows(starts_S1: Numbers, *, text_rows_X: Numbers, spans: Spans) -> Rows:
    total = int(starts_S1[-1])
    first_N = np.cumsum(spans.counts_S) - spans.counts_S
    return Rows(
        tokens_T=np.empty(total, np.int64),
        segments_T=np.empty(total, np.int64),
        positions_T=np.arange(total) - np.repeat(starts_S1[:-1], np.diff(starts_S1)),
        starts_S1=starts_S1,
        text_rows_X=text_rows_X,
        text_lengths_S=np.add.reduceat(spans.lengths_N, first_N),
    )


def _insert(rows: Rows, inserted: Inserted, at: Numbers) -> None:
    for offset, (token, segment) in enumerate(zip(inserted.ids, inserted.segments, strict=True)):
        rows.tokens_T[at + offset] = token
        rows.segments_T[at + offset] = segment
