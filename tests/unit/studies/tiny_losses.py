"""Losses of a few steps of every part that has a number in COMPUTES, and the keys of all presets.

`python -m tests.unit.studies.tiny_losses` stores them anew: after a number was raised or a part was added.
"""

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import optim
from torch.nn import functional

from bertsmith.core.files import read_json
from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import finetune
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.packed import pack
from bertsmith.recipe.load import load_recipe, preset_names
from bertsmith.studies.cells import Data, Stage
from bertsmith.studies.stages import FINETUNE, PRETRAIN, answered
from bertsmith.tasks.catalogue import TASKS, task_named
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.journal import read_metrics
from tests.tiny import tiny_network
from tests.tiny_runs import run_tiny, tiny_store, without_pictures
from tests.tiny_training import SEQUENCES
from tests.toy_folder import write_toy_folder
from tests.toy_tasks import TOYS, sentence
from tests.tuning import QUICK, SHORT, Notebook

STORED = Path(__file__).parent / "tiny_losses.json"
ON_CPU = ["run.device=cpu"]
NO_PAIRS = "examples.pairs=doc-sentences"
ELECTRA = ("model.type=electra", "model.embedding_width=16", "examples.objective=replaced", NO_PAIRS)
ELMO = ("model.type=elmo", "model.segments=0", "model.cell=48", "model.heads=12", "model.inner=3072")
PRETRAINING: dict[str, tuple[str, ...]] = {
    "masked, adamw": (),
    "left-to-right, lamb": ("examples.objective=left-to-right", NO_PAIRS, "optim.algorithm=lamb"),
    "right-to-left, muon": ("examples.objective=right-to-left", NO_PAIRS, "optim.algorithm=muon"),
    "replaced": (*ELECTRA, "replaced.generator_size=0.5", "masking.as_mask=0.85", "masking.as_random=0"),
    "distilled": ("examples.objective=distilled", NO_PAIRS, "distill.teacher={teacher}"),
    "two-directions": (*ELMO, "examples.objective=two-directions", "examples.pairs=full-sentences"),
}
"""Parts of names are those of COMPUTES."""
TUNING = {
    "classify": "sst2",
    "regress": "stsb",
    "tag": "wnut17",
    "span": "squad",
    "choice": "swag",
    "multilabel": "",
    "bilstm": "sst2",
}
"""Toy task of each kind of task, and of each other part of a fine-tuning run."""
Losses = dict[str, list[float]]


def losses_of_objectives(place: Path) -> Losses:
    """Losses of three steps of pre-training, and on held-out documents."""
    store, found = tiny_store(place), {}
    for name, settings in PRETRAINING.items():
        given = [each.replace("{teacher}", str(place / "masked, adamw" / "model")) for each in settings]
        short = ("run.steps=3", "run.log_every_steps=1", "optim.warmup_fraction=0")
        run_tiny(store, place / name, *short, *given)
        found[name] = journalled(place / name)
    return found


def losses_of_tasks(place: Path) -> Losses:
    """Losses of a few steps of fine-tuning, and on the development set."""
    write_toy_folder(place / "toy")
    found = {}
    for kind, name in TUNING.items():
        data, task = place / "data" / kind, task_named(name) if name else many_labels(place / "data" / kind)
        if name:
            TOYS[name](data)
        own = ["head.reader=bilstm"] if kind == "bilstm" else []
        recipe = finetuning_recipe(task, [*QUICK, *SHORT, "run.device=cpu", "run.limit=40", *own])
        finetune(Assignment(task, recipe, place / "toy", data, place / kind), Notebook())
        found[kind] = journalled(place / kind)
    return found


def many_labels(folder: Path) -> Task:
    """Write a table of texts with several labels each, and return its task."""
    chance, lines = random.Random(4), []
    for _ in range(60):
        labels = [label for label in ("sun", "rain", "tea") if chance.random() < 0.5]
        lines.append({"text": sentence(chance, *labels), "label": labels})
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return custom_task(CustomSpec("text", "label", kind="multilabel", dev_fraction=0.3))


def losses_of_architectures() -> Losses:
    """Losses of three steps of a tiny tagger of each architecture."""
    batch, found = pack(SEQUENCES), {}
    labels_T = batch.tokens_T % 3
    for model_type in ARCHITECTURES:
        network = tiny_network(model_type, {"tag": 3})
        optimizer = optim.AdamW(network.parameters(), lr=1e-3)
        losses = []
        for _ in range(4):
            loss = functional.cross_entropy(network.scores("tag", network(batch), batch.layout), labels_T)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[model_type] = losses
    return found


def journalled(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run) if line["kind"] in ("train", "held-out")]


def keys_of_presets() -> dict[str, str]:
    """Keys of a stage of each preset and of each task, on the same made-up data."""
    data = Data(Path("data"), {"all": "0"})
    presets = {
        name: Stage(PRETRAIN, answered(load_recipe(name, ["run.device=cpu"]), device="cpu"), data)
        for name in preset_names()
    }
    model = {"model": presets["bert-tiny"]}
    trained = (task for task in TASKS if "train" in task.splits)
    tuned = {
        task.name: Stage(FINETUNE, answered(finetuning_recipe(task, ON_CPU), device="cpu"), data, model)
        for task in trained
    }
    return {name: stage.key for name, stage in (presets | tuned).items()}


def stored() -> dict[str, Any]:
    """Return what was stored."""
    return read_json(STORED, remedy="python -m tests.unit.studies.tiny_losses")


if __name__ == "__main__":
    with TemporaryDirectory() as made, without_pictures():
        (first := Path(made) / "first").mkdir()
        found = {
            "objectives": losses_of_objectives(first),
            "tasks": losses_of_tasks(Path(made) / "second"),
            "architectures": losses_of_architectures(),
            "keys": keys_of_presets(),
        }
    STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
