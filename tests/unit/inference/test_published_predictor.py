"""How a head is asked where no task.json says it: windows as in run_squad.py, labels from one half on."""

from math import log

import pytest
import torch

import bertsmith
from bertsmith.inference.predictor import default_config
from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.network import Network, new_network
from tests.tiny import tiny_encoder_config
from tests.toy_folder import toy_vocabulary, write_toy_folder


def network_with(heads: dict[str, int], *, positions: int) -> Network:
    config = tiny_encoder_config(vocabulary=len(toy_vocabulary()), positions=positions)
    return new_network(config, {"pooler": 0, **heads}, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("positions", "longest", "longest_question"), [(512, 384, 64), (128, 128, 64), (64, 64, 32)]
)
def test_the_reader_of_someone_else_is_asked_as_in_run_squad(positions, longest, longest_question):
    note = default_config(Model(network_with({"span": 2}, positions=positions)), "span")
    assert (note.kind.name, note.text.longest, note.text.longest_question) == (
        "span",
        longest,
        longest_question,
    )
    assert (note.text.step, note.answers.best, note.answers.longest) == (128, 20, 30)
    assert note.answers.null_threshold == "off"


@pytest.mark.parametrize("head", ["classify", "tag", "choice"])
def test_other_heads_of_someone_else_see_all_that_the_model_takes(head):
    note = default_config(Model(network_with({head: 1}, positions=512)), head)
    assert note.text.longest == 512


def test_of_several_labels_those_below_one_half_are_not_given(tmp_path):
    probabilities = {"a": 0.45, "b": 0.55, "c": 0.05, "d": 0.95}
    network = network_with({"classify": 4}, positions=64)
    with torch.no_grad():
        network.heads["classify"].output.weight.zero_()
        network.heads["classify"].output.bias.copy_(
            torch.tensor([log(share / (1 - share)) for share in probabilities.values()])
        )
    names = {str(number): label for number, label in enumerate(probabilities)}
    write_toy_folder(tmp_path)
    write_model(tmp_path, Model(network, {"id2label": names, "problem_type": "multi_label_classification"}))
    (found,) = bertsmith.load(tmp_path).classify(["the sun is warm"])
    assert found.probabilities == pytest.approx(probabilities, abs=1e-6)
    assert found.labels == ("b", "d")
