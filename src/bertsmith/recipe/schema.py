"""Every setting of a pre-training run, with its published source: frozen, complete, unknown keys rejected."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.recipe.data_sections import BatchSection, ExamplesSection, MaskingSection, ReplacedSection
from bertsmith.recipe.distill_section import DistillSection
from bertsmith.recipe.model_section import ModelSection
from bertsmith.recipe.optim_section import OPTIM_ONLY, OptimSection
from bertsmith.recipe.section import Count, Off, Only, RuleError, Section


class StartSection(Section):
    """Initial model of the run."""

    model: str = "scratch"
    """scratch, or the folder or name of a model to continue from, which replaces the model section."""
    add_words: str = "none"
    """File of words, one per line, that were added to that model's vocabulary, or none."""


class RunSection(Section):
    """Budget, precision and safety."""

    budget: Literal["steps", "tokens", "minutes"] = "steps"
    """Quantity that ends the run."""
    steps: Count = 1_000_000
    """Optimisation steps, if the budget is steps."""
    tokens: Count = 100_000_000_000
    """Tokens shown, if the budget is tokens."""
    minutes: Annotated[float, Field(gt=0)] = 60.0
    """Wall-clock minutes, if the budget is minutes; waiting between two starts does not count."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of every random number in the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """bf16: fp32 master weights with autocast; fp16: the same with loss scaling, for GPUs without bf16; auto
    is bf16 on a GPU that has it, else fp16, and fp32 on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto is on for a GPU."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Distribution over several processes: full copies, or sharded weights (FSDP2)."""
    patience_seconds: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """With several processes: seconds without news from one of them after which the run ends; it can be
    resumed. auto is 60 on the CPUs of one machine, else 300."""
    deterministic: Literal["auto", "on", "off"] = "auto"
    """Use only bitwise reproducible algorithms; auto is on for a CPU, off for a GPU (a fifth faster)."""
    recompute: bool = False
    """Gradient checkpointing: a third more work for a fraction of the memory."""
    loader_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Number of processes that build batches; the batches do not depend on it."""
    log_every_steps: Count = 10
    """Steps between two lines of metrics."""
    evaluate_every_steps: Count | Literal["auto"] = "auto"
    """Steps between two evaluations on held-out documents; auto: ten evaluations in a run, fewer in a short
    one, and one at each end."""
    evaluation_sequences: Count | Literal["auto"] = "auto"
    """Number of held-out sequences per evaluation; auto is 2,048 on a GPU and 128 on a CPU."""
    save_every_steps: Count = 1000
    """Maximum steps between two checkpoints."""
    save_every_minutes: Annotated[float, Field(gt=0)] = 15.0
    """Maximum minutes between two checkpoints."""
    keep_last: Count = 2
    """Number of checkpoints to keep on disk."""
    keep_at: tuple[Count, ...] = ()
    """Steps at which the checkpoint is kept for good."""
    average_from: Annotated[float, Field(ge=0, lt=1)] | Off = "off"
    """Use the average of the weights of all steps after this fraction of the run; off: the last ones."""
    average_decay: Annotated[float, Field(gt=0, lt=1)] | Literal["equal"] = "equal"
    """Decay per step of an exponential average; equal: an unweighted average."""
    spike_factor: Annotated[float, Field(gt=1)] | Off = "off"
    """A step is skipped if its gradient norm exceeds the running median by this factor."""
    rollback_after: Count = 10
    """Skipped steps in a row (not a number, or a spike) after which the last checkpoint is restored."""

    @model_validator(mode="after")
    def only_an_average_has_a_decay(self) -> "RunSection":
        if self.average_decay != "equal" and self.average_from == "off":
            what = "run.average_decay applies to an average, but run.average_from is off"
            keys = ("run.average_decay", "run.average_from")
            raise RuleError(what, keys=keys, remedy="use `run.average_from=0.8`, or remove it")
        return self


class Recipe(Section):
    """A complete pre-training recipe."""

    ONLY = (
        *OPTIM_ONLY,
        Only(
            ("examples.pair_weight", "examples.single_fraction"),
            "examples.pairs",
            ("nsp", "sop", "sentence-pair"),
        ),
        Only(("masking.final_rate",), "masking.masks", ("dynamic",)),
    )

    name: str = "bert-base"
    """Name of the recipe in logs and on the model card."""
    start: StartSection = StartSection()
    model: ModelSection = ModelSection()
    examples: ExamplesSection = ExamplesSection()
    masking: MaskingSection = MaskingSection()
    replaced: ReplacedSection = ReplacedSection()
    distill: DistillSection = DistillSection()
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
        if architecture.pretraining is None and self.start.model == "scratch" and not self.distill.layers:
            raise RuleError(
                f"model.type = {self.model.type} cannot start from scratch",
                keys=("model.type",),
                remedy="set start.model to a model folder to continue from",
            )
        if self.examples.sees not in architecture.directions:
            reads = architecture.directions[0]
            raise RuleError(
                f"model.type = {self.model.type} reads {reads}, so it cannot learn examples.objective = "
                f"{self.examples.objective}",
                keys=("model.type", "examples.objective"),
                remedy=f"set examples.objective to {'masked' if reads == 'both' else reads}"
                " and examples.pairs to full-sentences",
            )
        if not architecture.has_pair_head() and self.examples.pair_head != "none":
            raise RuleError(
                f"model.type = {self.model.type} does not have a head for examples.pairs = nsp or sop",
                keys=("model.type", "examples.pairs"),
                remedy="set examples.pairs to full-sentences, doc-sentences or none",
            )
        if not self.examples.masks_tokens and self.examples.pair_head != "none":
            what = "a one-sided objective does not support sentence pairs"
            remedy = "use `examples.pairs=none`"
            raise RuleError(what, keys=("examples.objective",), remedy=remedy)
        return self

    @model_validator(mode="after")
    def teacher_fits(self) -> "Recipe":
        has_teacher, distill = self.examples.has_teacher, self.distill
        if has_teacher != (distill.teacher != "none"):
            what = "requires a teacher" if has_teacher else "does not use distill.teacher"
            raise RuleError(
                f"examples.objective = {self.examples.objective} {what}",
                keys=("examples.objective", "distill.teacher"),
                remedy="set examples.objective to distilled and distill.teacher to a model, or neither",
            )
        if not has_teacher:
            return self
        if self.examples.pair_head != "none":
            raise RuleError(
                f"a student learns only masked words, but examples.pairs = {self.examples.pairs} has labels",
                keys=("examples.pairs", "examples.objective"),
                remedy="set examples.pairs to doc-sentences, full-sentences or none",
            )
        if distill.layers and self.start.model != "scratch":
            raise RuleError(
                "a student begins with layers of its teacher or with another model, not with both",
                keys=("distill.layers", "start.model"),
                remedy="remove one of them",
            )
        return self

    @model_validator(mode="after")
    def masking_rate_can_change(self) -> "Recipe":
        if self.masking.final_rate == "rate":
            return self
        if not self.examples.masks_tokens:
            raise RuleError(
                f"examples.objective = {self.examples.objective} masks nothing",
                keys=("masking.final_rate", "examples.objective"),
                remedy="remove masking.final_rate",
            )
        # Steps are built ahead, before the number of tokens in earlier steps is known.
        if self.run.budget == "tokens":
            raise RuleError(
                "masking.final_rate cannot follow run.budget = tokens",
                keys=("masking.final_rate", "run.budget"),
                remedy="set run.budget to steps or minutes",
            )
        return self

    @model_validator(mode="after")
    def generator_fits(self) -> "Recipe":
        if not self.examples.has_generator:
            return self
        pretraining = ARCHITECTURES[self.model.type].pretraining
        if pretraining is None or pretraining.generator_config is None:
            raise RuleError(
                f"model.type = {self.model.type} does not have a head for examples.objective = replaced",
                keys=("model.type", "examples.objective"),
                remedy="set model.type to electra or modernbert, or examples.objective to masked",
            )
        model = self.model.encoder_config(pretraining.vocabulary)
        generator = pretraining.generator_config(model, self.replaced.generator_size)
        if generator.width % generator.heads:
            raise RuleError(
                f"a generator of {generator.heads} heads and width {generator.width} is impossible: heads "
                "must divide the width",
                keys=("replaced.generator_size", "model.heads", "model.width"),
                remedy="choose a size that leaves whole heads: 0.25 of 4 heads, 0.3333 of 12",
            )
        return self
