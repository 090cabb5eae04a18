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

from bertsmith.ground.errors import UserError
from bertsmith.ground.progress import progress_bar
from bertsmith.text.learn_pieces import Joining, Merge, Spelled, join_pairs, spell
from bertsmith.text.merge_ranking import frequency_gain, likelihood_gain
from bertsmith.text.pipelines import INSIDE, Case, bert_pipeline, roberta_pipeline
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.tokenizer_files import USUAL_LONGEST_WORD
from bertsmith.text.word_counts import WordCounts
from bertsmith.text.words import BertWords, ByteWords, WordCutter

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
    unknown_rate: float  # share of words


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
    scored = counts.held_out or counts.learned
    tokens, unknown = _score(library, scored)
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
    within_limit = {word: count for word, count in words.items() if len(word) <= USUAL_LONGEST_WORD}
    spelled = spell(within_limit, characters=settings.characters, inside=INSIDE)
    unused = [f"[unused{number}]" for number in range(settings.unused)]
    start = ["[PAD]", *unused, "[UNK]", "[CLS]", "[SEP]", "[MASK]", *spelled.texts[1:]]
    pieces, _ = _grow(start, spelled, settings=settings)
    return bert_pipeline(_numbered(pieces), case=settings.case), len(spelled.texts) - 1


def _learn_byte_bpe(words: Mapping[str, int], settings: VocabularySettings) -> tuple[Library, int]:
    bytes_as_characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = spell(words, characters=len(bytes_as_characters), inside="")
    pieces, merges = _grow([*_ROBERTA_SPECIAL, *bytes_as_characters], spelled, settings=settings)
    pairs = [(merge.left, merge.right) for merge in merges]
    return roberta_pipeline(_numbered(pieces), merges=pairs), len(bytes_as_characters)


def _grow(
    start: list[str], spelled: Spelled, *, settings: VocabularySettings
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
    joining = Joining(_GAINS[settings.kind], inside=inside, min_count=settings.min_count)
    with progress_bar("joining pieces", settings.size - len(start)) as advance:
        joined = join_pairs(spelled, joining)
        while len(pieces) < settings.size and (merge := next(joined, None)):
            merges.append(merge)
            advance(merge.joined not in pieces)
            pieces[merge.joined] = None
    return list(pieces), merges


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(pieces)}


def _score(library: Library, words: Mapping[str, int]) -> tuple[int, int]:
    """The tokens of these words and how many words are unknown, as the model cuts them."""
    unknown_id = library.token_to_id("[UNK]")
    tokens = unknown = 0
    for word, count in words.items():
        cut = library.model.tokenize(word)
        tokens += len(cut) * count
        unknown += count * (cut[0].id == unknown_id)
    return tokens, unknown
