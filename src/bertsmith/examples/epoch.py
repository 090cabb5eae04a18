"""One pass through the documents of a split: its examples, their order, and how steps are cut from them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bertsmith.corpus.store import TokenStore
from bertsmith.examples.filling import FillRules, SplitText, fill_across_documents, fill_within_documents
from bertsmith.examples.pairs import ExampleIndex, Numbers, Sentences, WalkRules, walk_documents
from bertsmith.examples.sequences import Spans, truncated_spans
from bertsmith.examples.split import Split, documents_of
from bertsmith.examples.template import Template, Templates
from bertsmith.ground.seeds import Words, bits, key_of, sub_keys
from bertsmith.recipe.schema import BatchSection, Recipe, Stage


@dataclass(frozen=True, slots=True)
class Epoch:
    """The examples of an epoch, the order they are shown in, and where in it each step starts."""

    index: ExampleIndex
    order: Numbers
    step_starts: Numbers
    """One more than there are steps: the last entry is where the last step ends."""


@dataclass(frozen=True)
class StageSource:
    """What the examples of a stage are made of; everything follows from it and the number of the epoch."""

    store: TokenStore
    recipe: Recipe
    templates: Templates
    number: int = 0
    """Which of the recipe's stages."""
    split: Split = "train"

    @property
    def stage(self) -> Stage:
        """The stage of the recipe."""
        return self.recipe.examples.stages[self.number]

    @property
    def template(self) -> Template:
        """What stands around the text of a sequence."""
        is_pair = self.recipe.examples.pairs in ("nsp", "sop")
        return self.templates.pair if is_pair else self.templates.single

    @property
    def specials(self) -> int:
        """Special tokens in a sequence, separators between documents not counted."""
        return self.template.specials(2 if self.template is self.templates.pair else 1)

    @property
    def room(self) -> int:
        """Most tokens of text in a sequence."""
        return self.stage.length - self.specials

    @property
    def seed(self) -> int:
        """The run's seed; but runs that differ in it are judged on the same held-out examples."""
        return self.recipe.run.seed if self.split == "train" else 0

    @property
    def again(self) -> tuple[int, ...]:
        """The stage's number, where an earlier one of the same length would be trained on a second time."""
        earlier = (stage.length for stage in self.recipe.examples.stages[: self.number])
        return (self.number,) if self.split == "train" and self.stage.length in earlier else ()

    def purpose(self, epoch: int) -> tuple[int | str, ...]:
        """What tells the draws of an epoch from others; static masks come back, in all stages alike."""
        masking = self.recipe.masking
        if masking.masks == "static":
            return (self.split, self.stage.length, epoch % masking.copies)
        return (self.split, self.stage.length, epoch, *self.again)

    def keys(self, what: str, epoch: int, numbers: Numbers) -> Words:
        """A key for each of these examples: its draws depend on nothing else."""
        return sub_keys(key_of(self.seed, what, *self.purpose(epoch)), numbers)

    @cached_property
    def sentences(self) -> Sentences:
        """The documents of the split."""
        starts = self.store.document_starts
        share = self.recipe.examples.held_out_share
        documents = documents_of(self.split, count=len(starts) - 1, held_out_share=share)
        return Sentences(self.store.sentence_starts, starts, documents)

    @cached_property
    def split_text(self) -> SplitText:
        """The text of the split as one stretch."""
        return SplitText(self.sentences)

    def spans(self, epoch: int, numbers: Numbers, examples: ExampleIndex) -> Spans:
        """The text of examples with these numbers."""
        if self.recipe.examples.pairs == "full-sentences":
            return Spans(*self.split_text.parts(examples.first_start, examples.first_length.astype(np.int64)))
        return truncated_spans(examples, room=self.room, keys_S=self.keys("truncate", epoch, numbers))


def make_epoch(source: StageSource, epoch: int) -> Epoch:
    """The examples of an epoch in their random order, cut into steps."""
    index = _examples(source, epoch)
    key = key_of(source.seed, "order", source.split, source.stage.length, epoch, *source.again)
    order = np.argsort(bits(np.uint64(key), np.arange(len(index), dtype=np.uint64)), kind="stable")
    starts = cut_steps(index.length[order].astype(np.int64), source.recipe.batch)
    if source.split == "held-out" and starts[-1] < len(order):
        starts = np.append(starts, len(order))  # evaluation looks at what there is
    return Epoch(index, order, starts)


def cut_steps(lengths: Numbers, batch: BatchSection) -> Numbers:
    """Where each whole step starts and the last one ends; what is left at the end makes no step."""
    if batch.by == "sequences":
        return np.arange(0, len(lengths) + 1, batch.sequences)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts, used = [0], 0
    while starts[-1] < len(lengths):
        cut = max(int(np.searchsorted(ends, used + batch.tokens, side="right")), starts[-1] + 1)
        if cut == len(lengths) and ends[-1] - used < batch.tokens:
            break
        starts.append(cut)
        used = int(ends[cut - 1])
    return np.array(starts, np.int64)


def _examples(source: StageSource, epoch: int) -> ExampleIndex:
    examples = source.recipe.examples
    if examples.pairs == "full-sentences":
        return fill_across_documents(source.sentences, FillRules(source.room, source.specials))
    if examples.pairs == "doc-sentences":
        return fill_within_documents(source.sentences, FillRules(source.room, source.specials))
    rules = WalkRules(
        kind=examples.pairs,
        room=source.room,
        specials=source.specials,
        negative_share=examples.negative_share,
        short_share=examples.short_share,
        seed=source.seed,
        purpose=source.purpose(epoch),
    )
    return walk_documents(source.sentences, rules)
