"""Linear probes on the word vectors of each layer: part of speech, and depth in the dependency tree.

A word's vector is the mean over its pieces. The probe is ridge regression onto one-hot labels, so that one
pass over a treebank collects the sums for all layers and labels. Each task has a control task (Hewitt and
Liang 2019): every word form gets a random label, as frequent as the real ones. The probe can only memorise
these labels. Selectivity is the difference of the two accuracies.

Shapes: L states (the embeddings, then each layer), W words, D width, D1 = D + 1 with a constant, C labels of
a task, S sentences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertsmith.core.progress import progress_bar
from bertsmith.core.seeds import stream
from bertsmith.inference.loaded_model import Bert
from bertsmith.insight.bootstrap import Counts, bootstrap_intervals
from bertsmith.insight.treebank import ParsedSentence
from bertsmith.insight.word_attention import EncodedWords, encode_words
from bertsmith.packed import PackedBatch, unpack

RIDGE = 1e-3
"""Ridge as a fraction of the mean square of a dimension: makes the system solvable, hardly changes it."""
DEEPEST = 7
"""Maximum depth; deeper words share its label."""
WINDOW = 512
"""Number of sentences that have their word vectors in memory at once."""

TASKS: dict[str, Callable[[ParsedSentence], Sequence[str]]] = {
    "part of speech": lambda sentence: sentence.tags,
    "depth": lambda sentence: [str(min(depth, DEEPEST)) for depth in sentence.depths()],
}


@dataclass(frozen=True, slots=True)
class LayerScore:
    """Accuracy of a probe on one layer, for a task and for its control task."""

    task: str
    layer: int
    """Index of the layer, with 0 for the embeddings."""
    accuracy: float
    low: float
    high: float
    control: float

    @property
    def selectivity(self) -> float:
        """Accuracy on the task minus accuracy on its control task."""
        return self.accuracy - self.control


@dataclass(frozen=True, slots=True)
class LayerProbes:
    """The scores of all tasks and layers, and the accuracy of the most frequent label by task."""

    scores: tuple[LayerScore, ...]
    majority: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Labels:
    """The label names of a task, and the control label of each word form."""

    names: tuple[str, ...]
    control_of: dict[str, int]

    @classmethod
    def learn(cls, task: str, sentences: Sequence[ParsedSentence], seed: int) -> "_Labels":
        """Collect the labels of a task in a treebank, and draw the control labels."""
        given = [label for sentence in sentences for label in TASKS[task](sentence)]
        names = tuple(sorted(set(given)))
        numbers = [names.index(label) for label in given]
        words = sorted({word.lower() for sentence in sentences for word in sentence.words})
        drawn = stream(seed, "control task", task).integers(0, len(numbers), len(words))
        return cls(names, {word: numbers[at] for word, at in zip(words, drawn.tolist(), strict=True)})

    def of(self, task: str, sentence: ParsedSentence) -> tuple[list[int], list[int]]:
        """Return the indices of the real and the control labels; -1 for a label that training lacks."""
        number_of = {name: number for number, name in enumerate(self.names)}
        real = [number_of.get(label, -1) for label in TASKS[task](sentence)]
        return real, [self.control_of.get(word.lower(), -1) for word in sentence.words]


def study_layers(
    bert: Bert, scored: Sequence[ParsedSentence], train: Sequence[ParsedSentence], *, seed: int
) -> LayerProbes:
    """Fit a probe for each layer to one treebank, and score it on another."""
    labels = {task: _Labels.learn(task, train, seed) for task in TASKS}
    probes = _fit(bert, train, labels)
    # Right answers to each task and its control, side by side, and all words: [S, 2 x tasks] and [S].
    right, total = [], []
    for sentence, states_LWD in _word_states(bert, scored):
        targets = [numbers for task in TASKS for numbers in labels[task].of(task, sentence)]
        found = [
            (_with_constant(states_LWD) @ probe_LDC).argmax(-1) == torch.tensor(numbers)
            for probe_LDC, numbers in zip(probes, targets, strict=True)
        ]
        right.append(torch.stack([each.sum(1) for each in found]).double().numpy())
        total.append(float(len(sentence.words)))
    return _scores(np.stack(right), np.array(total), _majority(scored, labels), seed)


def _fit(bert: Bert, train: Sequence[ParsedSentence], labels: dict[str, _Labels]) -> list[Tensor]:
    """Fit the probes [L, D1, C]: for each task one for the task, then one for its control task."""
    moments_LDD: Tensor | float = 0.0
    targets: list[Tensor | float] = [0.0] * (2 * len(TASKS))
    for sentence, states_LWD in _word_states(bert, train):
        inputs_LWD = _with_constant(states_LWD)
        moments_LDD = moments_LDD + inputs_LWD.mT @ inputs_LWD
        for at, task in enumerate(TASKS):
            for control, numbers in enumerate(labels[task].of(task, sentence)):
                one_hot_WC = torch.nn.functional.one_hot(
                    torch.tensor(numbers), len(labels[task].names)
                ).double()
                targets[2 * at + control] = targets[2 * at + control] + inputs_LWD.mT @ one_hot_WC
    assert isinstance(moments_LDD, Tensor)
    size_L = moments_LDD.diagonal(0, 1, 2).mean(-1)
    ridge_LDD = RIDGE * size_L[:, None, None] * torch.eye(moments_LDD.shape[-1], dtype=torch.float64)
    return [torch.linalg.solve(moments_LDD + ridge_LDD, each) for each in targets]


def _word_states(bert: Bert, sentences: Sequence[ParsedSentence]) -> Iterator[tuple[ParsedSentence, Tensor]]:
    """Yield each sentence that the model can read, with its words' vectors at every layer [L, W, D]."""

    def states(batch: PackedBatch) -> list[Tensor]:
        layers_TLD = torch.stack(bert.engine.network.encoder.hidden_states(batch), 1).double().cpu()
        return [each.transpose(0, 1) for each in unpack(layers_TLD, batch.layout)]

    with progress_bar("words", len(sentences)) as advance:
        for first in range(0, len(sentences), WINDOW):
            window = sentences[first : first + WINDOW]
            encoded = encode_words(bert, [each.words for each in window])
            kept = [(each, text) for each, text in zip(window, encoded, strict=True) if text is not None]
            found = bert.engine.predict_encoded([text.encoded for _, text in kept], states)
            for (sentence, text), states_LND in zip(kept, found, strict=True):
                yield sentence, _of_words(text, states_LND)
            advance(len(window))


def _of_words(text: EncodedWords, states_LND: Tensor) -> Tensor:
    """Return the mean over the pieces of each word [L, W, D]; zeros for a word without pieces."""
    zero_LD = torch.zeros_like(states_LND[:, 0])
    return torch.stack([states_LND[:, list(p)].mean(1) if p else zero_LD for p in text.pieces], 1)


def _with_constant(states_LWD: Tensor) -> Tensor:
    return torch.cat([states_LWD, torch.ones_like(states_LWD[..., :1])], -1)


def _majority(scored: Sequence[ParsedSentence], labels: dict[str, _Labels]) -> dict[str, float]:
    """Return, for each task, the accuracy of the most frequent label of the scored treebank."""
    found = {}
    for task in labels:
        given = [label for sentence in scored for label in TASKS[task](sentence)]
        found[task] = max(map(given.count, set(given))) / len(given)
    return found


def _scores(right_SPL: Counts, total_S: Counts, majority: dict[str, float], seed: int) -> LayerProbes:
    """Compute the scores from right answers [S, P, L]; P is each task, then its control."""
    rate_PL = right_SPL.sum(0) / total_S.sum()
    scores = []
    for at, task in enumerate(TASKS):
        right_SL = right_SPL[:, 2 * at]
        low_L, high_L = bootstrap_intervals(
            right_SL, np.repeat(total_S[:, None], right_SL.shape[1], 1), seed=seed
        )
        scores += [
            LayerScore(task, layer, float(rate_PL[2 * at, layer]), float(low_L[layer]), float(high_L[layer]),
                       float(rate_PL[2 * at + 1, layer]))
            for layer in range(right_SL.shape[1])
        ]  # fmt: skip
    return LayerProbes(tuple(scores), majority)
