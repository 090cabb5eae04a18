"""A student from its teacher's layers: trained, resumed, saved, and what cannot be distilled."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from bertsmith.core.errors import UserError
from bertsmith.corpus.token_store import TokenStore
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.objectives.step_memory import estimate_memory
from bertsmith.packed import pack
from bertsmith.pretraining.checkpoint_export import export_checkpoints
from bertsmith.pretraining.hardware import training_load
from bertsmith.pretraining.initial_model import build_initial_model, with_true_model
from bertsmith.recipe.load import load_recipe
from bertsmith.training.distributed import ALONE
from tests.tiny_runs import (
    Listener,
    differing,
    last_scalars,
    last_state,
    metrics_of,
    run_tiny,
    stop_at,
    tiny_recipe,
    tiny_store,
    tiny_tokenizer,
    without_pictures,
)

DISTILLED = ("examples.objective=distilled", "examples.pairs=doc-sentences", "masking.smoothing=0.7")
PLAIN = ("examples.pairs=doc-sentences", "run.steps=2", "model.layers=4")
MODERN = ("model.type=modernbert", "model.segments=0", "model.norm_eps=1e-5")
EVERY = ("distill.hidden_weight=1", "distill.attention_weight=1", "distill.relation_weight=1")


@pytest.fixture(scope="module")
def teacher(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose layers do so much that leaving some out is a loss."""
    folder = tmp_path_factory.mktemp("teacher")
    with without_pictures():
        run_tiny(store, folder / "run", *PLAIN, "run.steps=1")
    network = read_model(folder / "run" / "model").network
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    write_model(folder / "model", Model(network))
    store.tokenizer().save(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def student(store: TokenStore, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; not to be changed."""
    out = tmp_path_factory.mktemp("student") / "run"
    with without_pictures():
        assert run_tiny(store, out, *of(teacher)).state == "finished"
    return out


def of(teacher: Path, layers: str = "[0, 3]") -> tuple[str, ...]:
    return (*DISTILLED, f"distill.teacher={teacher}", f"distill.layers={layers}")


def test_a_student_learns_from_its_teacher(teacher, store, tmp_path):
    run_tiny(store, tmp_path / "run", *of(teacher), "distill.mlm_weight=0")
    before, *_, after = metrics_of(tmp_path / "run", "held-out")
    assert after["soft_loss"] < before["soft_loss"] and after["cosine_loss"] < before["cosine_loss"]
    assert after["teacher_accuracy"] == before["teacher_accuracy"]


def test_a_loss_is_its_parts_with_their_weights(student):
    lines = metrics_of(student)
    assert lines[-1]["fixed_token_loss"] < lines[0]["fixed_token_loss"]
    for line in lines:
        parts = 5 * line["soft_loss"] + 2 * line["token_loss"] + line["cosine_loss"]
        assert line["loss"] == pytest.approx(parts) and "pair_loss" not in line


def test_its_positions_stay_those_of_the_teacher_and_all_else_learns(student, teacher):
    theirs, ours = (read_model(each).network.state_dict() for each in (teacher, student / "model"))
    table, segment = (f"encoder.embeddings.added.{name}.weight" for name in ("position", "segment"))
    assert torch.equal(ours[table], theirs[table] + theirs[segment][0])
    assert not any(torch.equal(each, theirs[name]) for name, each in ours.items() if name in theirs)


def test_a_student_is_a_distilbert_that_transformers_opens(student, store):
    theirs, found = transformers.DistilBertForMaskedLM.from_pretrained(
        student / "model", output_loading_info=True
    )
    assert not (found["missing_keys"] or found["unexpected_keys"])
    ids = store.tokenizer().encode("the smith heats the iron near the forge .").ids
    network = read_model(student / "model").network
    expected = theirs.eval()(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(network.scores_of_words(network(pack([ids]))), expected, rtol=0, atol=1e-5)


def test_the_recipe_the_card_and_the_log_tell_the_truth(student, teacher, store, tmp_path):
    recipe = load_recipe(student / "recipe.toml")
    assert (recipe.model.type, recipe.model.layers, recipe.model.segments) == ("distilbert", 2, 0)
    card = (student / "model" / "card.md").read_text(encoding="utf-8")
    assert "from the layers 0, 3 of its teacher" in card
    assert "loss = 5 x soft + 2 x mlm + 1 x cosine, at a temperature of 2, at every token" in card
    listener = Listener()
    result = run_tiny(store, student, *of(teacher), listener=listener)
    last = metrics_of(student, "held-out")[-1]
    assert result.held_out == {name: each for name, each in last.items() if name in result.declared.reported}
    assert "soft_loss" in result.held_out and "teacher_agreement" in result.held_out


@pytest.mark.parametrize(
    "more", [(), (*MODERN, *EVERY, "distill.frozen_positions=false")], ids=["bert", "modern"]
)
def test_a_run_stopped_twice_ends_as_one_that_was_not(student, teacher, store, tmp_path, more):
    straight, asked = student, of(teacher)
    if more:
        run_tiny(store, tmp_path / "teacher", *PLAIN, *MODERN)
        # Narrower than its teacher: there is a projection whose weights and moments are saved, too.
        asked = (*DISTILLED, f"distill.teacher={tmp_path / 'teacher'}", "model.width=16", *more)
        straight = tmp_path / "straight"
        run_tiny(store, straight, *asked)
        assert any(name.startswith("optimizer.project.") for name in last_state(straight))
    for count in (2, 4):
        with stop_at(count - 1):
            assert run_tiny(store, tmp_path / "run", *asked).state == "stopped"
    assert run_tiny(store, tmp_path / "run", *asked).state == "finished"
    assert metrics_of(tmp_path / "run") == metrics_of(straight)
    assert differing(last_state(tmp_path / "run"), last_state(straight)) == []
    assert last_scalars(tmp_path / "run") == last_scalars(straight)


def test_a_checkpoint_is_exported_without_the_teacher(student, store, tmp_path):
    export_checkpoints(student, {8: tmp_path / "exported"})
    exported, model = (
        read_model(each).network.state_dict() for each in (tmp_path / "exported", student / "model")
    )
    assert differing(exported, model) == []


def test_a_modernbert_student_keeps_its_architecture(store, tmp_path):
    run_tiny(store, tmp_path / "teacher", *PLAIN, *MODERN, "run.steps=1")
    recipe = tiny_recipe(*of(tmp_path / "teacher", "[0, 2, 3]"))
    model = with_true_model(recipe).model
    assert (model.type, model.layers, model.global_layers) == ("modernbert", 3, 2)
    network = build_initial_model(recipe, store).network
    assert all(each.requires_grad for each in network.parameters())


def test_a_student_may_keep_its_segments_or_begin_with_a_model_or_fresh(teacher, student, store):
    kept = build_initial_model(tiny_recipe(*of(teacher), "distill.segments=kept"), store).network
    assert kept.config.model_type == "bert" and kept.config.segments == 2
    name = f"distill.teacher={teacher}"
    fresh = build_initial_model(tiny_recipe(*DISTILLED, name, "model.width=16"), store)
    assert fresh.network.config.width == 16 and fresh.teacher is not None
    begun = build_initial_model(tiny_recipe(*DISTILLED, name, f"start.model={student}"), store).network
    held = read_model(student / "model").network.state_dict()
    assert differing(begun.state_dict(), held) == []


def test_the_memory_of_the_teacher_is_counted(teacher, store):
    recipe = with_true_model(tiny_recipe(*of(teacher), "distill.rows=predicted"))
    initial = build_initial_model(recipe, store)
    networks = (initial.network, initial.teacher)
    load = training_load(recipe, networks, ALONE, "fp32", compiled=False)
    alone = replace(load, teacher=None, teacher_parameters=0)
    with_it, without = (estimate_memory(each, 256) for each in (load, alone))
    parameters = sum(each.numel() for each in initial.teacher.parameters())
    assert with_it.weights - without.weights == 4 * parameters
    assert with_it.scores > without.scores and with_it.gradients == without.gradients
    assert load.compared == 0
    matched = with_true_model(
        tiny_recipe(*of(teacher), "distill.hidden_weight=1", "distill.attention_weight=1")
    )
    ours, theirs = (each.config for each in networks)
    states = (ours.layers + 1) * (ours.width + theirs.width)
    scores = 3 * ours.layers * ours.heads * load.longest
    assert training_load(matched, networks, ALONE, "fp32", compiled=False).compared == 4 * (states + scores)


def test_a_resumed_run_wants_the_same_teacher(teacher, store, tmp_path):
    folder = tmp_path / "teacher"
    shutil.copytree(teacher, folder)
    with stop_at(1):
        run_tiny(store, tmp_path / "run", *of(folder))
    network = read_model(folder).network
    with torch.no_grad():
        network.heads["mlm"].bias += 1
    write_model(folder, Model(network))
    with pytest.raises(UserError, match="the teacher has changed since"):
        run_tiny(store, tmp_path / "run", *of(folder))


# ---- what cannot be distilled


def refused(store: TokenStore, out: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as told:
        run_tiny(store, out, *overrides)
    assert not out.exists()
    return told.value.line()


def test_a_layer_that_the_teacher_lacks_is_refused(teacher, store, tmp_path):
    assert "4 layers" in refused(store, tmp_path / "run", *of(teacher, "[0, 4]"))


def test_a_teacher_with_another_vocabulary_is_refused(teacher, tmp_path):
    other = tiny_store(tmp_path, tokenizer=tiny_tokenizer(tmp_path / "other", unused=3))
    assert "another vocabulary" in refused(other, tmp_path / "run", *of(teacher))


def test_a_teacher_without_an_mlm_head_is_refused_unless_nobody_asks_it_for_words(teacher, store, tmp_path):
    network = read_model(teacher).network
    del network.heads["mlm"]
    write_model(tmp_path / "bare", Model(network))
    store.tokenizer().save(tmp_path / "bare")
    asked = of(tmp_path / "bare")
    assert "lacks an MLM head" in refused(store, tmp_path / "run", *asked)
    initial = build_initial_model(tiny_recipe(*asked, "distill.soft_weight=0"), store)
    assert "the head mlm is not in the folder: it starts from fresh weights" in initial.notes


def test_a_teacher_that_takes_shorter_texts_is_refused(store, tmp_path):
    short = ("model.positions=24", "examples.stages=[{fraction=1, length=24, predictions=4}]", "run.steps=1")
    run_tiny(store, tmp_path / "teacher", *PLAIN, *short)
    asked = (*DISTILLED, f"distill.teacher={tmp_path / 'teacher'}")
    assert "at most 24 tokens" in refused(store, tmp_path / "run", *asked)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (("examples.objective=distilled", "examples.pairs=none"), "requires a teacher"),
        (("distill.teacher=x",), "does not use distill.teacher"),
        (("examples.objective=distilled", "distill.teacher=x"), "only masked words"),
        ((*DISTILLED, "distill.teacher=x", "distill.layers=[0]", "start.model=y"), "not with both"),
        (("distill.soft_weight=0", "distill.cosine_weight=0"), "every weight"),
        (("distill.relation_weight=1", "distill.relations=[]"), "the list is empty"),
        (("masking.smoothing=0.7", "masking.unit=word"), "one by one"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, word):
    with pytest.raises(UserError, match=word):
        tiny_recipe(*settings)
