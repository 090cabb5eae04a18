"""Distillation: a student predicts masked words and learns from a teacher's outputs for the same batch.

Soft targets, masked words and the cosine of the last states are DistilBERT's (Sanh et al. 2019); matched
hidden states and attention scores TinyBERT's (Jiao et al. 2019); relations of the last layer MiniLM's (Wang
et al. 2020). Each loss is a sum over rows, divided by a global count of them.

Shapes: T packed tokens, P predicted rows, R rows that count (all T or the predicted ones), D model width, H
heads, K head width, V vocabulary, C counts.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.core.measures import Declaration, LossTerm, Metric, mean, mean_loss
from bertsmith.core.seeds import key_of
from bertsmith.data.collate import WORD_FIELDS, PretrainingBatch
from bertsmith.model.attention.projection import Vectors
from bertsmith.model.attention.rule import AttentionRule
from bertsmith.model.attention.watched import shown
from bertsmith.model.encoder import WordView
from bertsmith.model.encoder_config import EncoderConfig, PassSize, need
from bertsmith.model.flops import flops_per_step
from bertsmith.model.network import Network
from bertsmith.model.transformer.transformer_config import with_heads
from bertsmith.objectives import masked_language_modelling as mlm
from bertsmith.objectives.distillation_losses import (
    Projections,
    attention_losses,
    cosine_losses,
    in_sequences,
    relation_losses,
    state_losses,
)
from bertsmith.objectives.linear_cross_entropy import word_sums
from bertsmith.objectives.pretraining_objective import PretrainingObjective, weighted_sums
from bertsmith.packed import ALL, Layout, PackedBatch, Rows
from bertsmith.recipe.distill_section import DistillSection
from bertsmith.recipe.schema import Recipe
from bertsmith.training.soft_targets import soft_losses

LOSSES = ("soft", "mlm", "cosine", "hidden", "attention", "relation")
"""Names of the losses, in the order of their weights in the recipe."""


@dataclass
class Pass:
    """Outputs of one network for a batch, to compare with the other network's."""

    last_RD: Tensor
    states: list[Tensor] = field(default_factory=list)
    """Compared states, of the embeddings and of each layer [T, D]."""
    projections: dict[int, Projections] = field(default_factory=dict)
    """Projections of the layers with compared attention, by their numbers from 0."""


class Distillation(PretrainingObjective):
    """A student with its teacher; the teacher is not trained."""

    def __init__(self, network: Network, teacher: Network, distill: DistillSection, *, seed: int = 0) -> None:
        super().__init__(network, measures(distill))
        # In a tuple, which hides it from torch's search for modules: optimisers do not train it, checkpoints
        # do not contain it, and processes do not shard it. The caller has already moved it to the run's
        # device.
        self._asked = (teacher.eval().requires_grad_(False),)
        self.distill = distill
        ours, theirs = network.config, teacher.config
        self.depths = matching_depths(ours.layers, theirs.layers)
        self.heads = 0
        if distill.compares_heads:
            wanted = distill.relation_heads
            self.heads = with_heads(theirs).heads if wanted == "heads" else wanted
        self.project: nn.Module = nn.Identity()
        if ours.width != theirs.width and (distill.cosine_weight or distill.hidden_weight):
            self.project = nn.Linear(ours.width, theirs.width, bias=False)
            stream = torch.Generator().manual_seed(key_of(seed, "projection to the teacher"))
            nn.init.normal_(self.project.weight, 0.0, ours.width**-0.5, generator=stream)

    @property
    def teacher(self) -> Network:
        """The teacher network."""
        return self._asked[0]

    def flops(self, tokens: int, sequences: int, predicted: int) -> float:
        """Return the operations of training the student and of running the teacher."""
        everywhere = self.distill.rows == "all" and self.distill.soft_weight > 0
        size = PassSize(tokens, sequences, tokens if everywhere else predicted)
        return flops_per_step([self.network], size, teacher=self.teacher)

    def summed(self, batch: PretrainingBatch) -> dict[str, Tensor]:
        """Return the losses with weights, and the counts of right and equal predictions of words."""
        everywhere, inputs = self.distill.rows == "all", batch.inputs
        rows = ALL if everywhere else batch["masked_rows_P"]
        ours = self._pass(self.network, inputs, rows)
        with torch.no_grad():
            theirs = self._pass(self.teacher, inputs, rows)
        weights_T = (torch.arange(len(inputs.tokens_T), device=batch.end_1.device) < batch.end_1).float()
        weights_R = weights_T if everywhere else batch["masked_weights_P"]
        sums = self._words(batch, ours, theirs, weights_R)
        if self.distill.cosine_weight:
            cosine_R = cosine_losses(self.project(ours.last_RD), theirs.last_RD)
            sums["cosine_loss"] = (cosine_R * weights_R).sum()
        return sums | self._layers(inputs.layout, ours, theirs, weights_T)

    def _pass(self, network: Network, inputs: PackedBatch, rows: Rows) -> Pass:
        """Return a network's outputs for a batch at the rows that count, and the rest to compare."""
        distill, encoder = self.distill, network.encoder
        last = encoder.layers - 1
        wanted = {last} if distill.relation_weight else set()
        if distill.attention_weight:
            wanted |= {depth - 1 for depth in self._depths_of(network) if depth}
        kept: dict[int, Projections] = {}

        def see(layer: int, vectors: Vectors, _rule: AttentionRule) -> None:
            if layer in wanted:
                kept[layer] = Projections(*vectors).in_heads(self.heads)

        heads = need(encoder.heads, "attention heads") if wanted else None
        if distill.hidden_weight:
            states = heads.hidden_states(inputs, shown(see)) if heads else encoder.hidden_states(inputs)
            return Pass(states[-1][rows], states, kept)
        if heads:
            return Pass(heads.last_states(inputs, shown(see), rows), [], kept)
        return Pass(encoder(inputs, rows=rows), [], kept)

    def _depths_of(self, network: Network) -> list[int]:
        """Return the depths of a network's compared states, 0 for its embeddings."""
        which = 1 if network is self.teacher else 0
        return [pair[which] for pair in self.depths]

    def _words(
        self, batch: PretrainingBatch, ours: Pass, theirs: Pass, weights_R: Tensor
    ) -> dict[str, Tensor]:
        """Return the losses of predicted words, the right predictions of each network, and the equal ones."""
        everywhere, rows_P, ids_P = self.distill.rows == "all", batch["masked_rows_P"], batch["masked_ids_P"]
        weights_P, network = batch["masked_weights_P"], self.network
        if not self.distill.soft_weight:
            last_PD = ours.last_RD[rows_P] if everywhere else ours.last_RD
            token_loss, hits = word_sums(network, last_PD, ids_P, weights_P)
            return {"token_loss": token_loss, "token_hits": hits}
        ours_RV = network.scores_of_words(ours.last_RD)
        with torch.no_grad():
            theirs_RV = self.teacher.scores_of_words(theirs.last_RD)
        soft_R = soft_losses(ours_RV, theirs_RV, self.distill.temperature)
        ours_PV, theirs_PV = (ours_RV[rows_P], theirs_RV[rows_P]) if everywhere else (ours_RV, theirs_RV)
        token_loss, hits = weighted_sums(ours_PV, ids_P, weights_P)
        best_P, theirs_best_P = ours_PV.detach().argmax(-1), theirs_PV.argmax(-1)
        known, agreed = (
            (each * weights_P).sum() for each in (theirs_best_P == ids_P, theirs_best_P == best_P)
        )
        told = {"token_hits": hits, "teacher_hits": known, "agreements": agreed}
        return {"token_loss": token_loss, "soft_loss": (soft_R * weights_R).sum(), **told}

    def _layers(self, layout: Layout, ours: Pass, theirs: Pass, weights_T: Tensor) -> dict[str, Tensor]:
        """Return the losses of hidden states, attention scores and relations that the recipe requires."""
        found: dict[str, list[Tensor]] = {}
        if self.distill.hidden_weight:
            found["hidden"] = [
                state_losses(self.project(ours.states[depth]), theirs.states[other]) * weights_T
                for depth, other in self.depths
            ]
        if self.distill.compares_heads:
            weights_SN = in_sequences(weights_T, layout)
        if self.distill.attention_weight:
            layers = (
                (ours.projections[one - 1], theirs.projections[two - 1]) for one, two in self.depths[1:]
            )
            found["attention"] = [attention_losses(*each, layout) * weights_SN for each in layers]
        if self.distill.relation_weight:
            last = ours.projections[max(ours.projections)], theirs.projections[max(theirs.projections)]
            relations = self.distill.relations
            found["relation"] = [relation_losses(*last, layout, each) * weights_SN for each in relations]
        return {
            f"{name}_loss": torch.stack([each.sum() for each in parts]).sum() for name, parts in found.items()
        }


def sum_of(loss: str) -> str:
    """Return the name of a loss's sum; masked words have the same name as in other objectives."""
    return f"{'token' if loss == 'mlm' else loss}_loss"


def measures(distill: DistillSection) -> Declaration:
    """Declare the losses that have weights, and the fraction of masked words that both predict alike."""
    rows = "tokens" if distill.rows == "all" else "masked"
    over = {"mlm": "masked", "soft": rows, "cosine": rows}
    weights = {name: getattr(distill, f"{name}_weight") for name in LOSSES}
    # Masked words count with a weight of 0, too: distributed runs need a gradient for every weight.
    terms = tuple(
        LossTerm(sum_of(name), over.get(name, "tokens"), weight)
        for name, weight in weights.items()
        if weight or name == "mlm"
    )
    losses = {each.sum: mean_loss(each.sum, each.over) for each in terms}
    word_loss, *words = mlm.WORD_METRICS
    declared = Declaration(
        terms,
        ("token_hits",),
        (*(losses | {"token_loss": word_loss}).values(), *words),
        "token_loss",
        # A student that only compares states does not learn words.
        "unigram" if distill.soft_weight or distill.mlm_weight else None,
        WORD_FIELDS,
    )
    if not distill.soft_weight:
        return declared
    right = Metric("teacher_accuracy", of=mean("teacher_hits", "masked"))
    same = Metric("teacher_agreement", of=mean("agreements", "masked"), short="as the teacher")
    return declared + Declaration((), ("teacher_hits", "agreements"), (right, same))


def matching_depths(ours: int, theirs: int) -> list[tuple[int, int]]:
    """Return the states to compare: the embeddings' (0), and each layer's with the teacher's at the same
    fraction.

    A student's layer m of M has the teacher's layer m x N / M of N (TinyBERT).
    """
    return [(depth, int(depth * theirs / ours + 0.5)) for depth in range(ours + 1)]


def check_reads_masks(network: Network) -> None:
    """Raise if a student or teacher does not predict a word at its mask."""
    if network.encoder.word_views() != (WordView(),):
        what = (
            "a student and its teacher are compared at masked words, but one of them predicts words elsewhere"
        )
        raise UserError(what, key="distill.teacher", remedy="use models that were trained with masks")


def check_comparable(student: EncoderConfig, teacher: EncoderConfig, distill: DistillSection) -> None:
    """Raise if these two models cannot be compared as the recipe requires."""
    if not distill.compares_heads:
        return
    key, student, teacher = "distill.relation_heads", with_heads(student), with_heads(teacher)
    if not (student.plain_attention and teacher.plain_attention):
        what = "a DeBERTa's attention is not a product of only queries and keys"
        remedy = "set `distill.attention_weight` and `distill.relation_weight` to 0"
        raise UserError(what, key="distill.relation_weight", remedy=remedy)
    if student.layer_heads or teacher.layer_heads:
        what = "a model with pruned heads cannot be compared with another model's heads"
        remedy = "set `distill.attention_weight` and `distill.relation_weight` to 0"
        raise UserError(what, key="distill.relation_weight", remedy=remedy)
    if distill.relation_heads == "heads":
        if student.heads != teacher.heads:
            what = f"the student has {student.heads} heads, but the teacher has {teacher.heads}"
            remedy = f"set `{key}` to a number that divides {student.width} and {teacher.width}"
            raise UserError(what, key=key, remedy=remedy)
    elif student.width % distill.relation_heads or teacher.width % distill.relation_heads:
        what = f"{distill.relation_heads} does not divide the widths {student.width} and {teacher.width}"
        raise UserError(what, key=key, remedy="give a number that divides both")


def summary(recipe: Recipe) -> str:
    """Describe the objective, for the card."""
    return f"distilled; {_weighed(recipe)}; {mlm.summary(recipe)}"


def choices(recipe: Recipe) -> list[str]:
    """Describe the weights of the losses, the rows that count, and the student's initial weights."""
    layers = recipe.distill.layers
    lines = [f"distillation: {_weighed(recipe)}"]
    if layers:
        lines.append(f"the student begins with the teacher's layers {', '.join(map(str, layers))}")
    return lines


def _weighed(recipe: Recipe) -> str:
    distill = recipe.distill
    terms = [
        f"{getattr(distill, f'{name}_weight'):g} x {name}"
        for name in LOSSES
        if getattr(distill, f"{name}_weight")
    ]
    where = "every token" if distill.rows == "all" else "predicted tokens"
    return f"loss = {' + '.join(terms)}, at a temperature of {distill.temperature:g}, at {where}"


def heads_of(_: Recipe) -> dict[str, int]:
    """Return the student's head."""
    return {"mlm": 0}


def build(network: Network, teacher: Network | None, recipe: Recipe) -> Distillation:
    """Build the recipe's objective over a student and its teacher."""
    assert teacher is not None
    check_reads_masks(network)
    return Distillation(network, teacher, recipe.distill, seed=recipe.run.seed)
