"""ALBERT's layers share all weights, a part of them or none, in groups: trained so, saved so, opened so."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.folder.model_folder import read_model
from bertsmith.model.network import build_network
from bertsmith.packed import pack
from bertsmith.recipe.load import encoder_parameters, load_recipe
from bertsmith.recipe.optim_section import OptimSection
from bertsmith.training.optimizers import build_optimizer
from tests.tiny_runs import differing, last_state, run_tiny, stop_at, tiny_recipe

ALBERT = ("model.type=albert", "model.embedding_width=16", "examples.pairs=sop", "model.layers=4")
SHORT = ("run.steps=3", "run.evaluate_every_steps=9")
PARTS = {"attention": ("attention.",), "ffn": ("ffn", "full_layer_layer_norm")}
"""How the published names of a shared part begin, behind the layer's own."""
CLOSE = 1e-5


def settings(sharing: str, groups: int = 1) -> tuple[str, ...]:
    return (*ALBERT, *SHORT, f"model.sharing={sharing}", f"model.groups={groups}")


def layers_of(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tensors of each layer in a file, by their names inside it."""
    start = "albert.encoder.albert_layer_groups."
    numbers = {int(name.removeprefix(start).split(".")[0]) for name in weights if name.startswith(start)}
    prefixes = [f"{start}{number}.albert_layers.0." for number in sorted(numbers)]
    return [
        {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
        for prefix in prefixes
    ]


@pytest.mark.parametrize(
    ("sharing", "millions"), [("auto", 12), ("all", 12), ("attention", 64), ("ffn", 38), ("none", 90)]
)
def test_albert_base_has_as_many_weights_as_in_the_paper(sharing, millions):
    # Table 4 says 89 where nothing is shared, without the pooler.
    model = load_recipe("albert-base", [f"model.sharing={sharing}"]).model
    assert round(encoder_parameters(model, 30_000) / 1e6) == millions


@pytest.mark.parametrize("sharing", ["all", "attention", "ffn", "none"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_number_of_weights_is_that_of_the_network(sharing, groups):
    model = tiny_recipe(*settings(sharing, groups)).model
    network = build_network(model.encoder_config(99), {"pooler": 0})
    assert encoder_parameters(model, 99) == sum(each.numel() for each in network.parameters())


@pytest.mark.parametrize(("sharing", "groups"), [("attention", 1), ("ffn", 2), ("all", 2), ("none", 1)])
def test_a_model_is_opened_as_it_was_trained(store, tmp_path, sharing, groups):
    run_tiny(store, tmp_path / "run", *settings(sharing, groups))
    folder = tmp_path / "run" / "model"
    recipe = load_recipe(tmp_path / "run" / "recipe.toml")
    network = read_model(folder).network
    assert network.config == recipe.model.encoder_config(store.vocabulary, pad_id=network.config.pad_id)
    assert sum(each.numel() for each in network.encoder.parameters()) == sum(
        each.numel() for each in architecture_of("albert").build_encoder(network.config).parameters()
    )
    theirs, found = transformers.AlbertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not (found["missing_keys"] or found["unexpected_keys"])
    ids = [2, 7, 9, 11, 3, 14, 3]
    ours = network.scores_of_words(network(pack([ids])))
    expected = theirs.eval()(torch.tensor([ids])).prediction_logits[0]
    assert (expected - ours).abs().max() <= CLOSE


def test_only_what_is_shared_is_the_same_in_all_layers_of_a_group(store, tmp_path):
    run_tiny(store, tmp_path / "run", *settings("ffn", 2))
    layers = layers_of(load_file(tmp_path / "run" / "model" / "model.safetensors"))
    assert len(layers) == 4
    shared = {name for name in layers[0] if name.startswith(PARTS["ffn"])}
    assert len(shared) == 6
    for one, other in ((0, 1), (2, 3)):
        assert set(differing(layers[one], layers[other])) == layers[0].keys() - shared
    assert shared & set(differing(layers[1], layers[2]))
    config = read_json(tmp_path / "run" / "model" / "config.json", remedy="")
    assert (config["shared_parts"], config["shared_groups"], config["num_hidden_groups"]) == ("ffn", 2, 4)


def test_a_run_with_shared_parts_resumes_to_the_bit(store, tmp_path):
    run_tiny(store, tmp_path / "straight", *settings("attention"))
    with stop_at(1):
        run_tiny(store, tmp_path / "run", *settings("attention"))
    run_tiny(store, tmp_path / "run", *settings("attention"))
    assert differing(last_state(tmp_path / "run"), last_state(tmp_path / "straight")) == []


def test_a_run_goes_on_from_a_folder_with_shared_parts(store, tmp_path):
    run_tiny(store, tmp_path / "run", *settings("attention", 2))
    folder = tmp_path / "run" / "model"
    run_tiny(store, tmp_path / "further", "examples.pairs=sop", *SHORT, f"start.model={folder}")
    model = load_recipe(tmp_path / "further" / "recipe.toml").model
    assert (model.sharing, model.groups) == ("attention", 2)
    layers = layers_of(load_file(tmp_path / "further" / "model" / "model.safetensors"))
    assert not [name for name in differing(layers[0], layers[1]) if name.startswith(PARTS["attention"])]


def test_layers_that_should_share_a_weight_and_do_not_are_a_clear_error(store, tmp_path: Path):
    run_tiny(store, tmp_path / "run", *settings("attention"))
    file = tmp_path / "run" / "model" / "model.safetensors"
    weights = load_file(file)
    weights["albert.encoder.albert_layer_groups.0.albert_layers.0.attention.dense.bias"] += 1
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match="attention.output.bias differs from another layer's weight"):
        read_model(file.parent)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.sharing=ffn",), "model.sharing = ffn, but model.type = bert does not share weights"),
        (("model.groups=2",), "model.groups = 2, but model.type = bert does not share weights"),
        ((*ALBERT, "model.groups=5"), "model.groups = 5 is more than model.layers = 4"),
    ],
)
def test_what_cannot_be_shared_is_rejected(overrides, message):
    with pytest.raises(UserError, match=message):
        tiny_recipe(*overrides)


def test_shared_layers_have_no_learning_rates_of_their_own():
    config = tiny_recipe(*settings("attention")).model.encoder_config(99)
    optim = OptimSection(layer_decay=0.9)
    with pytest.raises(UserError, match="this model's layers share their weights"):
        build_optimizer(build_network(config, {}), optim)
    unshared = tiny_recipe(*settings("none")).model.encoder_config(99)
    assert build_optimizer(build_network(unshared, {}), optim).param_groups
