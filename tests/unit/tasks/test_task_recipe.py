"""Rules between the settings of a run."""

import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task_recipe import finetuning_recipe


def test_windows_that_would_not_overlap_are_rejected_with_the_step_to_set():
    rule = "text.step = 128 is not below text.longest = 128: windows would not overlap; --set text.step=64"
    with pytest.raises(UserError, match=rule):
        finetuning_recipe(task_named("sst2"), ["text.long_texts=windows"])
    recipe = finetuning_recipe(task_named("sst2"), ["text.long_texts=windows", "text.step=64"])
    assert recipe.text.step == 64
