"""The file formats: what is read from them, and what others read from ours."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Library
from tokenizers import models

from bertsmith.core.errors import UserError
from bertsmith.text.tokenizer import Tokenizer
from tests import tokenizer_makers as makers
from tests.tokenizer_folders import add_tokens_in_a_file, opened, write_settings, write_vocab

Maker = Callable[[Path], Path]
every_kind = pytest.mark.parametrize("maker", makers.MAKERS, ids=lambda maker: maker.__name__)
LITERALS = "iron [MASK] is <mask>hot [CLS]<pad> </s>   [unused0]"
TEXT = makers.PARAGRAPH + LITERALS


# --- reading ---


def test_vocab_txt_gives_what_transformers_makes_of_it(tmp_path: Path) -> None:
    theirs = transformers.BertTokenizer.from_pretrained(makers.uncased_wordpiece(tmp_path))
    assert opened(Tokenizer.load(tmp_path), TEXT) == theirs(TEXT)["input_ids"]


def test_a_cased_vocabulary_without_settings_keeps_case(tmp_path: Path) -> None:
    theirs = transformers.BertTokenizer.from_pretrained(makers.cased_wordpiece(tmp_path), do_lower_case=False)
    assert opened(Tokenizer.load(tmp_path), TEXT) == theirs(TEXT)["input_ids"]


def test_a_letter_without_lower_case_does_not_make_a_vocabulary_cased(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(
        write_vocab(tmp_path, [*makers.BERT_SPECIAL, "[unused1]", "[BOS]", "ℝ", "iron"])
    )
    assert tokenizer.encode("IRON ℝ").ids[1:-1] == [8, 7]


@pytest.mark.parametrize(
    "settings",
    [
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": True, "tokenize_chinese_chars": False},
        {"do_lower_case": True, "mask_token": "[CLS]", "cls_token": "[MASK]"},
    ],
    ids=str,
)
def test_tokenizer_config_decides_for_vocab_txt(settings: dict[str, Any], tmp_path: Path) -> None:
    write_settings(makers.uncased_wordpiece(tmp_path), **settings)
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    assert opened(Tokenizer.load(tmp_path), TEXT) == theirs(TEXT)["input_ids"]


def test_tokens_added_in_tokenizer_config_are_read(tmp_path: Path) -> None:
    folder = makers.uncased_wordpiece(tmp_path)
    size = Tokenizer.load(folder).vocabulary_size
    entry = {
        "content": "[unused0]",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    }
    write_settings(folder, added_tokens_decoder={str(size): {**entry, "special": True}})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.id("[unused0]") == size
    assert size not in tokenizer.encode(TEXT).ids
    assert opened(tokenizer, TEXT) == transformers.BertTokenizer.from_pretrained(folder)(TEXT)["input_ids"]


@pytest.mark.parametrize("settings", [{}, {"add_prefix_space": True}, {"trim_offsets": False}], ids=str)
def test_vocab_json_with_merges_gives_what_transformers_makes_of_it(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    write_settings(makers.byte_bpe(tmp_path), **settings)
    theirs = transformers.RobertaTokenizer.from_pretrained(tmp_path)(TEXT, return_offsets_mapping=True)
    tokenizer = Tokenizer.load(tmp_path)
    special = tuple(tokenizer.token(number) for number in tokenizer.special_ids)
    ours = tokenizer.encode(TEXT, allow_special=special)
    assert (ours.ids, ours.offsets) == (theirs["input_ids"], theirs["offset_mapping"])


def test_the_mask_of_roberta_takes_the_space_before_it_along(tmp_path: Path) -> None:
    (makers.byte_bpe(tmp_path) / "special_tokens_map.json").unlink()
    roberta = Tokenizer.load(tmp_path)
    encoded = roberta.encode("iron <mask>", allow_special=("<mask>",))
    assert [roberta.token(number) for number in encoded.ids][-2:] == ["<mask>", "</s>"]
    assert "Ġ" not in [roberta.token(number) for number in encoded.ids]


def test_pieces_may_hold_any_separator_but_a_line_feed(tmp_path: Path) -> None:
    odd = ["\u2028", "\u00a0", "\x85", "a\rb", "#", "##", "\u2029"]
    tokenizer = Tokenizer.load(write_vocab(tmp_path, [*makers.BERT_SPECIAL, *odd, "iron"]))
    assert tokenizer.id("iron") == tokenizer.vocabulary_size - 1 == len(makers.BERT_SPECIAL) + len(odd)
    assert tokenizer.encode("# iron").ids[1:-1] == [tokenizer.id("#"), tokenizer.id("iron")]


def test_vocab_txt_may_have_windows_line_ends_and_no_last_one(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes("\r\n".join([*makers.BERT_SPECIAL, "iron"]).encode())
    assert Tokenizer.load(tmp_path).id("iron") == 5


@pytest.mark.parametrize(
    ("pieces", "warning"),
    [
        ([*makers.BERT_SPECIAL, "", "iron", "hot"], "vocab.txt: line 6 is empty: read anyway"),
        ([*makers.BERT_SPECIAL, "", "iron", "", "hot"], "vocab.txt: line 6 is empty; line 8 is empty: read"),
        ([*makers.BERT_SPECIAL, "iron", "is", "iron", "hot"], "vocab.txt: line 8 repeats line 6: read"),
        (
            [*makers.BERT_SPECIAL, "iron", "iron", "iron", "hot"],
            "line 7 repeats line 6; line 8 repeats line 7",
        ),
        (["[PAD]", *makers.BERT_SPECIAL, "iron", "hot"], "line 2 repeats line 1: read"),
    ],
    ids=["empty", "twice-empty", "repeated", "thrice", "special"],
)
def test_empty_and_repeated_lines_of_vocab_txt_keep_the_ids_that_transformers_gives(
    pieces: list[str], warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_vocab(tmp_path / "source", pieces)
    theirs = transformers.BertTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    assert len(caplog.messages) == 1 and warning in caplog.messages[0]
    assert tokenizer.encode("hot iron, is").ids == theirs("hot iron, is")["input_ids"]
    assert (tokenizer.vocabulary_size, tokenizer.gaps) == (len(pieces), ())
    tokenizer.save(tmp_path / "copy")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert saved("hot iron, is")["input_ids"] == theirs("hot iron, is")["input_ids"]
    assert Tokenizer.load(tmp_path / "copy").encode("hot iron, is") == tokenizer.encode("hot iron, is")


def test_a_byte_order_mark_is_no_part_of_the_first_piece(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_vocab(tmp_path, ["\ufeff[PAD]", *makers.BERT_SPECIAL[1:], "iron"])
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.pad_id, tokenizer.encode("iron").ids) == (0, [2, 5, 3])
    assert len(caplog.messages) == 1 and "vocab.txt: begins with a byte order mark" in caplog.messages[0]


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_a_vocabulary_without_padding_and_mask_serves_whoever_needs_neither(
    named: bool, tmp_path: Path
) -> None:
    folder = write_vocab(tmp_path / "source", ["[UNK]", "[CLS]", "[SEP]", "iron"])
    if named:  # transformers writes the usual names down whatever the vocabulary has
        write_settings(folder, pad_token="[PAD]", mask_token="[MASK]", tokenizer_class="BertTokenizer")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("iron").ids == [1, 3, 2]
    for ask in (lambda: tokenizer.mask_id, lambda: tokenizer.pad_id):
        with pytest.raises(UserError, match="this tokenizer lacks a (mask|pad)_token"):
            ask()
    tokenizer.save(tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").encode("iron").ids == [1, 3, 2]
    assert Tokenizer.load(tmp_path / "copy").vocabulary_size == 4
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")("iron")["input_ids"] == [1, 3, 2]


def test_white_space_after_a_piece_is_dropped_as_transformers_does(tmp_path: Path) -> None:
    write_vocab(tmp_path, [*makers.BERT_SPECIAL, "iron\u00a0", "hot\t"])
    assert Tokenizer.load(tmp_path).encode("iron hot").ids == [2, 5, 6, 3]
    assert transformers.BertTokenizer.from_pretrained(tmp_path)("iron hot")["input_ids"] == [2, 5, 6, 3]


def test_a_word_longer_than_the_limit_is_unknown(tmp_path: Path) -> None:
    folder = write_vocab(tmp_path, [*makers.BERT_SPECIAL, "a", "##a"])
    assert Tokenizer.load(folder).encode("a" * 101).ids == [2, 1, 3]
    assert len(Tokenizer.load(folder, max_word_characters=200).encode("a" * 101)) == 103


def test_truncation_and_padding_in_tokenizer_json_are_switched_off(tmp_path: Path) -> None:
    library = Library.from_file(str(makers.albert_unigram(tmp_path) / "tokenizer.json"))
    library.enable_truncation(8)
    library.enable_padding(length=128)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("iron")) < 128
    assert len(tokenizer.encode(TEXT)) > 128


@pytest.mark.parametrize("entry", ["<pad>", {"content": "<pad>", "lstrip": False}], ids=str)
def test_special_tokens_map_names_the_roles(entry: object, tmp_path: Path) -> None:
    (makers.albert_unigram(tmp_path) / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"mask_token": entry}), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.mask_token == "<pad>"
    assert tokenizer.sep_id == tokenizer.id("[SEP]")


def test_additional_special_tokens_of_the_settings_are_special(tmp_path: Path) -> None:
    write_settings(makers.uncased_wordpiece(tmp_path), additional_special_tokens=["iron", {"content": "hot"}])
    tokenizer = Tokenizer.load(tmp_path)
    assert not {tokenizer.id("iron"), tokenizer.id("hot")} & set(tokenizer.encode("iron hot").ids)
    assert tokenizer.encode("iron", allow_special=("iron",)).ids[1:-1] == [tokenizer.id("iron")]


WITH_ADDED = "the [E1] iron [/E1] is covid19 Covid19 hot <mask>"


@pytest.mark.parametrize(
    ("maker", "model_type"),
    [(makers.uncased_wordpiece, "bert"), (makers.byte_bpe, "roberta"), (makers.albert_unigram, "albert")],
    ids=["vocab.txt", "vocab.json", "tokenizer.json"],
)
def test_added_tokens_json_is_read_and_kept_as_in_transformers(
    maker: Maker, model_type: str, tmp_path: Path
) -> None:
    folder = maker(tmp_path / "source")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    size = Tokenizer.load(folder).vocabulary_size
    pair = ["[E1]", "[/E1]"]
    add_tokens_in_a_file(folder, *pair, "covid19", first=size, additional_special_tokens=pair)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs(WITH_ADDED)["input_ids"]
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.id("[E1]"), tokenizer.id("covid19"), tokenizer.vocabulary_size) == (
        size,
        size + 2,
        size + 3,
    )
    assert opened(tokenizer, WITH_ADDED) == expected
    assert size not in tokenizer.encode(WITH_ADDED).ids  # special: ordinary text never yields it
    before = {file.name for file in folder.iterdir()}
    tokenizer.save(folder)
    assert before <= {file.name for file in folder.iterdir()}
    assert opened(Tokenizer.load(folder), WITH_ADDED) == expected
    assert transformers.AutoTokenizer.from_pretrained(folder)(WITH_ADDED)["input_ids"] == expected
    tokenizer.save(tmp_path / "copy")
    assert opened(Tokenizer.load(tmp_path / "copy"), WITH_ADDED) == expected
    (tmp_path / "copy" / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")(WITH_ADDED)["input_ids"] == expected


def test_vocab_txt_is_saved_with_the_tokens_that_it_cannot_hold(tmp_path: Path) -> None:
    folder = write_vocab(tmp_path, [*makers.BERT_SPECIAL, "iron"])
    add_tokens_in_a_file(folder, "covid19", first=6)
    Tokenizer.load(folder).save(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "added_tokens.json").read_text()) == {"covid19": 6}


def test_a_role_may_be_played_by_an_added_token(tmp_path: Path) -> None:
    folder = write_vocab(tmp_path, [*makers.BERT_SPECIAL[:4], "iron"])
    add_tokens_in_a_file(folder, "covid19", "<hole>", first=5, mask_token="<hole>")
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.id("covid19"), tokenizer.mask_id) == (5, 6)
    assert tokenizer.encode("<hole>", allow_special=("<hole>",)).ids == [2, 6, 3]


def test_nothing_that_others_wrote_into_a_folder_is_removed_by_a_save(tmp_path: Path) -> None:
    names = ["vocab.json", "merges.txt", "spiece.model", "special_tokens_map.json", "added_tokens.json"]
    for name in [*names, "README.md"]:
        (tmp_path / name).write_text("{}", encoding="utf-8")
    Tokenizer.load(makers.uncased_wordpiece(tmp_path / "source")).save(tmp_path)
    assert {*names, "README.md"} <= {file.name for file in tmp_path.iterdir()}
    assert all((tmp_path / name).read_text() == "{}" for name in names)
    assert Tokenizer.load(tmp_path).mask_token == "[MASK]"


# --- tokenizer_config.json against tokenizer.json ---

SWITCHES = [
    ({"do_lower_case": True, "strip_accents": True}, 0),
    ({"do_lower_case": False}, 1),
    ({"do_lower_case": False, "strip_accents": True}, 2),
    ({"do_lower_case": True, "strip_accents": False}, 1),
    ({"do_lower_case": True, "tokenize_chinese_chars": False}, 1),
]


@pytest.mark.parametrize(("settings", "warnings"), SWITCHES, ids=str)
@pytest.mark.parametrize("name", ["BertTokenizer", "BertTokenizerFast", "DistilBertTokenizer", None])
def test_tokenizer_config_is_followed_against_tokenizer_json_as_transformers_does(
    settings: dict[str, Any],
    warnings: int,
    name: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Tokenizer.load(makers.uncased_wordpiece(tmp_path / "source")).save(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    write_settings(tmp_path, **settings, **({"tokenizer_class": name} if name else {}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert opened(Tokenizer.load(tmp_path), TEXT) == theirs(TEXT)["input_ids"]
    told = [line for line in caplog.messages if "the former is used, as in transformers 5" in line]
    assert len(told) == len(caplog.messages) == warnings


def test_a_class_that_takes_tokenizer_json_as_it_is_keeps_its_normaliser(tmp_path: Path) -> None:
    Tokenizer.load(makers.uncased_wordpiece(tmp_path / "source")).save(tmp_path)
    write_settings(tmp_path, do_lower_case=False, tokenizer_class="PreTrainedTokenizerFast")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert opened(Tokenizer.load(tmp_path), "IRON") == theirs("IRON")["input_ids"]
    assert Tokenizer.load(tmp_path).encode("IRON") == Tokenizer.load(tmp_path).encode("iron")


def test_the_longest_text_is_the_one_of_tokenizer_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = Library.from_file(str(makers.modern_bpe(tmp_path) / "tokenizer.json"))
    library.enable_truncation(128)
    library.save(str(tmp_path / "tokenizer.json"))
    write_settings(tmp_path, model_max_length=256, tokenizer_class="PreTrainedTokenizerFast")
    assert Tokenizer.load(tmp_path).max_length == 256
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).model_max_length == 256
    (told,) = caplog.messages
    assert "takes texts of 256 tokens and tokenizer.json cuts them at 128: the former is used" in told
    write_settings(tmp_path, model_max_length=int(1e30), tokenizer_class="PreTrainedTokenizerFast")
    assert Tokenizer.load(tmp_path).max_length is None


def test_an_unknown_class_of_tokenizer_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_settings(makers.uncased_wordpiece(tmp_path), tokenizer_class="BertJapaneseTokenizer")
    Tokenizer.load(tmp_path)
    (told,) = caplog.messages
    assert "does not support the tokenizer_class BertJapaneseTokenizer" in told


# --- writing ---


@every_kind
def test_a_saved_tokenizer_loads_as_the_same(maker: Maker, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path / "source"))
    tokenizer.save(tmp_path / "copy")
    again = Tokenizer.load(tmp_path / "copy")
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert opened(again, TEXT) == opened(tokenizer, TEXT)
    assert (again.special_ids, again.vocabulary_size) == (tokenizer.special_ids, tokenizer.vocabulary_size)


@every_kind
def test_transformers_opens_what_we_save(maker: Maker, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path / "source"))
    tokenizer.save(tmp_path / "copy")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert opened(tokenizer, TEXT) == theirs(TEXT)["input_ids"]
    assert (theirs.mask_token_id, theirs.pad_token_id) == (tokenizer.mask_id, tokenizer.pad_id)
    assert len(theirs) == tokenizer.vocabulary_size


@pytest.mark.parametrize("maker", [makers.uncased_wordpiece, makers.cased_wordpiece])
def test_the_saved_vocab_txt_is_the_one_loaded(maker: Maker, tmp_path: Path) -> None:
    source = maker(tmp_path / "source")
    Tokenizer.load(source).save(tmp_path / "copy")
    assert (tmp_path / "copy" / "vocab.txt").read_bytes() == (source / "vocab.txt").read_bytes()


def test_only_wordpiece_is_saved_with_a_vocab_txt(tmp_path: Path) -> None:
    Tokenizer.load(makers.byte_bpe(tmp_path / "source")).save(tmp_path / "copy")
    saved = {file.name for file in (tmp_path / "copy").iterdir()}
    assert saved == {"tokenizer.json", "tokenizer_config.json"}


def test_a_vocabulary_that_lines_cannot_hold_is_saved_without_vocab_txt(tmp_path: Path) -> None:
    library = Library(models.WordPiece({"[UNK]": 0, "a\nb": 1}, unk_token="[UNK]"))
    Tokenizer.from_library(library).save(tmp_path)
    assert not (tmp_path / "vocab.txt").exists()
    assert Tokenizer.load(tmp_path).token(1) == "a\nb"


@pytest.mark.parametrize(
    ("maker", "name"),
    [
        (makers.uncased_wordpiece, "BertTokenizer"),
        (makers.byte_bpe, "RobertaTokenizer"),
        (makers.modern_bpe, "PreTrainedTokenizerFast"),
    ],
)
def test_the_saved_class_is_one_that_rebuilds_the_tokenizer(maker: Maker, name: str, tmp_path: Path) -> None:
    Tokenizer.load(maker(tmp_path / "source")).save(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())["tokenizer_class"] == name


def test_settings_that_came_with_a_tokenizer_are_saved_with_it(tmp_path: Path) -> None:
    source = makers.albert_unigram(tmp_path / "source")
    Tokenizer.load(source).save(tmp_path / "copy")
    before = json.loads((source / "tokenizer_config.json").read_text())
    after = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())
    assert before.items() <= after.items()


def test_a_longer_limit_for_words_survives_saving_for_transformers_too(tmp_path: Path) -> None:
    folder = write_vocab(tmp_path, [*makers.BERT_SPECIAL, "a", "##a"])
    Tokenizer.load(folder, max_word_characters=200).save(tmp_path / "copy")
    expected = [2, 5, *[6] * 149, 3]
    assert Tokenizer.load(tmp_path / "copy").encode("a" * 150).ids == expected
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert theirs("a" * 150)["input_ids"] == expected


def test_a_tokenizer_made_with_the_library_is_saved_with_its_settings(tmp_path: Path) -> None:
    library = Library.from_file(str(makers.modern_bpe(tmp_path / "source") / "tokenizer.json"))
    Tokenizer.from_library(library, settings={"model_max_length": 512}).save(tmp_path / "copy")
    saved = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())
    assert (saved["model_max_length"], saved["mask_token"]) == (512, "[MASK]")
