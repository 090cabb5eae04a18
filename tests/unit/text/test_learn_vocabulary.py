"""From counted words to a tokenizer folder that others open."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from bertsmith.core.errors import UserError
from bertsmith.text.learn_vocabulary import LearnedVocabulary, VocabularySettings, learn_vocabulary
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.word_counts import Counting, count_words
from tests.tokenizer_makers import PARAGRAPH

KINDS = [
    VocabularySettings(180),
    VocabularySettings(180, case="cased"),
    VocabularySettings(180, kind="wordpiece-frequency", unused=3),
    VocabularySettings(330, kind="byte-bpe"),
    VocabularySettings(150, kind="unigram"),
    VocabularySettings(150, kind="unigram", case="cased"),
]
NAMES = ["uncased", "cased", "frequency", "bytes", "unigram", "cased-unigram"]
every_kind = pytest.mark.parametrize("settings", KINDS, ids=NAMES)

CHINESE = """\
铁匠在炉火旁打铁，火花飞溅。
他打了一把BERT剑，又打了两把BERTs。
"""


def learn(text: str, settings: VocabularySettings, *, held_out: float = 0.0) -> LearnedVocabulary:
    counting = Counting(str.splitlines, settings.cutter(), held_out=held_out)
    return learn_vocabulary(count_words([text], counting), settings)


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(number) for number in tokenizer.encode(text).ids[1:-1]]


def pieces(learned: LearnedVocabulary) -> list[str]:
    return [learned.tokenizer.token(number) for number in range(learned.tokenizer.vocabulary_size)]


@every_kind
def test_transformers_reads_the_folder_as_we_do(settings: VocabularySettings, tmp_path: Path) -> None:
    learn(PARAGRAPH, settings).tokenizer.save(tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    masked = f"The smith {ours.mask_token} a horseshoe"
    for text in (PARAGRAPH, "Un naïve  forgeron!", masked):
        assert theirs(text)["input_ids"] == ours.encode(text, allow_special=(ours.mask_token,)).ids
    pair = ours.encode_pair("The iron is hot", "déjà vu")
    assert theirs("The iron is hot", "déjà vu")["input_ids"] == pair.ids
    assert len(theirs) == ours.vocabulary_size == settings.size


@pytest.mark.parametrize(
    ("settings", "name", "files"),
    [
        (KINDS[0], "BertTokenizer", {"tokenizer.json", "tokenizer_config.json", "vocab.txt"}),
        (KINDS[1], "BertTokenizer", {"tokenizer.json", "tokenizer_config.json", "vocab.txt"}),
        (KINDS[3], "RobertaTokenizer", {"tokenizer.json", "tokenizer_config.json"}),
        (KINDS[4], "PreTrainedTokenizerFast", {"tokenizer.json", "tokenizer_config.json"}),
    ],
    ids=["uncased", "cased", "bytes", "unigram"],
)
def test_the_pipeline_is_the_published_one(
    settings: VocabularySettings, name: str, files: set[str], tmp_path: Path
) -> None:
    learn(PARAGRAPH, settings).tokenizer.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == name
    assert {file.name for file in tmp_path.iterdir()} == files


@every_kind
def test_the_text_it_was_learned_from_has_no_unknown_word(settings: VocabularySettings) -> None:
    learned = learn(PARAGRAPH, settings)
    assert learned.tokenizer.unknown_id not in learned.tokenizer.encode(PARAGRAPH).ids
    assert (learned.report.pieces, learned.report.unknown_rate) == (settings.size, 0.0)


def test_chinese_is_learned_character_by_character_without_unknowns() -> None:
    learned = learn(CHINESE, VocabularySettings(200))
    assert learned.tokenizer.unknown_id not in learned.tokenizer.encode(CHINESE).ids
    assert tokens(learned.tokenizer, "打铁") == ["打", "铁"]
    assert tokens(learned.tokenizer, "一把bert剑") == ["一", "把", "bert", "剑"]
    assert not any(piece.startswith("##") and piece[-1] >= "\u4e00" for piece in pieces(learned))


def test_special_pieces_come_first_in_the_published_order() -> None:
    assert pieces(learn("ab ab", VocabularySettings(20, unused=2))) == [
        *("[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b", "ab"),
    ]


def test_with_99_unused_pieces_the_special_ids_are_those_of_bert_base() -> None:
    tokenizer = learn("ab", VocabularySettings(200, unused=99)).tokenizer
    found = (tokenizer.pad_id, tokenizer.unknown_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    assert found == (0, 100, 101, 102, 103)


def test_bytes_start_with_the_special_pieces_and_all_256_bytes() -> None:
    learned = learn("ab ab", VocabularySettings(400, kind="byte-bpe"))
    assert pieces(learned)[:7] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "!", '"']
    assert (learned.report.alphabet, pieces(learned)[261:]) == (256, ["ab"])
    unseen = "\N{CUNEIFORM SIGN A} Ж"
    assert learned.tokenizer.decode(learned.tokenizer.encode(unseen).ids) == unseen


def test_the_mask_of_bytes_takes_the_space_before_it_along() -> None:
    tokenizer = learn(PARAGRAPH, KINDS[3]).tokenizer
    alone = tokenizer.encode("<mask>", allow_special=("<mask>",)).ids
    assert tokenizer.encode(" <mask>", allow_special=("<mask>",)).ids == alone


def test_only_the_uncased_kind_loses_case_and_accents() -> None:
    uncased, cased = (learn("Café Café", settings).tokenizer for settings in KINDS[:2])
    assert tokens(uncased, "CAFÉ") == ["cafe"]
    assert tokens(cased, "Café") == ["Café"]
    assert cased.unknown_id in cased.encode("café").ids


def test_a_word_with_a_character_past_the_alphabet_is_unknown() -> None:
    learned = learn("ab ab ab az", VocabularySettings(100, characters=2))
    assert tokens(learned.tokenizer, "ab az") == ["ab", "[UNK]"]
    assert (learned.report.unknown_rate, learned.report.alphabet) == (0.25, 2)


def test_pairs_below_the_least_count_are_not_joined() -> None:
    text = "abc abc xyz"
    assert "xyz" not in pieces(learn(text, VocabularySettings(100)))
    assert "xyz" in pieces(learn(text, VocabularySettings(100, min_count=1)))


def test_words_longer_than_the_tokenizer_takes_are_not_learned_from() -> None:
    longest = "ab" * 50
    assert longest in pieces(learn(f"{longest} {longest}", VocabularySettings(400)))
    assert pieces(learn(f"{longest}a {longest}a cd cd", VocabularySettings(400)))[5:] == ["c", "##d", "cd"]


def test_held_out_documents_are_evaluated_on_and_not_learned_from() -> None:
    text = "\n".join(f"smith{number} smith{number}" for number in range(200))
    report = learn(text, VocabularySettings(1000), held_out=0.1).report
    assert (report.documents, report.scored_on) == (200, "held-out text")
    assert report.words == 2 * report.held_out_documents
    assert report.distinct_words == 200 - report.held_out_documents
    assert 1 < report.tokens_per_word < 3


def test_tokens_per_word_are_those_of_the_tokenizer() -> None:
    learned = learn(PARAGRAPH, VocabularySettings(300))
    inner = len(learned.tokenizer.encode(PARAGRAPH).ids) - 2
    assert learned.report.scored_on == "the text it was learned from"
    assert learned.report.tokens_per_word * learned.report.words == pytest.approx(inner)


@pytest.mark.parametrize(
    ("text", "settings", "complaint"),
    [
        ("", VocabularySettings(100), "the text contains no words"),
        ("a b c d", VocabularySettings(8), "vocabulary of 8 cannot hold the 9 special and one-character"),
        ("a", VocabularySettings(200, kind="byte-bpe"), "vocabulary of 200 cannot hold the 261"),
    ],
)
def test_what_cannot_be_learned_is_rejected(text: str, settings: VocabularySettings, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        learn(text, settings)


def test_fewer_characters_are_not_advised_where_there_are_always_256() -> None:
    for kind, is_advised in (("wordpiece", True), ("byte-bpe", False)):
        with pytest.raises(UserError, match="`size`") as caught:
            learn("a b c d", VocabularySettings(8, kind=kind))
        assert ("`alphabet`" in str(caught.value)) == is_advised


def test_bytes_with_unused_pieces_are_rejected() -> None:
    with pytest.raises(UserError, match="cannot have .unused. pieces"):
        replace(KINDS[3], unused=1)


# --- unigram ---


def test_a_unigram_vocabulary_begins_as_alberts_and_goes_on_from_the_likeliest_piece() -> None:
    learned = learn(PARAGRAPH, KINDS[4])
    assert pieces(learned)[:5] == ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    scores = [score for _, score in json.loads(learned.tokenizer.spec.pipeline)["model"]["vocab"]][5:]
    assert scores == sorted(scores, reverse=True)
    assert tokens(learned.tokenizer, "The iron") == ["▁the", "▁iron"]
    assert learned.tokenizer.encode_pair("iron", "iron").segments[-1] == 1


def test_a_unigram_vocabulary_may_keep_case_and_accents() -> None:
    uncased, cased = (
        learn("Élan élan elan Elan " * 9, replace(KINDS[4], size=30, case=case))
        for case in ("uncased", "cased")
    )
    assert len({tuple(tokens(uncased.tokenizer, word)) for word in ("Élan", "elan")}) == 1
    assert len({tuple(tokens(cased.tokenizer, word)) for word in ("Élan", "élan", "elan", "Elan")}) == 4


def test_a_unigram_vocabulary_is_the_same_in_another_process_and_order() -> None:
    lines = PARAGRAPH.splitlines()
    one, other = learn("\n".join(lines), KINDS[4]), learn("\n".join(reversed(lines)), KINDS[4])
    assert one.tokenizer.spec == other.tokenizer.spec
    code = (
        "import hashlib\n"
        "from tests.unit.text.test_learn_vocabulary import KINDS, PARAGRAPH, learn\n"
        "print(hashlib.sha256(learn(PARAGRAPH, KINDS[4]).tokenizer.spec.pipeline.encode()).hexdigest())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == hashlib.sha256(one.tokenizer.spec.pipeline.encode()).hexdigest()


def test_a_character_too_rare_for_a_unigram_vocabulary_is_unknown_by_itself() -> None:
    learned = learn("iron " * 50 + "x☃", replace(KINDS[4], size=20, characters=6))
    assert learned.tokenizer.unknown_id in learned.tokenizer.encode("iron☃").ids
    assert learned.report.unknown_rate == pytest.approx(1 / 51)


def test_a_unigram_vocabulary_has_room_for_its_characters_or_is_rejected() -> None:
    with pytest.raises(UserError, match="a vocabulary of 9 cannot hold the 10 special and one-character"):
        learn("iron", replace(KINDS[4], size=9))
    with pytest.raises(UserError, match="unigram vocabulary .*\\[unused\\] pieces"):
        replace(KINDS[4], unused=3)
