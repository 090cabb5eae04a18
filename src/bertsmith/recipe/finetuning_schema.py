"""Every setting of a fine-tuning run, with its published source: frozen, complete, unknown keys rejected."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bertsmith.recipe.distill_section import TaskDistillSection
from bertsmith.recipe.optim_section import OptimSection, Schedule
from bertsmith.recipe.section import Count, Fraction, Off, RuleError, Section


class TextSection(Section):
    """How texts become sequences."""

    longest: Annotated[int, Field(ge=8)] = 128
    """Longest sequence in tokens, special tokens counted: 128 for GLUE, 384 for SQuAD."""
    long_texts: Literal["truncate", "head-tail", "windows"] = "truncate"
    """What becomes of longer texts: their beginning (BERT), beginning and end (Sun et al. 2019: a quarter
    from the front), or overlapping windows whose scores are averaged."""
    step: Count = 128
    """Tokens between the beginnings of two windows (run_squad.py's doc_stride; others mean the overlap)."""
    longest_question: Count = 64
    """A question is cut to so many tokens."""
    context: Literal["sentence", "document"] = "sentence"
    """What a tagged word sees: its sentence, or as much of its document as fits (Devlin et al. 2018, 5.3)."""


class HeadSection(Section):
    """What stands on the encoder."""

    cls: Literal["pooled", "raw"] = "pooled"
    """The sentence's vector: through the pooler (run_classifier.py), or the last state (the paper)."""
    pooling: Literal["model", "first", "mean"] = "model"
    """What stands for a sequence, before the pooler where there is one: its first token ([CLS]), the mean of
    all, or what the model has, which is the first but for some ModernBERTs. The mean is often better where no
    pre-training taught the first token anything; of others' tools, only ModernBERT's know it."""
    span_over: Literal["all", "passage"] = "all"
    """Where an answer may begin: anywhere (run_squad.py), or in the passage and at the first token only."""
    encoder: Literal["tuned", "lora", "frozen-linear", "frozen-features"] = "tuned"
    """Everything is tuned; or the encoder stays as it is, and low-rank adapters of some of its layers learn
    with the head (LoRA; Hu et al. 2021); or it stays as it is under a linear head; or its layers are the
    features of a two-layer BiLSTM, as `features` says (ELMo; Devlin et al. 2018, 5.3)."""
    weights: Literal["fresh", "solved"] = "fresh"
    """The head's first weights: small random numbers (the papers), or the optimal linear head on the frozen
    encoder, from which tuning starts (Kumar et al. 2022). frozen-linear always takes the optimal ones."""
    class_weights: Literal["equal", "balanced"] = "equal"
    """balanced: each class weighs as much as any other, however frequent."""
    fresh_layers: Annotated[int, Field(ge=0)] = 0
    """So many of the last layers begin anew (Zhang et al. 2021)."""


LayerChoice = Literal["embeddings", "second-to-last", "last", "last4", "all", "all-and-embeddings"]
"""Layers of an encoder, as the feature-based table of the paper names them (Devlin et al. 2018, table 7)."""


class FeaturesSection(Section):
    """What head.encoder = frozen-features reads, and with what; by default ELMo's mix of all there is."""

    layers: LayerChoice = "all-and-embeddings"
    """Which states of a token are its features; all: those of every layer, without the embeddings."""
    combine: Literal["weighted-sum", "concat"] = "weighted-sum"
    """Several layers are summed with weights that are learned (Peters et al. 2018), or stand side by side."""
    width: Count | Literal["model"] = "model"
    """Units of the BiLSTM in each direction; model: the encoder's width. The paper has 768."""
    layer_norm: bool = False
    """Normalise every layer's states first (Peters et al. 2018, 3.2): where the encoder normalises before its
    sub-layers, they grow from layer to layer."""


PUBLISHED_FEATURES = FeaturesSection(layers="last4", combine="concat", width=768)
"""The best of the paper's table 7, which its table 8 takes as the feature-based approach."""

Target = Literal["query", "key", "value", "output", "feed-forward"]


class LoraSection(Section):
    """The adapters of head.encoder = lora; the defaults are those of the paper for RoBERTa on GLUE."""

    rank: Count = 8
    """How many rows A and columns B have."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The low-rank product is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of what goes into an adapter, on top of the encoder's own dropout."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = ("query", "value")
    """Which layers of a block have adapters; output is that of the attention, feed-forward both of its
    layers. Where query, key and value are one layer (ModernBERT), each of the three names it."""
    rank_stabilized: bool = False
    """Multiply by alpha / the square root of the rank instead (rsLoRA; Kalajdzievski 2023)."""


class FinetuningOptimSection(OptimSection):
    """The optimiser and its learning-rate schedule, with the defaults of fine-tuning."""

    peak_lr: Annotated[float, Field(gt=0)] = 3e-5
    """Learning rate at the end of the warm-up; the paper's grid is 5e-5, 3e-5, 2e-5."""
    bias_correction: bool = True
    """BERT's published code has none, which makes small data sets unstable (Mosbach et al. 2021)."""
    warmup_fraction: Fraction = 0.1
    """Fraction of the run with a rising learning rate."""
    schedule: Schedule = "linear"
    """After the warm-up: a line to 0; Google's line from step 0; slanted triangular from 1/32 of the peak and
    back (Howard & Ruder 2018); none (constant); flat until `decay_from`, then a line to 0 (wsd); cosine."""


Rate = Annotated[float, Field(ge=0, lt=1)] | Literal["model"]


class FinetuningRunSection(Section):
    """How long, where and how carefully."""

    epochs: Annotated[float, Field(gt=0)] = 3.0
    """Passes through the training examples; the paper's grid is 2, 3, 4."""
    minutes: Annotated[float, Field(gt=0)] | Off = "off"
    """After these minutes the run takes no more steps, even if passes remain; the learning rate decays
    towards that end. Setting up counts, waiting between two starts does not."""
    examples: Count = 32
    """Examples a step; the paper's grid is 16, 32."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Decides the head's first weights, the order of examples and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU where there is one."""
    patience_seconds: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """With several processes: the run ends, and can be resumed, when one of them is silent for so long; auto
    is 60 on the CPUs of one machine, else 300."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """bf16: fp32 master weights with autocast; fp16: the same with loss scaling, for GPUs without bf16; auto
    is bf16 on a GPU that has it, else fp16, and fp32 on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto is on for a GPU. It takes up to a minute, which few steps do not win back: off is
    for these, whose steps are recorded all the same."""
    dropout: Rate = "model"
    """Dropout of embeddings and layers; model: what config.json says, which is what it was pre-trained with,
    for a model that was trained without dropout is ruined by it."""
    attention_dropout: Rate = "model"
    """Dropout of attention probabilities; model: what config.json says."""
    head_dropout: Rate = "model"
    """Dropout before the task's output layer, and of what a BiLSTM over frozen layers reads; model: what
    config.json says, which is 0 in a ModernBERT."""
    recompute: bool = False
    """Gradient checkpointing: a third more work for a fraction of the memory."""
    micro_tokens: Count | Literal["auto"] = "auto"
    """Most tokens in one forward pass; a step above it accumulates gradients. auto is 16,384 and, on a GPU of
    whose free memory half is enough for it, 32,768 or 65,536; a run keeps what it began with."""
    evaluations: Annotated[int, Field(ge=1)] = 5
    """How often the development set is evaluated, the end included; what is kept says run.keep."""
    keep: Literal["last", "best"] = "last"
    """Which weights are kept: the last (the papers), or those that did best on the development set; of equals
    those with the smaller loss there."""
    patience: Count | Off = "off"
    """The run ends after so many evaluations in a row that were not better than the best one before."""
    keep_state: bool = True
    """Whether a finished run keeps the state that it takes to lengthen it (three times the model's size, and
    the best weights); the runs of a study never do."""
    limit: Count | Off = "off"
    """So many examples of each split at most, to try things out."""


class AnswersSection(Section):
    """How scores become answers: spans as in run_squad.py, and labels."""

    best: Count = 20
    """Starts and ends that are considered."""
    longest: Count = 30
    """Longest answer in tokens."""
    null_threshold: float | Literal["tuned", "off"] = "off"
    """SQuAD 2.0: no answer where null score - best span score is above it; tuned: the value that gives the
    best F1 on the development set; off: every question gets an answer (SQuAD 1.1)."""
    label_thresholds: tuple[Fraction, ...] | Literal["tuned", "off"] = "off"
    """Texts: from which probability on a label is given (multilabel, one for each label), or the second of
    two classes; tuned: by the development set; off: from 0.5 on, or whichever is likeliest (the papers)."""


class FinetuningRecipe(Section):
    """A complete fine-tuning recipe."""

    task: str
    """The task's name."""
    text: TextSection = TextSection()
    head: HeadSection = HeadSection()
    lora: LoraSection = LoraSection()
    features: FeaturesSection = FeaturesSection()
    optim: FinetuningOptimSection = FinetuningOptimSection()
    run: FinetuningRunSection = FinetuningRunSection()
    answers: AnswersSection = AnswersSection()
    distill: TaskDistillSection = TaskDistillSection()

    @model_validator(mode="after")
    def patience_keeps_the_best(self) -> "FinetuningRecipe":
        if self.run.patience != "off" and self.run.keep == "last":
            what = "run.patience waits for better weights, and run.keep = last would drop them"
            raise RuleError(what, keys=("run.patience", "run.keep"), remedy="--set run.keep=best")
        return self

    @model_validator(mode="after")
    def only_lora_has_adapters(self) -> "FinetuningRecipe":
        if self.head.encoder != "lora" and self.lora != LoraSection():
            key = next(name for name, value in self.lora if value != getattr(LoraSection(), name))
            what = f"head.encoder = {self.head.encoder} has no adapters, and lora.{key} is about them"
            raise RuleError(what, keys=(f"lora.{key}", "head.encoder"), remedy="--set head.encoder=lora")
        return self

    @model_validator(mode="after")
    def only_frozen_features_have_layers(self) -> "FinetuningRecipe":
        # A task brings the published ones along, whether they are asked for or not.
        idle = self.features in (FeaturesSection(), PUBLISHED_FEATURES)
        if self.head.encoder != "frozen-features" and not idle:
            key = next(name for name, value in self.features if value != getattr(FeaturesSection(), name))
            what = f"head.encoder = {self.head.encoder} reads no features, and features.{key} is about them"
            remedy = "--set head.encoder=frozen-features"
            raise RuleError(what, keys=(f"features.{key}", "head.encoder"), remedy=remedy)
        return self

    @model_validator(mode="after")
    def only_an_encoder_that_learns_recomputes(self) -> "FinetuningRecipe":
        if self.run.recompute and self.head.encoder not in ("tuned", "lora"):
            what = f"head.encoder = {self.head.encoder} keeps nothing of its layers that could be recomputed"
            raise RuleError(what, keys=("run.recompute", "head.encoder"), remedy="--set run.recompute=false")
        return self

    @model_validator(mode="after")
    def only_an_encoder_that_learns_drops_out(self) -> "FinetuningRecipe":
        for key in ("dropout", "attention_dropout"):
            if getattr(self.run, key) != "model" and self.head.encoder not in ("tuned", "lora"):
                what = (
                    f"head.encoder = {self.head.encoder} stays as it is, and run.{key} is about its training"
                )
                raise RuleError(what, keys=(f"run.{key}", "head.encoder"), remedy=f"leave run.{key} out")
        return self

    @model_validator(mode="after")
    def windows_overlap(self) -> "FinetuningRecipe":
        step, longest = self.text.step, self.text.longest
        if self.text.long_texts == "windows" and step >= longest:
            what = f"text.step = {step} is not below text.longest = {longest}: windows would not overlap"
            raise RuleError(
                what, keys=("text.step", "text.longest"), remedy=f"--set text.step={longest // 2}"
            )
        return self
