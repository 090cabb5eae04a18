"""The optimal linear head on a frozen encoder: found exactly, kept if tuning gains nothing."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from bertsmith.core.errors import UserError
from bertsmith.finetuning.linear_probe import PENALTIES, Rows, choose_penalty, initial, mean_loss, solve
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.inference.loaded_model import load
from bertsmith.inference.task_model import TaskModel
from tests.lazily import Lazily
from tests.tiny_runs import differing
from tests.tuning import SHORT, Notebook, set_up_run, stop_at, toy_assignment, tune

linear = Lazily("sklearn.linear_model")
ROWS, WIDTH, CLASSES = 400, 12, 3


@pytest.fixture(scope="module")
def vectors():
    return np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


def rows_of(vectors_ND, targets):
    return Rows(
        torch.from_numpy(vectors_ND),
        torch.from_numpy(targets),
        torch.ones(len(targets)),
        np.arange(len(targets)),
    )


def noisy_classes(vectors_ND):
    noise = np.random.default_rng(1).normal(size=(len(vectors_ND), CLASSES))
    return (vectors_ND[:, :CLASSES] + noise).argmax(-1)


def test_classes_have_the_weights_of_scikit_learn(vectors):
    classes, penalty = noisy_classes(vectors), 0.01
    oracle = linear.LogisticRegression(C=1 / (ROWS * penalty), tol=1e-8, max_iter=1000).fit(vectors, classes)
    rows = rows_of(vectors, classes)
    weight_CD, _ = solve(rows, "classes", penalty, initial(rows, CLASSES))
    assert weight_CD.numpy() == pytest.approx(oracle.coef_, abs=2e-3)


def test_numbers_have_the_weights_of_ridge_regression(vectors):
    numbers, penalty = (vectors[:, :1] * 2 - vectors[:, 1:2] + 1).astype(np.float32), 0.1
    oracle = linear.Ridge(alpha=ROWS * penalty / 2).fit(vectors, numbers[:, 0])
    rows = rows_of(vectors, numbers)
    weight_CD, bias_C = solve(rows, "numbers", penalty, initial(rows, 1))
    assert weight_CD.numpy()[0] == pytest.approx(oracle.coef_, abs=2e-3)
    assert float(bias_C) == pytest.approx(oracle.intercept_, abs=2e-3)


def test_labels_are_logistic_regressions_of_their_own(vectors):
    labels = (vectors[:, :2] + np.random.default_rng(2).normal(size=(ROWS, 2)) > 0).astype(np.float32)
    penalty = 0.01
    rows = rows_of(vectors, labels)
    weight_CD, _ = solve(rows, "labels", penalty, initial(rows, 2))
    for column in range(2):
        # The loss is a mean over the labels, and so half as strong beside the penalty.
        oracle = linear.LogisticRegression(C=1 / (2 * ROWS * penalty), tol=1e-8).fit(
            vectors, labels[:, column]
        )
        assert weight_CD.numpy()[column] == pytest.approx(oracle.coef_[0], abs=2e-3)


def test_pure_noise_gets_a_stronger_penalty_than_a_clear_rule(vectors):
    noise = np.random.default_rng(3).integers(CLASSES, size=ROWS)
    clear = vectors[:, :CLASSES].argmax(-1)
    chosen = [choose_penalty(rows_of(vectors, each), "classes", CLASSES) for each in (noise, clear)]
    assert chosen[0] == PENALTIES[0] > chosen[1]


def test_heavier_rows_have_a_smaller_loss(vectors):
    classes = noisy_classes(vectors)
    rows = rows_of(vectors, classes)
    heavy = Rows(rows.vectors_ND, rows.targets, torch.where(rows.targets == 0, 20.0, 1.0), rows.groups_N)
    first = rows.subset(classes == 0)
    losses = [
        float(mean_loss(first, "classes", *solve(each, "classes", 0.01, initial(each, CLASSES))))
        for each in (rows, heavy)
    ]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("name", ["sst2", "stsb", "pos"])
def test_a_frozen_encoder_gets_its_optimal_head_without_a_step(name, model, tmp_path):
    result = tune(name, model, tmp_path, "head.encoder=frozen-linear")
    assert result.steps == 0
    (metrics,) = result.metrics.values()
    predicted = predict_labelled([result.folder], tmp_path / "data" / name, device="cpu")
    assert predicted.metrics() == pytest.approx(metrics, rel=1e-4, abs=1e-4)
    before, after = (load(folder, device="cpu").model.network for folder in (model, result.folder / "model"))
    assert differing(dict(before.encoder.state_dict()), dict(after.encoder.state_dict())) == []
    assert " 0 steps" not in (result.folder / "card.md").read_text()


def test_no_weights_do_better_on_the_training_set(model, tmp_path):
    run = set_up_run(toy_assignment("sst2", model, tmp_path, "head.encoder=frozen-linear"))
    layer = run.model.objective.scorer.network.heads["classify"].output
    encoded = run.train.encoded

    def loss() -> float:
        predictions = run.model.predict(run.train.examples, encoded)
        return run.model.config.kind.mean_loss(encoded, predictions)

    best = loss()
    for seed in range(3):
        move = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            layer.weight.mul_(0.5).add_(0.2 * move)
        assert loss() > best


def test_tuning_that_gains_nothing_keeps_the_probe_and_says_so(model, tmp_path):
    settings = ("head.weights=solved", "run.keep=best", "optim.peak_lr=1e-12", *SHORT)
    result = tune("sst2", model, tmp_path, *settings)
    probe = result.references["linear probe"]["dev"]
    assert result.metrics["dev"]["accuracy"] == probe["accuracy"]
    assert "tuning did not improve on the linear probe" in (result.folder / "card.md").read_text()


def test_a_run_that_is_stopped_keeps_its_probe(model, tmp_path):
    settings = ("head.weights=solved", "run.keep=best", "run.keep_state=true")
    whole = tune("sst2", model, tmp_path / "whole", *settings)
    with stop_at(3):
        assert not tune("sst2", model, tmp_path / "halves", *settings).finished
    halves = tune("sst2", model, tmp_path / "halves", *settings)
    assert (halves.metrics, halves.references) == (whole.metrics, whole.references)


def test_scores_that_compete_have_no_optimal_head(model, tmp_path):
    with pytest.raises(UserError, match=r"head\.weights: the scores of a span head compete"):
        tune("squad", model, tmp_path, "head.weights=solved")


def test_the_vectors_of_a_split_are_computed_once(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    computed, plain = [], TaskModel.logits
    monkeypatch.setattr(TaskModel, "logits", lambda *given: computed.append(1) or plain(*given))
    asked = toy_assignment("sst2", model, tmp_path, "head.encoder=frozen-linear")
    heads = [probe_weights(asked)]
    (file,) = (tmp_path / "cache" / "bertsmith" / "features").glob("*.npy")
    heads.append(probe_weights(asked))
    tuned = toy_assignment("sst2", model, tmp_path, "head.weights=solved", "run.seed=1")
    set_up_run(tuned)
    assert len(computed) == 1
    file.write_bytes(file.read_bytes()[:-40])  # a disk that was full
    heads.append(probe_weights(asked))
    assert len(computed) == 2
    assert torch.equal(heads[0], heads[1]) and torch.equal(heads[0], heads[2])
    set_up_run(toy_assignment("sst2", model, tmp_path, "head.encoder=frozen-linear", "head.pooling=mean"))
    assert len(computed) == 3


def probe_weights(assignment):
    """What the head of a run is solved to."""
    return set_up_run(assignment).model.objective.scorer.network.heads["classify"].output.weight.clone()


def test_the_note_tells_how_the_head_was_regularised(model, tmp_path):
    notebook = Notebook()
    tune("sst2", model, tmp_path, "head.encoder=frozen-linear", notebook=notebook)
    assert [note for note in notebook.notes if note.startswith("the linear probe is the optimal head")]


def test_a_layer_without_biases_has_the_best_weights_alone():
    stream = torch.Generator().manual_seed(0)
    vectors_ND = torch.randn(200, 5, generator=stream) + 1.0
    targets = (vectors_ND.sum(-1) > 5.0).long() + (vectors_ND[:, 0] > 1.5).long()
    rows = Rows(vectors_ND, targets, torch.ones(200), np.arange(200), biased=False)
    weight_CD, bias_C = solve(rows, "classes", 0.1, initial(rows, 3))
    assert not bias_C.any()
    weight_CD.requires_grad_()
    loss = functional.cross_entropy(vectors_ND @ weight_CD.T, targets) + 0.05 * weight_CD.square().sum()
    (gradient_CD,) = torch.autograd.grad(loss, weight_CD)
    assert gradient_CD.abs().max() < 1e-3
