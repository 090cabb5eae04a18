"""Every setting of a pre-training run, with its published source: frozen, complete, unknown keys rejected."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from bertsmith.core.errors import UserError
from bertsmith.model.activations import ACTIVATIONS
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.encoder_config import ConfigReader, EncoderConfig

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Off = Literal["off"]
Unit = Literal["token", "word", "ngram", "phrase", "entity"]
Objective = Literal["masked", "replaced", "left-to-right", "right-to-left"]
"""What a step learns from; what each is stands in objectives/registry.py, which loads torch."""
PairHead = Literal["nsp", "sop", "none"]
Algorithm = Literal["adamw", "lamb"]
"""Optimisers; what each is and needs stands in training/optimizers.py, which loads torch."""


class RuleError(ValueError):
    """A broken rule between keys: what is wrong, the keys it is about, and what to do."""

    def __init__(self, what: str, *, keys: tuple[str, ...], remedy: str = "") -> None:
        self.what, self.keys, self.remedy = what, keys, remedy
        super().__init__(what)


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


if TYPE_CHECKING:
    ModelType = str
    Activation = str
else:  # the tables decide, so that a new architecture or activation is known here by being there
    ModelType = Literal[tuple(ARCHITECTURES)]
    Activation = Literal[tuple(ACTIVATIONS)]


class ModelSection(Section):
    """The architecture; the defaults are BERT-Base (Devlin et al. 2018)."""

    type: ModelType = "bert"
    """Architecture; modernbert, xlm-roberta, camembert and deberta-v2 only continue from a model folder
    (start.model)."""
    layers: Count = 12
    """Transformer layers."""
    width: Count = 768
    """Width of the hidden states."""
    heads: Count = 12
    """Attention heads a layer."""
    inner: Count = 3072
    """Width inside the feed-forward layer: four times the width in every published size."""
    embedding_width: Count | Literal["width"] = "width"
    """Width of the word embeddings: 128 in ALBERT and ELECTRA-Small, elsewhere that of the hidden states."""
    positions: Count = 512
    """Longest sequence in tokens."""
    segments: Annotated[int, Field(ge=0)] = 2
    """Segment embeddings: 2 in BERT, 1 in RoBERTa (unused), 0 in DistilBERT."""
    task_types: Annotated[int, Field(ge=0)] = 0
    """ERNIE 2.0's task embeddings; 0 leaves them out."""
    activation: Activation = "gelu"
    """gelu: the erf form of BERT's first release; gelu_new: the tanh form of its later code and of ALBERT;
    the others are for model folders to continue from."""
    dropout: Fraction = 0.1
    """After embeddings, attention and feed-forward."""
    attention_dropout: Fraction = 0.1
    """On attention probabilities."""
    norm_eps: Annotated[float, Field(gt=0, lt=1e30)] = 1e-12
    """Inside LayerNorm: 1e-12 in BERT, 1e-5 in RoBERTa."""
    initial_std: Annotated[float, Field(gt=0, lt=1e30)] = 0.02
    """Standard deviation of the initial weights."""
    sharing: Literal["auto", "all", "attention", "ffn", "none"] = "auto"
    """Which weights layers share, for model.type = albert (its section 4.5): whole layers, the attention or
    the feed-forward with its LayerNorm, or none; auto is all in ALBERT."""
    groups: Count = 1
    """Groups of neighbouring layers that share with each other: 1 in ALBERT, where all layers do."""

    @model_validator(mode="after")
    def heads_divide_width(self) -> "ModelSection":
        if self.width % self.heads:
            raise RuleError(
                f"model.heads = {self.heads} does not divide model.width = {self.width}",
                keys=("model.heads", "model.width"),
                remedy="make the width a multiple of the heads: BERT's is 64 times as large",
            )
        return self

    @model_validator(mode="after")
    def layers_can_share(self) -> "ModelSection":
        pretraining = ARCHITECTURES[self.type].pretraining
        can_share = pretraining is not None and pretraining.shares_layers
        if not can_share and (self.groups > 1 or self.sharing not in ("auto", "none")):
            key = "groups" if self.groups > 1 else "sharing"
            raise RuleError(
                f"model.{key} = {getattr(self, key)}, but layers of model.type = {self.type} share nothing",
                keys=(f"model.{key}", "model.type"),
                remedy="set model.type to albert",
            )
        if self.groups > self.layers:
            raise RuleError(
                f"model.groups = {self.groups} is more than model.layers = {self.layers}",
                keys=("model.groups", "model.layers"),
                remedy="make the groups fewer, or set model.sharing to none",
            )
        return self

    @model_validator(mode="after")
    def can_be_saved(self) -> "ModelSection":
        architecture = ARCHITECTURES[self.type]
        if architecture.pretraining is None:
            return self
        if self.segments < architecture.pretraining.min_segments:
            raise self._lost("segments", f"{architecture.pretraining.min_segments} or more")
        # What comes back from the config.json that would be written, which lacks some keys.
        config = self.encoder_config(architecture.pretraining.vocabulary)
        try:
            saved = architecture.read_config(ConfigReader(architecture.write_config(config), "config.json"))
        except UserError as error:  # a size beyond what any file may hold
            what = f"a saved model of model.type = {self.type} could not be opened: {error.what}"
            raise RuleError(what, keys=("model.type",), remedy=error.remedy) from error
        not_in_all = ("type", "sharing", "groups")
        for key in [each for each in type(self).model_fields if each not in not_in_all]:
            if getattr(saved, key) != getattr(config, key):
                raise self._lost(key, "width" if key == "embedding_width" else getattr(saved, key))
        return self

    def _lost(self, key: str, kept: object) -> RuleError:
        what = f"model.{key} = {getattr(self, key)} would be lost in a saved model"
        return RuleError(
            f"{what} of model.type = {self.type}",
            keys=(f"model.{key}", "model.type"),
            remedy=f"set model.{key} to {kept}",
        )

    def encoder_config(self, vocabulary: int, **own: int) -> EncoderConfig:
        """The config of a new encoder; `own` replaces what a recipe has no key for (`pad_id`)."""
        pretraining = ARCHITECTURES[self.type].pretraining
        assert pretraining is not None, "a recipe rejects what cannot start from scratch"
        values = self.model_dump(exclude={"type", "embedding_width", "sharing", "groups"}) | own
        if pretraining.shares_layers:
            values["groups"] = self.layers if self.sharing == "none" else self.groups
            values["sharing"] = "all" if self.sharing in ("auto", "none") else self.sharing
        width = self.width if self.embedding_width == "width" else self.embedding_width
        return pretraining.config_class(
            model_type=self.type, vocabulary=vocabulary, embedding_width=width, **values
        )


class StartSection(Section):
    """What the run begins with."""

    model: str = "scratch"
    """scratch, or a model to continue from, by its folder or name: it replaces the model section."""
    add_words: str = "none"
    """A file of words, one a line, that were added to that model's vocabulary, or none."""


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
    """Masked LM; replaced: tell which tokens a small masked LM made up (ELECTRA); or one of the comparators
    that see one side only."""
    pairs: Literal["nsp", "sop", "sentence-pair", "full-sentences", "doc-sentences", "none"] = "nsp"
    """nsp: next-sentence pairs of segments (BERT); sop: sentence order (ALBERT); sentence-pair: nsp of single
    sentences, full-sentences and doc-sentences: filled to the length across or within documents (all three
    RoBERTa); none: BERT's walk with one segment a sequence."""
    negative_probability: Fraction = 0.5
    """Probability of a random second segment (nsp, sentence-pair) or a swapped pair (sop)."""
    short_probability: Fraction = 0.1
    """Probability that a document is walked with a random shorter target length (nsp, sop, none)."""
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
        return self.objective in ("masked", "replaced")

    @model_validator(mode="after")
    def stages_cover_the_run(self) -> "ExamplesSection":
        if abs(sum(stage.fraction for stage in self.stages) - 1) > 1e-6:
            raise RuleError("the fractions of examples.stages must add up to 1", keys=("examples.stages",))
        return self


class Level(Section):
    """One of ERNIE's masking levels and its fraction of the sequences, or of the run."""

    unit: Annotated[Unit, Field(examples=["token"])]
    fraction: Annotated[float, Field(gt=0, le=1, examples=[0.5])]


class MaskingSection(Section):
    """Which tokens the model must predict (Devlin et al. 2018, 3.1)."""

    rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Fraction of tokens to predict."""
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
        return self


class ReplacedSection(Section):
    """Replaced-token detection, where examples.objective is replaced (ELECTRA; Clark et al. 2020)."""

    generator_size: Annotated[float, Field(gt=0, le=1)] = 0.25
    """The generator's width, heads and feed-forward width, as a fraction of the model's: 1/4 for Small and
    Large, 1/3 for Base; it has as many layers, and shares the embeddings."""
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


class OptimSection(Section):
    """The optimiser and its learning-rate schedule; the defaults are BERT's (optimization.py)."""

    algorithm: Algorithm = "adamw"
    """Adam with decoupled weight decay, or LAMB (ALBERT)."""
    peak_lr: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate at the end of the warm-up."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled; not applied to biases and LayerNorms."""
    bias_correction: bool = False
    """BERT's published code has none ("mostly an oversight"); RoBERTa has it."""
    clip_norm: Annotated[float, Field(gt=0)] | Off = 1.0
    """Largest global gradient norm."""
    warmup_fraction: Fraction = 0.01
    """Fraction of the run with a rising learning rate: 10,000 of 1,000,000 steps in BERT."""
    schedule: Literal["google", "linear", "slanted", "constant"] = "google"
    """After the warm-up. google: a line that counts from step 0, so the rate jumps where it takes over;
    linear: a line from the end of the warm-up; slanted: linear from 1/32 of the peak and back (Howard &
    Ruder 2018); constant: no decay."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Each layer's learning rate as a multiple of the one above it."""
    head_lr_factor: Annotated[float, Field(gt=0)] = 1.0
    """The heads' learning rate as a multiple of the encoder's."""

    @field_validator("schedule", mode="before")
    @classmethod
    def read_former_value(cls, schedule: object) -> object:
        """Pre-training recipes called the linear schedule continuous."""
        return "linear" if schedule == "continuous" else schedule


class RunSection(Section):
    """Budget, precision and safety."""

    budget: Literal["steps", "tokens", "minutes"] = "steps"
    """What ends the run."""
    steps: Count = 1_000_000
    """Optimisation steps, where the budget is steps."""
    tokens: Count = 100_000_000_000
    """Tokens shown, where the budget is tokens."""
    minutes: Annotated[float, Field(gt=0)] = 60.0
    """Wall-clock minutes, where the budget is minutes; waiting between two starts does not count."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Everything random follows from it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """bf16: fp32 master weights with autocast; fp16: the same with loss scaling, for GPUs without bf16; auto
    is bf16 on a GPU that has it, else fp16, and fp32 on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto is on for a GPU."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes share the work: full copies, or sharded weights (FSDP2)."""
    deterministic: Literal["auto", "on", "off"] = "auto"
    """Only algorithms that give the same bits again; auto is on for a CPU, off for a GPU (a fifth faster)."""
    recompute: bool = False
    """Gradient checkpointing: a third more work for a fraction of the memory."""
    loader_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Processes that build batches; the batches do not depend on it."""
    log_every_steps: Count = 10
    """How often metrics are written."""
    evaluate_every_steps: Count | Literal["auto"] = "auto"
    """How often the held-out documents are evaluated; auto is ten times in a run, fewer in a short one, and
    at both its ends."""
    evaluation_sequences: Count | Literal["auto"] = "auto"
    """How many held-out sequences; auto is 2,048 on a GPU and 128 on a CPU."""
    save_every_steps: Count = 1000
    """How often the resumable state is saved, at the latest."""
    save_every_minutes: Annotated[float, Field(gt=0)] = 15.0
    """How often the resumable state is saved, at the latest, by the clock."""
    keep_last: Count = 2
    """How many resumable states stay on disk."""
    keep_at: tuple[Count, ...] = ()
    """Steps whose states are never deleted."""
    spike_factor: Annotated[float, Field(gt=1)] | Off = "off"
    """A step whose gradient norm exceeds this many times the running median is skipped."""
    rollback_after: Count = 10
    """After so many skipped steps in a row (not a number, or a spike) the last saved state is taken again."""


class Recipe(Section):
    """A complete pre-training recipe."""

    name: str = "bert-base"
    """What it is called in logs and on the model card."""
    start: StartSection = StartSection()
    model: ModelSection = ModelSection()
    examples: ExamplesSection = ExamplesSection()
    masking: MaskingSection = MaskingSection()
    replaced: ReplacedSection = ReplacedSection()
    batch: BatchSection = BatchSection()
    optim: OptimSection = OptimSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def parts_fit(self) -> "Recipe":
        longest = max(stage.length for stage in self.examples.stages)
        if longest > self.model.positions:
            raise RuleError(
                f"examples.stages ask for {longest} tokens but model.positions = {self.model.positions}",
                keys=("examples.stages", "model.positions"),
                remedy="give the model more positions or make the stages shorter",
            )
        architecture = ARCHITECTURES[self.model.type]
        if architecture.pretraining is None and self.start.model == "scratch":
            raise RuleError(
                f"model.type = {self.model.type} cannot start from scratch",
                keys=("model.type",),
                remedy="set start.model to a model folder to continue from",
            )
        if not architecture.has_pair_head() and self.examples.pair_head != "none":
            raise RuleError(
                f"model.type = {self.model.type} has no head for examples.pairs = nsp or sop",
                keys=("model.type", "examples.pairs"),
                remedy="set examples.pairs to full-sentences, doc-sentences or none",
            )
        if not self.examples.masks_tokens and self.examples.pair_head != "none":
            what = "a one-sided objective has no sentence pairs"
            remedy = "set examples.pairs to none (--set examples.pairs=none)"
            raise RuleError(what, keys=("examples.objective",), remedy=remedy)
        return self

    @model_validator(mode="after")
    def generator_fits(self) -> "Recipe":
        if self.examples.objective != "replaced":
            return self
        pretraining = ARCHITECTURES[self.model.type].pretraining
        if pretraining is None or pretraining.generator_config is None:
            raise RuleError(
                f"model.type = {self.model.type} has no head for examples.objective = replaced",
                keys=("model.type", "examples.objective"),
                remedy="set model.type to electra, or examples.objective to masked",
            )
        model = self.model.encoder_config(pretraining.vocabulary)
        generator = pretraining.generator_config(model, self.replaced.generator_size)
        if generator.width % generator.heads:
            raise RuleError(
                f"a generator of {generator.heads} heads and width {generator.width} cannot be: the one does "
                "not divide the other",
                keys=("replaced.generator_size", "model.heads", "model.width"),
                remedy="choose a size that leaves whole heads: 0.25 of 4 heads, 0.3333 of 12",
            )
        return self
