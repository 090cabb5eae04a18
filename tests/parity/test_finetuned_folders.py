"""Folders of fine-tuned models opened by transformers: the right classes and labels, the same scores."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from bertsmith.finetuning.finetune import finetune
from bertsmith.inference.loaded_model import load_task_model
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.task import read_split
from tests.tuning import SHORT, Notebook, quickly, toy_assignment, toy_model

__all__ = ["quickly", "toy_model"]

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

CLASSES = {
    "sst2": ("SequenceClassification", {0: "negative", 1: "positive"}),
    "rte": ("SequenceClassification", {0: "entailment", 1: "not_entailment"}),
    "multilabel": ("SequenceClassification", {0: "cold", 1: "hot", 2: "wet"}),
    "stsb": ("SequenceClassification", {0: "score"}),
    "wnut17": ("TokenClassification", None),
    "squad": ("QuestionAnswering", None),
    "swag": ("MultipleChoice", None),
}


def assignment_of(name, model, place):
    if name != "multilabel":
        return toy_assignment(name, model, place, *SHORT)
    plain = toy_assignment("sst2", model, place, *SHORT)
    table = place / "my.csv"
    labels = ("cold", '"hot,wet"', "", "wet")
    table.write_text("text,label\n" + "".join(f"the cat {n},{labels[n % 4]}\n" for n in range(48)))
    return replace(plain, task=custom_task(CustomSpec("text", "label", kind="multilabel")), data=table)


def theirs(folder, kind, encoded, item):
    """The scores that transformers gives the sequences of an item, row by row."""
    opened = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder, dtype=torch.float32).eval()
    rows = [
        slice(encoded.starts_N1[number], encoded.starts_N1[number + 1])
        for number in range(encoded.items_M1[item], encoded.items_M1[item + 1])
    ]
    longest = max(row.stop - row.start for row in rows)
    padded = np.zeros((3, len(rows), longest), np.int64)
    for place, row in enumerate(rows):
        length = row.stop - row.start
        padded[:, place, :length] = encoded.tokens_T[row], encoded.segments_T[row], np.ones(length)
    ids, segments, mask = torch.from_numpy(padded)
    inputs = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
    if kind == "MultipleChoice":
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    with torch.no_grad():
        found = opened(**inputs)
    if kind == "QuestionAnswering":
        return torch.stack((found.start_logits, found.end_logits), -1)[0].numpy(), opened.config
    return found.logits[0].numpy(), opened.config


def ours(task_model, encoded, item):
    scores, kind = task_model.logits(encoded), task_model.config.kind.name
    if kind == "span":
        return scores[encoded.starts_N1[item] : encoded.starts_N1[item + 1]]
    if kind == "choice":
        return scores[encoded.items_M1[item] : encoded.items_M1[item + 1]]
    return scores if kind == "tag" else scores[item]


@pytest.mark.parametrize("name", CLASSES)
def test_transformers_opens_the_folder_and_says_the_same(name, model, tmp_path):
    kind, labels = CLASSES[name]
    assignment = assignment_of(name, model, tmp_path)
    folder = finetune(assignment, Notebook()).folder / "model"
    task_model = load_task_model(folder, device="cpu")
    encoded = task_model.encode(read_split(assignment.task, assignment.data, "dev", skip_bad=False).examples)
    scores, config = theirs(folder, kind, encoded, 0)
    expected = ours(task_model, encoded, 0)
    if encoded.unit == "word":
        length = encoded.starts_N1[1]
        asked = encoded.rows_P[encoded.rows_P < length]
        scores, expected = scores[asked], expected[: len(asked)]
    np.testing.assert_allclose(scores.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)
    assert np.ptp(expected) > 0 or expected.size == 1
    assert config.architectures[0] == f"BertFor{kind}"
    if labels or encoded.unit == "word":
        assert config.id2label == (labels or dict(enumerate(task_model.config.labels)))
        assert config.label2id == {label: number for number, label in config.id2label.items()}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sst2", "single_label_classification"),
        ("stsb", "regression"),
        ("multilabel", "multi_label_classification"),
    ],
)
def test_the_config_says_which_loss_fits(name, problem, model, tmp_path):
    folder = finetune(assignment_of(name, model, tmp_path), Notebook()).folder / "model"
    assert transformers.AutoConfig.from_pretrained(folder).problem_type == problem


def test_the_tokenizer_of_the_folder_is_that_of_the_model(model, tmp_path):
    folder = finetune(toy_assignment("sst2", model, tmp_path, *SHORT), Notebook()).folder / "model"
    found = transformers.AutoTokenizer.from_pretrained(folder)("The cat plays.", "Under a tree!")
    mine = load_task_model(folder, device="cpu").tokenizer.encode_pair("The cat plays.", "Under a tree!")
    assert (found["input_ids"], found["token_type_ids"]) == (list(mine.ids), list(mine.segments))
