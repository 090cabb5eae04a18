"""Replaced-token detection (ELECTRA; Clark et al. 2020): find the tokens that a small masked LM made up.

A generator predicts masked tokens, and samples of its predictions replace them. The model, here the
discriminator, predicts for every token if it was replaced and, for pairs, if they belong together. Only the
discriminator is kept for tasks.

Shapes: T packed tokens, P predicted rows, S sequences, D model width, V vocabulary, C counts.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.core.measures import Declaration, LossTerm, Metric, answers, mean, mean_loss
from bertsmith.data.collate import DRAWS, PretrainingBatch
from bertsmith.data.masking import SAMPLING_BITS
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.encoder import WordView
from bertsmith.model.network import Network
from bertsmith.objectives import masked_language_modelling as mlm
from bertsmith.objectives.pretraining_objective import PretrainingObjective, weighted_sums
from bertsmith.recipe.data_sections import PairHead
from bertsmith.recipe.schema import Recipe

GENERATOR = "generator"
"""The generator's folder inside the model's."""


def measures(discriminator_weight: float, pair_head: PairHead, pair_weight: float) -> Declaration:
    """Declare the generator's words, the tokens that the discriminator judges, and pairs if there are any."""
    words = (replace(each, title=f"{GENERATOR}'s {each.label}") for each in mlm.WORD_METRICS)
    judged = (
        mean_loss("replaced_loss", "tokens"),
        *answers("replaced", "replaced", "tokens", short="replaced", what="Replaced tokens"),
        # As in scikit-learn, 0 if nothing was flagged or nothing was replaced.
        Metric("replaced_precision", of=mean("found", "flagged", empty=0.0)),
        Metric("replaced_recall", of=mean("found", "replaced", empty=0.0)),
    )
    term = LossTerm("replaced_loss", "tokens", discriminator_weight)
    counted = ("replaced_hits", "replaced", "flagged", "found")
    replaced = Declaration((term,), counted, judged, fields=(DRAWS,))
    return mlm.with_pairs(mlm.declare_words(tuple(words)) + replaced, pair_head, pair_weight)


class ReplacedTokenDetection(PretrainingObjective):
    """A discriminator with the generator that it learns from; both share their embeddings."""

    def __init__(
        self,
        network: Network,
        generator: Network,
        *,
        discriminator_weight: float,
        pair_head: PairHead = "none",
        pair_weight: float = 1.0,
    ) -> None:
        super().__init__(network, measures(discriminator_weight, pair_head, pair_weight))
        generator.encoder.share_tables(network.encoder)  # all three, and their norm (google-research/electra)
        self.generator, self.pair_head = generator, pair_head

    def networks(self) -> Mapping[str, Network]:
        """Return the discriminator, which is the model, and the generator."""
        return {"": self.network, GENERATOR: self.generator}

    def summed(self, batch: PretrainingBatch) -> dict[str, Tensor]:
        """Return the sums of the generator's words, of the judged tokens and of pairs."""
        assert self.generator.encoder.word_views() == (WordView(),), "masks are read at their own rows"
        hidden_PD = self.generator.encoder(batch.inputs, rows=batch["masked_rows_P"])
        scores_PV = self.generator.scores_of_words(hidden_PD, aligned=hidden_PD.is_cuda)
        token_loss, token_hits = weighted_sums(scores_PV, batch["masked_ids_P"], batch["masked_weights_P"])
        sampled_P = sample(scores_PV.detach()[:, : self.generator.config.vocabulary], batch["draws_P"])
        original_T, shown_T = with_tokens(batch, batch["masked_ids_P"]), with_tokens(batch, sampled_P)
        # A sample that equals the token it replaces counts as original.
        replaced_T = shown_T != original_T
        # All tokens of examples are judged, special ones too.
        weights_T = torch.arange(len(shown_T), device=shown_T.device) < batch.end_1
        inputs = replace(batch.inputs, tokens_T=shown_T)
        hidden_TD = self.network(inputs)
        scores_T1 = self.network.scores("replaced", hidden_TD, inputs.layout)
        scores_T, targets_T = scores_T1[:, 0].float(), replaced_T.float()
        losses_T = functional.binary_cross_entropy_with_logits(scores_T, targets_T, reduction="none")
        replaced_loss = (losses_T * weights_T).sum()
        flagged_T = scores_T.detach() > 0
        judged = {
            "replaced_hits": flagged_T == replaced_T,
            "replaced": replaced_T,
            "flagged": flagged_T,
            "found": flagged_T & replaced_T,
        }
        sums = {"token_loss": token_loss, "token_hits": token_hits, "replaced_loss": replaced_loss}
        sums |= {name: (each & weights_T).sum() for name, each in judged.items()}
        if self.pair_head == "none":
            return sums
        sentence_SD = self.network.encoder.sentence_states(hidden_TD, inputs.layout)
        return sums | mlm.pair_sums(self.network, self.pair_head, sentence_SD, batch)


def sample(scores_PV: Tensor, draws_P: Tensor) -> Tensor:
    """Sample a token for each row [P] from the softmax of its scores, by inverting the distribution.

    The draws are whole numbers below 2**SAMPLING_BITS that are part of the batch. So samples depend on the
    seed, the step and the weights, not on the state of the device's generator.
    """
    # Probabilities as whole numbers: their running sums are exact, on a GPU too, in any order of summing.
    probabilities_PV = scores_PV.float().softmax(-1)
    running_PV = (probabilities_PV * 2**SAMPLING_BITS).int().cumsum(-1, dtype=torch.int32)
    thresholds_P = (draws_P * running_PV[:, -1]) >> SAMPLING_BITS
    sampled_P: Tensor = (running_PV <= thresholds_P[:, None]).sum(-1)
    # NaN weights must not index past the table: the step is skipped later.
    return sampled_P.clamp(max=scores_PV.shape[-1] - 1)


def with_tokens(batch: PretrainingBatch, tokens_P: Tensor) -> Tensor:
    """Return the batch's tokens [T] with these at its predicted rows."""
    tokens_T, counts_P = batch.inputs.tokens_T, batch["masked_weights_P"] > 0
    # Filler rows point at a real token: they write the filler's last one again instead.
    rows_P = torch.where(counts_P, batch["masked_rows_P"], len(tokens_T) - 1)
    return tokens_T.scatter(0, rows_P, torch.where(counts_P, tokens_P, tokens_T[-1]))


def _generator_and_loss(recipe: Recipe) -> tuple[str, str]:
    """Describe the generator compared with the model, and the sum of the losses."""
    replaced, pretraining = recipe.replaced, architecture_of(recipe.model.type).pretraining
    assert pretraining is not None, "the recipe was checked"
    loss = f"loss = generator + {replaced.discriminator_weight:g} x discriminator"
    if recipe.examples.pair_head != "none":
        loss += f" + {recipe.examples.pair_weight:g} x pairs"
    return f"{replaced.generator_size:g} of its {pretraining.generator_part}", loss


def summary(recipe: Recipe) -> str:
    """Describe the objective, for the card."""
    size, loss = _generator_and_loss(recipe)
    return (
        f"replaced-token detection; the model finds the tokens that a generator of {size} made up"
        f" (folder `{GENERATOR}`, {mlm.summary(recipe)}); {loss}"
    )


def choices(recipe: Recipe) -> list[str]:
    """Describe the input of the generator, and the weights of the losses."""
    masking, (size, loss) = recipe.masking, _generator_and_loss(recipe)
    kept = 1 - masking.as_mask - masking.as_random
    return [
        f"replaced tokens: a generator of {size} sees {masking.as_mask:.0%} of the chosen tokens as the "
        f"mask, {masking.as_random:.0%} as random ones, {kept:.0%} as they are; {loss}"
    ]


def heads_of(recipe: Recipe) -> dict[str, int]:
    """Return the discriminator's heads."""
    return mlm.with_pair_head({"replaced": 1}, recipe)


def declared(recipe: Recipe) -> Declaration:
    """Return the sums and metrics of the recipe's objective."""
    examples = recipe.examples
    return measures(recipe.replaced.discriminator_weight, examples.pair_head, examples.pair_weight)


def build(network: Network, generator: Network | None, recipe: Recipe) -> ReplacedTokenDetection:
    """Build the recipe's objective over a discriminator and its generator."""
    assert generator is not None
    return ReplacedTokenDetection(
        network,
        generator,
        discriminator_weight=recipe.replaced.discriminator_weight,
        pair_head=recipe.examples.pair_head,
        pair_weight=recipe.examples.pair_weight,
    )
