"""Files of a tokenizer that are refused, each in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from bertsmith.core.errors import UserError
from bertsmith.text.tokenizer import Tokenizer
from tests import tokenizer_makers as makers
from tests.tokenizer_folders import add_tokens_in_a_file, edit_json, write_settings, write_vocab

Maker = Callable[[Path], Path]
every_kind = pytest.mark.parametrize("maker", makers.MAKERS, ids=lambda maker: maker.__name__)
LITERALS = "iron [MASK] is <mask>hot [CLS]<pad> </s>   [unused0]"
TEXT = makers.PARAGRAPH + LITERALS


def test_an_added_token_that_cannot_have_its_id_is_rejected(tmp_path: Path) -> None:
    add_tokens_in_a_file(write_vocab(tmp_path, [*makers.BERT_SPECIAL, "iron"]), "covid19", first=9)
    assert_refused(tmp_path, "the added token 'covid19' would get id 6, not 9")


def test_a_faulty_added_tokens_json_is_rejected(tmp_path: Path) -> None:
    add_tokens_in_a_file(write_vocab(tmp_path, [*makers.BERT_SPECIAL, "iron"]), "covid19", first=6)
    (tmp_path / "added_tokens.json").write_text('{"covid19": "6"}', encoding="utf-8")
    assert_refused(tmp_path, "added_tokens.json: the id of 'covid19' is '6'")


def test_a_folder_without_a_tokenizer_names_the_three_formats(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Tokenizer.load(tmp_path)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path}: does not contain a tokenizer")
    assert all(name in line for name in ("tokenizer.json", "vocab.txt", "vocab.json with merges.txt"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"vocab.txt: lacks the piece '\[UNK\]'"),
        (b"[CLS]\n[SEP]\n[PAD]\n[MASK]\n", r"vocab.txt: lacks the piece '\[UNK\]'.*unk_token"),
        (b"[UNK]\n[CLS]\n[PAD]\n[MASK]\n", r"vocab.txt: lacks the piece '\[SEP\]'.*sep_token"),
        (b"[UNK]\n\xff\n", r"vocab.txt: is not UTF-8 text .*position 6"),
    ],
)
def test_a_faulty_vocab_txt_is_rejected(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "vocab.json: is not valid JSON"),
        ("[1]", "vocab.json: is not a JSON object"),
        ("{}", "vocab.json: no piece has id 0"),
        ('{"a": "0"}', "vocab.json: the id of 'a' is '0'"),
        ('{"a": true}', "vocab.json: the id of 'a' is True"),
        ('{"a": 0, "b": 2}', "vocab.json: no piece has id 1, though there are 2 pieces"),
        ('{"a": 0, "b": 0}', "vocab.json: no piece has id 1"),
        ('{"a": 0, "b": -1}', "vocab.json: no piece has id 1"),
        ('{"a": 0}', "vocab.json: lacks the piece '<unk>'"),
    ],
)
def test_a_faulty_vocab_json_is_rejected(content: str, message: str, tmp_path: Path) -> None:
    (makers.byte_bpe(tmp_path) / "vocab.json").write_text(content, encoding="utf-8")
    assert_refused(tmp_path, message)


@pytest.mark.parametrize("line", ["h", "h e l", "h  e", "", " ", "h zzz", "zzz h"])
def test_a_faulty_line_of_merges_txt_is_rejected(line: str, tmp_path: Path) -> None:
    file = makers.byte_bpe(tmp_path) / "merges.txt"
    lines = file.read_text(encoding="utf-8").split("\n")
    lines[3] = line
    file.write_text("\n".join(lines), encoding="utf-8")
    assert_refused(tmp_path, r"merges.txt:4: .* does not join two pieces")


@pytest.mark.parametrize("size", [0, 1, 100, 1000])
def test_a_cut_off_tokenizer_json_is_rejected(size: int, tmp_path: Path) -> None:
    file = makers.modern_bpe(tmp_path) / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:size])
    assert_refused(tmp_path, "tokenizer.json: is not a usable tokenizer")


@pytest.mark.parametrize("content", ["[]", "1", "null", '"a"', "{}", '{"model": {}}', "[" * 100_000])
def test_a_tokenizer_json_of_another_kind_is_rejected(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    assert_refused(tmp_path, "tokenizer.json: is not a usable tokenizer")


def test_a_template_with_an_id_outside_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    file = makers.albert_unigram(tmp_path) / "tokenizer.json"
    edit_json(file, lambda parts: parts["post_processor"]["special_tokens"]["[SEP]"].update(ids=[99_999]))
    assert_refused(tmp_path, "the template adds an id that no piece has")


def test_a_template_with_an_unknown_token_is_rejected(tmp_path: Path) -> None:
    file = makers.albert_unigram(tmp_path) / "tokenizer.json"
    edit_json(file, lambda parts: parts["post_processor"]["special_tokens"].pop("[SEP]"))
    assert_refused(tmp_path, "tokenizer.json: its template names .*, not one of its special_tokens")


def test_two_pieces_with_one_id_are_rejected(tmp_path: Path) -> None:
    Tokenizer.load(makers.uncased_wordpiece(tmp_path / "source")).save(tmp_path)
    edit_json(tmp_path / "tokenizer.json", lambda parts: parts["model"]["vocab"].update(iron=9))
    assert_refused(tmp_path, "two pieces share an id")


def test_an_added_token_that_would_be_renumbered_is_rejected(tmp_path: Path) -> None:
    file = makers.modern_bpe(tmp_path) / "tokenizer.json"
    edit_json(file, lambda parts: parts["added_tokens"][-1].update(id=9_000))
    assert_refused(tmp_path, "an added token cannot have the id it states")


def test_a_model_without_its_unknown_piece_is_rejected(tmp_path: Path) -> None:
    library = Library(models.WordPiece({"iron": 0}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    assert_refused(tmp_path, r"tokenizer.json: is not a usable tokenizer .*Missing \[UNK\]")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_lower_case": "yes"}, "do_lower_case is 'yes'; write true or false"),
        ({"mask_token": 4}, "mask_token is 4; write the token as a string"),
        ({"mask_token": {"content": 4}}, "mask_token is 4"),
        ({"mask_token": "<mask>"}, "lacks the piece '<mask>'"),
        ({"additional_special_tokens": 7}, "additional_special_tokens is 7; write a list"),
        ({"extra_special_tokens": [7]}, "extra_special_tokens is 7; write the token as a string"),
        ({"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder is malformed"),
        ({"added_tokens_decoder": {"7": "x"}}, "added_tokens_decoder is malformed"),
    ],
    ids=str,
)
def test_faulty_settings_are_rejected(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert_refused(write_settings(makers.uncased_wordpiece(tmp_path), **settings), message)


def test_settings_that_are_no_json_are_rejected(tmp_path: Path) -> None:
    (makers.uncased_wordpiece(tmp_path) / "tokenizer_config.json").write_text("{", encoding="utf-8")
    assert_refused(tmp_path, "tokenizer_config.json: is not valid JSON")


def assert_refused(folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)
