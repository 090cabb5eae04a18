"""Any text at all: the same ids and offsets as the `tokenizers` library and as transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Encoding
from tokenizers import Tokenizer as Library

from bertsmith.text.tokenizer import Encoded, Tokenizer
from tests.tokenizer_makers import MAKERS, PARAGRAPH

SNIPPETS = [
    *(
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[PAD]",
        "[UNK]",
        "<s>",
        "</s>",
        "<pad>",
        "<unk>",
        "<mask>",
        "<|endoftext|>",
    ),
    *(
        "[unused0]",
        "|||IP_ADDRESS|||",
        " [MASK]",
        "<mask> ",
        "[MASK",
        "<pad",
        "pad>",
        "<PAD>",
        "＜pad＞",
        "[𝐂𝐋𝐒]",
    ),
    *("é", "e\u0301", "İ", "ﬁ", "ß", "Å", "Ångström", "ñ\u0303\u0303", "\u0301", "``", "''"),
    *("铁匠", "鍛冶屋は", "대장장이", "\U00020000", "الحديد", "लोहार", "ช่าง"),
    *("👩🏽‍🏭", "👨‍👩‍👧‍👦", "🇪🇺", "❤️", "\ufe0f", "\u200d", "\u200b", "\ufeff"),
    *("\x00", "\ufffd", "\x07", "\x85", "\u2028", "\u00a0", "\u3000", "\t", "\r\n", "\uffff", "\U0010ffff"),
    *(
        " ",
        "  ",
        "     ",
        "a" * 100,
        "a" * 101,
        "iron" * 50,
        "é" * 200,
        "▁",
        "Ġ",
        "##a",
        "'s",
        "0x1f",
        "3.14€",
    ),
    *PARAGRAPH.split(),
]
any_character = st.characters(exclude_categories=["Cs"])
any_text = st.lists(st.sampled_from(SNIPPETS) | st.text(any_character, max_size=8), max_size=12).map("".join)
any_texts = st.lists(any_text | st.tuples(any_text, any_text), max_size=5)

WITHOUT_LEAKS = ["uncased_wordpiece", "cased_wordpiece", "byte_bpe", "modern_bpe"]
UNIGRAM = ["albert_unigram", "cased_unigram"]
every_kind = pytest.mark.parametrize("kind", [*WITHOUT_LEAKS, *UNIGRAM])


@dataclass(frozen=True, repr=False)
class Rivals:
    """Ours, the class of transformers that reads the same files, and the library open and closed."""

    ours: Tokenizer
    special: tuple[str, ...]
    theirs: transformers.PreTrainedTokenizerBase
    open: Library
    closed: Library


def make_rivals(folder: Path, class_name: str, **settings: Any) -> Rivals:
    ours = Tokenizer.load(folder)
    theirs = getattr(transformers, class_name).from_pretrained(folder, **settings)
    open_library, closed_library = (Library.from_str(theirs.backend_tokenizer.to_str()) for _ in range(2))
    closed_library.encode_special_tokens = True
    special = tuple(ours.token(number) for number in ours.special_ids)
    return Rivals(ours, special, theirs, open_library, closed_library)


@pytest.fixture(scope="module")
def all_rivals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rivals]:
    folder = tmp_path_factory.mktemp("tokenizers")
    folders = {maker.__name__: maker(folder / maker.__name__) for maker in MAKERS}
    classes = {"uncased_wordpiece": "BertTokenizer", "byte_bpe": "RobertaTokenizer"}
    rivals = {
        name: make_rivals(place, classes.get(name, "PreTrainedTokenizerFast"))
        for name, place in folders.items()
        if name != "cased_wordpiece"
    }
    cased = make_rivals(folders["cased_wordpiece"], "BertTokenizer", do_lower_case=False)
    return rivals | {"cased_wordpiece": cased}


def same(ours: Encoded, library: Encoding) -> bool:
    return (ours.ids, ours.offsets, ours.segments) == (library.ids, library.offsets, library.type_ids)


@every_kind
@given(first=any_text, second=any_text)
def test_with_every_special_token_allowed_we_are_the_library(
    kind: str, all_rivals: dict[str, Rivals], first: str, second: str
) -> None:
    rivals = all_rivals[kind]
    assert same(rivals.ours.encode(first, allow_special=rivals.special), rivals.open.encode(first))
    pair = rivals.ours.encode_pair(first, second, allow_special=rivals.special)
    assert same(pair, rivals.open.encode(first, second))


@every_kind
@given(first=any_text, second=any_text)
def test_with_every_special_token_allowed_we_are_transformers(
    kind: str, all_rivals: dict[str, Rivals], first: str, second: str
) -> None:
    rivals = all_rivals[kind]
    # To transformers an empty second text is no second text.
    single, pair = first + second, (first, second or "iron")
    ours = rivals.ours.encode_many([single, pair], allow_special=rivals.special)
    theirs = [rivals.theirs(*texts, return_offsets_mapping=True) for texts in ((single,), pair)]
    assert [it.ids for it in ours] == [it["input_ids"] for it in theirs]
    assert [it.offsets for it in ours] == [it["offset_mapping"] for it in theirs]


@pytest.mark.parametrize("kind", WITHOUT_LEAKS)
@given(first=any_text, second=any_text)
def test_closed_we_are_the_library_with_encode_special_tokens(
    kind: str, all_rivals: dict[str, Rivals], first: str, second: str
) -> None:
    rivals = all_rivals[kind]
    assert same(rivals.ours.encode(first), rivals.closed.encode(first))
    assert same(rivals.ours.encode_pair(first, second), rivals.closed.encode(first, second))


@every_kind
@given(text=any_text)
def test_no_text_yields_a_special_token(kind: str, all_rivals: dict[str, Rivals], text: str) -> None:
    ours = all_rivals[kind].ours
    assert not set(ours.encode(text).ids[1:-1]) & (ours.special_ids - {ours.unknown_id})


@every_kind
@given(text=any_text)
def test_an_open_door_for_the_mask_lets_in_every_mask_and_nothing_else(
    kind: str, all_rivals: dict[str, Rivals], text: str
) -> None:
    ours = all_rivals[kind].ours
    inner = ours.encode(text, allow_special=(ours.mask_token,)).ids[1:-1]
    assert inner.count(ours.mask_id) == text.count(ours.mask_token)
    assert not set(inner) & (ours.special_ids - {ours.unknown_id, ours.mask_id})


@pytest.mark.parametrize("kind", UNIGRAM)
@given(text=any_text)
def test_a_unigram_word_without_a_special_literal_is_as_in_the_library(
    kind: str, all_rivals: dict[str, Rivals], text: str
) -> None:
    rivals = all_rivals[kind]
    ours, library = rivals.ours.encode(text), rivals.closed.encode(text)
    ours_placed, library_placed = (set(zip(it.ids, it.offsets, strict=True)) for it in (ours, library))
    for _, (start, end) in ours_placed ^ library_placed:
        word = rivals.closed.normalizer.normalize_str(word_around(text, start, end))
        assert any(literal in word for literal in rivals.special)


def word_around(text: str, start: int, end: int) -> str:
    """The characters between the white space before and after this span."""
    before = next((at for at in range(start, 0, -1) if text[at - 1].isspace()), 0)
    after = next((at for at in range(end, len(text)) if text[at].isspace()), len(text))
    return text[before:after]


@every_kind
@given(texts=any_texts)
def test_many_texts_give_the_same_as_one_by_one(
    kind: str, all_rivals: dict[str, Rivals], texts: list[str | tuple[str, str]]
) -> None:
    ours = all_rivals[kind].ours
    one_by_one = [ours.encode(it) if isinstance(it, str) else ours.encode_pair(*it) for it in texts]
    assert ours.encode_many(texts) == one_by_one
