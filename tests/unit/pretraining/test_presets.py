"""Every preset takes two steps in the small, and one in its published size on no memory at all."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.collate import Multiples, PretrainingBatch
from bertsmith.data.data_loader import PretrainingDataset, StepIndex
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.folder.model_folder import head_outputs, read_model
from bertsmith.model.network import Network, build_network
from bertsmith.objectives.registry import OBJECTIVES, declaration
from bertsmith.pretraining.initial_model import build_initial_model, encoder_config_of
from bertsmith.pretraining.pretrain import pretrain
from bertsmith.recipe.load import load_recipe, preset_names, published_vocabulary
from bertsmith.recipe.schema import Recipe
from tests.tiny_runs import Listener, metrics_of

SHORT = ("examples.stages=[{fraction=1.0, length=32, predictions=5}]", "examples.held_out_fraction=0.2")
FEW = ("batch.sequences=4", "batch.tokens=100", "run.evaluation_sequences=8", "run.device=cpu")
SOON = ("run.steps=2", "run.budget=steps", "run.evaluate_every_steps=9")
NARROW = ("model.layers=3", "model.width=32", "model.heads=2", "model.inner=64")
LSTM = ("model.width=32", "model.cell=48")
SMALL_ENOUGH = ("bert-tiny", "bert-mini")
THEIR_CLASSES = {
    "bert": ("BertConfig", "BertForPreTraining"),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM"),
    "albert": ("AlbertConfig", "AlbertForPreTraining"),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM"),
    "ernie": ("ErnieConfig", "ErnieForPreTraining"),
    "electra": ("ElectraConfig", "ElectraForPreTraining"),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
}
OF_TRANSFORMERS = [name for name in preset_names() if not name.startswith("elmo")]
"""An LSTM reads lengths, of which torch's device without numbers has none."""
each_preset = pytest.mark.parametrize("name", preset_names())


def small(name: str) -> Recipe:
    """The preset with few short sequences a step and, unless it is small itself, a small network."""
    sizes = () if name in SMALL_ENOUGH else LSTM if name.startswith("elmo") else NARROW
    factorised = ("model.embedding_width=16",) if name.startswith(("albert", "electra-small")) else ()
    return load_recipe(name, [*SHORT, *FEW, *SOON, *sizes, *factorised])


@each_preset
def test_a_preset_takes_two_steps(name, store, tmp_path):
    result = pretrain(small(name), store=store.folder, out=tmp_path / "run", callback=Listener())
    assert (result.state, result.steps) == ("finished", 2)
    before, after = metrics_of(tmp_path / "run", "held-out")
    assert after["token_loss"] != before["token_loss"]
    assert ("pair_loss" in after) == (load_recipe(name).examples.pairs in ("nsp", "sop"))
    assert read_model(tmp_path / "run" / "model").network.config.model_type == load_recipe(name).model.type


# ---- the published sizes, on torch's device that holds no numbers


def in_full_size(recipe: Recipe, store: TokenStore, *, layers: int) -> Network:
    """So many layers of the preset's network with its published vocabulary, without memory."""
    heads = head_outputs(build_initial_model(small(recipe.name), store).network)
    vocabulary = published_vocabulary(recipe.model.type)
    config = replace(encoder_config_of(recipe.model, store.tokenizer()), vocabulary=vocabulary, layers=layers)
    if recipe.model.type == "roberta":
        config = replace(config, pad_id=1)  # the published tokenizer's
    with torch.device("meta"):
        return build_network(config, heads)


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def theirs_in_full_size(recipe: Recipe) -> nn.Module:
    """The same model of transformers."""
    model = recipe.model
    embedded = model.width if model.embedding_width == "width" else model.embedding_width
    narrow = {"embedding_size": embedded} if model.type in ("albert", "electra") else {}
    sizes = {"hidden_size": model.width, "num_hidden_layers": model.layers, "intermediate_size": model.inner}
    sizes |= {"num_attention_heads": model.heads, "type_vocab_size": model.segments}
    if model.type == "distilbert":
        sizes = {"dim": model.width, "n_layers": model.layers, "n_heads": model.heads}
        sizes |= {"hidden_dim": model.inner}
    positions = model.positions + 2 * (model.type == "roberta")
    vocabulary = published_vocabulary(model.type)
    config, network = (getattr(transformers, each) for each in THEIR_CLASSES[model.type])
    with torch.device("meta"):
        return network(config(vocab_size=vocabulary, max_position_embeddings=positions, **sizes, **narrow))


@pytest.mark.parametrize("name", [name for name in OF_TRANSFORMERS if not name.startswith("speedrun")])
def test_a_preset_in_its_published_size_has_as_many_weights_as_in_transformers(name, store):
    recipe = load_recipe(name)
    ours = in_full_size(recipe, store, layers=recipe.model.layers)
    assert parameters(ours) == parameters(theirs_in_full_size(recipe))


def generator_of(network: Network, recipe: Recipe) -> Network:
    """The generator of a discriminator in full size."""
    generator_config = ARCHITECTURES[recipe.model.type].pretraining.generator_config
    with torch.device("meta"):
        return build_network(generator_config(network.config, recipe.replaced.generator_size), {"mlm": 0})


def batch_without_numbers(recipe: Recipe, store: TokenStore, cache) -> PretrainingBatch:
    sizes = {"micro_tokens": 256, "multiples": Multiples(8, 8)}
    fields = declaration(recipe).fields
    feed = PretrainingDataset(store, small(recipe.name), cache=cache, fields=fields, **sizes)
    return feed[StepIndex(0, 0)].micros[0].to("meta")


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_a_preset_in_its_published_size_goes_forward_and_backward(name, store, tmp_path, full):
    recipe = load_recipe(name)
    layers = recipe.model.layers if full else 2  # one layer is as large as the other
    network = in_full_size(recipe, store, layers=layers).train()
    spec = OBJECTIVES[recipe.examples.objective]
    generator = generator_of(network, recipe) if recipe.examples.has_generator else None
    objective = spec.build(network, generator, recipe)
    batch = batch_without_numbers(recipe, store, tmp_path)
    loss, sums = objective(batch, torch.ones(len(objective.declared.counts), device="meta"))
    loss.backward()
    assert (loss.shape, sums.shape) == ((), (len(objective.declared.sums),))
    assert [name for name, parameter in objective.named_parameters() if parameter.grad is None] == []
