"""Runs that do not learn are named early; those that learn are left alone."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertsmith.cli.pretrain import show
from bertsmith.data.collate import PretrainingBatch
from bertsmith.objectives.distillation import Distillation
from bertsmith.objectives.masked_language_modelling import declare_words
from bertsmith.packed import pack
from bertsmith.pretraining.learning_watch import LearningWatch, constant_prediction
from bertsmith.pretraining.pretrain import PretrainingResult, pretrain
from bertsmith.recipe.distill_section import DistillSection
from bertsmith.training.callbacks import StopRequested
from bertsmith.training.distributed import ALONE
from bertsmith.training.early_stopping import EarlyStopping
from tests.tiny import tiny_network
from tests.tiny_runs import Listener, metrics_of, run_tiny, stop_at, tiny_recipe, without_pictures

LINE = 7.0
WATCHED = declare_words().own["token_loss"]
ABSURD = ("optim.peak_lr=3.0", "run.steps=60", "run.log_every_steps=2", "run.evaluate_every_steps=60")


def watched(losses: Sequence[float], norms: Sequence[float] = (), *, warmup: float = 0.01) -> LearningWatch:
    watch = LearningWatch(LINE, warmup, WATCHED)
    for number, loss in enumerate(losses):
        norm = norms[number] if len(norms) else 1.0
        watch.add(10 * (number + 1), {"token_loss": float(loss), "gradient_norm": float(norm)})
    return watch


def falling(to: float, lines: int = 40) -> list[float]:
    """A loss that falls quickly at first and comes to its end in small steps."""
    return [to + 3.5 * np.exp(-number / 2) for number in range(lines)]


def test_a_loss_that_stays_at_the_unigram_line_is_a_plateau():
    found = watched(falling(LINE)).plateau(0.05)
    assert found is not None and found.kind == "plateau"
    assert "step 400: the token loss stays near 7.00 since step 110; 7.00 is" in found.text
    assert "below 7.00, the loss of mere word frequencies (the unigram line)" in found.text


@pytest.mark.parametrize(
    "losses",
    [
        falling(6.5),  # below the line it may be slow
        falling(LINE, 8),  # nobody knows yet
        list(np.linspace(10.4, 7.1, 40)),  # still on its way to the line
        list(np.linspace(7.3, 6.9, 40)),  # slowly through it
    ],
)
def test_a_loss_that_falls_or_lies_below_the_line_is_none(losses):
    assert watched(losses).plateau(0.5) is None


def test_a_loss_that_comes_back_to_the_line_is_a_plateau_again():
    assert watched([*falling(5.0, 20), *[7.2] * 40]).plateau(0.5) is not None


def test_a_loss_that_went_up_and_falls_slowly_back_is_worse_than_none():
    assert watched([10.0, *np.linspace(900, 400, 39)]).plateau(0.5) is not None


def test_a_warm_up_is_waited_for():
    watch = watched(falling(LINE), warmup=0.1)
    assert watch.plateau(0.09) is None and watch.plateau(0.1) is not None


def test_gradient_norms_that_explode_are_named():
    healthy = [8.0, 4.0, *[1.0] * 20, *[2.5] * 8]
    assert watched([5.0] * 30, healthy).explosion() is None
    found = watched([5.0] * 30, [*healthy[:-3], 90.0, 200.0, 400.0]).explosion()
    assert found is not None and "the gradient norm rose from 1 to 200: it explodes" in found.text
    assert watched([5.0] * 30, [*healthy[:-1], 4000.0]).explosion() is None  # one spike is none


@pytest.fixture(scope="module")
def flat(store, tmp_path_factory) -> tuple[PretrainingResult, Listener, StopRequested]:
    """A run of a study, at an absurd learning rate, that is ended as soon as it is seen not to learn."""
    out, listener = tmp_path_factory.mktemp("flat") / "run", Listener()
    with without_pictures(), StopRequested() as study:
        result = pretrain(
            tiny_recipe(*ABSURD),
            store=store.folder,
            out=out,
            callback=listener,
            early_stopping=EarlyStopping(if_flat=True),
        )
    return result, listener, study


def test_a_run_that_does_not_learn_says_so_once_and_what_to_try(flat):
    _, listener, _ = flat
    (told,) = [note for note in listener.notes if "the unigram line" in note]
    assert "the decoder is dead: it predicts '" in told
    assert "try a lower optim.peak_lr, a longer optim.warmup_fraction, or a pre-norm model" in told


def test_a_flat_run_ends_early_where_that_was_asked_for_and_can_be_resumed(flat, store):
    result, _, study = flat
    assert not study.here  # its other runs are still worth their time
    assert result.state == "stopped" and result.steps == result.saved_step < 60
    assert "the unigram line" in result.early_end
    warning, end = metrics_of(result.folder, "event")
    assert (end["state"], end["early_end"]) == ("stopped", result.early_end)
    assert warning["warning"] == "plateau" and "the unigram line" in warning["text"]
    listener = Listener()
    resumed = run_tiny(store, result.folder, *ABSURD, listener=listener)
    assert (resumed.state, resumed.steps, resumed.early_end) == ("finished", 60, "")
    assert not [note for note in listener.notes if "the unigram line" in note]  # it was told before


def test_a_plateau_is_named_by_a_run_that_was_resumed_and_not_evaluated_since(store, tmp_path):
    with stop_at(4):
        assert run_tiny(store, tmp_path / "run", *ABSURD).state == "stopped"
    listener = Listener()
    assert run_tiny(store, tmp_path / "run", *ABSURD, listener=listener).state == "finished"
    (told,) = [note for note in listener.notes if "the unigram line" in note]
    assert "the decoder is dead: it predicts '" in told


def test_a_run_that_learns_is_not_ended_and_nothing_is_said(store, tmp_path):
    settings = ("run.steps=40", "run.log_every_steps=2", "run.evaluate_every_steps=40")
    listener = Listener()
    result = pretrain(
        tiny_recipe(*settings),
        store=store.folder,
        out=tmp_path / "run",
        callback=listener,
        early_stopping=EarlyStopping(if_flat=True),
    )
    assert (result.state, result.steps, result.early_end) == ("finished", 40, "")
    assert not [line for line in metrics_of(tmp_path / "run", "event") if "warning" in line]
    assert not [note for note in listener.notes if "unigram" in note or "explodes" in note]


def test_a_flat_generator_is_called_so(store, tmp_path):
    electra = ("model.type=electra", "model.embedding_width=16", "examples.objective=replaced")
    electra += ("examples.pairs=none", "replaced.generator_size=0.5")
    listener = Listener()
    run_tiny(store, tmp_path / "run", *ABSURD, *electra, "run.steps=30", listener=listener)
    (told,) = [note for note in listener.notes if "the unigram line" in note]
    assert "the generator's token loss stays near" in told and "the decoder is dead" in told


def test_a_student_that_is_taught_no_words_is_not_held_against_them(store, tmp_path, capsys):
    run_tiny(store, tmp_path / "teacher", "examples.pairs=none", "run.steps=1")
    taught = ("examples.objective=distilled", "examples.pairs=none", "run.steps=30", "run.log_every_steps=2")
    taught += (f"distill.teacher={tmp_path / 'teacher'}", "distill.soft_weight=0", "distill.mlm_weight=0")
    listener = Listener()
    result = pretrain(
        tiny_recipe(*taught),
        store=store.folder,
        out=tmp_path / "run",
        callback=listener,
        early_stopping=EarlyStopping(if_flat=True),
    )
    assert (result.state, result.steps) == ("finished", 30)
    assert result.held_out["token_loss"] > result.unigram_entropy  # it knows no words, as nobody taught it
    show(result, as_json=False)
    assert not [text for text in (*listener.notes, capsys.readouterr().out) if "unigram" in text]


@pytest.mark.parametrize("rows", ["all", "predicted"])
def test_a_student_that_predicts_one_word_everywhere_is_seen(rows):
    student, teacher = (tiny_network("bert", {"mlm": 0}, seed=seed) for seed in (1, 2))
    objective = Distillation(student, teacher, DistillSection(rows=rows))
    inputs = pack([[2, 5, 4, 7, 3], [2, 9, 4, 4, 10, 3]])
    masked = {"masked_rows_P": torch.tensor([2, 7, 8]), "masked_ids_P": torch.tensor([6, 8, 9])}
    none = torch.zeros(2)
    batch = PretrainingBatch(
        inputs,
        end_1=inputs.layout.starts_S1[-1:].long(),
        fields={
            **masked,
            "masked_weights_P": torch.ones(3),
            "pair_labels_S": none.long(),
            "pair_weights_S": none,
        },
    )
    trainer = SimpleNamespace(objective=objective, world=ALONE, precision="fp32")
    held_out = SimpleNamespace(batches=SimpleNamespace(micros=[batch]))
    with torch.no_grad():
        student.heads["mlm"].bias[17] = 100.0
    assert constant_prediction(trainer, held_out) == 17
    with torch.no_grad():  # of what it predicts at other tokens nobody asks
        student.heads["mlm"].bias.zero_()
    assert constant_prediction(trainer, held_out) != 17
