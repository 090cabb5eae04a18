"""Learn a vocabulary from counted words: WordPiece by likelihood or by frequency, byte-level BPE, or unigram.

WordPiece vocabularies are laid out as published: [PAD], [unused0] and so on, [UNK], [CLS], [SEP], [MASK],
characters that begin words, characters inside words, learned pieces in the order they were learned. With
99 [unused] pieces the first 104 ids are those of bert-base-uncased. Byte-level BPE has <s>, <pad>, </s>,
<unk>, <mask>, the 256 bytes, then learned pieces. Unigram has <pad>, <unk>, [CLS], [SEP], [MASK], like
ALBERT, then pieces in order of decreasing probability.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from bertsmith.core.errors import UserError
from bertsmith.core.progress import progress_bar
from bertsmith.text.learn_merges import (
    CharacterPieces,
    Merge,
    MergeRule,
    frequency_gain,
    learn_merges,
    likelihood_gain,
    split_characters,
)
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.tokenizer_files import (
    INSIDE,
    USUAL_WORD_CHARACTERS,
    Case,
    bert_pipeline,
    roberta_pipeline,
)
from bertsmith.text.unigram_pipeline import albert_pipeline
from bertsmith.text.word_counts import BertWords, ByteWords, UnigramWords, WordCounts, WordCutter

Kind = Literal["wordpiece", "wordpiece-frequency", "byte-bpe", "unigram"]

_ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # the first four have the ids of roberta-base
_ALBERT_SPECIAL = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
_UNIGRAM_WORDS = 20_000_000
"""Maximum number of words, with repetitions, for the unigram trainer, which reads them one by one."""
_TRAINER_STEP = 1e-4
_SCORE_DIGITS = 5
"""Decimal digits to keep; further digits depend on the order in which the trainer adds."""
_GAINS = {
    "wordpiece": likelihood_gain,
    "wordpiece-frequency": frequency_gain,
    "byte-bpe": frequency_gain,
}


@dataclass(frozen=True, slots=True)
class VocabularySettings:
    """Settings of a vocabulary to learn; case, characters and unused do not apply to byte-level BPE."""

    size: int
    kind: Kind = "wordpiece"
    case: Case = "uncased"
    characters: int = 1000  # distinct characters to keep; words with rarer ones become unknown
    unused: int = 0
    min_count: int = 2  # pairs of pieces with a lower count are not joined

    def __post_init__(self) -> None:
        if self.kind in ("byte-bpe", "unigram") and self.unused:
            remedy = "remove `unused`, or learn a WordPiece vocabulary"
            name = {"byte-bpe": "byte-level BPE", "unigram": "a unigram vocabulary"}[self.kind]
            raise UserError(f"{name} cannot have [unused] pieces", remedy=remedy)

    def cutter(self) -> WordCutter:
        """Return the word cutter for this kind of vocabulary."""
        if self.kind == "byte-bpe":
            return ByteWords()
        return UnigramWords(self.case) if self.kind == "unigram" else BertWords(self.case)


@dataclass(frozen=True, slots=True)
class VocabularyReport:
    """Sizes of a learned vocabulary, and its results on text it was not learned from."""

    pieces: int
    pieces_asked_for: int  # more than `pieces` if too few pairs were frequent enough
    alphabet: int  # single-character pieces
    documents: int
    held_out_documents: int
    distinct_words: int
    scored_on: Literal["held-out text", "the text it was learned from"]
    words: int  # number of scored words; a punctuation mark is a word
    tokens_per_word: float
    unknown_rate: float  # fraction of words


@dataclass(frozen=True, slots=True)
class LearnedVocabulary:
    """A tokenizer with the learned vocabulary, and the report on it."""

    tokenizer: Tokenizer
    report: VocabularyReport


def learn_vocabulary(counts: WordCounts, settings: VocabularySettings) -> LearnedVocabulary:
    """Learn the vocabulary of these words, which the settings' own cutter must have cut."""
    if not counts.learned:
        raise UserError("the text contains no words", remedy="give more text, or hold out less of it")
    learn = {"byte-bpe": _learn_byte_bpe, "unigram": _learn_unigram}.get(settings.kind, _learn_wordpiece)
    library, alphabet = learn(counts.learned, settings)
    # Score each word once with the model alone: the pipeline before it cuts text into exactly these words.
    scored = counts.held_out or counts.learned
    unknown_id = library.token_to_id("<unk>" if settings.kind == "unigram" else "[UNK]")
    tokens = unknown = 0
    for word, count in scored.items():
        cut = library.model.tokenize(word)
        tokens += len(cut) * count
        unknown += count * any(token.id == unknown_id for token in cut)
    words = sum(scored.values())
    report = VocabularyReport(
        pieces=library.get_vocab_size(),
        pieces_asked_for=settings.size,
        alphabet=alphabet,
        documents=counts.documents,
        held_out_documents=counts.held_out_documents,
        distinct_words=len(counts.learned),
        scored_on="held-out text" if counts.held_out else "the text it was learned from",
        words=words,
        tokens_per_word=tokens / words,
        unknown_rate=unknown / words,
    )
    return LearnedVocabulary(Tokenizer.from_library(library), report)


def _learn_wordpiece(words: Mapping[str, int], settings: VocabularySettings) -> tuple[Library, int]:
    # A longer word is unknown to the model whatever its pieces, so it must not influence them.
    within_limit = {word: count for word, count in words.items() if len(word) <= USUAL_WORD_CHARACTERS}
    characters = split_characters(within_limit, characters=settings.characters, inside=INSIDE)
    unused = [f"[unused{number}]" for number in range(settings.unused)]
    start = ["[PAD]", *unused, "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters.texts[1:]]
    pieces, _ = _grow(start, characters, settings=settings)
    return bert_pipeline(_numbered(pieces), case=settings.case), len(characters.texts) - 1


def _learn_byte_bpe(words: Mapping[str, int], settings: VocabularySettings) -> tuple[Library, int]:
    bytes_as_characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = split_characters(words, characters=len(bytes_as_characters), inside="")
    pieces, merges = _grow([*_ROBERTA_SPECIAL, *bytes_as_characters], characters, settings=settings)
    pairs = [(merge.left, merge.right) for merge in merges]
    return roberta_pipeline(_numbered(pieces), merges=pairs), len(bytes_as_characters)


def _learn_unigram(words: Mapping[str, int], settings: VocabularySettings) -> tuple[Library, int]:
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for character in set(word):
            characters[character] += count
    # The trainer keeps every character it sees: rare ones would crowd out pieces of a small vocabulary.
    in_order = sorted(characters, key=lambda character: (-characters[character], character))
    kept = set(in_order[: settings.characters])
    start = len(_ALBERT_SPECIAL) + len(kept)
    if start > settings.size:
        what = f"a vocabulary of {settings.size} cannot hold the {start} special and one-character pieces"
        raise UserError(what, remedy="choose a larger one (`size`) or for fewer characters (`alphabet`)")
    scale = min(1.0, _UNIGRAM_WORDS / sum(words.values()))
    trainer = trainers.UnigramTrainer(
        vocab_size=settings.size,
        special_tokens=list(_ALBERT_SPECIAL),
        unk_token="<unk>",
        show_progress=False,
    )
    library = Library(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with progress_bar("learning pieces", len(words)) as advance:

        def repeated() -> Iterator[str]:
            for word in sorted(words):
                if kept.issuperset(word):
                    yield " ".join([word] * max(1, round(words[word] * scale)))
                advance(1)

        library.train_from_iterator(repeated(), trainer)
    learned = json.loads(library.to_str())["model"]["vocab"][len(_ALBERT_SPECIAL) :]
    # Pruned characters get the lowest score plus small steps, in the order of a hash table. Without the
    # steps, and rounded, scores do not depend on the run.
    lowest = min(score for _, score in learned)
    pruned_below = lowest + _TRAINER_STEP * len(kept)
    settled = (
        (piece, lowest if len(piece) == 1 and score < pruned_below else score) for piece, score in learned
    )
    rounded = sorted(((piece, round(score, _SCORE_DIGITS)) for piece, score in settled), key=_likeliest_first)
    scores = [*((piece, 0.0) for piece in _ALBERT_SPECIAL), *rounded]
    pipeline = albert_pipeline(scores, cased=settings.case == "cased")
    return pipeline, sum(len(piece) == 1 for piece, _ in rounded)


def _likeliest_first(scored: tuple[str, float]) -> tuple[float, str]:
    return -scored[1], scored[0]


def _grow(
    start: list[str], characters: CharacterPieces, *, settings: VocabularySettings
) -> tuple[list[str], list[Merge]]:
    """Return the initial pieces plus learned ones, up to the requested size, and all merges."""
    if len(start) > settings.size:
        what = (
            f"a vocabulary of {settings.size} cannot hold the {len(start)} special and one-character pieces"
        )
        larger = "choose a larger one (`size`)"
        fewer = "" if settings.kind == "byte-bpe" else " or for fewer characters (`alphabet`)"
        raise UserError(what, remedy=larger + fewer)
    pieces, merges = dict.fromkeys(start), []
    inside = "" if settings.kind == "byte-bpe" else INSIDE
    rule = MergeRule(_GAINS[settings.kind], inside=inside, min_count=settings.min_count)
    with progress_bar("learning merges", settings.size - len(start)) as advance:
        joined = learn_merges(characters, rule)
        while len(pieces) < settings.size and (merge := next(joined, None)):
            merges.append(merge)
            advance(merge.joined not in pieces)
            pieces[merge.joined] = None
    return list(pieces), merges


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(pieces)}
