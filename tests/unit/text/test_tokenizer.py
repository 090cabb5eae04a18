"""What a text becomes, what stays ordinary characters, and what truncation keeps."""

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from bertsmith.core.errors import UserError
from bertsmith.text.tokenizer import (
    Encoded,
    Tokenizer,
    join_pair,
    read_templates,
    truncate_longest_first,
)
from tests import tokenizer_makers as makers

Maker = Callable[[Path], Path]
every_kind = pytest.mark.parametrize("maker", makers.MAKERS, ids=lambda maker: maker.__name__)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(makers.uncased_wordpiece(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def modern(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(makers.modern_bpe(tmp_path_factory.mktemp("modern")))


def tokens(tokenizer: Tokenizer, encoded: Encoded) -> list[str]:
    return [tokenizer.token(number) for number in encoded.ids]


def test_a_text_stands_between_cls_and_sep(bert: Tokenizer) -> None:
    encoded = bert.encode("The Iron")
    assert tokens(bert, encoded) == ["[CLS]", "the", "iron", "[SEP]"]
    assert encoded.offsets == [(0, 0), (0, 3), (4, 8), (0, 0)]
    assert encoded.sequence == [-1, 0, 0, -1]
    assert len(encoded) == 4


def test_a_pair_has_two_segments_and_offsets_into_its_own_texts(bert: Tokenizer) -> None:
    encoded = bert.encode_pair("the iron", "is hot")
    assert tokens(bert, encoded) == ["[CLS]", "the", "iron", "[SEP]", "is", "hot", "[SEP]"]
    assert encoded.segments == [0, 0, 0, 0, 1, 1, 1]
    assert encoded.sequence == [-1, 0, 0, -1, 1, 1, -1]
    assert encoded.offsets[4:6] == [(0, 2), (3, 6)]


def test_a_gpt_pair_has_the_token_between_documents_and_a_single_text_has_nothing(tmp_path: Path) -> None:
    gpt = Tokenizer.load(makers.gpt_bpe(tmp_path))
    first, second = gpt.encode("the smith heats"), gpt.encode("the sun")
    pair = gpt.encode_pair("the smith heats", "the sun")
    assert 0 not in first.ids and set(first.sequence) == {0}
    assert pair.ids == [*first.ids, gpt.sep_id, *second.ids]
    assert pair.offsets == [*first.offsets, (0, 0), *second.offsets]
    assert pair.sequence == [0] * len(first) + [-1] + [1] * len(second)
    assert pair.words == [*first.words, None, *second.words]
    assert pair.segments == [0] * len(pair)  # a GPT has none
    assert gpt.encode_many(["the sun", ("the smith heats", "the sun")]) == [second, pair]
    assert join_pair(first, second, read_templates(gpt).pair) == pair
    assert gpt.encode_pair("", "the sun").sequence == [-1] + [1] * len(second)
    assert gpt.encode_pair("the sun", "").sequence == [0] * len(second) + [-1]


def test_a_pair_that_nothing_can_divide_is_refused_and_a_single_text_is_not() -> None:
    library = Library(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer = Tokenizer.from_library(library)
    assert tokenizer.encode("a").ids == [0]
    for encode in (lambda: tokenizer.encode_pair("a", "b"), lambda: tokenizer.encode_many([("a", "b")])):
        with pytest.raises(UserError, match="this tokenizer lacks a sep_token; name its sep_token"):
            encode()


def test_a_roberta_pair_has_two_separators_and_one_segment(tmp_path: Path) -> None:
    roberta = Tokenizer.load(makers.byte_bpe(tmp_path))
    encoded = roberta.encode_pair("a", "b")
    assert tokens(roberta, encoded) == ["<s>", "a", "</s>", "</s>", "b", "</s>"]
    assert encoded.segments == [0] * 6
    assert encoded.sequence == [-1, 0, -1, -1, 1, -1]


@every_kind
def test_an_empty_text_gives_the_template_alone(maker: Maker, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    assert tokenizer.encode("").ids == [tokenizer.cls_id, tokenizer.sep_id]


def test_offsets_count_code_points_of_the_original_text(bert: Tokenizer) -> None:
    text = "🔥 NAÏVE 铁"
    encoded = bert.encode(text)
    assert [text[start:end] for start, end in encoded.offsets[1:-1]] == ["🔥", "NAÏVE", "铁"]


@every_kind
def test_a_special_token_written_in_a_text_is_ordinary_characters(maker: Maker, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    special = [tokenizer.token(number) for number in tokenizer.special_ids]
    encoded = tokenizer.encode("iron ".join(special) + "".join(special))
    inner = set(encoded.ids[1:-1]) - {tokenizer.unknown_id}
    assert not inner & tokenizer.special_ids


@every_kind
def test_only_the_allowed_special_token_is_read_out_of_the_text(maker: Maker, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    mask, sep = tokenizer.mask_token, tokenizer.token(tokenizer.sep_id)
    encoded = tokenizer.encode(f"iron {mask} is {sep} hot{mask}", allow_special=(mask,))
    inner = encoded.ids[1:-1]
    assert inner.count(tokenizer.mask_id) == 2
    assert tokenizer.sep_id not in inner
    assert set(encoded.sequence[1:-1]) == {0}


@every_kind
def test_the_door_moves_no_id(maker: Maker, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    for number in tokenizer.special_ids:
        literal = tokenizer.token(number)
        assert tokenizer.encode(literal, allow_special=(literal,)).ids[1:-1] == [number]


def test_a_name_that_is_no_special_token_is_not_allowed(bert: Tokenizer) -> None:
    with pytest.raises(UserError, match="'<mask>' is not a special token.*\\[MASK\\]"):
        bert.encode("iron", allow_special=("<mask>",))


def test_runs_of_spaces_stay_tokens_of_a_modern_tokenizer(modern: Tokenizer) -> None:
    encoded = modern.encode("a    |||IP_ADDRESS|||[CLS]")
    assert tokens(modern, encoded)[1:4] == ["a", "    ", "|||IP_ADDRESS|||"]
    assert modern.cls_id not in encoded.ids[1:]


def test_a_unigram_model_does_not_spell_a_special_piece_from_upper_case(tmp_path: Path) -> None:
    albert = Tokenizer.load(makers.albert_unigram(tmp_path))
    assert albert.pad_id not in albert.encode("the <PAD> and the <pad><pad>").ids


def test_a_unigram_model_does_not_spell_a_special_piece_from_compatibility_letters(tmp_path: Path) -> None:
    unigram = Tokenizer.load(makers.cased_unigram(tmp_path))
    text = "[𝐂𝐋𝐒] ＜pad＞ a[MASK]a"
    encoded = unigram.encode(text)
    assert not set(encoded.ids[1:-1]) & (unigram.special_ids - {unigram.unknown_id})
    assert encoded.offsets[-2] == (len(text) - 1, len(text))


def test_a_word_that_is_a_special_piece_of_wordpiece_is_cut() -> None:
    vocabulary = {"[UNK]": 0, "[MASK]": 1, "[": 2, "##x": 3, "MASK]": 4}
    library = Library(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer.from_library(library)
    assert tokenizer.encode("[MASK]x").ids == [2, 4, 3]
    assert tokenizer.encode("[MASK]", allow_special=("[MASK]",)).ids == [1]


@pytest.mark.parametrize("splitter", [None, pre_tokenizers.ByteLevel(add_prefix_space=False)])
def test_a_bpe_model_that_looks_words_up_whole_does_not_find_a_special_one(
    splitter: pre_tokenizers.PreTokenizer | None,
) -> None:
    vocabulary = {"<|>": 0, "<": 1, "|": 2, ">": 3, "|>": 4}
    library = Library(models.BPE(vocabulary, [("|", ">")], ignore_merges=True))
    library.pre_tokenizer = splitter
    library.add_special_tokens(["<|>"])
    assert Tokenizer.from_library(library).encode("<|><|>").ids == [1, 4, 1, 4]


def test_a_special_token_of_one_character_that_text_can_spell_is_rejected() -> None:
    library = Library(models.WordPiece({"[UNK]": 0, "#": 1}, unk_token="[UNK]"))
    library.add_special_tokens(["#"])
    with pytest.raises(UserError, match="cannot keep the special token '#' apart from text"):
        Tokenizer.from_library(library)


def test_a_mask_that_the_pipeline_forgot_to_declare_is_special() -> None:
    library = Library(models.WordLevel({"[UNK]": 0, "MASK": 1, "iron": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer.from_library(library, settings={"mask_token": {"content": "MASK"}})
    assert tokenizer.mask_id == 1
    assert tokenizer.encode("iron MASK").ids == [2, 0, 0]
    assert tokenizer.encode("iron MASK", allow_special=("MASK",)).ids == [2, 1]


@every_kind
def test_many_texts_give_the_same_as_one_by_one(maker: Maker, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    lines = makers.PARAGRAPH.splitlines()
    one_by_one = [tokenizer.encode(line) for line in lines] + [tokenizer.encode_pair(*lines[:2])]
    assert tokenizer.encode_many([*lines, (lines[0], lines[1])]) == one_by_one
    assert tokenizer.encode_many([]) == []


@every_kind
@pytest.mark.parametrize("limit", [None, 64, 20, 9])
def test_two_encoded_texts_are_joined_to_what_their_pair_gives(
    maker: Maker, limit: int | None, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    first, second = makers.PARAGRAPH.splitlines()[:2]
    template = read_templates(tokenizer).pair
    for one, other in ((first, second), (second, "a"), ("a", first)):
        whole = tokenizer.encode_pair(one, other)
        expected = whole if limit is None or len(whole) <= limit else truncate_longest_first(whole, limit)
        encoded = tokenizer.encode(one), tokenizer.encode(other)
        assert join_pair(*encoded, template, limit=limit) == expected


def test_half_a_surrogate_pair_is_rejected_with_its_place(bert: Tokenizer) -> None:
    with pytest.raises(UserError, match="text: character 2 .*ud800.*UTF-8"):
        bert.encode("ab\ud800")
    with pytest.raises(UserError, match="second text: character 0"):
        bert.encode_pair("ab", "\udfff")
    with pytest.raises(UserError, match="text 1: character 1"):
        bert.encode_many(["ab", ("ab", "a\udfff")])


@every_kind
def test_decoding_drops_special_tokens(maker: Maker, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    assert tokenizer.decode(tokenizer.encode_pair("the iron", "is hot").ids).split() in (
        ["the", "iron", "is", "hot"],
        ["the", "ironis", "hot"],  # byte-level: the second text began without a space
    )


def test_an_id_outside_the_vocabulary_is_rejected(bert: Tokenizer) -> None:
    assert bert.token(bert.vocabulary_size - 1)
    for number in (-1, bert.vocabulary_size):
        with pytest.raises(UserError, match=f"no token has id {number}"):
            bert.token(number)
        with pytest.raises(UserError, match=f"no token has id {number}"):
            bert.decode([number])


def test_a_token_outside_the_vocabulary_is_rejected(bert: Tokenizer) -> None:
    assert bert.id("iron") == bert.encode("iron").ids[1]
    with pytest.raises(UserError, match="'anvil' is not in the vocabulary"):
        bert.id("anvil")


def test_each_family_has_its_names_for_the_roles(bert: Tokenizer, modern: Tokenizer, tmp_path: Path) -> None:
    roberta, albert = (
        Tokenizer.load(makers.byte_bpe(tmp_path / "a")),
        Tokenizer.load(makers.albert_unigram(tmp_path / "b")),
    )
    assert [it.mask_token for it in (bert, modern, roberta, albert)] == [
        "[MASK]",
        "[MASK]",
        "<mask>",
        "[MASK]",
    ]
    assert [bert.pad_id, bert.unknown_id, bert.cls_id, bert.sep_id, bert.mask_id] == [0, 1, 2, 3, 4]
    assert [roberta.cls_id, roberta.pad_id, roberta.sep_id, roberta.unknown_id] == [0, 1, 2, 3]
    assert albert.pad_id == 0
    assert modern.vocabulary_size == modern.id("[unused1]") + 1


def test_a_tokenizer_without_a_mask_says_so() -> None:
    library = Library(models.WordLevel({"[UNK]": 0, "iron": 1}, unk_token="[UNK]"))
    with pytest.raises(UserError, match="lacks a mask_token; name its mask_token in tokenizer_config.json"):
        _ = Tokenizer.from_library(library).mask_id


@every_kind
def test_a_pickled_tokenizer_is_the_same_and_still_closed(maker: Maker, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path))
    again = pickle.loads(pickle.dumps(tokenizer))
    text = makers.PARAGRAPH + tokenizer.mask_token
    assert again.encode(text) == tokenizer.encode(text)
    assert again.mask_id not in again.encode(text).ids


def test_threads_share_a_tokenizer(bert: Tokenizer) -> None:
    doors = [(), ("[MASK]",), ("[MASK]", "[SEP]"), ("[SEP]",)] * 8
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda door: bert.encode("iron [MASK] [SEP]", allow_special=door), doors))
    assert results == [bert.encode("iron [MASK] [SEP]", allow_special=door) for door in doors]


def made_up(first: int, second: int) -> Encoded:
    """A pair in BERT's template whose ids tell the tokens apart."""
    sequence = [-1, *[0] * first, -1, *[1] * second, -1]
    ids = list(range(len(sequence)))
    segments, offsets = [max(number, 0) for number in sequence], [(row, row + 1) for row in ids]
    return Encoded(ids, segments, offsets, sequence, [None] * len(ids))


def truncated_one_by_one(encoded: Encoded, limit: int) -> list[int]:
    """Google's loop: the longer text loses its last token, the second one on a tie."""
    texts = [[row for row, number in enumerate(encoded.sequence) if number == text] for text in (0, 1)]
    template = encoded.sequence.count(-1)
    while len(texts[0]) + len(texts[1]) + template > limit:
        texts[0 if len(texts[0]) > len(texts[1]) else 1].pop()
    kept = {*texts[0], *texts[1]}
    return [row for row, number in enumerate(encoded.sequence) if number < 0 or row in kept]


def test_truncation_of_the_longer_text_agrees_with_googles_loop() -> None:
    for first, second, limit in product(range(8), range(8), range(3, 20)):
        encoded = made_up(first, second)
        shorter = truncate_longest_first(encoded, limit)
        assert shorter.ids == truncated_one_by_one(encoded, limit), (first, second, limit)
        assert shorter.sequence == [encoded.sequence[row] for row in shorter.ids]
        assert shorter.segments == [encoded.segments[row] for row in shorter.ids]
        assert shorter.offsets == [encoded.offsets[row] for row in shorter.ids]


def test_truncation_of_a_single_text_keeps_its_start_and_its_template(bert: Tokenizer) -> None:
    shorter = truncate_longest_first(bert.encode("the iron is hot"), 4)
    assert tokens(bert, shorter) == ["[CLS]", "the", "iron", "[SEP]"]


def test_a_limit_that_cannot_be_kept_is_rejected() -> None:
    with pytest.raises(UserError, match="2 tokens cannot hold the special tokens"):
        truncate_longest_first(made_up(1, 1), 2)


def test_a_typed_unknown_token_of_a_unigram_is_ordinary_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(makers.albert_unigram(tmp_path))
    text = "iron<unk>iron"
    encoded = tokenizer.encode(text)
    whole = [text[start:end] for start, end in encoded.offsets]
    assert "<unk>" not in whole and "".join(piece for piece in whole if piece) == text
