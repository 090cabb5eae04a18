"""Special tokens around segments, and sequences laid out as the tokenizer itself would."""

from pathlib import Path

import numpy as np
import pytest

from bertsmith.data.collate import lay_out
from bertsmith.data.example_index import Spans
from bertsmith.text.tokenizer import Tokenizer, read_templates
from tests.tokenizer_makers import MAKERS, byte_bpe, uncased_wordpiece

every_kind = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
TEXTS = ["The iron is hot.", "A smith", "twelve horseshoes for luck", "heats"]


def test_bert_puts_three_tokens_around_a_pair(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(uncased_wordpiece(tmp_path))
    pair = read_templates(tokenizer).pair
    assert (pair.lead.ids, pair.between.ids) == ((tokenizer.cls_id,), (tokenizer.sep_id,))
    assert pair.specials(2) == 3
    assert pair.text_segments == (0, 1)


def test_roberta_puts_four_tokens_around_a_pair_and_knows_one_segment(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_bpe(tmp_path))
    pair = read_templates(tokenizer).pair
    assert pair.between.ids == (tokenizer.sep_id, tokenizer.sep_id)
    assert pair.specials(2) == 4
    assert pair.text_segments == (0, 0)


def laid_out(tokenizer: Tokenizer, texts: list[list[str]], template):
    """These texts, one or more spans a sequence, as rows."""
    spans = [[number for number in body(tokenizer, text)] for sequence in texts for text in sequence]
    lengths = np.array([len(span) for span in spans])
    counts = np.array([len(sequence) for sequence in texts])
    flat = np.array([number for span in spans for number in span])
    return lay_out(flat, Spans(counts, np.zeros_like(lengths), lengths), template)


def body(tokenizer: Tokenizer, text: str) -> list[int]:
    encoded = tokenizer.encode(text)
    return [number for number, part in zip(encoded.ids, encoded.sequence, strict=True) if part == 0]


@every_kind
def test_pairs_are_laid_out_as_the_tokenizer_encodes_them(make, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make(tmp_path))
    pairs = [[TEXTS[0], TEXTS[1]], [TEXTS[2], TEXTS[3]]]
    rows = laid_out(tokenizer, pairs, read_templates(tokenizer).pair)
    expected = [tokenizer.encode_pair(*pair) for pair in pairs]
    assert rows.tokens_T.tolist() == [number for each in expected for number in each.ids]
    assert rows.segments_T.tolist() == [segment for each in expected for segment in each.segments]
    assert rows.positions_T.tolist() == [place for each in expected for place in range(len(each))]
    assert np.diff(rows.starts_S1).tolist() == [len(each) for each in expected]


@every_kind
def test_single_segments_are_laid_out_as_the_tokenizer_encodes_them(make, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make(tmp_path))
    rows = laid_out(tokenizer, [[text] for text in TEXTS], read_templates(tokenizer).single)
    expected = [tokenizer.encode(text) for text in TEXTS]
    assert rows.tokens_T.tolist() == [number for each in expected for number in each.ids]
    assert rows.segments_T.tolist() == [segment for each in expected for segment in each.segments]


@every_kind
def test_pairs_and_single_segments_stand_side_by_side_as_the_tokenizer_encodes_each(make, tmp_path) -> None:
    tokenizer = Tokenizer.load(make(tmp_path))
    rows = laid_out(tokenizer, [TEXTS[:1], TEXTS[1:3], TEXTS[3:]], read_templates(tokenizer).pair)
    expected = [tokenizer.encode(TEXTS[0]), tokenizer.encode_pair(*TEXTS[1:3]), tokenizer.encode(TEXTS[3])]
    assert rows.tokens_T.tolist() == [number for each in expected for number in each.ids]
    assert rows.segments_T.tolist() == [segment for each in expected for segment in each.segments]


def test_documents_in_one_sequence_are_kept_apart_by_one_separator(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_bpe(tmp_path))
    rows = laid_out(tokenizer, [TEXTS[:3], TEXTS[3:]], read_templates(tokenizer).single)
    parts = [body(tokenizer, text) for text in TEXTS]
    begin, end = [tokenizer.cls_id], [tokenizer.sep_id]
    first = [*begin, *parts[0], *end, *parts[1], *end, *parts[2], *end]
    assert rows.tokens_T.tolist() == [*first, *begin, *parts[3], *end]
    assert rows.tokens_T[rows.text_rows_X].tolist() == [number for part in parts for number in part]
