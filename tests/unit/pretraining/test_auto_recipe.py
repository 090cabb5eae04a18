"""`pretrain auto`: what is chosen for a budget, with speeds that are given instead of measured."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bertsmith.core.errors import UserError
from bertsmith.corpus.token_store import TokenStore
from bertsmith.pretraining import auto_recipe as module
from bertsmith.pretraining.auto_recipe import (
    BATCHES,
    MIN_STEPS,
    SHAPES,
    SIZES,
    AutoRequest,
    Shape,
    auto_recipe,
    choose,
    lines,
)
from bertsmith.pretraining.pretrain import pretrain
from bertsmith.pretraining.scaling_law import MASKED
from bertsmith.pretraining.training_speed import ShapeSpeed, token_flops
from bertsmith.recipe.load import load_recipe, recipe_text
from bertsmith.recipe.schema import Recipe
from tests.tiny_runs import Listener

CPU, GPU = 1e11, 3e14
"""Operations a second."""
FAST = ("run.device=cpu", "run.evaluation_sequences=8", "examples.held_out_fraction=0.2")


def speeds_of(recipes: Sequence[Recipe], store: TokenStore, *_: object, **__: object) -> list[ShapeSpeed]:
    """What `measure_speeds` would give on two cores."""
    return [speed_of(recipe, CPU, store.vocabulary) for recipe in recipes]


def speed_of(recipe: Recipe, flops: float, vocabulary: int = 16_384) -> ShapeSpeed:
    return ShapeSpeed(0.01, token_flops(recipe, vocabulary) / flops, token_flops(recipe, vocabulary), 10**6)


def shapes_for(flops: float, *settings: str) -> list[Shape]:
    base = [("auto", line) for line in module.BELOW]
    recipes = [
        load_recipe("speedrun-small", settings, options=[*base, *module._shape_options(each)])
        for each in SHAPES
    ]
    return [Shape(recipe, speed_of(recipe, flops)) for recipe in recipes]


def request(store: TokenStore, out: Path, *settings: str, size: str = "", objective: str = "") -> AutoRequest:
    def load(base: str | Path, below: Sequence[tuple[str, str]]) -> Recipe:
        return load_recipe(base, [*FAST, *settings], options=below)

    return AutoRequest(load, store.folder, out, size, objective)


@pytest.fixture(autouse=True)
def known_speeds(monkeypatch):
    monkeypatch.setattr(module, "measure_speeds", speeds_of)


def minutes(count: float) -> tuple[str, str]:
    return "run.budget=minutes", f"run.minutes={count:g}"


def weights_for(flops: float, *settings: str, text: float = 60e6) -> float:
    return choose(shapes_for(flops, *settings), text)[0].size.weights


def test_more_time_and_a_faster_machine_take_a_larger_model():
    assert weights_for(CPU, *minutes(4)) < weights_for(CPU, *minutes(240)) < weights_for(GPU, *minutes(240))


def test_the_first_candidate_has_the_lowest_expected_loss_and_enough_steps():
    candidates = choose(shapes_for(CPU, *minutes(20)), 60e6)
    losses = [each.loss for each in candidates if each.size.steps >= MIN_STEPS]
    assert losses == sorted(losses)
    assert len(candidates) == len(SHAPES)
    assert candidates[0].size.steps >= MIN_STEPS


def test_a_budget_in_minutes_keeps_time_for_the_rest_of_the_run():
    def seconds(**more: float) -> float:
        best = choose(shapes_for(CPU, *minutes(10)), 60e6, **more)[0]
        return best.size.steps * best.shape.speed.step_seconds(best.size.batch_tokens)

    assert seconds() == pytest.approx(552)
    assert seconds(spent=60.0) == pytest.approx(492)
    assert seconds(spent=590.0) == pytest.approx(300)  # at least half of it is for steps


def test_a_budget_in_steps_or_tokens_is_what_the_run_gets():
    steps = choose(shapes_for(CPU, "run.budget=steps", "run.steps=900"), 60e6)[0]
    assert steps.size.steps == pytest.approx(900)
    tokens = choose(shapes_for(CPU, "run.budget=tokens", "run.tokens=5_000_000"), 60e6)[0]
    assert tokens.size.tokens == pytest.approx(5e6)


@pytest.mark.parametrize("budget", ["steps", "tokens"])
def test_candidates_of_a_budget_in_steps_or_tokens_are_compared_at_equal_time(budget):
    candidates = choose(shapes_for(CPU, f"run.budget={budget}", f"run.{budget}=3_000"), 60e6)
    assert len({id(each.shape) for each in candidates}) == len(SHAPES)
    times = [each.size.steps * each.shape.speed.step_seconds(each.size.batch_tokens) for each in candidates]
    assert times == pytest.approx([times[0]] * len(times))


def test_more_tokens_take_a_larger_model():
    few, many = (f"run.tokens={count}" for count in (10**6, 10**9))
    budget = "run.budget=tokens"
    assert weights_for(CPU, budget, few) < weights_for(CPU, budget, many)


def test_five_lines_say_what_was_chosen_why_and_what_to_expect():
    shapes = shapes_for(CPU, *minutes(4))
    candidates = choose(shapes, 60e6)
    told = lines(candidates, load_recipe("speedrun-small", minutes(4)), MASKED.frequencies, measured=3)
    assert len(told) == 5
    assert told[0].startswith(f"auto: {candidates[0].name},")
    assert "the lowest expected loss for 4 minutes; next" in told[1]
    assert "shapes measured: 3" in told[2]
    assert "% of masked words right" in told[4]


def test_the_expected_loss_is_of_this_text_and_of_no_other_masking():
    candidates = choose(shapes_for(CPU, *minutes(30)), 60e6)
    recipe = load_recipe("speedrun-small", minutes(30))
    one, half = (
        float(lines(candidates, recipe, entropy, measured=3)[4].split("loss ")[1].split()[0])
        for entropy in (MASKED.frequencies, MASKED.frequencies / 2)
    )
    assert one == pytest.approx(2 * half, abs=0.11)
    other = load_recipe("speedrun-small", [*minutes(30), "masking.rate=0.15"])
    assert "not known: the law is for Muon" in lines(candidates, other, MASKED.frequencies, measured=3)[4]


def test_beyond_the_runs_of_the_law_nothing_is_said_to_be_expected():
    candidates = choose(shapes_for(CPU, *minutes(4)), 1e5)
    assert (
        "not known"
        in lines(candidates, load_recipe("speedrun-small", minutes(4)), MASKED.frequencies, measured=3)[4]
    )


def test_a_budget_that_is_too_small_says_so():
    for settings in (minutes(0.1), ("run.budget=tokens", "run.tokens=1_000_000_000", "optim.peak_lr=9.0")):
        shapes = shapes_for(CPU, *settings)
        told = lines(
            choose(shapes, 60e6), load_recipe("speedrun-small", settings), MASKED.frequencies, measured=3
        )
        assert "little more than how frequent words are; allow more `run.minutes`" in told[4]


def test_a_recipe_is_complete_and_told(store, tmp_path):
    told: list[str] = []
    recipe = auto_recipe(request(store, tmp_path / "run"), told.append)
    assert (recipe.name, recipe.run.budget, recipe.run.minutes) == ("auto", "minutes", 30)
    assert (recipe.model.layers, recipe.model.width) in SHAPES
    assert recipe.batch.tokens in BATCHES
    assert recipe.examples.pairs == "full-sentences"
    assert len(told) == 5


@pytest.mark.parametrize("size", SIZES)
def test_a_size_keeps_its_shape(store, tmp_path, size):
    recipe = auto_recipe(request(store, tmp_path / "run", size=size), lambda _: None)
    assert (recipe.model.layers, recipe.model.width) == SIZES[size]


def test_an_unknown_size_or_objective_is_rejected_with_what_there_is(store, tmp_path):
    with pytest.raises(UserError, match="huge") as caught:
        auto_recipe(request(store, tmp_path / "run", size="huge"), lambda _: None)
    assert "size: " in caught.value.line() and "tiny, mini, small, base" in caught.value.line()
    with pytest.raises(UserError, match="none") as caught:
        auto_recipe(request(store, tmp_path / "run", objective="none"), lambda _: None)
    assert "objective: " in caught.value.line()


def test_replaced_tokens_have_their_own_masking_and_half_of_the_rate(store, tmp_path):
    told: list[str] = []
    fixed = ("model.layers=2", "model.width=64", "model.heads=1", "batch.tokens=508")
    masked = auto_recipe(request(store, tmp_path / "run", *fixed), lambda _: None)
    replaced = auto_recipe(request(store, tmp_path / "run", *fixed, objective="replaced"), told.append)
    assert (replaced.examples.objective, replaced.masking.rate) == ("replaced", 0.2)
    assert 0.4 < replaced.optim.peak_lr / masked.optim.peak_lr < 0.6
    assert "not known: the law is for masked tokens" in told[4]


def test_the_users_settings_stand_above_what_is_chosen(store, tmp_path):
    given = ("batch.tokens=1_500", "optim.peak_lr=0.001", "model.layers=3")
    recipe = auto_recipe(request(store, tmp_path / "run", *given), lambda _: None)
    assert (recipe.batch.tokens, recipe.optim.peak_lr, recipe.model.layers) == (1500, 0.001, 3)


def test_a_batch_that_was_given_is_the_only_one_tried(store, tmp_path, monkeypatch):
    tried: list[Shape] = []
    before = module.choose
    monkeypatch.setattr(
        module, "choose", lambda shapes, *rest, **more: tried.extend(shapes) or before(shapes, *rest, **more)
    )
    auto_recipe(request(store, tmp_path / "run", "batch.tokens=1_500"), lambda _: None)
    assert {each.batches for each in tried} == {(1500,)}


def test_a_batch_in_sequences_is_planned_with_its_tokens(store, tmp_path):
    told: list[str] = []
    given = ("batch.by=sequences", "batch.sequences=256", "run.budget=steps", "run.steps=2000")
    recipe = auto_recipe(request(store, tmp_path / "run", *given), told.append)
    assert recipe.batch.sequences == 256
    assert "32,768 tokens a step, about 2,000 steps" in told[0]


@pytest.mark.parametrize("width", [96, 512])
def test_heads_follow_from_a_width_that_was_given(store, tmp_path, width):
    recipe = auto_recipe(request(store, tmp_path / "run", f"model.width={width}"), lambda _: None)
    assert (recipe.model.width, recipe.model.heads) == (width, width // 64)


def test_shapes_that_do_not_fit_into_memory_are_left_out(store, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda _: 3 * 10**7)
    told: list[str] = []
    auto_recipe(request(store, tmp_path / "run", *minutes(1e6)), told.append)
    assert "12 x 768" not in told[1]
    assert told[0].startswith(("auto: 2 x", "auto: 4 x 128"))


def test_auto_does_not_continue_from_a_model(store, tmp_path):
    with pytest.raises(UserError, match="from scratch"):
        auto_recipe(request(store, tmp_path / "run", "start.model=somewhere"), lambda _: None)


def test_a_run_that_resumes_keeps_its_recipe_and_measures_nothing(store, tmp_path, monkeypatch):
    settings = ("run.budget=steps", "run.steps=2", "batch.tokens=300", "model.layers=2")
    asked = request(store, tmp_path / "run", *settings, size="tiny")
    recipe = auto_recipe(asked, lambda _: None)
    result = pretrain(recipe, store=store.folder, out=tmp_path / "run", callback=Listener())
    assert (result.state, result.steps) == ("finished", 2)
    monkeypatch.setattr(module, "measure_speeds", None)  # calling it would fail
    told: list[str] = []
    again = auto_recipe(asked, told.append)
    assert recipe_text(again) == recipe_text(recipe)
    assert told == [f"auto: the initial recipe of the run ({tmp_path / 'run' / 'recipe.toml'})"]
    other = auto_recipe(replace(asked, size="mini"), told.append)
    assert (other.model.layers, other.model.width) == (2, 256)  # which the run then rejects
    with pytest.raises(UserError, match="another run"):
        pretrain(other, store=store.folder, out=tmp_path / "run", callback=Listener())


def test_a_folder_with_a_run_of_a_preset_is_not_taken_for_one_of_auto(store, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text('base = "bert-tiny"\n')
    with pytest.raises(UserError, match="another recipe: bert-tiny, not auto"):
        auto_recipe(request(store, tmp_path / "run"), lambda _: None)
