"""The sections of a recipe that say what the model is shown: examples, masking, replaced tokens, batches."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bertsmith.recipe.section import Count, Fraction, Off, RuleError, Section

Unit = Literal["token", "word", "ngram", "phrase", "entity"]
Objective = Literal["masked", "replaced", "distilled", "left-to-right", "right-to-left"]
"""What a step learns from; what each is stands in objectives/registry.py, which loads torch."""
PairHead = Literal["nsp", "sop", "none"]


class Stage(Section):
    """A part of the run with its own sequence length."""

    fraction: Annotated[float, Field(gt=0, le=1, examples=[0.9])]
    """Fraction of the run's steps."""
    length: Annotated[int, Field(ge=8, examples=[128])]
    """Longest sequence in tokens, special tokens counted."""
    predictions: Annotated[Count, Field(examples=[20])]
    """Most predicted tokens a sequence: 20 at 128, 77 at 512 (the published length x 0.15)."""


class ExamplesSection(Section):
    """What a sequence is made of; the defaults are BERT's (create_pretraining_data.py)."""

    objective: Objective = "masked"
    """Masked LM; replaced: tell which tokens a small masked LM made up (ELECTRA; for model.type electra and
    modernbert); distilled: masked LM beside a teacher (the distill section); or one of the comparators that
    see one side only."""
    pairs: Literal["nsp", "sop", "sentence-pair", "full-sentences", "doc-sentences", "none"] = "nsp"
    """nsp: next-sentence pairs of segments (BERT); sop: sentence order (ALBERT); sentence-pair: nsp of single
    sentences, full-sentences and doc-sentences: filled to the length across or within documents (all three
    RoBERTa); none: BERT's walk with one segment a sequence."""
    negative_probability: Fraction = 0.5
    """Probability of a random second segment (nsp, sentence-pair) or a swapped pair (sop)."""
    pair_weight: Annotated[float, Field(gt=0)] = 1.0
    """What the loss of pairs is multiplied by; 1 in BERT (docs/speedrun.md says when to take less)."""
    short_probability: Fraction = 0.1
    """Probability that a document is walked with a random shorter target length (nsp, sop, none)."""
    single_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the documents that a pass shows as single segments, as doc-sentences does, in the place of
    pairs (nsp, sop, sentence-pair): tasks have both."""
    short_fraction: Fraction = 0.0
    """Fraction of the sequences of full-sentences, of doc-sentences and of `single_fraction` that are short:
    filled with whole sentences up to a random length from 1 to `short_length` tokens, or with one sentence
    that is longer."""
    short_length: Count = 32
    """Longest text that a short sequence of `short_fraction` is filled to."""
    stages: tuple[Stage, ...] = (
        Stage(fraction=0.9, length=128, predictions=20),
        Stage(fraction=0.1, length=512, predictions=77),
    )
    """Sequence lengths over the run: 90 % of the steps at 128, the last 10 % at 512 (BERT)."""
    held_out_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.005
    """Fraction of documents kept for evaluation, chosen by a hash of their number, never trained on."""

    @property
    def pair_head(self) -> PairHead:
        """Which head learns from the pairs: a sequence without pairs has none."""
        heads: dict[str, PairHead] = {"nsp": "nsp", "sentence-pair": "nsp", "sop": "sop"}
        return heads.get(self.pairs, "none")

    @property
    def masks_tokens(self) -> bool:
        """Whether some tokens are masked, which somebody then predicts."""
        return self.objective == "masked" or self.has_generator or self.has_teacher

    @property
    def has_generator(self) -> bool:
        """Whether a second, smaller model predicts them, from which the model learns."""
        return self.objective == "replaced"

    @property
    def has_teacher(self) -> bool:
        """Whether the model also learns from what another one predicts."""
        return self.objective == "distilled"

    @model_validator(mode="after")
    def stages_cover_the_run(self) -> "ExamplesSection":
        if abs(sum(stage.fraction for stage in self.stages) - 1) > 1e-6:
            raise RuleError("the fractions of examples.stages must add up to 1", keys=("examples.stages",))
        return self

    @model_validator(mode="after")
    def weight_is_of_pairs(self) -> "ExamplesSection":
        if self.pair_weight != 1 and self.pair_head == "none":
            raise RuleError(
                f"examples.pair_weight is not for examples.pairs = {self.pairs}, which has no pairs",
                keys=("examples.pair_weight", "examples.pairs"),
                remedy="set it to 1, or set examples.pairs to nsp, sop or sentence-pair",
            )
        return self

    @model_validator(mode="after")
    def short_sequences_are_filled(self) -> "ExamplesSection":
        if self.single_fraction and self.pair_head == "none":
            raise RuleError(
                f"examples.single_fraction is not for examples.pairs = {self.pairs}, which has no pairs",
                keys=("examples.single_fraction", "examples.pairs"),
                remedy="set it to 0, or set examples.pairs to nsp, sop or sentence-pair",
            )
        is_filled = self.pairs in ("full-sentences", "doc-sentences") or self.single_fraction
        if self.short_fraction and not is_filled:
            raise RuleError(
                f"examples.short_fraction is not for examples.pairs = {self.pairs}",
                keys=("examples.short_fraction", "examples.pairs"),
                remedy="set examples.short_probability instead, examples.pairs to full-sentences or "
                "doc-sentences, or examples.single_fraction above 0",
            )
        return self


class Level(Section):
    """One of ERNIE's masking levels and its fraction of the sequences, or of the run."""

    unit: Annotated[Unit, Field(examples=["token"])]
    fraction: Annotated[float, Field(gt=0, le=1, examples=[0.5])]


class MaskingSection(Section):
    """Which tokens the model must predict (Devlin et al. 2018, 3.1)."""

    rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Fraction of tokens to predict; where final_rate differs, that of the run's beginning."""
    final_rate: Annotated[float, Field(gt=0, lt=1)] | Literal["rate"] = "rate"
    """The fraction at the run's end: it changes linearly with the progress that the learning rate goes by
    (from 0.3 to 0.15, say); rate: it stays as it is. For a budget of steps or minutes."""
    as_mask: Fraction = 0.8
    """Of those, the fraction shown as the mask token."""
    as_random: Fraction = 0.1
    """Of those, the fraction shown as a random token; the rest is shown as it is."""
    unit: Unit = "token"
    """What is chosen whole: a token, a word, one to `longest_ngram` words (ALBERT), a phrase or an entity."""
    longest_ngram: Count = 3
    """Longest run of words of unit ngram; a run of n words is drawn with probability proportional to 1/n."""
    levels: tuple[Level, ...] = ()
    """ERNIE's several units, written as [{unit="token", fraction=0.5}, {unit="entity", fraction=0.5}]; empty
    means `unit` alone."""
    levels_by: Literal["mix", "stage"] = "mix"
    """mix: each sequence draws its level; stage: the levels follow each other over the run."""
    count: Literal["rounded", "stochastic"] = "rounded"
    """rounded: max(1, round(rate x length)) with special tokens counted (BERT); stochastic: a fraction is
    rounded up with that probability (RoBERTa)."""
    smoothing: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Tokens that are rare in the store are chosen more often: a token of count n with the weight
    n^-smoothing; 0.7 in DistilBERT (XLM), 0 elsewhere: all alike. For unit token."""
    random_from: Literal["vocabulary", "ordinary"] = "vocabulary"
    """Random tokens from the whole list, special tokens included (BERT), or without them (RoBERTa)."""
    masks: Literal["dynamic", "static"] = "dynamic"
    """dynamic: new examples and masks every epoch; static: `copies` fixed versions of the corpus, in turn."""
    copies: Count = 10
    """How many fixed versions static masking makes (BERT's dupe_factor)."""

    @model_validator(mode="after")
    def fractions_fit(self) -> "MaskingSection":
        if self.as_mask + self.as_random > 1 + 1e-9:
            raise RuleError(
                "masking.as_mask + masking.as_random must not exceed 1",
                keys=("masking.as_mask", "masking.as_random"),
            )
        if self.levels and abs(sum(level.fraction for level in self.levels) - 1) > 1e-6:
            raise RuleError("the fractions of masking.levels must add up to 1", keys=("masking.levels",))
        if self.final_rate != "rate" and self.masks == "static":
            raise RuleError(
                "masking.final_rate needs masks that are made anew, and masking.masks is static",
                keys=("masking.final_rate", "masking.masks"),
                remedy="set masking.masks to dynamic",
            )
        if self.smoothing and (self.unit != "token" or self.levels):
            raise RuleError(
                "masking.smoothing is for tokens that are chosen one by one",
                keys=("masking.smoothing", "masking.levels" if self.levels else "masking.unit"),
                remedy="set masking.unit to token, without masking.levels, or masking.smoothing to 0",
            )
        return self

    def rate_at(self, progress: float) -> float:
        """The fraction of tokens to predict when so much of the run is done."""
        if self.final_rate == "rate":
            return self.rate
        return self.rate + (self.final_rate - self.rate) * progress

    @property
    def largest_rate(self) -> float:
        """The largest fraction of tokens that is predicted at any time."""
        return max(self.rate, self.rate_at(1.0))


class ReplacedSection(Section):
    """Replaced-token detection, where examples.objective is replaced (ELECTRA; Clark et al. 2020)."""

    generator_size: Annotated[float, Field(gt=0, le=1)] = 0.25
    """The generator's width, heads and feed-forward width, as a fraction of the model's: 1/4 for Small and
    Large, 1/3 for Base; it has as many layers, and shares the embeddings. A modernbert's generator is as wide
    and has this fraction of its layers (as in DeBERTaV3, which takes a half)."""
    discriminator_weight: Annotated[float, Field(gt=0)] = 50.0
    """What the discriminator's loss is multiplied by before the generator's is added."""


class BatchSection(Section):
    """How much one optimisation step sees."""

    by: Literal["sequences", "tokens"] = "sequences"
    """sequences: as published, whatever their length; tokens: a deviation that keeps steps equally large."""
    sequences: Count = 256
    """Sequences a step, over all processes."""
    tokens: Count = 131_072
    """Token budget a step, over all processes, where `by` is tokens."""
    micro_tokens: Count | Literal["auto"] = "auto"
    """Most tokens in one forward pass of one process; a step above it accumulates gradients."""
    ramp_from: Count | Off = "off"
    """Sequences, or tokens where `by` is tokens, of the first steps: the number rises in multiples of it, on
    a line to the full one, which it has after `ramp_steps` steps, or where the second stage begins."""
    ramp_steps: Count = 1000
    """Steps of such a ramp; in steps, so that what a step shows does not depend on budget or clock."""

    @model_validator(mode="after")
    def ramp_rises(self) -> "BatchSection":
        if self.ramp_from != "off" and self.ramp_from > self.full_size:
            raise RuleError(
                f"batch.ramp_from = {self.ramp_from} is more than batch.{self.by} = {self.full_size}",
                keys=("batch.ramp_from", f"batch.{self.by}"),
                remedy="begin with less than a full step has, or set batch.ramp_from to off",
            )
        return self

    @property
    def full_size(self) -> int:
        """Sequences of a step, or tokens where `by` is tokens, after any ramp."""
        return self.sequences if self.by == "sequences" else self.tokens

    def size_at(self, step: int) -> int:
        """Sequences, or tokens where `by` is tokens, of this step of the first stage."""
        if self.ramp_from == "off" or step >= self.ramp_steps:
            return self.full_size
        multiples = -(-self.full_size // self.ramp_from)
        return min(self.full_size, self.ramp_from * -(-multiples * (step + 1) // self.ramp_steps))
