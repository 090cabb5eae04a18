"""Settings of a model that not every architecture has, and those that no model can have."""

import pytest

from bertsmith.core.errors import UserError
from bertsmith.recipe.load import load_recipe

PARTS = [
    ("model.global_layers=2", "model.global_layers = 2"),
    ("model.global_layers=[0, 1]", "model.global_layers = [0, 1]"),
    ("model.local_attention=64", "model.local_attention = 64"),
    ("model.global_theta=500", "model.global_theta = 500.0"),
    ("model.local_theta=500", "model.local_theta = 500.0"),
    ("model.gated=true", "model.gated = true"),
    ("model.norm=rmsnorm", 'model.norm = "rmsnorm"'),
    ("model.qk_norm=true", "model.qk_norm = true"),
    ("model.sandwich_norm=true", "model.sandwich_norm = true"),
]


@pytest.mark.parametrize(("setting", "shown"), PARTS)
@pytest.mark.parametrize("name", ["bert-tiny", "albert-base"])
def test_a_part_of_modernbert_is_rejected_elsewhere(name, setting, shown):
    with pytest.raises(UserError) as caught:
        load_recipe(name, [setting])
    kind = name.partition("-")[0]
    assert f"{shown} is not supported by model.type = {kind}" in caught.value.line()
    assert "set model.type to modernbert" in caught.value.line()


def test_which_layers_are_global():
    def layers(*settings):
        return load_recipe("modernbert-base", settings).model.encoder_config(99).global_layers

    assert layers() == (0, 3, 6, 9, 12, 15, 18, 21)
    assert layers("model.global_layers=1") == tuple(range(22))
    assert layers("model.global_layers=[3, 21]") == (3, 21)
    with pytest.raises(UserError, match="names 22, but the last of model.layers = 22 layers is 21"):
        layers("model.global_layers=[0, 22]")


@pytest.mark.parametrize("name", ["modernbert-base", "bert-base"])
def test_more_layers_than_a_saved_model_may_have_are_rejected(name):
    with pytest.raises(UserError, match="model.layers = 2000 is more than .*; set it to 1024 or less"):
        load_recipe(name, ["model.layers=2000"])


def test_heads_that_no_rotation_fits_are_rejected():
    with pytest.raises(UserError, match="rotary positions need heads of an even width, not 3"):
        load_recipe("modernbert-base", ["model.width=36"])


def test_segments_are_none_of_modernberts():
    with pytest.raises(UserError, match="model.segments = 2 would be lost .* set model.segments to 0"):
        load_recipe("modernbert-base", ["model.segments=2"])


@pytest.mark.parametrize(
    ("name", "rate"),
    [("bert-tiny", 0.0), ("roberta-base", 0.0), ("electra-small", 0.0), ("distilbert", 0.2)],
)
def test_a_head_drops_out_as_the_encoder_does_unless_its_rate_was_published(name, rate):
    assert load_recipe(name, ["model.dropout=0"]).model.encoder_config(99).head_dropout == rate


def test_alberts_head_keeps_its_published_dropout():
    config = load_recipe("albert-base").model.encoder_config(99)
    assert (config.dropout, config.head_dropout) == (0.0, 0.1)
