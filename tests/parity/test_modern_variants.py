"""A ModernBERT from scratch opens in transformers; one with settings of our own is refused there."""

import pytest
import torch
import transformers

from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.network import new_network
from bertsmith.packed import pack, unpack
from bertsmith.recipe.load import load_recipe

SMALL = (
    *("model.layers=4", "model.width=32", "model.heads=4", "model.inner=48", "model.positions=64"),
    *("examples.stages=[{fraction=1.0, length=32, predictions=10}]", "model.initial_std=0.2"),
)
SETTINGS = [
    (),
    ("model.activation=relu2", "model.local_attention=6", "model.global_layers=2"),
    ("model.global_layers=[1, 2]", "model.local_attention=10", "model.global_theta=500"),
]
OWN = ("model.qk_norm=true", "model.norm=rmsnorm", "model.gated=false", "model.sandwich_norm=true")
TEXTS = [[5, 17, 8, 30, 41, 7, 9, 60, 11, 44, 3, 12], [44, 9]]


def saved(folder, *settings, heads):
    """A network from scratch as a recipe asks for it."""
    config = load_recipe("modernbert-base", [*SMALL, *settings]).model.encoder_config(99, pad_id=0)
    network = new_network(config, heads, torch.Generator().manual_seed(0)).eval()
    write_model(folder, Model(network))
    return network


@pytest.mark.parametrize("settings", SETTINGS, ids=["published", "relu2", "other-layers"])
def test_a_new_modernbert_scores_words_as_in_transformers(settings, tmp_path):
    network = saved(tmp_path, *settings, heads={"mlm": 0, "nsp": 2})
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert type(theirs) is transformers.ModernBertForMaskedLM
    assert theirs.decoder.weight.data_ptr() == theirs.model.embeddings.tok_embeddings.weight.data_ptr()
    batch = pack(TEXTS)
    with torch.no_grad():
        ours = unpack(network.word_scores(network(batch), torch.arange(len(batch.tokens_T))), batch.layout)
        for text, scores in zip(TEXTS, ours, strict=True):
            expected = theirs(input_ids=torch.tensor([text])).logits[0]
            assert (scores - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("setting", [*OWN, "direction"])
def test_a_setting_of_our_own_is_refused_by_transformers(setting, tmp_path):
    if setting == "direction":
        config = load_recipe("modernbert-base", SMALL).model.encoder_config(99, direction="left-to-right")
        write_model(tmp_path, Model(new_network(config, {"mlm": 0}, torch.Generator().manual_seed(0))))
    else:
        saved(tmp_path, setting, heads={"mlm": 0})
    with pytest.raises(ValueError, match="bertsmith"):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    # Called by its name, a class only warns of another model_type: the pooling stops it.
    with pytest.raises(Exception, match="classifier_pooling"):
        transformers.ModernBertForMaskedLM.from_pretrained(tmp_path)
    with pytest.raises(Exception, match="classifier_pooling"):
        transformers.ModernBertModel.from_pretrained(tmp_path)
