"""Every setting of a fine-tuning run, with its published source: frozen, complete, unknown keys rejected."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bertsmith.recipe.distill_section import TaskDistillSection
from bertsmith.recipe.optim_section import OPTIM_ONLY, OptimSection, Schedule
from bertsmith.recipe.section import Count, Fraction, Off, Only, RuleError, Section


class TextSection(Section):
    """Conversion of texts to sequences."""

    longest: Annotated[int, Field(ge=8)] = 128
    """Longest sequence in tokens, special tokens counted: 128 for GLUE, 384 for SQuAD."""
    long_texts: Literal["truncate", "head-tail", "windows"] = "truncate"
    """Treatment of longer texts. truncate: keep the beginning (BERT); head-tail: keep beginning and end (Sun
    et al. 2019: a quarter from the front); windows: average the scores of overlapping windows."""
    step: Count = 128
    """Tokens from one window's start to the next (run_squad.py's doc_stride; others mean the overlap)."""
    longest_question: Count = 64
    """Maximum question length in tokens; longer questions are cut."""
    context: Literal["sentence", "document"] = "sentence"
    """Context of a tagged word: the sentence, or what fits of the document (Devlin et al. 2018, 5.3)."""


class HeadSection(Section):
    """The task head."""

    cls: Literal["pooled", "raw"] = "pooled"
    """Sentence vector: the pooler's output (run_classifier.py), or the last state (raw; the paper)."""
    pooling: Literal["model", "first", "mean"] = "model"
    """Vector of a sequence, before any pooler: first: the first token ([CLS]); mean: the mean of all tokens;
    model: as the model has it, which is first except for some ModernBERTs. mean is often better if
    pre-training did not train the first token; other tools support it only for ModernBERT."""
    span_over: Literal["all", "passage"] = "all"
    """Rows where an answer may begin: all (run_squad.py), or only the passage and the first token."""
    encoder: Literal["tuned", "lora", "frozen-linear", "frozen-features"] = "tuned"
    """tuned: train everything; lora: freeze the encoder and train low-rank adapters of some layers with the
    head (LoRA; Hu et al. 2021); frozen-linear: freeze it under a linear head; frozen-features: feed its
    layers to a two-layer BiLSTM, set by `features` (ELMo; Devlin et al. 2018, 5.3).
    """
    reader: Literal["linear", "bilstm"] = "linear"
    """linear: the model's own head, one linear layer over its states; bilstm: a two-layer BiLSTM over the
    layers that `features` names learns with the encoder. frozen-features always has the BiLSTM."""
    weights: Literal["fresh", "solved"] = "fresh"
    """Initial weights of the head: small random numbers (the papers), or the optimal linear head on the
    frozen encoder as the starting point of tuning (Kumar et al. 2022). frozen-linear always uses the optimal
    head.
    """
    class_weights: Literal["equal", "balanced"] = "equal"
    """balanced: classes have equal total weight, however frequent."""
    fresh_layers: Annotated[int, Field(ge=0)] = 0
    """Number of last layers to initialise anew (Zhang et al. 2021)."""

    @property
    def has_bilstm(self) -> bool:
        """True if a BiLSTM reads the states, of a frozen encoder or of one that learns."""
        return self.encoder == "frozen-features" or self.reader == "bilstm"


LayerChoice = Literal["embeddings", "second-to-last", "last", "last4", "all", "all-and-embeddings"]
"""Layers of an encoder, named as in the paper's feature-based table (Devlin et al. 2018, table 7)."""


class FeaturesSection(Section):
    """States that a BiLSTM reads (head.encoder = frozen-features, or head.reader = bilstm), and the BiLSTM;
    by default ELMo's mix of all layers."""

    layers: LayerChoice = "all-and-embeddings"
    """States of a token that are its features; all: every layer, without the embeddings."""
    combine: Literal["weighted-sum", "concat"] = "weighted-sum"
    """weighted-sum: sum the layers with learned weights (Peters et al. 2018); concat: concatenate them."""
    width: Count | Literal["model"] = "model"
    """Units of the BiLSTM in each direction; model: the encoder's width. The paper has 768."""
    layer_norm: bool = False
    """Normalise every layer's states first (Peters et al. 2018, 3.2): in a pre-norm encoder they grow from
    layer to layer."""


PUBLISHED_FEATURES = FeaturesSection(layers="last4", combine="concat", width=768)
"""The best features of the paper's table 7, its feature-based approach in table 8."""

Target = Literal["query", "key", "value", "output", "feed-forward"]


class LoraSection(Section):
    """Adapters for head.encoder = lora; the defaults are the paper's for RoBERTa on GLUE."""

    rank: Count = 8
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """Scale: the low-rank product is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of an adapter's input, in addition to the encoder's own dropout."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = ("query", "value")
    """Layers of a block with adapters; output is the attention's, feed-forward means both layers. In
    ModernBERT query, key and value are one layer, and each of the three names selects it."""
    rank_stabilized: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA; Kalajdzievski 2023)."""


class FinetuningOptimSection(OptimSection):
    """The optimiser and its learning-rate schedule, with the defaults of fine-tuning."""

    peak_lr: Annotated[float, Field(gt=0)] = 3e-5
    """Learning rate at the end of the warm-up; the paper's grid is 5e-5, 3e-5, 2e-5."""
    bias_correction: bool = True
    """Adam's bias correction; BERT's published code lacks it, which makes small data sets unstable (Mosbach
    et al. 2021)."""
    warmup_fraction: Fraction = 0.1
    """Fraction of the run with a rising learning rate."""
    schedule: Schedule = "linear"
    """After the warm-up. linear: a line to 0; google: a line counted from step 0; slanted: linear from 1/32
    of the peak and back (Howard & Ruder 2018); constant: no decay; wsd: flat until `decay_from`, then a line
    to 0; cosine: half a wave to 0."""


Rate = Annotated[float, Field(ge=0, lt=1)] | Literal["model"]


class FinetuningRunSection(Section):
    """Length, hardware and evaluation of a run."""

    epochs: Annotated[float, Field(gt=0)] = 3.0
    """Passes through the training examples; the paper's grid is 2, 3, 4."""
    minutes: Annotated[float, Field(gt=0)] | Off = "off"
    """Time limit in minutes, even if passes remain; the learning rate decays towards that end. Setting up
    counts, waiting between two starts does not."""
    examples: Count = 32
    """Examples per step; the paper's grid is 16, 32."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the head's initial weights, the order of examples and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one."""
    patience_seconds: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """With several processes: seconds without news from one of them after which the run ends; it can be
    resumed. auto is 60 on the CPUs of one machine, else 300."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """bf16: fp32 master weights with autocast; fp16: the same with loss scaling, for GPUs without bf16; auto
    is bf16 on a GPU that has it, else fp16, and fp32 on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto is on for a GPU.

    It takes up to a minute, which short runs do not win back: use off for those; their steps are recorded
    (CUDA graphs) anyway.
    """
    dropout: Rate = "model"
    """Dropout of embeddings and layers; model: from config.json, the value of pre-training.

    A model that was pre-trained without dropout is ruined by it.
    """
    attention_dropout: Rate = "model"
    """Dropout of attention probabilities; model: from config.json."""
    head_dropout: Rate = "model"
    """Dropout before the task's output layer and of the input of a BiLSTM; model: from config.json, 0 in a
    ModernBERT.
    """
    recompute: bool = False
    """Gradient checkpointing: a third more work for a fraction of the memory."""
    micro_tokens: Count | Literal["auto"] = "auto"
    """Maximum tokens in one forward pass; a larger step accumulates gradients. auto: 16,384, or 32,768 or
    65,536 on a GPU if half of its free memory is enough for it; fixed for a run once chosen."""
    evaluations: Annotated[int, Field(ge=1)] = 5
    """Number of evaluations on the development set, the final one included (run.keep uses them)."""
    keep: Literal["last", "best"] = "last"
    """last: keep the last weights (the papers); best: those with the best score on the development set, on a
    tie those with the smaller loss there."""
    patience: Count | Off = "off"
    """Evaluations in a row without improvement on the best after which the run ends (early stopping)."""
    keep_state: bool = True
    """Keep the training state of a finished run, so that the run can be lengthened (three times the model's
    size, and the best weights); runs of a study never keep it."""
    limit: Count | Off = "off"
    """Maximum examples of each split, for trying things out."""


class AnswersSection(Section):
    """Conversion of scores to answers: spans as in run_squad.py, and labels."""

    best: Count = 20
    """Number of starts and of ends to consider."""
    longest: Count = 30
    """Longest answer in tokens."""
    null_threshold: float | Literal["tuned", "off"] = "off"
    """SQuAD 2.0: a question is unanswered if null score - best span score is above this; tuned: the value
    with the best F1 on the development set; off: every question gets an answer (SQuAD 1.1).
    """
    label_thresholds: tuple[Fraction, ...] | Literal["tuned", "off"] = "off"
    """Minimum probability for giving a label (multilabel, one for each label) or the second of two classes;
    tuned: by the development set; off: 0.5, or the most likely class (the papers)."""


Part = Annotated[float, Field(ge=0, lt=1)]


class SparseSection(Section):
    """Zero weights in the layers (pruning by magnitude); embeddings, norms, biases and heads have none."""

    gradual: Annotated[float, Field(gt=0, lt=1)] | Off = "off"
    """Fraction of the weights to set to zero, the smallest first, between a tenth and seven tenths of the run
    (Zhu & Gupta 2017)."""
    keep_zeros: bool = False
    """Weights that are zero when the run begins stay zero."""
    begin_at: Part = 0.0
    """Fraction of the schedule at which a run with keep_zeros begins: with its examples and learning rate
    (rewinding; Renda et al. 2020)."""
    early_at: Part | Off = "off"
    """Fraction of the schedule at which the weights are written to early.safetensors, for later runs to
    rewind to (Frankle et al. 2020)."""

    @property
    def has_masks(self) -> bool:
        """True if some weights are zero."""
        return self.keep_zeros or self.gradual != "off"


SPARSE = ("sparse.gradual", "sparse.keep_zeros", "sparse.early_at")


class FinetuningRecipe(Section):
    """A complete fine-tuning recipe."""

    ONLY = (
        *OPTIM_ONLY,
        Only(("run.patience",), "run.keep", ("best",)),
        Only(tuple(f"lora.{key}" for key in LoraSection.model_fields), "head.encoder", ("lora",)),
        Only(
            ("run.recompute", "run.dropout", "run.attention_dropout"),
            "head.encoder",
            ("tuned", "lora"),
        ),
        Only(("head.reader",), "head.encoder", ("tuned",)),
        Only(
            ("head.cls", "head.fresh_layers", "head.pooling", "head.weights", *SPARSE),
            "head.reader",
            ("linear",),
        ),
        Only(SPARSE, "head.encoder", ("tuned",)),
        Only(SPARSE, "run.minutes", ("off",)),  # which weights go follows from the number of steps
        # The best weights may be some of before the pruning.
        Only(("sparse.gradual",), "run.keep", ("last",)),
        Only(("sparse.begin_at",), "sparse.keep_zeros", (True,)),
    )

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
    sparse: SparseSection = SparseSection()

    @model_validator(mode="after")
    def only_a_bilstm_has_features(self) -> "FinetuningRecipe":
        # Tasks bring the published features along, even if they are not used.
        idle = self.features in (FeaturesSection(), PUBLISHED_FEATURES)
        if not (self.head.has_bilstm or idle):
            key = next(name for name, value in self.features if value != getattr(FeaturesSection(), name))
            what = (
                f"head.encoder = {self.head.encoder} does not read features, so features.{key} does not apply"
            )
            remedy = "use `head.encoder=frozen-features` or `head.reader=bilstm`"
            raise RuleError(what, keys=(f"features.{key}", "head.encoder"), remedy=remedy)
        return self

    @model_validator(mode="after")
    def windows_overlap(self) -> "FinetuningRecipe":
        step, longest = self.text.step, self.text.longest
        if self.text.long_texts == "windows" and step >= longest:
            what = f"text.step = {step} is not below text.longest = {longest}: windows would not overlap"
            raise RuleError(
                what, keys=("text.step", "text.longest"), remedy=f"use `text.step={longest // 2}`"
            )
        return self
