"""A user's own numbers, whatever their size."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
import transformers

from bertsmith.core.errors import UserError
from bertsmith.finetuning import tuning_parts
from bertsmith.finetuning.finetune import finetune
from bertsmith.finetuning.predict import Reading, predict_labelled
from bertsmith.finetuning.target_scaler import TargetScaler
from bertsmith.inference.loaded_model import load
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.objective import TaskObjective
from bertsmith.training.journal import read_metrics
from tests.toy_tasks import COLD, WARM, sentence
from tests.tuning import Notebook, toy_assignment

MEAN, DEVIATION = 90_000, 5_000
WARMTH = CustomSpec("text", "price", kind="regress", dev_fraction=0.2)


def own_run(model, place, *settings, mean=MEAN, deviation=DEVIATION):
    """A run on sentences of warm and cold things, the first of which cost more."""
    chance, lines = Random(0), []
    for number in range(200):
        price = mean + deviation * (1 if number % 2 else -1) + chance.uniform(-1, 1) * deviation / 10
        words = WARM if number % 2 else COLD
        lines.append(f"{sentence(chance, chance.choice(words))},{price:.4f}")
    place.mkdir(exist_ok=True)
    (place / "my.csv").write_text("\n".join(["text,price", *lines]) + "\n")
    plain = toy_assignment("sst2", model, place, *settings)
    return replace(plain, task=custom_task(WARMTH), data=place / "my.csv")


@pytest.fixture(scope="module", params=["tuned", "frozen-features"])
def prices(request, model, tmp_path_factory):
    place = tmp_path_factory.mktemp("prices")
    rate = () if request.param == "tuned" else ("optim.peak_lr=5e-3", "run.epochs=12")
    assignment = own_run(model, place, f"head.encoder={request.param}", *rate)
    return finetune(assignment, Notebook())


def test_numbers_far_from_zero_are_learned_and_predicted_as_they_are(prices):
    assert prices.metrics["dev"]["pearson"] > 0.9
    warm, cold = load(prices.folder, device="cpu").score(["the warm sun", "the cold snow"])
    assert warm == pytest.approx(MEAN + DEVIATION, abs=DEVIATION / 2)
    assert cold == pytest.approx(MEAN - DEVIATION, abs=DEVIATION / 2)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_half_precision_keeps_the_digits_of_numbers_far_from_zero(prices, monkeypatch, precision):
    for name in ("has_bf16_products", "has_int8_products"):  # whatever machine this is
        monkeypatch.setattr(f"bertsmith.inference.precision.{name}", lambda: True)
    texts = ["the warm sun", "the cold snow", "a warm day", "a cold day"]
    exact, rounded = (
        load(prices.folder, device="cpu", precision=each).score(texts) for each in ("fp32", precision)
    )
    # In bf16 a number of this size comes in steps of 512, a tenth of the deviation.
    assert rounded == pytest.approx(exact, abs=DEVIATION / 20)
    assert any(number % 256 for number in rounded)


def test_a_file_is_evaluated_as_the_run_evaluated_it(prices):
    predicted = predict_labelled(
        [prices.folder], prices.folder.parents[1] / "my.csv", reading=Reading(split="dev"), device="cpu"
    )
    assert predicted.metrics() == pytest.approx(prices.metrics["dev"], rel=1e-3)


def test_the_loss_is_that_of_the_distances(prices):
    losses = [line["loss"] for line in read_metrics(prices.folder) if line["kind"] == "train"]
    assert losses[0] < 10
    assert "the model predicts true numbers" in (prices.folder / "card.md").read_text()


def test_other_tools_get_the_same_numbers(model, tmp_path):
    folder = finetune(own_run(model, tmp_path, "run.epochs=1"), Notebook()).folder / "model"
    bert = load(folder, device="cpu")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    encoded = bert.tokenizer.encode("the warm sun")
    with torch.no_grad():
        expected = float(theirs(torch.tensor([encoded.ids])).logits)
    assert bert.score(["the warm sun"]) == pytest.approx([expected], rel=1e-5)
    assert expected > MEAN / 2


def test_a_head_that_gives_true_numbers_resumes_from_them(model, tmp_path):
    first = finetune(own_run(model, tmp_path / "first"), Notebook())
    notebook = Notebook()
    other = own_run(first.folder / "model", tmp_path / "second", "run.epochs=0.1", "optim.peak_lr=1e-9")
    second = finetune(other, notebook)
    assert "the head classify of the folder is kept" in notebook.notes
    one, again = (
        load(run.folder, device="cpu").score(["the warm sun", "the cold snow"]) for run in (first, second)
    )
    assert again == pytest.approx(one, rel=1e-4)


def test_numbers_that_are_all_the_same_have_a_scale(model, tmp_path):
    folder = finetune(own_run(model, tmp_path, "run.epochs=0.2", deviation=0), Notebook()).folder
    (found,) = load(folder, device="cpu").score(["the warm sun"])
    assert found == pytest.approx(MEAN, abs=10)


def test_published_numbers_are_learned_as_they_are(model, tmp_path):
    notebook = Notebook()
    finetune(toy_assignment("stsb", model, tmp_path, "run.epochs=0.1"), notebook)
    assert not [note for note in notebook.notes if "true numbers" in note]


def test_what_is_transformed_is_transformed_back():
    scaler = TargetScaler(MEAN, DEVIATION)
    distances = np.array([-1.0, 0.0, 2.0], np.float32)
    assert scaler.inverse_transform(distances).tolist() == [85_000, 90_000, 100_000]
    assert scaler.transform(scaler.inverse_transform(distances)).tolist() == distances.tolist()


# ---- runs that end in nothing


def test_numbers_that_no_model_can_give_are_refused_before_the_first_step(model, tmp_path):
    assignment = own_run(model, tmp_path, mean=0, deviation=1e35)
    with pytest.raises(UserError, match="the training file: its numbers reach .*e.35"):
        finetune(assignment, Notebook())


def test_a_run_whose_every_step_is_skipped_writes_no_model(model, tmp_path, monkeypatch):
    own = TaskObjective.forward

    def forward(self, *arguments):
        loss, sums = own(self, *arguments)
        return loss * float("nan"), sums

    monkeypatch.setattr(TaskObjective, "forward", forward)
    notebook = Notebook()
    with pytest.raises(UserError, match="each of the .* steps was skipped: .*; no model is written"):
        finetune(own_run(model, tmp_path, "run.epochs=1"), notebook)
    assert not list(tmp_path.rglob("model.safetensors"))
    assert notebook.lines and all(math.isnan(line["loss"]) for line in notebook.lines)


def test_a_run_that_diverged_writes_no_model(model, tmp_path, monkeypatch):
    own = tuning_parts.evaluate
    monkeypatch.setattr(
        tuning_parts,
        "evaluate",
        lambda *arguments, **options: replace(own(*arguments, **options), loss=float("nan")),
    )
    with pytest.raises(UserError, match="the run diverged: .*; no model is written"):
        finetune(own_run(model, tmp_path, "run.epochs=1"), Notebook())
    assert not list(tmp_path.rglob("model.safetensors"))
