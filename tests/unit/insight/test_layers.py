"""How far layers move tokens and what fine-tuning changed, against loops over transformers' hidden states."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import transformers

import bertsmith as package
from bertsmith.core.errors import UserError
from bertsmith.insight.changes import state_changes, weight_changes
from bertsmith.insight.layer_distances import layer_distances, untrained_distances
from bertsmith.insight.random_control import untrained_twin
from tests.command_line import bertsmith, mistake

TEXTS = ["The dog plays in the snow.", ("My cat sits under a tree.", "It is cold."), "A boy drinks tea."]


def slow_states(model, encoded):
    """[L + 1][N][D], one text at a time."""
    with torch.no_grad():
        found = model.bert(
            torch.tensor([encoded.ids]),
            token_type_ids=torch.tensor([encoded.segments]),
            output_hidden_states=True,
        )
    return [state[0].double().tolist() for state in found.hidden_states]


def length(vector):
    return math.sqrt(sum(each * each for each in vector))


def distance(one, other):
    return length([a - b for a, b in zip(one, other, strict=True)])


def angle(one, other):
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return math.degrees(math.acos(max(-1.0, min(1.0, product / length(one) / length(other)))))


@pytest.fixture(scope="module")
def tuned(eager, lively_folder, tmp_path_factory):
    """The same model with other weights in its second layer, as transformers and as we open it."""
    other = transformers.BertForMaskedLM.from_pretrained(lively_folder, attn_implementation="eager").eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.bert.encoder.layer[1].parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("tuned") / "after"
    other.save_pretrained(folder)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (folder / name).write_bytes((lively_folder / name).read_bytes())
    return other, folder


def test_the_distance_and_the_angle_of_each_layer(bert, eager):
    found = layer_distances(bert, TEXTS, longest=128)
    distances, angles, tokens = np.zeros(2), np.zeros(2), 0
    for encoded in bert.reader.encode(TEXTS, truncate=False):
        states = slow_states(eager, encoded)
        tokens += len(encoded)
        for layer in range(2):
            for before, after in zip(states[layer], states[layer + 1], strict=True):
                distances[layer] += distance(before, after)
                angles[layer] += angle(before, after)
    assert found.tokens == tokens and found.texts == 3
    assert found.distances_L == pytest.approx(distances / tokens, abs=1e-5)
    assert found.angles_L == pytest.approx(angles / tokens, abs=1e-4)  # degrees, of a steep function


def test_the_control_is_the_mean_of_three_networks_with_random_weights(bert):
    control = untrained_distances(bert, TEXTS, longest=128, seed=3)
    single = [layer_distances(untrained_twin(bert, seed), TEXTS, longest=128) for seed in (3, 4, 5)]
    for measure in ("distances_L", "angles_L"):
        values = [getattr(each, measure) for each in single]
        assert getattr(control, measure) == pytest.approx(
            [sum(each) / 3 for each in zip(*values, strict=True)]
        )
        assert len({each[0] for each in values}) == 3
    assert control.tokens == layer_distances(bert, TEXTS, longest=128).tokens


def test_weights_that_changed_and_weights_that_did_not(bert, eager, tuned):
    other, folder = tuned
    embeddings, first, second = weight_changes(bert, package.load(folder, device="cpu"))
    assert embeddings.parts == {"all": 0.0} and set(first.parts.values()) == {0.0}
    before = eager.bert.encoder.layer[1].state_dict()
    after = other.bert.encoder.layer[1].state_dict()
    norms = [name for name in before if "LayerNorm" in name]
    attention = [name for name in before if name.startswith("attention.") and name not in norms]
    rest = [name for name in before if name not in (*norms, *attention)]
    for part, names in {"attention": attention, "feed-forward": rest, "norms": norms, "all": before}.items():
        changed = sum(float((after[n].double() - before[n].double()).square().sum()) for n in names)
        whole = sum(float(before[n].double().square().sum()) for n in names)
        assert second.parts[part] == pytest.approx(math.sqrt(changed / whole), abs=1e-5)


def slow_cka(one, other):
    """By the definition: centred Gram matrices of tokens against tokens."""
    one, other = (np.array(each) - np.mean(each, 0) for each in (one, other))
    products = [[(a @ a.T).ravel() @ (b @ b.T).ravel() for b in (one, other)] for a in (one, other)]
    return products[0][1] / math.sqrt(products[0][0] * products[1][1])


def test_states_that_changed(bert, eager, tuned):
    other, folder = tuned
    found = state_changes(bert, package.load(folder, device="cpu"), TEXTS, longest=128)
    every = [[], [], []], [[], [], []]
    for encoded in bert.reader.encode(TEXTS, truncate=False):
        for model, kept in zip((eager, other), every, strict=True):
            for layer, state in enumerate(slow_states(model, encoded)):
                kept[layer] += state
    for layer, change in enumerate(found):
        pairs = list(zip(every[0][layer], every[1][layer], strict=True))
        angles = [angle(*pair) for pair in pairs]
        relative = [distance(one, after) / length(one) for one, after in pairs]
        assert change.angle == pytest.approx(np.mean(angles), abs=1e-2 if layer < 2 else 1e-4)
        assert change.relative_distance == pytest.approx(np.mean(relative), abs=1e-5)
        assert change.cka == pytest.approx(slow_cka(every[0][layer], every[1][layer]), abs=1e-5)
    assert found[1].relative_distance < 1e-5 < found[2].relative_distance


def test_the_commands_leave_tables_and_pictures(capsys, lively_folder, tuned, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("The dog plays.\nA boy drinks tea.\n")
    words = ("layers", "--model", lively_folder, tuned[1], "--input", texts)
    told = bertsmith(capsys, "look", *words, "--out", tmp_path / "moves.png")
    assert told.code == 0 and "How far each layer moves a token, 2 texts" in told.out
    assert "The same of untrained networks" in told.out
    values = json.loads((tmp_path / "moves.json").read_text())
    assert [len(each["untrained"]["l2"]) for each in values.values()] == [2, 2]
    assert (tmp_path / "moves.png").read_bytes().startswith(b"\x89PNG")
    both = ("changes", lively_folder, tuned[1])
    told = bertsmith(capsys, "look", *both, "--input", texts, "--out", tmp_path / "changes.png")
    assert "feed-forward" in told.out and "CKA" in told.out
    told = bertsmith(capsys, "look", *both, "--out", tmp_path / "weights.png", "--json")
    assert json.loads(told.out)["weights"]["states"] == {}
    assert "is not the name of a picture" in mistake(capsys, "look", *both, "--out", tmp_path / "x.txt")
    same = ("layers", "--model", lively_folder, lively_folder, "--input", texts, "--out", tmp_path / "x.png")
    assert f"{lively_folder}: is given twice; name each model once" in mistake(capsys, "look", *same)


def test_models_whose_folders_have_one_name_are_told_apart_by_the_folders_above(
    capsys, lively_folder, tuned, tmp_path
):
    for run, folder in (("first", lively_folder), ("second", tuned[1])):
        (tmp_path / run).mkdir()
        shutil.copytree(folder, tmp_path / run / "model")
    texts = tmp_path / "texts.txt"
    texts.write_text("The dog plays.\n")
    both = (tmp_path / "first" / "model", tmp_path / "second" / "model")
    words = ("layers", "--model", *both, tuned[1], "--input", texts, "--json")
    told = bertsmith(capsys, "look", *words, "--out", tmp_path / "moves.png")
    assert told.code == 0, told.err
    assert list(json.loads(told.out)["moves"]) == ["first/model", "second/model", "after"]
    told = bertsmith(capsys, "look", "changes", *both, "--out", tmp_path / "changes.png")
    assert told.out.startswith("From first/model to second/model: weights\n")


def test_models_of_other_shapes_are_refused(bert):
    with pytest.raises(UserError, match="the two models have different shapes"):
        weight_changes(bert, package.load(device="cpu"))
