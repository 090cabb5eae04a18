"""Learn a vocabulary from counted words: WordPiece by likelihood or by frequency, or byte-level BPE.

WordPiece vocabularies are laid out as published: [PAD], [unused0] and so on, [UNK], [CLS], [SEP], [MASK],
characters that begin words, characters inside words, learned pieces in the order they were learned. With
99 [unused] pieces the first 104 ids are those of bert-base-uncased. Byte-level BPE has <s>, <pad>, </s>,
<unk>, <mask>, the 256 bytes, then learned pieces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers

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
from bertsmith.text.word_counts import BertWords, ByteWords, WordCounts, WordCutter

Kind = Literal["wordpiece", "wordpiece-frequency", "byte-bpe"]

_ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # the first four have the ids of roberta-base
_GAINS = {
    "wordpiece": likelihood_gain,
    "wordpiece-frequency": frequency_gain,
    "byte-bpe": frequency_gain,
}


@dataclass(frozen=True, slots=True)
class VocabularySettings:
    """What vocabulary to learn; case, characters and unused do not concern byte-level BPE."""

    size: int
    kind: Kind = "wordpiece"
    case: Case = "uncased"
    characters: int = 1000  # a word with a rarer one will be unknown
    unused: int = 0
    min_count: int = 2  # pairs of pieces seen less often are not joined

    def __post_init__(self) -> None:
        if self.kind == "byte-bpe" and self.unused:
            remedy = "leave out --unused, or learn a WordPiece vocabulary"
            raise UserError("byte-level BPE has no [unused] pieces", remedy=remedy)

    def cutter(self) -> WordCutter:
        """How text is cut into words for this vocabulary."""
        return ByteWords() if self.kind == "byte-bpe" else BertWords(self.case)


@dataclass(frozen=True, slots=True)
class VocabularyReport:
    """What was learned, and how it does on text it was not learned from."""

    pieces: int
    pieces_asked_for: int  # more than there are where no other pair is seen often enough
    alphabet: int  # single-character pieces
    documents: int
    held_out_documents: int
    distinct_words: int
    scored_on: Literal["held-out text", "the text it was learned from"]
    words: int  # those scored; a punctuation mark is a word
    tokens_per_word: float
    unknown_rate: float  # fraction of words


@dataclass(frozen=True, slots=True)
class LearnedVocabulary:
    """A tokenizer with the vocabulary, and the report on it."""

    tokenizer: Tokenizer
    report: VocabularyReport


def learn_vocabulary(counts: WordCounts, settings: VocabularySettings) -> LearnedVocabulary:
    """The vocabulary of these words, which must have been cut by the settings' own cutter."""
    if not counts.learned:
        raise UserError("there are no words to learn from", remedy="give more text, or hold out less of it")
    learn = _learn_byte_bpe if settings.kind == "byte-bpe" else _learn_wordpiece
    library, alphabet = learn(counts.learned, settings)
    # Scored by the model on words, each once: the pipeline before it cuts text into these very words.
    scored = counts.held_out or counts.learned
    unknown_id = library.token_to_id("[UNK]")
    tokens = unknown = 0
    for word, count in scored.items():
        cut = library.model.tokenize(word)
        tokens += len(cut) * count
        unknown += count * (cut[0].id == unknown_id)
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
    # A longer word is unknown to the model whatever its pieces: it must have no say in them.
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


def _grow(
    start: list[str], characters: CharacterPieces, *, settings: VocabularySettings
) -> tuple[list[str], list[Merge]]:
    """The pieces to start with and learned ones up to the size asked for, and the merges that made them."""
    if len(start) > settings.size:
        what = (
            f"a vocabulary of {settings.size} cannot hold the {len(start)} special and one-character pieces"
        )
        larger = "ask for a larger one (--size)"
        fewer = "" if settings.kind == "byte-bpe" else " or for fewer characters (--alphabet)"
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
