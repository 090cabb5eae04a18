"""Left and right, against loops over transformers' attentions and masks given to transformers."""

import json
from itertools import product

import numpy as np
import pytest
import torch
import transformers

import bertsmith as package
from bertsmith.core.errors import UserError
from bertsmith.insight.direction import SHARES, OneSidedScorer, one_sided_metrics, study_direction, visible
from bertsmith.packed import pack
from tests.command_line import bertsmith, mistake
from tests.tuning import SHORT, quickly, toy_model, tune
from tests.unit.insight.slow_attention import eager_maps

__all__ = ["quickly", "toy_model"]

TEXTS = ["The dog plays in the snow.", ("My cat sits under a tree.", "It is cold."), "A boy drinks tea."]


@pytest.mark.usefixtures("groups")
def test_the_fractions_of_attention_to_either_side(bert, eager):
    found = study_direction(bert, TEXTS, longest=128)
    sums, words = {name: np.zeros((2, 4)) for name in SHARES}, 0
    for encoded in bert.reader.encode(TEXTS, truncate=False):
        maps, inside = eager_maps(eager, encoded), [part >= 0 for part in encoded.sequence]
        for row in range(len(encoded)):
            words += inside[row]
            for column in range(len(encoded)):
                if not inside[row]:
                    continue
                side = "special" if not inside[column] else "itself" if row == column else ""
                side = side or ("left" if column < row else "right")
                sums[side] += maps[:, :, row, column]
    assert found.words == words
    for name in SHARES:
        assert np.abs(found.shares[name] - sums[name] / words).max() < 1e-5
    assert np.allclose(sum(found.shares.values()), 1.0)


def test_who_sees_whom():
    special = torch.tensor([[True, False, False, True]])
    hidden = {"right": [(1, 2)], "left": [(2, 1)]}
    for side, unseen in hidden.items():
        seen = visible(special, side)[0]
        assert [(r, c) for r, c in product(range(4), repeat=2) if not seen[r, c]] == unseen


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    return tune("rte", model, place, *SHORT).folder, place / "data" / "rte"


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_hidden_side_is_a_mask_in_transformers(run, side):
    bert = package.load(run[0], device="cpu")
    texts = [("a dog runs", "the cat sleeps"), ("my tea is hot", "it is")]
    encoded = bert.reader.encode(texts, truncate=False)
    batch = pack([each.ids for each in encoded], [each.segments for each in encoded])
    scorer = OneSidedScorer(
        bert.model.network, "classify", hidden=side, special=bert.tokenizer.special_ids
    ).eval()
    with torch.no_grad():
        found = scorer(batch)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        run[0] / "model", attn_implementation="eager"
    ).eval()
    for each, scores in zip(encoded, found, strict=True):
        special = [number in bert.tokenizer.special_ids for number in each.ids]
        length = len(each.ids)
        mask = torch.full((1, 1, length, length), torch.finfo(torch.float32).min)
        for row, column in product(range(length), repeat=2):
            shown = column <= row if side == "right" else column >= row
            if shown or special[row] or special[column]:
                mask[0, 0, row, column] = 0.0
        with torch.no_grad():
            expected = theirs(
                input_ids=torch.tensor([each.ids]),
                token_type_ids=torch.tensor([each.segments]),
                attention_mask=mask,
            ).logits[0]
        assert (scores - expected).abs().max() < 1e-5


def test_the_command_says_what_a_task_loses(capsys, run, tmp_path):
    words = ("look", "direction", "--model", run[0], "--data", run[1], "--out", tmp_path)
    told = bertsmith(capsys, *words)
    assert told.code == 0, told
    assert "RTE, accuracy on" in told.out and "left hidden" in told.out
    values = json.loads((tmp_path / "direction.json").read_text())["task"]
    bert = package.load(run[0], device="cpu")
    assert 0 <= values["right hidden"] <= 1 and values["metric"] == bert.finetuned.config.metrics[0]
    # People read percent, as in every table of a task; the JSON has fractions.
    change = 100 * (values["right hidden"] - values["both sides"])
    line = next(line for line in told.out.splitlines() if line.startswith("right hidden"))
    assert line.split()[2:] == [f"{100 * values['right hidden']:.2f}", f"{change:.2f}"]


def test_mistakes_are_one_line(capsys, run, lively_folder, tmp_path):
    out = ("--out", tmp_path)
    assert "nothing to look at" in mistake(capsys, "look", "direction", *out)
    untuned = ("--model", lively_folder, "--data", run[1])
    assert "only a fine-tuned model" in mistake(capsys, "look", "direction", *untuned, *out)
    with pytest.raises(UserError, match="was not fine-tuned by bertsmith"):
        one_sided_metrics(package.load(lively_folder, device="cpu"), [], None, hidden="left")
