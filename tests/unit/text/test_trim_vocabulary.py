"""A trimmed tokenizer splits the texts that it was trimmed to as before, of every kind."""

import pytest

from bertsmith.core.errors import UserError
from bertsmith.text import trim_vocabulary
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.trim_vocabulary import seen_ids, trimmed_vocabulary
from tests.tokenizer_folders import edit_json
from tests.tokenizer_makers import MAKERS, byte_bpe, cased_unigram, uncased_wordpiece

TEXTS = ["The smith heats the iron.", "Москва, and the iron is hot!", "it is a horseshoe  again"]


def trimmed(tokenizer, texts=TEXTS):
    return trimmed_vocabulary(tokenizer, set().union(*seen_ids(tokenizer, texts)))


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_the_texts_are_split_into_the_same_pieces(make, tmp_path):
    before = Tokenizer.load(make(tmp_path / "before"))
    found = trimmed(before)
    after = found.tokenizer
    assert after.vocabulary_size == len(found.kept) < before.vocabulary_size
    after.save(tmp_path / "after")
    for tokenizer in (after, Tokenizer.load(tmp_path / "after")):
        for text in TEXTS:
            assert [found.kept[number] for number in tokenizer.encode(text).ids] == before.encode(text).ids
        pair = tokenizer.encode_pair(*TEXTS[:2])
        assert [found.kept[number] for number in pair.ids] == before.encode_pair(*TEXTS[:2]).ids
        assert pair.segments == before.encode_pair(*TEXTS[:2]).segments
        assert [found.kept[number] for number in (tokenizer.mask_id, tokenizer.pad_id)] == [
            before.mask_id,
            before.pad_id,
        ]
        assert len(tokenizer.special_ids) == len(before.special_ids)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_new_words_of_known_characters_are_spelled(make, tmp_path):
    before = Tokenizer.load(make(tmp_path))
    after = trimmed(before).tokenizer
    new = "hammers shines stem"
    assert before.unknown_id not in before.encode(new).ids
    assert after.unknown_id not in after.encode(new).ids


def test_characters_of_other_scripts_go(tmp_path):
    before = Tokenizer.load(uncased_wordpiece(tmp_path))
    after = trimmed(before).tokenizer
    assert before.unknown_id not in before.encode("火花").ids
    assert after.unknown_id in after.encode("火花").ids


def add_byte_pieces(pipeline):
    model, added = pipeline["model"], pipeline["added_tokens"]
    for token in added:
        if token["id"] >= len(model["vocab"]):
            token["id"] += 256
    model["vocab"] += [[f"<0x{byte:02X}>", 0.0] for byte in range(256)]
    model["byte_fallback"] = True


def test_a_model_that_falls_back_on_bytes_keeps_them_all(tmp_path):
    edit_json(cased_unigram(tmp_path) / "tokenizer.json", add_byte_pieces)
    before = Tokenizer.load(tmp_path)
    found = trimmed(before)
    new = before.encode("iron \N{ANCHOR}").ids
    assert [before.token(number) for number in new][-4:-1] == ["<0xE2>", "<0x9A>", "<0x93>"]
    after = found.tokenizer.encode("iron \N{ANCHOR}").ids
    assert [found.kept[number] for number in after] == new
    assert len(found.kept) < before.vocabulary_size


def test_sets_are_not_made_anew_for_every_merge(tmp_path, monkeypatch):
    tokenizer = Tokenizer.load(byte_bpe(tmp_path))
    seen, made = set().union(*seen_ids(tokenizer, TEXTS)), []

    def noted(values=()):
        made.append(values)
        return set(values)

    monkeypatch.setattr(trim_vocabulary, "set", noted, raising=False)
    trimmed_vocabulary(tokenizer, seen)
    assert 0 < len(made) < 10


def test_a_vocabulary_of_words_is_refused(tmp_path):
    tokenizer = Tokenizer.load(uncased_wordpiece(tmp_path))
    tokenizer.save(tmp_path)
    edit_json(
        tmp_path / "tokenizer.json",
        lambda pipeline: pipeline.update(
            model={"type": "WordLevel", "vocab": pipeline["model"]["vocab"], "unk_token": "[UNK]"}
        ),
    )
    with pytest.raises(UserError, match="WordLevel"):
        trimmed(Tokenizer.load(tmp_path))
