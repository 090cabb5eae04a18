"""Preparing blocks of text: cleaning, sentences, tokens, units and fingerprints, block by block."""

from pathlib import Path

import pytest

from bertsmith.corpus import build_store
from bertsmith.corpus.clean import Cleaning
from bertsmith.corpus.readers import read_blocks
from bertsmith.text.tokenizer import Tokenizer
from tests.tokenizer_makers import byte_bpe, uncased_wordpiece

TEXT = "The iron is hot. The smith said: twelve!\nThe owner pays\n\nA smith.\n\n\u200b\n\nThe family smiles."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(uncased_wordpiece(tmp_path_factory.mktemp("vocabulary")))


def prepare(text: str, tmp_path: Path, tokenizer: Tokenizer, **settings) -> build_store.PreparedBlock:
    source = tmp_path / "text.txt"
    source.write_text(text, encoding="utf-8")
    state = build_store.PipelineState(
        build_store.load_resources(tokenizer, build_store.CorpusSettings(**settings))
    )
    (block,) = read_blocks([source])
    return build_store.prepare_block(block, state)


def sentences_of(block: build_store.PreparedBlock, tokenizer: Tokenizer) -> list[list[str]]:
    """The documents as lists of sentences, spelled in tokens."""
    tokens = iter([tokenizer.token(number) for number in block.documents.tokens.tolist()])
    lengths = iter(block.documents.sentence_lengths.tolist())
    return [
        [" ".join(next(tokens) for _ in range(next(lengths))) for _ in range(count)]
        for count in block.documents.document_lengths.tolist()
    ]


@pytest.mark.parametrize(
    ("rule", "first"),
    [
        ("split", ["the iron is hot .", "the smith said : twelve !", "the owner pays"]),
        ("line", ["the iron is hot . the smith said : twelve !", "the owner pays"]),
    ],
)
def test_paragraphs_become_sentences_or_each_line_is_one(
    rule: build_store.SentenceRule, first: list[str], tmp_path, tokenizer
) -> None:
    block = prepare(TEXT, tmp_path, tokenizer, sentences=rule)
    assert sentences_of(block, tokenizer) == [first, ["a smith ."], ["the family smiles ."]]


def test_a_document_without_tokens_is_dropped_as_empty(tmp_path, tokenizer) -> None:
    block = prepare(TEXT, tmp_path, tokenizer)
    assert dict(block.dropped) == {"empty": 1}
    assert block.words.tolist() == [14, 3, 4]  # a punctuation mark is a word


def test_a_sentence_without_tokens_is_skipped_in_its_document(tmp_path, tokenizer) -> None:
    block = prepare("The iron.\n\u200b\u200b\nThe smith.", tmp_path, tokenizer)
    assert sentences_of(block, tokenizer) == [["the iron .", "the smith ."]]


def test_documents_are_dropped_for_what_cleaning_finds(tmp_path, tokenizer) -> None:
    block = prepare(TEXT, tmp_path, tokenizer, cleaning=Cleaning(minimum_characters=12))
    assert dict(block.dropped) == {"short": 2}
    assert len(block.documents.document_lengths) == 2


def test_documents_that_hold_a_task_are_dropped_with_its_name(tmp_path, tokenizer) -> None:
    task = tmp_path / "dev.txt"
    task.write_text(
        "A naïve café owner in Zürich ordered twelve of them, for luck, he said\n", encoding="utf-8"
    )
    text = 'A smith.\n\nAnd then: a naive café owner in Zürich ordered twelve of them "for luck", he said.'
    block = prepare(text.replace("naive", "naïve"), tmp_path, tokenizer, exclude=(task,))
    assert dict(block.dropped) == {f"contaminated: {task}": 1}
    assert sentences_of(block, tokenizer) == [["a smith ."]]


def test_units_are_found_only_with_a_lexicon(tmp_path, tokenizer) -> None:
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("the iron\thorse\n".replace("horse", "phrase"), encoding="utf-8")
    assert prepare("The iron is hot.", tmp_path, tokenizer).documents.units is None
    units = prepare("The iron is hot.", tmp_path, tokenizer, lexicons=(lexicon,)).documents.units
    assert units is not None and units.tolist() == [2, 3, 0, 0, 0]


@pytest.mark.parametrize(("kind", "prints", "signed"), [("none", 0, 0), ("exact", 16, 0), ("near", 16, 1)])
def test_fingerprints_are_made_only_where_they_are_compared(
    kind, prints: int, signed: int, tmp_path, tokenizer
) -> None:
    block = prepare(TEXT, tmp_path, tokenizer, duplicates=kind)
    assert [len(fingerprint) for fingerprint in block.fingerprints] == [prints] * 3
    assert [signature is not None for signature in block.signatures] == [bool(signed)] * 3


def test_a_byte_level_vocabulary_sees_the_space_before_a_sentence(tmp_path) -> None:
    tokenizer = Tokenizer.load(byte_bpe(tmp_path))
    line = "The iron is hot. The iron is hot!"
    block = prepare(line, tmp_path, tokenizer)
    whole = [number for number in tokenizer.encode(line).ids if number not in tokenizer.special_ids]
    assert block.documents.tokens.tolist() == whole
    assert len(block.documents.sentence_lengths) == 2
