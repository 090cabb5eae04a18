"""Recipe sections on distillation, in pre-training and on a task."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bertsmith.recipe.section import Count, Fraction, RuleError, Section

Weight = Annotated[float, Field(ge=0, lt=1e30)]
Relation = Literal["qk", "qq", "kk", "vv"]


class DistillSection(Section):
    """Distillation, for examples.objective = distilled; the defaults are DistilBERT's documented run (Sanh et
    al. 2019)."""

    teacher: str = "none"
    """Folder or name of the teacher, which stays frozen."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Teacher layers, counted from 0, that initialise the student, with the teacher's embeddings and MLM
    head: [0, 2, 4, 7, 9, 11] in DistilBERT. Empty: start.model or the model section defines the student."""
    segments: Literal["dropped", "kept"] = "dropped"
    """dropped: layers of a BERT become a DistilBERT, without segment embeddings; kept: they become a BERT.

    No effect on other architectures.
    """
    frozen_positions: bool = True
    """Freeze the position embeddings copied from the teacher (--freeze_pos_embs)."""
    temperature: Annotated[float, Field(gt=0, lt=1e30)] = 2.0
    """Divisor of all scores before the softmax of soft targets; the loss is multiplied by its square, which
    keeps the size of gradients."""
    soft_weight: Weight = 5.0
    """Weight of soft targets: the Kullback-Leibler divergence from the teacher's word probabilities."""
    mlm_weight: Weight = 2.0
    """Weight of the masked LM loss."""
    cosine_weight: Weight = 1.0
    """Weight of 1 - cosine of the last hidden states, through a learned projection if widths differ."""
    rows: Literal["all", "predicted"] = "all"
    """Rows that soft targets and the cosine compare: all tokens, or only the predicted ones (for soft targets
    --restrict_ce_to_mask), which is a fraction of the work."""
    hidden_weight: Weight = 0.0
    """Weight of the squared difference of hidden states: the embeddings, and each layer with the teacher's
    layer at the same relative depth, through a learned projection if widths differ (TinyBERT)."""
    attention_weight: Weight = 0.0
    """Weight of the squared difference of these layers' attention scores, before softmax (TinyBERT)."""
    relation_weight: Weight = 0.0
    """Weight of the divergence between the last layers' relations (MiniLM), for any two widths."""
    relations: tuple[Relation, ...] = ("qk", "vv")
    """Relations to compare: softmax over scaled products of queries with keys (qk: attention), or of queries,
    keys or values with themselves; MiniLM has qk and vv, MiniLMv2 qq, kk and vv."""
    relation_heads: Count | Literal["heads"] = "heads"
    """Number of heads into which queries, keys and values of both models are cut for attention_weight and
    relation_weight (MiniLMv2); heads: each model's own heads, in equal numbers."""

    @property
    def compares_heads(self) -> bool:
        """True if queries, keys or values of the two models are compared."""
        return bool(self.attention_weight or self.relation_weight)

    @model_validator(mode="after")
    def something_is_learned(self) -> "DistillSection":
        weights = ("soft_weight", "cosine_weight", "hidden_weight", "attention_weight", "relation_weight")
        if not any(getattr(self, each) for each in weights):
            raise RuleError(
                "every weight of the teacher's losses is 0",
                keys=tuple(f"distill.{each}" for each in weights),
                remedy="give one of them a value, or set examples.objective to masked",
            )
        if self.relation_weight and not self.relations:
            what = "distill.relation_weight applies to distill.relations, but the list is empty"
            raise RuleError(what, keys=("distill.relations",), remedy='for example ["qk", "vv"]')
        return self


class TaskDistillSection(Section):
    """Distillation of a fine-tuning run from models fine-tuned before; the defaults are from DistilBERT's
    question answering (run_squad_w_distillation.py).
    """

    teachers: tuple[str, ...] = ()
    """Folders of the teachers; their scores are averaged. Empty: learn from labels alone."""
    soft_weight: Fraction = 0.5
    """Weight of the teachers' scores; labels have the remaining weight."""
    temperature: Annotated[float, Field(gt=0, lt=1e30)] = 2.0
    """Divisor of scores before their softmax; predicted numbers (regression) are compared directly."""
