"""Masked language modelling with sentence pairs (BERT, ALBERT), without them, or with one side only.

Shapes: P predicted rows, S sequences, R = P + S, D model width, V vocabulary, C counts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.measures import (
    Declaration,
    LossTerm,
    Metric,
    Totals,
    Value,
    answers,
    bits,
    mean,
    mean_loss,
    perplexity,
)
from bertsmith.data.collate import PAIR_FIELDS, WORD_FIELDS, PretrainingBatch
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.network import Network
from bertsmith.objectives.linear_cross_entropy import word_sums
from bertsmith.objectives.pretraining_objective import PretrainingObjective, weighted_sums
from bertsmith.recipe.data_sections import PairHead, Unit
from bertsmith.recipe.schema import Recipe

CHOSEN: dict[Unit, str] = {
    "token": "chosen one by one",
    "word": "chosen as whole words",
    "ngram": "chosen as runs of words",
    "phrase": "chosen as whole phrases",
    "entity": "chosen as whole entities",
}


def _of_nats(total: str, value: Callable[[float, float], float]) -> Value:
    """Return a function of the loss per token and of a total that only evaluations have."""

    def found(totals: Totals) -> float | None:
        nats = mean("token_loss", "masked")(totals)
        return None if nats is None or total not in totals else value(nats, totals[total])

    return found


_PERPLEXITY = _of_nats("sequences", lambda nats, _: perplexity(nats))
_BITS = _of_nats("tokens_per_character", lambda nats, tokens: bits(nats) * tokens)
_LOSS, _RIGHT = "Predicted words: loss in nats", "Predicted words: guessed right"
_SMALLER: dict[str, Any] = {"larger_is_better": False, "fixed": True}
WORD_METRICS = (
    mean_loss("token_loss", "masked", panel=_LOSS, level="unigram", fixed=True),
    Metric("token_accuracy", of=mean("token_hits", "masked"), short="words", panel=_RIGHT, fixed=True),
    Metric("perplexity", of=_PERPLEXITY, unit="number", **_SMALLER),
    Metric("bits_per_character", of=_BITS, unit="bits", short="bits/character", **_SMALLER),
)


def declare_words(metrics: tuple[Metric, ...] = WORD_METRICS) -> Declaration:
    """Return the declaration of predicted words."""
    term = LossTerm("token_loss", "masked")
    return Declaration((term,), ("token_hits",), metrics, "token_loss", "unigram", WORD_FIELDS)


def with_pairs(declared: Declaration, pair_head: PairHead, weight: float) -> Declaration:
    """Return a declaration with the loss and metrics of sentence pairs, if there are pairs."""
    if pair_head == "none":
        return declared
    right = answers("pair", "pairs_of_label_1", "pairs", short="pairs", what="Sentence pairs")
    term, metrics = LossTerm("pair_loss", "pairs", weight), (mean_loss("pair_loss", "pairs"), *right)
    return declared + Declaration((term,), ("pair_hits",), metrics, fields=PAIR_FIELDS)


class MaskedLanguageModelling(PretrainingObjective):
    """Predicts masked tokens and, if the recipe has pairs, if their texts belong together."""

    def __init__(self, network: Network, pair_head: PairHead, pair_weight: float = 1.0) -> None:
        super().__init__(network, with_pairs(declare_words(), pair_head, pair_weight))
        self.pair_head = pair_head

    def summed(self, batch: PretrainingBatch) -> dict[str, Tensor]:
        """Return the losses and right answers of predicted words and, if present, of pairs."""
        # Only the predicted rows and the rows that represent a sentence go through most of the last layer:
        # the heads do not read others.
        encoder = self.network.encoder
        rows_R = encoder.predicting_rows(batch["masked_rows_P"])
        if self.pair_head == "none":
            hidden_RD = encoder(batch.inputs, rows=rows_R)
        else:
            hidden_RD, sentence_SD = encoder.with_sentences(batch.inputs, rows_R)
        labels_P, weights_P = batch["masked_ids_P"], batch["masked_weights_P"]
        views = [word_sums(self.network, each, labels_P, weights_P) for each in encoder.by_view(hidden_RD)]
        # Each view of a word learns to predict it alone; the loss of a word is the mean over its views.
        loss, hits = views[0] if len(views) == 1 else map(_mean, zip(*views, strict=True))
        words = {"token_loss": loss, "token_hits": hits}
        if self.pair_head == "none":
            return words
        return words | pair_sums(self.network, self.pair_head, sentence_SD, batch)


def _mean(values: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(values).mean(0)


def pair_sums(
    network: Network, pair_head: PairHead, sentence_SD: Tensor, batch: PretrainingBatch
) -> dict[str, Tensor]:
    """Return the summed loss of a batch's pairs, and the number of pairs that the head gets right."""
    # Label 0 in examples means that B follows A, as in BERT; in ERNIE's head it is 1.
    swaps = pair_head == "nsp" and architecture_of(network.config.model_type).next_label == 1
    labels_S = 1 - batch["pair_labels_S"] if swaps else batch["pair_labels_S"]
    scores_S2 = network.scores_of_sentences(pair_head, sentence_SD)
    loss, hits = weighted_sums(scores_S2, labels_S, batch["pair_weights_S"])
    return {"pair_loss": loss, "pair_hits": hits}


def summary(recipe: Recipe) -> str:
    """Describe the objective, for the card."""
    masking = recipe.masking
    if not recipe.examples.masks_tokens:
        return f"{recipe.examples.objective}; every token is predicted"
    kept = 1 - masking.as_mask - masking.as_random
    shown = f"{masking.as_mask:.0%} masked, {masking.as_random:.0%} random, {kept:.0%} kept"
    units = [level.unit for level in masking.levels] or [masking.unit]
    chosen = " or ".join(CHOSEN[unit] for unit in units)
    rate = f"{masking.rate:.0%}"
    if masking.final_rate != "rate":
        rate += f", in the end {masking.final_rate:.0%},"
    return f"masked; {rate} of the tokens, {chosen}, of these {shown} ({masking.masks} masks)"


def heads_of(recipe: Recipe) -> dict[str, int]:
    """Return the heads that the recipe trains, with their numbers of outputs."""
    return with_pair_head({"mlm": 0}, recipe)


def with_pair_head(heads: dict[str, int], recipe: Recipe) -> dict[str, int]:
    """Add the head that learns from pairs, if the recipe has them."""
    pair = recipe.examples.pair_head
    if pair == "none":
        return heads
    specs = architecture_of(recipe.model.type).heads
    if pair not in specs:
        what = f"{recipe.model.type} does not have a {pair} head"
        others = (*(head for head in ("nsp", "sop") if head in specs), "full-sentences")
        remedy = f"choose {', '.join(others)} or another model"
        raise UserError(what, key="examples.pairs", remedy=remedy)
    return {**{support: 0 for support in specs[pair].needs}, **heads, pair: 2}


def declared(recipe: Recipe) -> Declaration:
    """Return the sums and metrics of the recipe's objective."""
    return with_pairs(declare_words(), recipe.examples.pair_head, recipe.examples.pair_weight)


def build(network: Network, _: Network | None, recipe: Recipe) -> MaskedLanguageModelling:
    """Build the recipe's objective over a network."""
    return MaskedLanguageModelling(network, recipe.examples.pair_head, recipe.examples.pair_weight)
