"""Score the words that decided a class: by leave-one-out, by gradient times input, and how faithful both are.

Shapes: N tokens of a text, W words of the text, D width, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.core.progress import progress_bar
from bertsmith.core.seeds import stream
from bertsmith.inference.finetuned_folder import FinetunedTask
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.predictor import default_config
from bertsmith.inference.task_model import task_model_of
from bertsmith.inference.text_reader import TextOrPair, TokenizedText
from bertsmith.inference.text_words import NO_WORD, TextWords, Word
from bertsmith.packed import pack, split_by_budget
from bertsmith.text.tokenizer import truncate_longest_first

METHODS = ("leave-one-out", "gradient x input")
FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)
"""Fractions of the words that are removed, as in DeYoung et al. 2020 (ERASER); at least one word."""
RANDOM_ORDERS = 20
BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Faithfulness:
    """The fall of a class's probability without its most important words, and with these words alone."""

    comprehensiveness: float
    """Fall without the important words: more is better."""
    sufficiency: float
    """Fall with the important words alone: less is better."""


@dataclass(frozen=True, slots=True)
class DecidingWords:
    """A text, its class and the score of each word."""

    text: TextOrPair
    label: str
    probability: float
    words: tuple[tuple[int, Word], ...]
    """Words, each with the index of its text: 0, or 1 for the second text of a pair."""
    scores: dict[str, list[float]]
    """Scores of the words by method; a score above 0 is evidence for the class."""
    faithfulness: dict[str, Faithfulness]
    """Faithfulness by method, and under "random" the mean of random orders."""


@dataclass(frozen=True, slots=True)
class _Classifier:
    """A classification head that supports gradients."""

    bert: Bert
    scorer: nn.Module
    labels: tuple[str, ...]
    longest: int

    @classmethod
    def of(cls, bert: Bert) -> "_Classifier":
        task = bert.finetuned or (
            FinetunedTask(default_config(bert.model, "classify")) if "classify" in bert.heads else None
        )
        if task is None or task.config.kind.name != "classify":
            what = (
                "does not choose one of several classes for a text, and only such decisions can be explained"
            )
            remedy = "give a run of `bertsmith finetune` for sst2, mnli or a similar task"
            raise UserError(f"this model {what}", remedy=remedy)
        if task.config.head.encoder == "frozen-features":
            what = "the frozen layers that this model reads do not have gradients"
            raise UserError(what, remedy="give a run that trained its encoder")
        # Not the engine's network: packed weights do not have gradients.
        model = task_model_of(bert.model.network, task, bert.engine)
        return cls(bert, model.objective.scorer, task.config.labels, task.config.text.longest)

    def probabilities(self, sequences: Sequence[TokenizedText], target: int) -> list[float]:
        """Return the probability of a class for each sequence."""
        order = sorted(range(len(sequences)), key=lambda number: len(sequences[number]))
        lengths = [len(sequences[number]) for number in order]
        found: dict[int, float] = {}
        for group in split_by_budget(lengths, BATCH_TOKENS):
            numbers = [order[at] for at in group]
            with torch.no_grad():
                logits_SC = self._logits([sequences[number] for number in numbers])
            found |= dict(zip(numbers, logits_SC.softmax(-1)[:, target].tolist(), strict=True))
        return [found[number] for number in range(len(sequences))]

    def decision(self, sequence: TokenizedText) -> tuple[int, float]:
        """Return the most probable class and its probability."""
        with torch.no_grad():
            probability_C = self._logits([sequence])[0].softmax(-1)
        return int(probability_C.argmax()), float(probability_C.max())

    def gradient_times_input(self, sequence: TokenizedText, target: int) -> list[float]:
        """Return, for each token, the gradient of the class's logit times the token's word embedding.

        If a norm reads the word embeddings alone, use its output instead: a gradient is orthogonal to the
        input of a norm, so that the product would be 0.
        """
        embedded: list[Tensor] = []

        def keep(_: nn.Module, __: object, vectors_ND: Tensor) -> Tensor:
            embedded.append(vectors_ND.detach().requires_grad_())
            return embedded[-1]

        encoder = self.bert.model.network.encoder
        read = encoder.words if encoder.input is None or encoder.input.added else encoder.input.norm
        hook = read.register_forward_hook(keep)
        try:
            logit = self._logits([sequence])[0, target]
        finally:
            hook.remove()
        (gradient_ND,) = torch.autograd.grad(logit, embedded)
        return [float(each) for each in (gradient_ND * embedded[0].detach()).sum(-1)]

    def _logits(self, sequences: Sequence[TokenizedText]) -> Tensor:
        encoded = [each.encoded for each in sequences]
        batch = pack([each.ids for each in encoded], [each.segments for each in encoded])
        logits_SC: Tensor = self.scorer(batch.to(self.bert.engine.device))
        return logits_SC.double()


def deciding_words(bert: Bert, texts: Sequence[TextOrPair], *, seed: int) -> list[DecidingWords]:
    """Score each word of each text by its effect on the text's class."""
    classifier, found = _Classifier.of(bert), []
    with progress_bar("leaving words out", len(texts)) as advance:
        for number, text in enumerate(texts):
            found.append(_explained(classifier, text, number, seed))
            advance(1)
    return found


def _explained(classifier: _Classifier, text: TextOrPair, number: int, seed: int) -> DecidingWords:
    read = _read(classifier, text, number)
    words = read.words
    target, probability = classifier.decision(read.tokenized)
    without = classifier.probabilities([read.without({word}) for word in range(len(words))], target)
    by_token = classifier.gradient_times_input(read.tokenized, target)
    summed = [0.0] * len(words)
    for word, value in zip(read.word_of_token, by_token, strict=True):
        if word != NO_WORD:
            summed[word] += value
    scores = {METHODS[0]: [probability - each for each in without], METHODS[1]: summed}
    orders = {name: [np.argsort(-np.array(each), kind="stable")] for name, each in scores.items()}
    draws = [stream(seed, "random words", number, draw) for draw in range(RANDOM_ORDERS)]
    orders["random"] = [draw.permutation(len(words)) for draw in draws]
    faithfulness = {
        name: _faithfulness(classifier, read, target, [each.tolist() for each in of_method])
        for name, of_method in orders.items()
    }
    return DecidingWords(text, classifier.labels[target], probability, words, scores, faithfulness)


def _read(classifier: _Classifier, text: TextOrPair, number: int) -> TextWords:
    """Return the words and tokens of a text, truncated to the longest text of the model's training."""
    (encoded,) = classifier.bert.reader.encode([text], truncate=True, first=number)
    if len(encoded) > classifier.longest:
        encoded = truncate_longest_first(encoded, classifier.longest)
    read = TextWords.of(TokenizedText(text, encoded))
    if not read.words:
        raise UserError("does not contain a word", index=number, remedy="write one")
    return read


def _faithfulness(
    classifier: _Classifier, read: TextWords, target: int, orders: Sequence[Sequence[int]]
) -> Faithfulness:
    """Return the means over fractions of the words and over orders of importance."""
    count = len(orders[0])
    tops = [set(order[: math.ceil(fraction * count)]) for order in orders for fraction in FRACTIONS]
    every = set(range(count))
    removed = [*tops, *(every - top for top in tops)]
    variants = [read.tokenized, *(read.without(each) for each in removed)]
    whole, *others = classifier.probabilities(variants, target)
    without, alone = others[: len(tops)], others[len(tops) :]
    return Faithfulness(fmean(whole - each for each in without), fmean(whole - each for each in alone))


def mean_faithfulness(found: Sequence[DecidingWords]) -> dict[str, Faithfulness]:
    """Return the means over texts, by method."""
    return {
        name: Faithfulness(
            fmean(each.faithfulness[name].comprehensiveness for each in found),
            fmean(each.faithfulness[name].sufficiency for each in found),
        )
        for name in (*METHODS, "random")
    }
