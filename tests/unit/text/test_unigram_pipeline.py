"""SentencePiece models as ALBERT, XLM-RoBERTa, CamemBERT and DeBERTa-v3 use them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from bertsmith.core.errors import UserError
from bertsmith.text.sentencepiece_model import read_sentencepiece_model
from bertsmith.text.tokenizer import Tokenizer
from tests.sentencepiece_writer import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Piece, write_sentencepiece
from tests.tokenizer_makers import PARAGRAPH

TEXTS = [
    "The smith heats the iron, hammers it.",
    "heats  the\tiron\nagain; then, twelve of them!",
    " le forgeron 42 café ",
    "铁匠 🔥 unknown ☃",
]


def single(score: float) -> float:
    """A score as the file holds it, in single precision."""
    return float(struct.unpack("<f", struct.pack("<f", score))[0])


@pytest.fixture(scope="module")
def learned() -> list[tuple[str, float]]:
    """Pieces with scores, without special ones."""
    library = Library(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(PARAGRAPH.lower().splitlines(), trainer)
    vocabulary = json.loads(library.to_str())["model"]["vocab"]
    return [(piece, single(score)) for piece, score in vocabulary if piece != "<unk>"]


def pieces(first: list[tuple[str, int]], learned: list[tuple[str, float]]) -> list[Piece]:
    return [*((text, 0.0, kind) for text, kind in first), *((text, score, NORMAL) for text, score in learned)]


ALBERT_FIRST = [("<pad>", CONTROL), ("<unk>", UNKNOWN), ("[CLS]", CONTROL), ("[SEP]", CONTROL)]
ALBERT_FIRST += [("[MASK]", USER_DEFINED)]
FAIRSEQ_FIRST = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
DEBERTA_FIRST = [("[PAD]", CONTROL), ("[CLS]", CONTROL), ("[SEP]", CONTROL), ("[UNK]", UNKNOWN)]


def assert_equal(tokenizer: Tokenizer, theirs: Any, mask: str) -> None:
    for text in TEXTS:
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"], text
    pair = tokenizer.encode_pair(TEXTS[0], TEXTS[1])
    assert pair.ids == theirs(TEXTS[0], TEXTS[1])["input_ids"]
    assert (tokenizer.mask_token, tokenizer.mask_id) == (mask, theirs.mask_token_id)
    assert (tokenizer.pad_id, tokenizer.cls_id) == (theirs.pad_token_id, theirs.cls_token_id)
    assert len(theirs) == tokenizer.vocabulary_size


def assert_survives_saving(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(folder)
    again, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids


@pytest.mark.parametrize("name", ["spiece.model", "30k-clean.model"])
def test_alberts_model_is_read(learned: list[tuple[str, float]], name: str, tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / name, pieces(ALBERT_FIRST, learned), unknown_id=1)
    vocabulary = [*((text, 0.0) for text, _ in ALBERT_FIRST), *learned]
    tokenizer = Tokenizer.load(tmp_path)
    assert_equal(tokenizer, transformers.AlbertTokenizer(vocab=vocabulary), "[MASK]")
    assert tokenizer.encode_pair("iron", "iron").segments[-1] == 1
    masked = tokenizer.encode("iron [MASK]", allow_special=("[MASK]",))
    assert [tokenizer.token(number) for number in masked.ids][-2:] == ["[MASK]", "[SEP]"]
    assert tokenizer.mask_id not in tokenizer.encode("iron [MASK]").ids
    assert_survives_saving(tokenizer, tmp_path / "copy")


def test_albert_keeps_case_and_accents_where_the_settings_say_so(
    learned: list[tuple[str, float]], tmp_path: Path
) -> None:
    write_sentencepiece(tmp_path / "spiece.model", pieces(ALBERT_FIRST, learned), unknown_id=1)
    settings = {"do_lower_case": False, "keep_accents": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = [*((text, 0.0) for text, _ in ALBERT_FIRST), *learned]
    assert_equal(
        Tokenizer.load(tmp_path), transformers.AlbertTokenizer(vocab=vocabulary, **settings), "[MASK]"
    )


def test_a_number_loses_its_comma_in_albert(learned: list[tuple[str, float]], tmp_path: Path) -> None:
    own = [("▁9,", -0.5), ("▁9", -9.0), (",", -9.0)]
    rest = [each for each in learned if each[0] not in {text for text, _ in own}]
    write_sentencepiece(tmp_path / "spiece.model", pieces(ALBERT_FIRST, [*own, *rest]), unknown_id=1)
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token(number) for number in tokenizer.encode("9,").ids[1:-1]] == ["▁9", ","]


def test_xlm_robertas_model_is_read_with_fairseqs_first_ids(
    learned: list[tuple[str, float]], tmp_path: Path
) -> None:
    write_sentencepiece(tmp_path / "sentencepiece.bpe.model", pieces(FAIRSEQ_FIRST, learned))
    first = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
    theirs = transformers.XLMRobertaTokenizer(vocab=[*first, *learned, ("<mask>", 0.0)])
    tokenizer = Tokenizer.load(tmp_path)
    assert_equal(tokenizer, theirs, "<mask>")
    assert set(tokenizer.encode_pair("iron", "iron").segments) == {0}
    assert_survives_saving(tokenizer, tmp_path / "copy")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"model_type": "camembert"}),
        ("tokenizer_config.json", {"tokenizer_class": "CamembertTokenizer"}),
    ],
)
def test_camemberts_model_is_told_from_xlm_robertas_by_the_folder(
    learned: list[tuple[str, float]], file: str, content: dict[str, str], tmp_path: Path
) -> None:
    write_sentencepiece(tmp_path / "sentencepiece.bpe.model", pieces(FAIRSEQ_FIRST, learned))
    (tmp_path / file).write_text(json.dumps(content))
    first = [(text, 0.0) for text in ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>")]
    ends = [("<s>", 0.0), ("</s>", 0.0)]
    vocabulary = [*first, ("<unk>NOTUSED", -100.0), *ends, *learned, ("<mask>", 0.0)]
    tokenizer = Tokenizer.load(tmp_path)
    assert_equal(tokenizer, transformers.CamembertTokenizer(vocab=vocabulary), "<mask>")
    assert (tokenizer.cls_id, tokenizer.sep_id) == (5, 6)


def test_debertas_model_is_read_and_its_mask_added_behind_the_end(
    learned: list[tuple[str, float]], tmp_path: Path
) -> None:
    write_sentencepiece(tmp_path / "spm.model", pieces(DEBERTA_FIRST, learned), unknown_id=3)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false, "vocab_type": "spm"}')
    vocabulary = [*((text, 0.0) for text, _ in DEBERTA_FIRST), *learned]
    tokenizer = Tokenizer.load(tmp_path)
    assert_equal(tokenizer, transformers.DebertaV2Tokenizer(vocab=vocabulary, unk_id=3), "[MASK]")
    assert tokenizer.mask_id == len(vocabulary)
    assert_survives_saving(tokenizer, tmp_path / "copy")


def test_the_table_of_characters_is_read_or_rejected(
    learned: list[tuple[str, float]], tmp_path: Path
) -> None:
    file = write_sentencepiece(
        tmp_path / "spm.model", pieces(DEBERTA_FIRST, learned), unknown_id=3, characters=b"\1\2\3"
    )
    assert read_sentencepiece_model(file).characters == b"\1\2\3"
    with pytest.raises(UserError, match="spm.model: its table of characters is damaged"):
        Tokenizer.load(tmp_path)


def test_a_model_cut_off_anywhere_is_rejected(learned: list[tuple[str, float]], tmp_path: Path) -> None:
    file = write_sentencepiece(tmp_path / "spm.model", pieces(DEBERTA_FIRST, learned[:40]), unknown_id=3)
    content = file.read_bytes()
    for size in range(len(content)):  # between two pieces as well as within one
        file.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"spm\.model: is not a SentencePiece model"):
            read_sentencepiece_model(file)
    with pytest.raises(UserError, match=r"spm\.model: is not a SentencePiece model"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"\xff" * 40, b"\x0b\x0c", b"{}", b"\x0a\x02\x08\x05"])
def test_what_is_no_protobuf_is_rejected(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(content)
    with pytest.raises(UserError, match=r"spiece\.model: is not a SentencePiece model"):
        Tokenizer.load(tmp_path)


def test_a_model_of_another_kind_names_tokenizer_json(
    learned: list[tuple[str, float]], tmp_path: Path
) -> None:
    write_sentencepiece(tmp_path / "spm.model", pieces(DEBERTA_FIRST, learned), unknown_id=3, algorithm=2)
    with pytest.raises(UserError, match=r"not a unigram model; add the tokenizer\.json of the same model"):
        Tokenizer.load(tmp_path)
