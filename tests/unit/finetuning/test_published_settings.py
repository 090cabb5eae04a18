"""Every task begins with the settings of its paper, and is decided by its measure.

Devlin et al. 2018: GLUE in 4.1 and table 1, SQuAD 1.1 in 4.2, SQuAD 2.0 in 4.3, SWAG in 4.4, CoNLL-2003 in
5.3, optimiser in A.2 and A.3; run_classifier.py and run_squad.py for what the paper leaves out.
"""

from dataclasses import dataclass

import pytest

from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.recipe.load import leaves
from bertsmith.tasks.catalogue import OWN, TASKS
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.task_recipe import finetuning_recipe

DEFAULTS = {
    # run_classifier.py cuts at 128 tokens; run_squad.py has 128 tokens between windows and questions of 64.
    "text.longest": 128,
    "text.long_texts": "truncate",
    "text.step": 128,
    "text.longest_question": 64,
    "text.context": "sentence",
    "head.cls": "pooled",
    "head.pooling": "model",
    "head.span_over": "all",
    "head.encoder": "tuned",
    "head.class_weights": "equal",
    "head.weights": "fresh",
    "head.reader": "linear",
    "head.fresh_layers": 0,
    "features.layers": "all-and-embeddings",
    "features.combine": "weighted-sum",
    "features.width": "model",
    "features.layer_norm": False,
    # No teachers; with some, those of DistilBERT's question answering.
    "distill.teachers": (),
    "distill.soft_weight": 0.5,
    "distill.temperature": 2.0,
    # No published fine-tuning prunes.
    "sparse.gradual": "off",
    "sparse.keep_zeros": False,
    "sparse.begin_at": 0.0,
    "sparse.early_at": "off",
    # Warm-up over 10 %, all else as in pre-training: A.2 and optimization.py.
    "optim.algorithm": "adamw",
    "optim.peak_lr": 3e-5,
    "optim.head_lr_factor": 1.0,
    "optim.beta1": 0.9,
    "optim.beta2": 0.999,
    "optim.eps": 1e-6,
    "optim.weight_decay": 0.01,
    "optim.bias_correction": True,
    "optim.clip_norm": 1.0,
    "optim.warmup_fraction": 0.1,
    "optim.schedule": "linear",
    "optim.decay_from": 0.5,
    "optim.layer_decay": 1.0,
    "lora.rank": 8,
    "lora.alpha": 16.0,
    "lora.dropout": 0.0,
    "lora.targets": ("query", "value"),
    "lora.rank_stabilized": False,
    "optim.embedding_lr_factor": 1.0,
    "optim.matrix_lr_factor": 1.0,
    "optim.muon_momentum": 0.95,
    "optim.muon_scale": "original",
    "run.epochs": 3.0,
    "run.minutes": "off",
    "run.examples": 32,
    "run.seed": 0,
    "run.device": "auto",
    "run.precision": "auto",
    "run.compile": "auto",
    "run.patience": "off",
    "run.patience_seconds": "auto",
    "run.limit": "off",
    "answers.label_thresholds": "off",
    "run.dropout": "model",
    "run.attention_dropout": "model",
    "run.head_dropout": "model",
    "run.recompute": False,
    "run.keep_state": True,
    "run.micro_tokens": "auto",
    "run.evaluations": 5,
    "run.keep": "last",
    # run_squad.py: 20 starts, 20 ends, at most 30 tokens.
    "answers.best": 20,
    "answers.longest": 30,
    "answers.null_threshold": "off",
}


@dataclass(frozen=True)
class Published:
    """What decides a task, and where its settings differ from the defaults."""

    decided_by: str
    settings: dict[str, object]


GLUE = {"optim.peak_lr": 2e-5}  # of the paper's 5e-5, 4e-5, 3e-5 and 2e-5; 3 epochs of 32
GLUE_TINY = {**GLUE, "run.epochs": 5.0}  # README of run_glue.py
SQUAD = {"text.longest": 384, "optim.peak_lr": 5e-5}  # 3 epochs of 32
SQUAD2 = {**SQUAD, "run.epochs": 2.0, "run.examples": 48, "answers.null_threshold": "tuned"}
SWAG = {"optim.peak_lr": 2e-5, "run.examples": 16}  # 3 epochs
NER = {
    "text.longest": 512,
    "text.context": "document",  # "the maximal document context"
    # Devlin et al. 2018, table 7 and section 5.3.
    "features.layers": "last4",
    "features.combine": "concat",
    "features.width": 768,
}
RACE = {  # Liu et al. 2019, table 10
    "text.longest": 512,
    "optim.peak_lr": 1e-5,
    "optim.weight_decay": 0.1,
    "optim.warmup_fraction": 0.06,
    "run.epochs": 4.0,
    "run.examples": 16,
}
ARCT = {  # the best of Niven & Kao's grid for BERT-Base
    "text.longest": 80,
    "optim.peak_lr": 8e-5,
    "run.epochs": 30.0,
    "run.examples": 8,
    "run.evaluations": 30,
    "run.keep": "best",
}
PUBLISHED = {
    "cola": Published("matthews", GLUE),
    "sst2": Published("accuracy", GLUE),
    "mrpc": Published("f1", GLUE_TINY),
    "stsb": Published("spearman", GLUE),
    "qqp": Published("f1", GLUE),
    "mnli": Published("accuracy", GLUE),
    "qnli": Published("accuracy", GLUE),
    "rte": Published("accuracy", GLUE),
    "wnli": Published("accuracy", GLUE_TINY),
    "diagnostic": Published("matthews", {}),
    "snli": Published("accuracy", {}),
    "sick-e": Published("accuracy", {}),
    "sick-r": Published("pearson", {}),
    "squad": Published("f1", SQUAD),
    "squad2": Published("f1", SQUAD2),
    "triviaqa": Published("f1", SQUAD),
    "ner": Published("span_f1", NER),
    "wnut17": Published("span_f1", {}),
    "pos": Published("accuracy", {}),
    "xpos": Published("accuracy", {}),
    "feats": Published("accuracy", {}),
    "deprel": Published("accuracy", {}),
    "tags": Published("accuracy", {}),
    "swag": Published("accuracy", SWAG),
    "race": Published("accuracy", RACE),
    "arct": Published("accuracy", ARCT),
    "arct-adversarial": Published("accuracy", ARCT),
}


def settings_of(recipe: FinetuningRecipe) -> dict[str, object]:
    return {key: value for key, value in leaves(recipe.model_dump()).items() if key != "task"}


def test_every_task_is_in_the_table() -> None:
    assert [task.name for task in TASKS] == list(PUBLISHED)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_begins_with_its_published_settings(task) -> None:
    assert settings_of(finetuning_recipe(task)) == DEFAULTS | PUBLISHED[task.name].settings


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_is_decided_by_its_published_metric(task) -> None:
    assert task.metrics[0] == PUBLISHED[task.name].decided_by


@pytest.mark.parametrize(
    ("kind", "measure"), [("classify", "accuracy"), ("multilabel", "micro_f1"), ("regress", "spearman")]
)
def test_a_table_of_ones_own_begins_with_the_defaults(kind, measure) -> None:
    task = custom_task(CustomSpec("text", "label", kind=kind))
    assert settings_of(finetuning_recipe(task)) == DEFAULTS
    assert (task.name, task.metrics[0]) == (OWN, measure)
