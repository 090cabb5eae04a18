"""Templates: the special tokens before, between and after the texts of a sequence.

They are read off the tokenizer, whatever its files say, and used wherever rows of ids become sequences: for
pre-training, for tasks and for inference.
"""

from dataclasses import dataclass

from bertsmith.text.tokenizer import Encoded, Tokenizer

# Any text does: only the template tokens around it matter.
_SAMPLE = "a"


@dataclass(frozen=True, slots=True)
class Inserted:
    """Special tokens that stand together, and their segments."""

    ids: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Template:
    """What stands before, between and after the spans of text in a sequence."""

    lead: Inserted
    between: Inserted
    tail: Inserted
    text_segments: tuple[int, int]
    """The segment of the first span and of all that follow it."""

    def specials(self, spans: int) -> int:
        """How many special tokens a sequence of so many spans has."""
        return len(self.lead) + (spans - 1) * len(self.between) + len(self.tail)


@dataclass(frozen=True, slots=True)
class Templates:
    """BERT's: [CLS] A [SEP], [CLS] A [SEP] B [SEP]; RoBERTa's: <s> A </s>, <s> A </s></s> B </s>."""

    single: Template
    """One segment; documents that share it are kept apart by one separator (RoBERTa's FULL-SENTENCES)."""
    pair: Template


def read_templates(tokenizer: Tokenizer) -> Templates:
    """The templates of a tokenizer."""
    alone = tokenizer.encode(_SAMPLE)
    pair = tokenizer.encode_pair(_SAMPLE, _SAMPLE)
    text = _segment_of(alone, 0)
    separator = Inserted((tokenizer.sep_id,), (text,))
    return Templates(
        single=Template(_between(alone, -1, 0), separator, _between(alone, 0, 1), (text, text)),
        pair=Template(
            _between(pair, -1, 0),
            _between(pair, 0, 1),
            _between(pair, 1, 2),
            (_segment_of(pair, 0), _segment_of(pair, 1)),
        ),
    )


def _between(encoded: Encoded, before: int, after: int) -> Inserted:
    """The special tokens after the text numbered `before` and ahead of the one numbered `after`."""
    first = max((row for row, text in enumerate(encoded.sequence) if 0 <= text <= before), default=-1) + 1
    last = min((row for row, text in enumerate(encoded.sequence) if text >= after), default=len(encoded))
    return Inserted(tuple(encoded.ids[first:last]), tuple(encoded.segments[first:last]))


def _segment_of(encoded: Encoded, text: int) -> int:
    return encoded.segments[encoded.sequence.index(text)]
