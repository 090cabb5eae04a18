"""The sections of recipes that say what a student learns from its teacher: of text, and of a task."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bertsmith.recipe.section import Count, Fraction, RuleError, Section

Weight = Annotated[float, Field(ge=0, lt=1e30)]
Relation = Literal["qk", "qq", "kk", "vv"]


class DistillSection(Section):
    """Distillation, where examples.objective is distilled; the defaults are DistilBERT's documented run
    (Sanh et al. 2019)."""

    teacher: str = "none"
    """The model that is learned from, by its folder or name; it does not learn."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The teacher's layers, counted from 0, that the student begins with, with the teacher's embeddings and
    MLM head: [0, 2, 4, 7, 9, 11] in DistilBERT. Empty: start.model and the model section say what it is."""
    segments: Literal["dropped", "kept"] = "dropped"
    """dropped: of a BERT's layers a DistilBERT is made, which has no segment embeddings; kept: it stays a
    BERT. Other architectures stay what they are."""
    frozen_positions: bool = True
    """Whether the position table that comes from the teacher stays as it is (--freeze_pos_embs)."""
    temperature: Annotated[float, Field(gt=0, lt=1e30)] = 2.0
    """What all scores are divided by before the softmax of soft targets; their loss is multiplied by its
    square, so that gradients keep their size."""
    soft_weight: Weight = 5.0
    """Of the teacher's soft targets: the Kullback-Leibler divergence from its predictions of words."""
    mlm_weight: Weight = 2.0
    """Of the masked words themselves."""
    cosine_weight: Weight = 1.0
    """Of 1 - the cosine between both last hidden states, through a learned projection where widths differ."""
    rows: Literal["all", "predicted"] = "all"
    """Where soft targets and the cosine count: at every token, or at the predicted ones only (as soft targets
    with --restrict_ce_to_mask), which is a fraction of the work."""
    hidden_weight: Weight = 0.0
    """Of the squared difference of hidden states, of the embeddings and of every layer with one of the
    teacher's at the same depth, through a learned projection where widths differ (TinyBERT)."""
    attention_weight: Weight = 0.0
    """Of the squared difference of the attention scores of the same layers, before the softmax (TinyBERT)."""
    relation_weight: Weight = 0.0
    """Of the divergence between the last layers' relations (MiniLM), which know no width."""
    relations: tuple[Relation, ...] = ("qk", "vv")
    """Which relations: softmax over scaled products of queries with keys (attention), queries, keys or values
    with themselves; MiniLM has qk and vv, MiniLMv2 qq, kk and vv."""
    relation_heads: Count | Literal["heads"] = "heads"
    """Into how many heads both models' queries, keys and values are cut for attention_weight and
    relation_weight (MiniLMv2); heads: into their own, of which both must have as many."""

    @property
    def compares_heads(self) -> bool:
        """Whether queries, keys or values of both models are compared."""
        return bool(self.attention_weight or self.relation_weight)

    @model_validator(mode="after")
    def something_is_learned(self) -> "DistillSection":
        weights = ("soft_weight", "cosine_weight", "hidden_weight", "attention_weight", "relation_weight")
        if not any(getattr(self, each) for each in weights):
            raise RuleError(
                "every weight of what a teacher says is 0",
                keys=tuple(f"distill.{each}" for each in weights),
                remedy="give one of them a value, or set examples.objective to masked",
            )
        if self.relation_weight and not self.relations:
            what = "distill.relation_weight is of distill.relations, and there are none"
            raise RuleError(what, keys=("distill.relations",), remedy='as in ["qk", "vv"]')
        return self


class TaskDistillSection(Section):
    """What a fine-tuning run learns from models that were fine-tuned before; the defaults are those of
    DistilBERT's question answering (run_squad_w_distillation.py)."""

    teachers: tuple[str, ...] = ()
    """Their folders; of several, the mean score is learned from. Empty: labels alone."""
    soft_weight: Fraction = 0.5
    """Of the teachers' scores; the labels have the rest."""
    temperature: Annotated[float, Field(gt=0, lt=1e30)] = 2.0
    """What scores are divided by before their softmax; numbers are compared as they are."""
