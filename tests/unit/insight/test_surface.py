"""The surface of attention, number by number against loops over transformers' attentions."""

import json
import math
from itertools import product

import numpy as np
import pytest
import torch

from bertsmith.inference.introspection import masked_tokens, token_masker
from bertsmith.insight.random_control import of_untrained, untrained_twin
from bertsmith.insight.surface import GRADIENTS, IMPORTANCE, MEASURES, study_surface
from tests.command_line import bertsmith
from tests.unit.insight.slow_attention import eager_maps

TEXTS = [
    "The dog plays in the snow, zap!",
    ("My cat sits under a tree.", "It is cold, and it rains."),
    "A boy drinks tea, some coffee.",
    "The boy walks, and the dog runs.",
    ("We got tea.", "The town is hot."),
]


def encodings(bert):
    return bert.reader.encode(TEXTS, truncate=False)


def kind(bert, encoded, text, row):
    """What a token is: one of sep, cls, punct, word."""
    if encoded.sequence[row] < 0:
        return "sep" if encoded.ids[row] == bert.tokenizer.sep_id else "cls"
    part = text if isinstance(text, str) else text[encoded.sequence[row]]
    start, end = encoded.offsets[row]
    return "punct" if part[start:end] in (".", ",") else "word"


def slow_measures(bert, eager):
    """Each measure as its definition says it, weight by weight: sums and numbers of rows."""
    layers, heads = 2, 4
    sums = {name: np.zeros((layers, heads)) for name in MEASURES}
    counts = dict.fromkeys(MEASURES, 0)
    for text, encoded in zip(TEXTS, encodings(bert), strict=True):
        maps = eager_maps(eager, encoded)
        length = len(encoded)
        kinds = [kind(bert, encoded, text, row) for row in range(length)]
        for row in range(length):
            for name in ("previous", "next", "itself", "[CLS]", "[SEP]", "punctuation", "entropy"):
                counts[name] += 1
            counts["[SEP] to [SEP]"] += kinds[row] == "sep"
            counts["others to [SEP]"] += kinds[row] != "sep"
            counts["entropy of [CLS]"] += kinds[row] == "cls"
            if isinstance(text, tuple):
                counts["A to B"] += encoded.sequence[row] == 0
                counts["B to A"] += encoded.sequence[row] == 1
            for layer, head, column in product(range(layers), range(heads), range(length)):
                weight = maps[layer, head, row, column]
                smooth = 0.9999 * weight + 0.0001 / length
                surprise = -smooth * math.log(smooth)
                held = {
                    "previous": column == row - 1,
                    "next": column == row + 1,
                    "itself": column == row,
                    "[CLS]": kinds[column] == "cls",
                    "[SEP]": kinds[column] == "sep",
                    "punctuation": kinds[column] == "punct",
                    "[SEP] to [SEP]": kinds[column] == kinds[row] == "sep",
                    "others to [SEP]": kinds[column] == "sep" != kinds[row],
                    "A to B": (encoded.sequence[row], encoded.sequence[column]) == (0, 1),
                    "B to A": (encoded.sequence[row], encoded.sequence[column]) == (1, 0),
                }
                for name, holds in held.items():
                    sums[name][layer, head] += weight * holds
                sums["entropy"][layer, head] += surprise
                sums["entropy of [CLS]"][layer, head] += surprise * (kinds[row] == "cls")
    return {name: sums[name] / counts[name] for name in MEASURES}


def masked_inputs(bert, encoded, seed):
    """Tokens as masking shows them, segments, and labels as transformers takes them."""
    masks = masked_tokens(token_masker(bert), encoded, seed)
    shown = torch.tensor([[masks.get(row, id) for row, id in enumerate(encoded.ids)]])
    labels = torch.full_like(shown, -100)
    for row in masks:
        labels[0, row] = encoded.ids[row]
    return shown, torch.tensor([encoded.segments]), labels


def slow_gradients(bert, eager, seed):
    """Absolute gradients of each text's masked-LM loss, by autograd through transformers."""
    sums, counts = np.zeros((3, 2, 4)), np.zeros(3)
    for number, (text, encoded) in enumerate(zip(TEXTS, encodings(bert), strict=True)):
        shown, segments, labels = masked_inputs(bert, encoded, seed + number)
        found = eager(shown, token_type_ids=segments, labels=labels, output_attentions=True)
        gradients = torch.autograd.grad(found.loss, found.attentions)
        for column in range(len(encoded)):
            at = {"sep": 0, "punct": 1}.get(kind(bert, encoded, text, column), 2)
            counts[at] += len(encoded)
            for layer, gradient in enumerate(gradients):
                sums[at, layer] += gradient[0, :, :, column].abs().sum(-1).double().numpy()
    return {name: sums[at] / counts[at] for at, name in enumerate(GRADIENTS)}


def slow_importance(bert, eager, seed):
    """Absolute gradients of gates on the heads' outputs, put on transformers' layers by hand."""
    sums = np.zeros((2, 4))
    for number, encoded in enumerate(encodings(bert)):
        shown, segments, labels = masked_inputs(bert, encoded, seed + number)
        gates = [torch.ones(4, requires_grad=True) for _ in range(2)]
        hooks = [
            layer.attention.output.dense.register_forward_pre_hook(
                lambda _, args, gate=gate: (args[0] * gate.repeat_interleave(args[0].shape[-1] // 4),)
            )
            for layer, gate in zip(eager.bert.encoder.layer, gates, strict=True)
        ]
        loss = eager(shown, token_type_ids=segments, labels=labels).loss
        for hook in hooks:
            hook.remove()
        sums += torch.stack(torch.autograd.grad(loss, gates)).abs().double().numpy()
    return {IMPORTANCE: sums / len(TEXTS)}


@pytest.mark.usefixtures("groups")
def test_every_measure_is_what_its_definition_says(bert, eager):
    found = study_surface(bert, TEXTS, longest=128, seed=3)
    expected = slow_measures(bert, eager) | slow_gradients(bert, eager, 3) | slow_importance(bert, eager, 3)
    assert set(found.measures) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found.measures[name], values, atol=1e-5, err_msg=name)
    assert found.tokens == sum(map(len, encodings(bert)))


def test_without_pairs_or_masked_lm_head_there_is_no_number(bert):
    single = study_surface(untrained_twin(bert, 0), TEXTS[:1], longest=128, seed=0)
    assert np.isnan(single.measures["A to B"]).all() and not np.isnan(single.measures["next"]).any()
    del (headless := untrained_twin(bert, 0)).model.network.heads["mlm"]
    assert np.isnan(study_surface(headless, TEXTS, longest=128, seed=0).measures[GRADIENTS[0]]).all()


def test_texts_are_cut_to_the_longest_length(bert):
    assert study_surface(bert, TEXTS, longest=8, seed=0).tokens == 8 * len(TEXTS)


def test_untrained_twins_differ_from_each_other_and_repeat(bert):
    first, second, third = of_untrained(bert, lambda twin: twin.embed(["tea"]), seed=5)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    assert torch.equal(first, of_untrained(bert, lambda twin: twin.embed(["tea"]), seed=5)[0])


def test_the_command_leaves_table_numbers_and_picture(capsys, tmp_path, lively_folder):
    (tmp_path / "texts.txt").write_text("The dog runs.\tIt is hot.\nA cat sleeps.\n")
    words = ("look", "surface", "--model", lively_folder, "--input", tmp_path / "texts.txt")
    told = bertsmith(capsys, *words, "--out", tmp_path / "look")
    assert told.code == 0 and "gradient to [SEP]" in told.out and "untrained" in told.out
    assert sorted(file.name for file in (tmp_path / "look").iterdir()) == [
        "surface.html",
        "surface.json",
        "surface.png",
        "surface.txt",
    ]
    values = json.loads((tmp_path / "look" / "surface.json").read_text())
    assert np.shape(values["measures"]["previous"]) == (2, 4) and len(values["untrained"]) == 3
    assert (tmp_path / "look" / "surface.txt").read_text() in told.out
    # An entropy over 0.5 nats is no finding.
    assert all(line.split()[-4] == "-" for line in told.out.splitlines() if line.startswith("entropy"))


@pytest.mark.parametrize(("text", "said"), [("", "does not contain a text"), ("a\tb\tc\n", "a pair has 2")])
def test_bad_texts_end_in_one_line_and_leave_nothing(capsys, tmp_path, lively_folder, text, said):
    (tmp_path / "texts.txt").write_text(text)
    words = ("look", "surface", "--model", lively_folder, "--input", tmp_path / "texts.txt")
    told = bertsmith(capsys, *words, "--out", tmp_path / "look")
    assert told.code == 2 and said in told.err and told.err.count("\n") == 1
    assert not (tmp_path / "look").exists()
