"""An objective that no package file knows: one class with its declaration is all that a run asks for."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.cli.pretrain import live_line
from bertsmith.core.measures import Declaration, LossTerm, Metric, mean, mean_loss
from bertsmith.data.collate import PretrainingBatch
from bertsmith.objectives.pretraining_objective import StepObjective
from bertsmith.objectives.registry import OBJECTIVES, ObjectiveSpec, declaration
from bertsmith.pretraining.held_out import sums_in_blocks
from bertsmith.training.curves import panels
from tests.command_line import bertsmith
from tests.tiny import tiny_network
from tests.tiny_runs import (
    Listener,
    differing,
    last_state,
    metrics_of,
    run_tiny,
    stop_at,
    tiny_recipe,
    tiny_store,
    without_pictures,
)

DECLARED = Declaration(
    (LossTerm("contrast_loss", "sequences", 0.5),),
    ("contrast_hits",),
    (
        mean_loss("contrast_loss", "sequences", panel="Contrast: loss in nats"),
        Metric("contrast_accuracy", of=mean("contrast_hits", "sequences"), short="found"),
    ),
    watched="contrast_accuracy",
    over_the_step=True,
)


class Contrast(StepObjective):
    """A sequence is to be found among those of its step by itself under other dropout (SimCSE)."""

    def rows(self, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        """Both vectors of each sequence [S, 2, D]."""
        encoder, layout = self.network.encoder, batch.inputs.layout
        vectors = [encoder.sentence_states(encoder(batch.inputs), layout) for _ in range(2)]
        return torch.stack(vectors, 1), layout.starts_S1[:-1] < batch.end_1

    def of_rows(self, rows_Z: Tensor) -> dict[str, Tensor]:
        """The cross-entropy over the sequences of a step, and which are found."""
        scores_ZZ = rows_Z[:, 0] @ rows_Z[:, 1].T
        labels_Z = torch.arange(len(scores_ZZ), device=scores_ZZ.device)
        losses_Z = functional.cross_entropy(scores_ZZ, labels_Z, reduction="none")
        return {"contrast_loss": losses_Z, "contrast_hits": scores_ZZ.argmax(-1) == labels_Z}


@pytest.fixture
def _contrastive(monkeypatch):
    spec = ObjectiveSpec(
        lambda network, _, recipe: Contrast(network, DECLARED),
        lambda recipe: {},
        lambda recipe: DECLARED,
        lambda recipe: "contrastive",
    )
    monkeypatch.setitem(OBJECTIVES, "masked", spec)


@pytest.mark.usefixtures("_contrastive")
def test_a_run_reports_what_an_objective_declares_and_nothing_else(tmp_path, capsys):
    store, listener, out = tiny_store(tmp_path), Listener(), tmp_path / "run"
    with without_pictures():
        with stop_at(4):
            run_tiny(store, out, "examples.pairs=none")
        result = run_tiny(store, out, "examples.pairs=none", listener=listener)
    shown = {"loss", "contrast_loss", "contrast_accuracy", "sequences", "candidates"}
    assert result.held_out.keys() == shown
    for line in metrics_of(out):
        assert line["loss"] == pytest.approx(0.5 * line["contrast_loss"])
        assert {name for name in line if name in shown or "token_" in name or "fixed" in name} <= shown
    last = result.held_out
    assert 0 < last["contrast_accuracy"] <= 1 and last["contrast_loss"] < 5
    told = f"step 8: held-out loss {last['loss']:.3f}, found {last['contrast_accuracy']:.1%}, candidates 4"
    assert told in listener.notes
    line = live_line(DECLARED.own, listener.lines[-1])
    assert f"found {listener.lines[-1]['contrast_accuracy']:.1%}  " in line
    card = (out / "card.md").read_text(encoding="utf-8")
    assert (
        f"| contrast accuracy | {last['contrast_accuracy']:.1%} |" in card
        and "Objective: contrastive." in card
    )
    assert "Fixed evaluation" not in card
    listed = bertsmith(capsys, "checkpoint", "list", out).out
    assert f"held-out contrast accuracy {last['contrast_accuracy']:.1%}" in listed


@pytest.mark.usefixtures("_contrastive")
def test_a_run_with_cached_gradients_resumes_to_the_bit(tmp_path):
    store, settings = tiny_store(tmp_path), ("examples.pairs=none", "batch.micro_tokens=64")
    with without_pictures():
        run_tiny(store, tmp_path / "straight", *settings)
        with stop_at(7):
            assert run_tiny(store, tmp_path / "stopped", *settings).state == "stopped"
        run_tiny(store, tmp_path / "stopped", *settings)
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "straight")
    assert not differing(last_state(tmp_path / "stopped"), last_state(tmp_path / "straight"))


def test_a_rank_without_held_out_rows_judges_none_and_adds_nothing():
    objective = Contrast(tiny_network(), DECLARED)
    for rows, block in ((8, 4), (6, 4), (3, 4), (0, 4), (0, 0)):
        sums, judged = sums_in_blocks(objective, torch.randn(rows, 2, 4), block)
        assert judged == (rows // 4 * 4) and (sums[0] > 0) == (rows >= 4)


@pytest.mark.usefixtures("_contrastive")
def test_sweeps_and_curves_read_the_declaration():
    declared = declaration(tiny_recipe())
    assert declared.deciding.name == "contrast_accuracy" and declared.deciding.larger_is_better
    drawn = [panel.metric for panel in panels(declared, unigram_entropy=7.0)]
    assert drawn == ["contrast_loss", "learning_rate", "tokens_per_second"]
