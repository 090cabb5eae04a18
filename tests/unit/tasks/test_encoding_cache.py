"""Encoded splits kept on disk."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.encoding_cache import cached_encoding, encoding_key
from bertsmith.tasks.kinds.classify import CLASSIFY
from bertsmith.tasks.kinds.registry import kind_named
from bertsmith.text.tokenizer import Tokenizer
from tests.unit.tasks.encoding_tools import encode_split, question, sentence, text_example

SPLITS = {
    "classify": ([text_example("the iron", "hot"), text_example("it")], ("hot",)),
    "multilabel": ([text_example("the iron", ("hot",))], ("hot", "cold")),
    "regress": ([text_example(("the", "iron"), 2.5)], ()),
    "tag": ([sentence(["the", "iron"], ["O", "O"])], ("O",)),
    "span": ([question("the iron is hot", [("hot", 12)])], ()),
}
TEXT = TextSection(longest=16)


def made(kind: str, tokenizers) -> EncodedSet:
    examples, labels = SPLITS[kind]
    return encode_split(kind, examples, labels, tokenizers["byte_bpe"], TEXT)


def same(first: object, second: object) -> bool:
    """Whether two sets hold the same arrays of the same types."""
    pairs = [(getattr(first, field.name), getattr(second, field.name)) for field in fields(first)]
    return all(_equal(left, right) for left, right in pairs)


def _equal(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return same(left, right) if is_dataclass(left) else left == right


def never() -> EncodedSet:
    raise AssertionError("it was to be found on disk")


@pytest.mark.parametrize("kind", list(SPLITS))
def test_what_is_kept_comes_back_as_it_was(kind, tokenizers, tmp_path: Path) -> None:
    encoded = made(kind, tokenizers)
    assert cached_encoding(tmp_path, "a", kind_named(kind), lambda: encoded) is encoded
    assert same(encoded, cached_encoding(tmp_path, "a", kind_named(kind), never))


def test_another_key_is_another_set(tokenizers, tmp_path: Path) -> None:
    cached_encoding(tmp_path, "a", kind_named("classify"), lambda: made("classify", tokenizers))
    found = cached_encoding(tmp_path, "b", kind_named("tag"), lambda: made("tag", tokenizers))
    assert found.unit == "word"


@pytest.mark.parametrize("damage", [lambda kept: kept[:-9], lambda kept: b"", lambda kept: b"x" * len(kept)])
def test_a_file_that_cannot_be_read_is_made_anew(damage, tokenizers, tmp_path: Path) -> None:
    check_made_anew(tokenizers, tmp_path, damage)


@pytest.mark.parametrize("place", [-1, -40, 0.5])
def test_a_changed_byte_is_noticed(place, tokenizers, tmp_path: Path) -> None:
    def damage(kept: bytes) -> bytes:
        where = int(place * len(kept)) if isinstance(place, float) else len(kept) + place
        return kept[:where] + bytes([kept[where] ^ 1]) + kept[where + 1 :]

    check_made_anew(tokenizers, tmp_path, damage)


def check_made_anew(tokenizers, folder: Path, damage) -> None:
    encoded = made("span", tokenizers)
    cached_encoding(folder, "a", kind_named("span"), lambda: encoded)
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    calls = []
    again = cached_encoding(folder, "a", kind_named("span"), lambda: calls.append(1) or encoded)
    assert calls and same(again, encoded)
    assert same(cached_encoding(folder, "a", kind_named("span"), never), encoded)


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        cached_encoding(tmp_path, "a", kind_named("span"), never)
    assert not list(tmp_path.iterdir())


def test_the_key_changes_with_all_that_decides_the_tokens(tokenizers) -> None:
    examples, labels = SPLITS["classify"]
    byte_bpe, other = tokenizers["byte_bpe"], tokenizers["modern_bpe"]
    keys = [
        encoding_key(CLASSIFY, examples, labels, byte_bpe, TEXT),
        encoding_key(kind_named("multilabel"), examples, labels, byte_bpe, TEXT),
        encoding_key(CLASSIFY, examples[:1], labels, byte_bpe, TEXT),
        encoding_key(
            kind_named("classify"),
            [replace(examples[0], texts="The iron"), examples[1]],
            labels,
            byte_bpe,
            TEXT,
        ),
        encoding_key(CLASSIFY, [replace(examples[0], label=None), examples[1]], labels, byte_bpe, TEXT),
        encoding_key(CLASSIFY, examples[::-1], labels, byte_bpe, TEXT),
        encoding_key(CLASSIFY, examples, ("hot", "cold"), byte_bpe, TEXT),
        encoding_key(CLASSIFY, examples, labels, other, TEXT),
        encoding_key(CLASSIFY, examples, labels, byte_bpe, TextSection(longest=17)),
    ]
    assert len(set(keys)) == len(keys)


def test_the_key_does_not_change_with_the_place_of_the_files(tokenizers, tmp_path: Path) -> None:
    examples, labels = SPLITS["classify"]
    moved = [replace(example, where="elsewhere:7") for example in examples]
    tokenizers["byte_bpe"].save(tmp_path)
    copied = Tokenizer.load(tmp_path)
    key = encoding_key(CLASSIFY, examples, labels, tokenizers["byte_bpe"], TEXT)
    assert encoding_key(CLASSIFY, moved, labels, tokenizers["byte_bpe"], TEXT) == key
    assert encoding_key(CLASSIFY, moved, labels, copied, TEXT) == key


def test_a_folder_that_cannot_be_written_is_reported_once_and_done_without(
    tokenizers, tmp_path, caplog
) -> None:
    (tmp_path / "file").write_text("in the way")
    encoded = made("classify", tokenizers)
    for key in ("a", "b"):
        assert (
            cached_encoding(tmp_path / "file" / "cache", key, kind_named("classify"), lambda: encoded)
            is encoded
        )
    (told,) = caplog.messages
    assert told.startswith(f"{tmp_path / 'file' / 'cache'}: cannot be written")
