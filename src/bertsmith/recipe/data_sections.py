"""Recipe sections on the input of the model: examples, masking, replaced tokens, batches."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bertsmith.model.encoder_config import Direction
from bertsmith.recipe.section import Count, Fraction, Off, RuleError, Section

Unit = Literal["token", "word", "ngram", "phrase", "entity"]
Objective = Literal["masked", "replaced", "distilled", "left-to-right", "right-to-left", "two-directions"]
"""Training objectives of a step; objectives/registry.py, which loads torch, defines each."""
PairHead = Literal["nsp", "sop", "none"]


class Stage(Section):
    """A part of the run with its own sequence length."""

    fraction: Annotated[float, Field(gt=0, le=1, examples=[0.9])]
    """Fraction of the run's steps."""
    length: Annotated[int, Field(ge=8, examples=[128])]
    """Longest sequence in tokens, special tokens counted."""
    predictions: Annotated[Count, Field(examples=[20])]
    """Maximum predicted tokens per sequence: 20 at 128, 77 at 512 (the published length x 0.15)."""


class ExamplesSection(Section):
    """Conversion of documents to examples; the defaults are BERT's (create_pretraining_data.py)."""

    objective: Objective = "masked"
    """masked: masked LM; replaced: detect the tokens that a small masked LM replaced (ELECTRA; for model.type
    electra and modernbert); distilled: masked LM and a teacher (the distill section); left-to-right and
    right-to-left: one-sided baselines; two-directions: both of these in one model (ELMo; for model.type
    elmo)."""
    pairs: Literal["nsp", "sop", "sentence-pair", "full-sentences", "doc-sentences", "none"] = "nsp"
    """nsp: next-sentence pairs of segments (BERT); sop: sentence order (ALBERT); sentence-pair: nsp of single
    sentences; full-sentences and doc-sentences: sequences filled to the length across or within documents
    (these three from RoBERTa); none: BERT's walk with one segment per sequence."""
    negative_probability: Fraction = 0.5
    """Probability of a random second segment (nsp, sentence-pair) or a swapped pair (sop)."""
    pair_weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the pair loss; 1 in BERT (docs/speedrun.md describes when a smaller one is better)."""
    short_probability: Fraction = 0.1
    """Probability that a document is walked with a random shorter target length (nsp, sop, none)."""
    single_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the documents that each pass shows as single segments, as in doc-sentences, instead of
    pairs (nsp, sop, sentence-pair), because tasks have both."""
    short_fraction: Fraction = 0.0
    """Fraction of the sequences of full-sentences, doc-sentences and `single_fraction` that are short: whole
    sentences up to a random length from 1 to `short_length` tokens, or one longer sentence."""
    short_length: Count = 32
    """Maximum length of a short sequence (`short_fraction`) in tokens of text."""
    stages: tuple[Stage, ...] = (
        Stage(fraction=0.9, length=128, predictions=20),
        Stage(fraction=0.1, length=512, predictions=77),
    )
    """Sequence lengths over the run: 90 % of the steps at 128, the last 10 % at 512 (BERT)."""
    held_out_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.005
    """Fraction of documents kept for evaluation, chosen by a hash of their number, never trained on."""

    @property
    def pair_head(self) -> PairHead:
        """The head that learns from the pairs, or none if sequences are not pairs."""
        heads: dict[str, PairHead] = {"nsp": "nsp", "sentence-pair": "nsp", "sop": "sop"}
        return heads.get(self.pairs, "none")

    @property
    def sees(self) -> Direction:
        """The side of a token that the model sees: to predict a neighbour, it must not see it."""
        if self.objective in ("left-to-right", "right-to-left", "two-directions"):
            return self.objective
        return "both"

    @property
    def masks_tokens(self) -> bool:
        """True if the objective masks some tokens, for the model or a generator to predict."""
        return self.objective == "masked" or self.has_generator or self.has_teacher

    @property
    def has_generator(self) -> bool:
        """True if a second, smaller model replaces the masked tokens with samples to be detected."""
        return self.objective == "replaced"

    @property
    def has_teacher(self) -> bool:
        """True if the model also learns from a teacher's predictions."""
        return self.objective == "distilled"

    @model_validator(mode="after")
    def stages_cover_the_run(self) -> "ExamplesSection":
        if abs(sum(stage.fraction for stage in self.stages) - 1) > 1e-6:
            raise RuleError("the fractions of examples.stages must add up to 1", keys=("examples.stages",))
        return self

    @model_validator(mode="after")
    def short_sequences_are_filled(self) -> "ExamplesSection":
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
    """Choice of the tokens to predict (Devlin et al. 2018, 3.1)."""

    rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Fraction of tokens to predict; at the start of the run, if final_rate differs."""
    final_rate: Annotated[float, Field(gt=0, lt=1)] | Literal["rate"] = "rate"
    """Fraction of tokens to predict at the end of the run, for example 0.15 after a rate of 0.3; rate: no
    change. It changes linearly with the progress of the learning-rate schedule. Needs a budget of steps or
    minutes."""
    as_mask: Fraction = 0.8
    """Fraction of the predicted tokens that are shown as the mask token."""
    as_random: Fraction = 0.1
    """Fraction of the predicted tokens that are shown as a random token; the rest is shown unchanged."""
    unit: Unit = "token"
    """Unit chosen whole: a token, a word, one to `longest_ngram` words (ALBERT), a phrase or an entity."""
    longest_ngram: Count = 3
    """Longest run of words of unit ngram; a run of n words is drawn with probability proportional to 1/n."""
    levels: tuple[Level, ...] = ()
    """Several masking units (ERNIE), written as [{unit="token", fraction=0.5}, {unit="entity",
    fraction=0.5}]; empty: `unit` alone."""
    levels_by: Literal["mix", "stage"] = "mix"
    """mix: each sequence draws its level; stage: the levels follow each other over the run."""
    count: Literal["rounded", "stochastic"] = "rounded"
    """rounded: max(1, round(rate x length)) with special tokens counted (BERT); stochastic: rounded up or
    down at random, with the fraction as the probability of rounding up (RoBERTa)."""
    smoothing: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Exponent that favours rare tokens: a token with count n in the store is chosen with weight
    n^-smoothing; 0.7 in DistilBERT (XLM), 0 elsewhere: equal weights. For unit token."""
    random_from: Literal["vocabulary", "ordinary"] = "vocabulary"
    """vocabulary: random tokens include special tokens (BERT); ordinary: they do not (RoBERTa)."""
    masks: Literal["dynamic", "static"] = "dynamic"
    """dynamic: new examples and masks every epoch; static: `copies` fixed versions of the corpus, in turn."""
    copies: Count = 10
    """Number of fixed versions with static masks (BERT's dupe_factor)."""

    @model_validator(mode="after")
    def fractions_fit(self) -> "MaskingSection":
        if self.as_mask + self.as_random > 1 + 1e-9:
            raise RuleError(
                "masking.as_mask + masking.as_random must not exceed 1",
                keys=("masking.as_mask", "masking.as_random"),
            )
        if self.levels and abs(sum(level.fraction for level in self.levels) - 1) > 1e-6:
            raise RuleError("the fractions of masking.levels must add up to 1", keys=("masking.levels",))
        if self.smoothing and (self.unit != "token" or self.levels):
            raise RuleError(
                "masking.smoothing is for tokens that are chosen one by one",
                keys=("masking.smoothing", "masking.levels" if self.levels else "masking.unit"),
                remedy="set masking.unit to token, without masking.levels, or masking.smoothing to 0",
            )
        return self

    def rate_at(self, progress: float) -> float:
        """Return the fraction of tokens to predict at this progress of the run, from 0 to 1."""
        if self.final_rate == "rate":
            return self.rate
        return self.rate + (self.final_rate - self.rate) * progress

    @property
    def largest_rate(self) -> float:
        """The largest fraction of tokens to predict during the run."""
        return max(self.rate, self.rate_at(1.0))


class ReplacedSection(Section):
    """Replaced-token detection, for examples.objective = replaced (ELECTRA; Clark et al. 2020)."""

    generator_size: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Size of the generator as a fraction of the model's width, heads and feed-forward width: 1/4 for Small
    and Large, 1/3 for Base. It has as many layers as the model and shares its embeddings. For modernbert it
    is the fraction of the layers instead, at the same width (DeBERTaV3 takes a half)."""
    discriminator_weight: Annotated[float, Field(gt=0)] = 50.0
    """Factor of the discriminator's loss before the generator's loss is added."""


class BatchSection(Section):
    """Size of an optimisation step."""

    by: Literal["sequences", "tokens"] = "sequences"
    """sequences: as published, whatever their length; tokens: equally large steps, which is a deviation."""
    sequences: Count = 256
    """Sequences per step, over all processes."""
    tokens: Count = 131_072
    """Tokens per step, over all processes, if `by` is tokens."""
    micro_tokens: Count | Literal["auto"] = "auto"
    """Maximum tokens in one forward pass of one process; a larger step accumulates gradients."""
    ramp_from: Count | Off = "off"
    """Batch-size ramp: size of the first steps, in sequences, or in tokens if `by` is tokens. The size rises
    linearly, in multiples of this one, until step `ramp_steps` or until the second stage begins."""
    ramp_steps: Count = 1000
    """Steps of the ramp; in steps, so that the examples of a step do not depend on budget or clock."""

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
        """Sequences per step, or tokens if `by` is tokens, after any ramp."""
        return self.sequences if self.by == "sequences" else self.tokens

    def size_at(self, step: int) -> int:
        """Return the size of this step of the first stage, in sequences, or in tokens if `by` is tokens."""
        if self.ramp_from == "off" or step >= self.ramp_steps:
            return self.full_size
        multiples = -(-self.full_size // self.ramp_from)
        return min(self.full_size, self.ramp_from * -(-multiples * (step + 1) // self.ramp_steps))
