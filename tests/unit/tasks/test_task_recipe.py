"""Rules between the settings of a run."""

import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task_recipe import finetuning_recipe, finetuning_recipe_with_origins


def test_windows_that_would_not_overlap_are_rejected_with_the_step_to_set():
    rule = "text.step = 128 is not below text.longest = 128: windows would not overlap; use `text.step=64`"
    with pytest.raises(UserError, match=rule):
        finetuning_recipe(task_named("sst2"), ["text.long_texts=windows"])
    recipe = finetuning_recipe(task_named("sst2"), ["text.long_texts=windows", "text.step=64"])
    assert recipe.text.step == 64


@pytest.mark.parametrize("encoder", ["frozen-features", "frozen-linear"])
def test_a_frozen_encoder_is_learned_from_at_a_rate_of_fresh_weights_unless_another_is_asked_for(encoder):
    tuned, frozen = finetuning_recipe(task_named("ner")), [f"head.encoder={encoder}"]
    assert tuned.optim.peak_lr < 1e-4
    fresh = finetuning_recipe_with_origins(task_named("ner"), frozen)
    assert fresh.recipe.optim.peak_lr == 1e-3
    assert fresh.origins["optim.peak_lr"] == "head.encoder"
    asked = finetuning_recipe(task_named("ner"), frozen, options=[("--lr", "optim.peak_lr=3e-4")])
    assert asked.optim.peak_lr == 3e-4
    assert finetuning_recipe(task_named("ner"), [*frozen, "optim.peak_lr=5e-5"]).optim.peak_lr == 5e-5
    with pytest.raises(UserError, match="optim"):
        finetuning_recipe(task_named("ner"), [*frozen, "optim=5"])
