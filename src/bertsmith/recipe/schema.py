"""Every setting of a pre-training run, with its published source: frozen, complete, unknown keys refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Off = Literal["off"]
Unit = Literal["token", "word", "ngram", "phrase", "entity"]


class Section(BaseModel):
    """A part of a recipe; a broken rule between keys says what is wrong and, behind "; ", what to do."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


# What the config.json of a member has no word for: any other value would be lost when the model is saved.
_NO_WORD_FOR: dict[str, dict[str, Any]] = {
    "bert": {"embedding_width": "width", "task_types": 0},
    "roberta": {"embedding_width": "width", "task_types": 0},
    "albert": {"task_types": 0},
    "distilbert": {"segments": 0, "embedding_width": "width", "task_types": 0, "norm_eps": 1e-12},
    "ernie": {"embedding_width": "width"},
}


class ModelSection(Section):
    """The architecture; the defaults are BERT-Base (Devlin et al. 2018)."""

    type: Literal["bert", "roberta", "albert", "distilbert", "ernie", "electra", "modernbert"] = "bert"
    """Member of the family; electra and modernbert only go on from a model folder (start.model)."""
    layers: Count = 12
    """Transformer layers."""
    width: Count = 768
    """Width of the hidden states."""
    heads: Count = 12
    """Attention heads a layer."""
    inner: Count = 3072
    """Width inside the feed-forward layer: four times the width in every published size."""
    embedding_width: Count | Literal["width"] = "width"
    """Width of the word embeddings: 128 in ALBERT, elsewhere that of the hidden states."""
    positions: Count = 512
    """Longest sequence in tokens."""
    segments: Annotated[int, Field(ge=0)] = 2
    """Segment embeddings: 2 in BERT, 1 in RoBERTa (unused), 0 in DistilBERT."""
    task_types: Annotated[int, Field(ge=0)] = 0
    """ERNIE 2.0's task embeddings; 0 leaves them out."""
    activation: Literal["gelu", "gelu_new"] = "gelu"
    """gelu: the erf form of BERT's first release; gelu_new: the tanh form of its later code and of ALBERT."""
    dropout: Share = 0.1
    """After embeddings, attention and feed-forward."""
    attention_dropout: Share = 0.1
    """On attention probabilities."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-12
    """Inside LayerNorm: 1e-12 in BERT, 1e-5 in RoBERTa."""
    initial_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def heads_divide_width(self) -> "ModelSection":
        if self.width % self.heads:
            raise ValueError(
                f"model.heads = {self.heads} does not divide model.width = {self.width}; "
                "make the width a multiple of the heads: BERT's is 64 times as large"
            )
        return self

    @model_validator(mode="after")
    def can_be_saved(self) -> "ModelSection":
        for key, fixed in _NO_WORD_FOR.get(self.type, {}).items():
            value = getattr(self, key)
            if value != fixed and (key, value) != ("embedding_width", self.width):
                raise ValueError(
                    f"model.{key} = {value} would be lost in a saved model of model.type = {self.type}; "
                    f"set model.{key} to {fixed}"
                )
        if self.segments == 0 and self.type in ("bert", "roberta", "albert", "ernie"):
            raise ValueError(
                f"model.segments = 0 would be lost in a saved model of model.type = {self.type}; "
                "set model.segments to 1 or more"
            )
        return self


class StartSection(Section):
    """What the run begins with."""

    model: str = "scratch"
    """scratch, or a model folder to go on from: its architecture replaces the model section."""
    add_words: str = "none"
    """A file of words, one a line, that were added to that model's vocabulary, or none."""


class Stage(Section):
    """A part of the run with its own sequence length."""

    share: Annotated[float, Field(gt=0, le=1, examples=[0.9])]
    """Share of the run's steps."""
    length: Annotated[int, Field(ge=8, examples=[128])]
    """Longest sequence in tokens, special tokens counted."""
    predictions: Annotated[Count, Field(examples=[20])]
    """Most predicted tokens a sequence: 20 at 128, 77 at 512 (the published length x 0.15)."""


class ExamplesSection(Section):
    """What a sequence is made of; the defaults are BERT's (create_pretraining_data.py)."""

    objective: Literal["masked", "left-to-right", "right-to-left"] = "masked"
    """Masked LM, or one of the comparators that see one side only."""
    pairs: Literal["nsp", "sop", "full-sentences", "doc-sentences", "none"] = "nsp"
    """nsp: next-sentence pairs (BERT); sop: sentence order (ALBERT); full-sentences and doc-sentences: filled
    to the length across or within documents (RoBERTa); none: BERT's walk with one segment a sequence."""
    negative_share: Share = 0.5
    """Probability of a random second segment (nsp) or a swapped pair (sop)."""
    short_share: Share = 0.1
    """Probability that a document is walked with a random shorter target length."""
    stages: tuple[Stage, ...] = (
        Stage(share=0.9, length=128, predictions=20),
        Stage(share=0.1, length=512, predictions=77),
    )
    """Sequence lengths over the run: 90 % of the steps at 128, the last 10 % at 512 (BERT)."""
    held_out_share: Annotated[float, Field(gt=0, lt=0.5)] = 0.005
    """Share of documents kept for evaluation, chosen by a hash of their number, never trained on."""

    @model_validator(mode="after")
    def stages_cover_the_run(self) -> "ExamplesSection":
        if abs(sum(stage.share for stage in self.stages) - 1) > 1e-6:
            raise ValueError("the shares of examples.stages must add up to 1")
        return self


class Level(Section):
    """One of ERNIE's masking levels and its share of the sequences, or of the run."""

    unit: Annotated[Unit, Field(examples=["token"])]
    share: Annotated[float, Field(gt=0, le=1, examples=[0.5])]


class MaskingSection(Section):
    """Which tokens the model must guess (Devlin et al. 2018, 3.1)."""

    rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of tokens to predict."""
    as_mask: Share = 0.8
    """Of those, share shown as the mask token."""
    as_random: Share = 0.1
    """Of those, share shown as a random token; the rest is shown as it is."""
    unit: Unit = "token"
    """What is chosen whole: a token, a word, one to `longest_ngram` words (ALBERT), a phrase or an entity."""
    longest_ngram: Count = 3
    """Longest run of words of unit ngram; a run of n words is drawn with probability proportional to 1/n."""
    levels: tuple[Level, ...] = ()
    """ERNIE's several units, written as [{unit="token", share=0.5}, {unit="entity", share=0.5}]; empty means
    `unit` alone."""
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
    def shares_fit(self) -> "MaskingSection":
        if self.as_mask + self.as_random > 1 + 1e-9:
            raise ValueError("masking.as_mask + masking.as_random must not exceed 1")
        if self.levels and abs(sum(level.share for level in self.levels) - 1) > 1e-6:
            raise ValueError("the shares of masking.levels must add up to 1")
        return self


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
    """The optimiser and its schedule; the defaults are BERT's (optimization.py)."""

    algorithm: Literal["adamw", "lamb"] = "adamw"
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
    warmup_share: Share = 0.01
    """Share of the run with a rising learning rate: 10,000 of 1,000,000 steps in BERT."""
    decay: Literal["google", "continuous", "constant"] = "google"
    """google: a line from step 0 to the end, taken up after the warm-up, so the rate jumps there; continuous:
    a line from the end of the warm-up; constant: no decay."""


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
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: fp32 master weights with autocast; auto is bf16 on a GPU and fp32 on a CPU."""
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
    """How often the held-out documents are looked at; auto is ten times in a run, and at both its ends."""
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
    batch: BatchSection = BatchSection()
    optim: OptimSection = OptimSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def parts_fit(self) -> "Recipe":
        longest = max(stage.length for stage in self.examples.stages)
        if longest > self.model.positions:
            raise ValueError(
                f"examples.stages ask for {longest} tokens but model.positions = {self.model.positions}; "
                "give the model more positions or make the stages shorter"
            )
        if self.model.type in ("electra", "modernbert") and self.start.model == "scratch":
            raise ValueError(
                f"model.type = {self.model.type} cannot start from scratch; "
                "set start.model to a model folder to go on from"
            )
        if self.model.type in ("roberta", "distilbert") and self.examples.pairs in ("nsp", "sop"):
            raise ValueError(
                f"model.type = {self.model.type} has no head for examples.pairs = nsp or sop; "
                "set examples.pairs to full-sentences, doc-sentences or none"
            )
        if self.examples.objective != "masked" and self.examples.pairs in ("nsp", "sop"):
            raise ValueError("a one-sided objective has no sentence pairs; set examples.pairs to none")
        return self
