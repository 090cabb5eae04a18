"""Files of a tokenizer that are refused, each in one line that names the file and the fault."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from bertsmith.core.errors import UserError
from bertsmith.text.tokenizer import Tokenizer
from tests import tokenizer_makers as makers
from tests.tokenizer_folders import add_tokens_in_a_file, edit_json, write_settings, write_vocab

Spoil = Callable[[Path], object]


def with_file(name: str, content: str | bytes, maker: Callable[[Path], Path] | None = None) -> Spoil:
    """A folder, of a whole tokenizer where it has a maker, in which one file has this content."""

    def spoil(folder: Path) -> None:
        if maker:
            maker(folder)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return spoil


def with_settings(**settings: object) -> Spoil:
    return lambda folder: write_settings(makers.uncased_wordpiece(folder), **settings)


def with_added(name: str, number: int) -> Spoil:
    def spoil(folder: Path) -> None:
        add_tokens_in_a_file(write_vocab(folder, [*makers.BERT_SPECIAL, "iron"]), name, first=number)

    return spoil


def cut_off(size: int) -> Spoil:
    def spoil(folder: Path) -> None:
        file = makers.modern_bpe(folder) / "tokenizer.json"
        file.write_bytes(file.read_bytes()[:size])

    return spoil


def with_merge(line: str) -> Spoil:
    def spoil(folder: Path) -> None:
        file = makers.byte_bpe(folder) / "merges.txt"
        lines = file.read_text(encoding="utf-8").split("\n")
        file.write_text("\n".join([*lines[:3], line, *lines[4:]]), encoding="utf-8")

    return spoil


def edited(maker: Callable[[Path], Path], change: Callable[[dict], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        Tokenizer.load(maker(folder)).save(folder)
        edit_json(folder / "tokenizer.json", change)

    return spoil


def without_its_unknown_piece(folder: Path) -> None:
    library = Library(models.WordPiece({"iron": 0}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(folder / "tokenizer.json"))


def specials(parts: dict) -> dict:
    return parts["post_processor"]["special_tokens"]


UNUSABLE = "tokenizer.json: is not a usable tokenizer"
FAULTS: list[tuple[Spoil, str]] = [
    (
        lambda folder: None,
        r": does not contain a tokenizer.*tokenizer\.json.*vocab\.txt.*vocab\.json with merges\.txt",
    ),
    (with_added("covid19", 9), "the added token 'covid19' would get id 6, not 9"),
    (
        with_file("added_tokens.json", '{"covid19": "6"}', with_added("covid19", 6)),
        "added_tokens.json: the id of 'covid19' is '6'",
    ),
    *(
        (with_file("vocab.txt", content), f"vocab.txt: {message}")
        for content, message in [
            (b"", r"lacks the piece '\[UNK\]'"),
            (b"[CLS]\n[SEP]\n[PAD]\n[MASK]\n", r"lacks the piece '\[UNK\]'.*unk_token"),
            (b"[UNK]\n[CLS]\n[PAD]\n[MASK]\n", r"lacks the piece '\[SEP\]'.*sep_token"),
            (b"[UNK]\n\xff\n", "is not UTF-8 text .*position 6"),
        ]
    ),
    *(
        (with_file("vocab.json", content, makers.byte_bpe), f"vocab.json: {message}")
        for content, message in [
            ("", "is not valid JSON"),
            ("[1]", "is not a JSON object"),
            ("{}", "no piece has id 0"),
            ('{"a": "0"}', "the id of 'a' is '0'"),
            ('{"a": true}', "the id of 'a' is True"),
            ('{"a": 0, "b": 2}', "no piece has id 1, though there are 2 pieces"),
            ('{"a": 0, "b": 0}', "no piece has id 1"),
            ('{"a": 0, "b": -1}', "no piece has id 1"),
            ('{"a": 0}', "lacks the piece '<unk>'"),
        ]
    ),
    *(
        (with_merge(line), r"merges.txt:4: .* does not join two pieces")
        for line in ("h", "h e l", "h  e", "", " ", "h zzz", "zzz h")
    ),
    *((cut_off(size), UNUSABLE) for size in (0, 1, 100, 1000)),
    *(
        (with_file("tokenizer.json", content), UNUSABLE)
        for content in ("[]", "1", "null", '"a"', "{}", '{"model": {}}', "[" * 100_000)
    ),
    (without_its_unknown_piece, rf"{UNUSABLE} .*Missing \[UNK\]"),
    (
        edited(makers.albert_unigram, lambda parts: specials(parts)["[SEP]"].update(ids=[99_999])),
        "the template adds an id that no piece has",
    ),
    (
        edited(makers.albert_unigram, lambda parts: specials(parts).pop("[SEP]")),
        "tokenizer.json: its template names .*, not one of its special_tokens",
    ),
    (
        edited(makers.uncased_wordpiece, lambda parts: parts["model"]["vocab"].update(iron=9)),
        "two pieces share an id",
    ),
    (
        edited(makers.modern_bpe, lambda parts: parts["added_tokens"][-1].update(id=9_000)),
        "an added token cannot have the id it states",
    ),
    (with_settings(do_lower_case="yes"), "do_lower_case is 'yes'; write true or false"),
    (with_settings(mask_token=4), "mask_token is 4; write the token as a string"),
    (with_settings(mask_token={"content": 4}), "mask_token is 4"),
    (with_settings(mask_token="<mask>"), "lacks the piece '<mask>'"),
    (with_settings(additional_special_tokens=7), "additional_special_tokens is 7; write a list"),
    (with_settings(extra_special_tokens=[7]), "extra_special_tokens is 7; write the token as a string"),
    (with_settings(added_tokens_decoder={"x": {}}), "added_tokens_decoder is malformed"),
    (with_settings(added_tokens_decoder={"7": "x"}), "added_tokens_decoder is malformed"),
    (
        with_file("tokenizer_config.json", "{", makers.uncased_wordpiece),
        "tokenizer_config.json: is not valid JSON",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), FAULTS)
def test_faulty_files_are_rejected_in_one_line(spoil: Spoil, message: str, tmp_path: Path) -> None:
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)
