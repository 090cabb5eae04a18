"""Probes on layers and on attention, against plain code over what transformers computes."""

import json

import numpy as np
import pytest
import torch

from bertsmith.core.seeds import stream
from bertsmith.insight import layer_probe
from bertsmith.insight.dependency_probe import DependencyProbe, study_dependency_probes, tree_features
from bertsmith.insight.layer_probe import TASKS, study_layers
from bertsmith.insight.treebank import ParsedSentence
from tests.command_line import bertsmith
from tests.unit.insight.slow_attention import eager_maps
from tests.unit.insight.test_relations import TREE, pieces_of_words, random_treebank, slow_words

TAGS = {"the": "DET", "my": "DET", "under": "ADP", "runs": "VERB", "zap": "X"}


def tagged(seed, sentences=40):
    """Random trees whose tags depend on the word."""
    return [
        ParsedSentence(s.words, tuple(TAGS.get(word, "NOUN") for word in s.words), s.heads, s.relations)
        for s in random_treebank(seed, sentences)
    ]


def slow_states(bert, eager, sentence):
    """[L, W, D]: means over pieces, word by word."""
    encoded = bert.tokenizer.encode(" ".join(sentence.words))
    with torch.no_grad():
        states = eager.bert(torch.tensor([encoded.ids]), output_hidden_states=True).hidden_states
    rows = pieces_of_words(bert, sentence.words)
    return np.array([[state[0, word].double().numpy().mean(0) for word in rows] for state in states])


def slow_accuracy(states, labels, test_states, test_labels, names):
    """Ridge regression onto one-hot labels, solved as a stacked least-squares problem."""
    inputs = np.hstack([states, np.ones((len(states), 1))])
    targets = np.array([[float(label == name) for name in names] for label in labels])
    ridge = np.sqrt(1e-3 * (inputs**2).sum() / inputs.shape[1])
    stacked = np.vstack([inputs, ridge * np.eye(inputs.shape[1])])
    solved = np.linalg.lstsq(
        stacked, np.vstack([targets, np.zeros((inputs.shape[1], len(names)))]), rcond=None
    )[0]
    guesses = (np.hstack([test_states, np.ones((len(test_states), 1))]) @ solved).argmax(1)
    return np.mean([names[guess] == label for guess, label in zip(guesses, test_labels, strict=True)])


def test_every_layer_scores_as_a_plain_ridge_regression(bert, eager):
    train, scored = tagged(1), tagged(2)
    found = study_layers(bert, scored, train, seed=0)
    states = [np.concatenate([slow_states(bert, eager, s) for s in part], axis=1) for part in (train, scored)]
    for task, read in TASKS.items():
        labels = [[label for sentence in part for label in read(sentence)] for part in (train, scored)]
        names, words = sorted(set(labels[0])), sorted({w.lower() for s in train for w in s.words})
        drawn = stream(0, "control task", task).integers(0, len(labels[0]), len(words))
        control_of = {word: labels[0][at] for word, at in zip(words, drawn, strict=True)}
        controls = [[control_of[w.lower()] for s in part for w in s.words] for part in (train, scored)]
        for score in [each for each in found.scores if each.task == task]:
            for value, (fitted, asked) in ((score.accuracy, labels), (score.control, controls)):
                layer = score.layer
                expected = slow_accuracy(states[0][layer], fitted, states[1][layer], asked, names)
                assert value == pytest.approx(expected, abs=1e-5)
            assert score.low <= score.accuracy <= score.high
    assert [each.layer for each in found.scores] == [0, 1, 2] * 2


def test_control_labels_belong_to_words_and_are_as_frequent_as_real_ones():
    labels = layer_probe._Labels.learn("part of speech", tagged(1), 0)
    (sentence, *_) = tagged(1)
    _, control = labels.of("part of speech", sentence)
    assert control == [labels.control_of[word] for word in sentence.words]
    unknown = ParsedSentence(("never",), ("NEW",), (-1,), ("root",))
    assert labels.of("part of speech", unknown) == ([-1], [-1])
    words = [ParsedSentence((f"w{n}",), ("A" if n % 4 else "B",), (-1,), ("root",)) for n in range(2000)]
    drawn = list(layer_probe._Labels.learn("part of speech", words, 0).control_of.values())
    assert np.mean(drawn) == pytest.approx(0.25, abs=0.04)


def test_an_embedding_knows_tags_that_depend_on_the_word_and_the_control_as_well(bert):
    found = study_layers(bert, tagged(2), tagged(1, 200), seed=0)
    first = found.scores[0]
    assert first.accuracy > 0.95 and first.control > 0.9  # both can be learned by heart


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("width", [0, 32])
def test_scores_of_the_dependency_probe_are_those_of_its_formula(bert, eager, width):
    sentence, longer = sorted(tagged(3, 2), key=lambda each: len(each.words))
    features, _ = tree_features(bert, [sentence, longer])
    assert len(sentence.words) < len(longer.words)
    generator = torch.Generator().manual_seed(1)
    probe = DependencyProbe(8, width, generator)
    for parameter in (probe.both, probe.root):
        torch.nn.init.normal_(parameter, generator=generator)
    words = slow_words(bert, eager, sentence, "mean").reshape(8, len(sentence.words), -1)
    encoded = bert.tokenizer.encode(" ".join(sentence.words))
    maps = eager_maps(eager, encoded).reshape(8, len(encoded), -1)
    rows, table = pieces_of_words(bert, sentence.words), eager.bert.embeddings.word_embeddings.weight
    vectors = [table[[encoded.ids[r] for r in each]].mean(0).detach().numpy()[:width] for each in rows]
    both, root, static = (each.detach().double().numpy() for each in (probe.both, probe.root, probe.static))
    plain = type(features)(
        features.words_AWW,
        features.root_A4W,
        features.static_WE[:, :width],
        features.heads_W,
        features.counted_W,
    )
    scores = probe(plain).detach().numpy()
    for word in range(len(rows)):
        for head in range(len(rows)):
            expected = 0.0
            for k in range(8):
                for way, weight in enumerate((words[k, word, head], words[k, head, word])):
                    factor = (
                        both[way, k] + static[way, 0, k] @ vectors[word] + static[way, 1, k] @ vectors[head]
                    )
                    expected += factor * weight
            if word == head:
                assert scores[word, head] == -np.inf
            else:
                assert scores[word, head] == pytest.approx(expected, abs=1e-4)
        ends = [
            (maps[:, rows[word], 0].mean(1), 0),
            (maps[:, 0][:, rows[word]].sum(1), 1),
            (maps[:, rows[word], -1].mean(1), 2),
            (maps[:, -1][:, rows[word]].sum(1), 3),
        ]
        assert scores[word, -1] == pytest.approx(sum(root[at] @ value for value, at in ends), abs=1e-4)


def test_dependency_probes_repeat_and_count_no_punctuation(bert):
    train, scored = tagged(4, 12), tagged(5, 6)
    first = study_dependency_probes(bert, scored, train, seed=1)
    assert first == study_dependency_probes(bert, scored, train, seed=1)
    assert [each.probe for each in first][1:] == ["attention", "attention and static vectors"]
    kept = [
        (w, h)
        for s in scored
        for w, (h, r) in enumerate(zip(s.heads, s.relations, strict=True))
        if r != "punct"
    ]
    offset = int(first[0].probe.split()[1])
    assert first[0].accuracy == pytest.approx(np.mean([word + offset == head for word, head in kept]))


def test_the_command_leaves_both_tables(capsys, tmp_path, lively_folder):
    (tmp_path / "a.conllu").write_text(TREE * 3)
    words = ("look", "probe", "--model", lively_folder, "--treebank", tmp_path / "a.conllu")
    told = bertsmith(capsys, *words, "--train", tmp_path / "a.conllu", "--out", tmp_path / "look")
    assert told.code == 0 and "selectivity" in told.out and "attention and static vectors" in told.out
    values = json.loads((tmp_path / "look" / "probe.json").read_text())
    assert len(values["layers"]) == 6 and len(values["untrained"]) == 3
    assert (tmp_path / "look" / "probe.png").exists()
