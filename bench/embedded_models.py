"""Make the embedded models of a pre-trained encoder, ask them the fixed questions, and write their cards.

    python bench/embedded_models.py --model runs/small/model --store store/ --data tasks/ --out embedded/

One command on a machine with or without a GPU; given again, it goes on where it stopped. The encoder is
written in half precision, as it is embedded, and LoRA adapters are trained over just that. Three seeds are
trained of each task: the first is kept, and its card gives the median and the spread. `embedded/models` holds
the folders for src/bertsmith/pretrained, `embedded/evaluation.md` and `.json` all that was asked and
answered, beside an older model (--beside). Questions, settings and seeds stand in files of this folder, fixed
before training. --store is the token store of the pre-training: masks are taken from the documents that it
held out, which the older model may have read, and the baselines are fitted on all others.
"""

import argparse
import re
import shutil
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from embedded_evaluation import (
    baselines,
    bias,
    cloze_answers,
    filled,
    masked_words,
    passage_answers,
    share_found,
)
from quiet import Quiet

from bertsmith.core.files import atomic_folder, read_json, write_json, write_text
from bertsmith.corpus.token_store import TokenStore
from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import FinetuningResult, finetune
from bertsmith.inference.adapter_folder import ADAPTER_FILES
from bertsmith.inference.embedded_models import default_model
from bertsmith.inference.finetuned_folder import FINETUNED_FILES
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.inference.model_path import ADAPTER_CONFIG, model_folder
from bertsmith.model.folder.model_folder import read_model, write_model
from bertsmith.model.folder.tensor_files import SAVED_WEIGHT_FILES
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.text.tokenizer import Tokenizer

ENCODER = "bertsmith-small"
MAX_BYTES = 64_000_000
"""Of all together."""
LORA = (
    *("head.encoder=lora", "lora.rank=16", "lora.alpha=32", "optim.peak_lr=5e-4", "run.examples=32"),
    *('lora.targets=["query","key","value","output","feed-forward"]', "run.evaluations=1"),
)
BESIDE_CARD = ("card.md", "curves.png", "recipe.toml", "metrics.jsonl")
"""What a run says of its model."""
ORIGIN = """## Text, licence, limits
- Text: English and Simple English Wikipedia (CC BY-SA), Wikinews (CC BY 2.5) and prose of Project Gutenberg
  (public domain), without documents that hold text of the tasks below (`bertsmith corpus --exclude`).
- It continues the run `docs/records/small-10-minutes.toml` of the project: 1.2 G tokens without pairs.
- The weights come under the licence of the project.
- English alone, in lower case. It learned for minutes: facts and numbers are often wrong
  (`docs/embedded-models.md` has what it was asked and what it said). Texts of up to 512 tokens.
"""
KEPT_FILES = (*ADAPTER_FILES, *FINETUNED_FILES, "recipe.toml")
"""Of an adapter: its tokenizer is that of its base, and its card is written here."""


@dataclass(frozen=True, slots=True)
class EmbeddedTask:
    """A task that an embedded adapter is trained for."""

    task: str
    folder: str
    metric: str
    settings: tuple[str, ...]
    purpose: str
    data: str
    limits: str


TASKS = {
    "sentiment": EmbeddedTask(
        *("sst2", "glue/SST-2", "accuracy", ("run.epochs=3",)),
        "Says whether an English sentence speaks well or badly of something.",
        "SST-2 (Socher et al. 2013, GLUE): sentences of film reviews, 67,349 to train, 872 in dev. The data "
        "set states no licence; its sentences come from Rotten Tomatoes.",
        "Films: of other things it knows less. There is no neutral class.",
    ),
    "entities": EmbeddedTask(
        *("wnut17", "wnut17", "span_f1", ("run.epochs=10",)),
        "Marks persons, locations, groups, corporations, products and creative works in English text.",
        "WNUT-17 (Derczynski et al. 2017, CC BY 4.0): 3,394 posts to train, 1,009 in dev, with rare names.",
        "Rare names in posts are hard to find, and so are names in other kinds of text.",
    ),
    "questions": EmbeddedTask(
        *("squad", "squad", "f1", ("run.epochs=3",)),
        "Answers an English question with a part of a passage.",
        "SQuAD 1.1 (Rajpurkar et al. 2016, CC BY-SA 4.0): 11,877 questions of 44 articles to train, a part "
        "of the official training set; the whole dev set, 10,570.",
        "Every question gets an answer, also where the passage holds none.",
    ),
}


def main() -> None:
    options = parse()
    models = options.out / "models"
    encoder = models / ENCODER
    if not encoder.exists():
        write_encoder(options.model, encoder)
    beside = load(options.beside)
    bert = load(encoder)
    found: dict[str, Any] = {"models": {"this": str(options.model), "beside": str(options.beside)}}
    store = TokenStore.open(options.store)
    found["masked words"] = evaluate_masks(store, {ENCODER: bert, options.beside.name: beside}, options)
    found["clozes"] = {ENCODER: cloze_answers(bert), options.beside.name: cloze_answers(beside)}
    found["bias"] = {
        ENCODER: bias(bert, options.data / "winobias"),
        options.beside.name: bias(beside, options.data / "winobias"),
    }
    train_together(encoder, options)
    found["tasks"] = {name: scored_adapter(name, encoder, options) for name in TASKS}
    questions = load(models / f"{ENCODER}-questions", base=encoder)
    found["answers"] = passage_answers(questions)
    write_json(options.out / "evaluation.json", found)
    write_text(options.out / "evaluation.md", report(found))
    write_cards(models, found, options)
    print(report(found))
    size = sum(file.stat().st_size for file in models.rglob("*") if file.is_file())
    print(f"{models}: {size / 1e6:.1f} MB of {MAX_BYTES / 1e6:.0f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=model_folder, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with glue, squad, wnut17, winobias")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--beside", type=model_folder, default=default_model(), help="an older model")
    parser.add_argument(
        "--held-out", type=float, default=0.005, help="examples.held_out_fraction of the pre-training"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--together", type=int, default=1, help="adapters that are trained at a time")
    parser.add_argument("--masks", type=int, default=500)
    parser.add_argument("--set", nargs="*", default=[], help="settings for all tasks, to try the script out")
    return parser.parse_args()


def write_encoder(source: Path, out: Path) -> None:
    """The encoder in half precision with its tokenizer, and what its run says of it."""
    with atomic_folder(out, replaces=SAVED_WEIGHT_FILES) as fresh:
        write_model(fresh, read_model(source, dtype=torch.bfloat16))
        Tokenizer.load(source).save(fresh)
        for name in BESIDE_CARD:
            for place in (source.parent, source):
                if (place / name).is_file():
                    shutil.copy(place / name, fresh / name)


# ---- masks


def evaluate_masks(
    store: TokenStore, models: Mapping[str, Bert], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """How often each model, and each baseline, finds the hidden word."""
    tokenizers = [bert.tokenizer for bert in models.values()]
    words = masked_words(store, tokenizers, count=options.masks, fraction=options.held_out)
    mask = store.tokenizer().mask_token
    ranked = {name: filled(bert, words, mask) for name, bert in models.items()}
    ranked |= baselines(store, words, fraction=options.held_out)
    return {name: {"masks": len(words), **share_found(each, words)} for name, each in ranked.items()}


# ---- adapters


def train_together(encoder: Path, options: argparse.Namespace) -> None:
    """Train all seeds of all tasks, several at a time; each has a process, for each has a GPU's memory."""
    wanted = [(name, seed, encoder, options) for name in TASKS for seed in range(options.seeds)]
    if options.together > 1:
        with ProcessPoolExecutor(options.together, get_context("spawn"), max_tasks_per_child=1) as pool:
            list(pool.map(trained, *zip(*wanted, strict=True)))


def scored_adapter(name: str, encoder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train what is not trained yet of a task, keep the adapter of the first seed, and give the scores."""
    runs = [trained(name, seed, encoder, options) for seed in range(options.seeds)]
    kept = encoder.with_name(f"{ENCODER}-{name}")
    if not kept.exists():
        keep_adapter(runs[0].folder / "model", kept)
    metric = TASKS[name].metric
    scores = [run.metrics["dev"][metric] for run in runs]
    return {
        "metric": metric,
        "scores": scores,
        "median": statistics.median(scores),
        "spread": max(scores) - min(scores),
        "constant answer": runs[0].baselines.get("dev", {}).get(metric),
        "settings": [*LORA, *TASKS[name].settings, *options.set],
        "bytes": sum(file.stat().st_size for file in kept.iterdir()),
    }


def trained(name: str, seed: int, encoder: Path, options: argparse.Namespace) -> FinetuningResult:
    """One run, or what it came to where it is finished."""
    of_task = TASKS[name]
    task = task_named(of_task.task)
    settings = [*LORA, *of_task.settings, f"run.seed={seed}", *options.set]
    out = options.out / "runs" / name / f"seed-{seed}"
    assignment = Assignment(
        task, finetuning_recipe(task, settings), encoder, options.data / of_task.folder, out, True
    )
    result = finetune(assignment, Quiet())
    score = result.metrics["dev"][of_task.metric]
    print(f"{name} seed {seed}: {of_task.metric} {score:.2%} in {result.seconds:.0f} s", flush=True)
    return replace(result, folder=out)


def keep_adapter(source: Path, out: Path) -> None:
    """The adapter without a tokenizer, which is its base's, and with that base by its name."""
    with atomic_folder(out) as fresh:
        for name in KEPT_FILES:
            if (source / name).is_file():
                shutil.copy(source / name, fresh / name)
        config = read_json(fresh / ADAPTER_CONFIG, remedy="train it again")
        write_json(fresh / ADAPTER_CONFIG, {**config, "base_model_name_or_path": ENCODER})


# ---- what is written of it


def report(found: Mapping[str, Any]) -> str:
    """All that was asked and answered, as Markdown."""
    lines = ["# The embedded models", "", *mask_table(found["masked words"]), "", "## Tasks, on dev", ""]
    lines += ["| task | metric | median | spread | seeds | constant answer |", "|---|---|---|---|---|---|"]
    for name, each in found["tasks"].items():
        constant = "" if each["constant answer"] is None else f"{each['constant answer']:.1%}"
        lines.append(
            f"| {name} | {each['metric']} | {each['median']:.1%} | {each['spread']:.1%} | "
            f"{len(each['scores'])} | {constant} |"
        )
    lines += ["", "## Questions about passages", "", "| question | answer | right |", "|---|---|---|"]
    lines += [f"| {one['question']} | {one['said']} | {_mark(one)} |" for one in found["answers"]]
    for model, of_model in found["clozes"].items():
        for kind, asked in of_model.items():
            right = sum(one["is_right"] for one in asked)
            lines += ["", f"## {model}: {kind}, {right} of {len(asked)} right", ""]
            lines += ["| text | candidates | right |", "|---|---|---|"]
            lines += [f"| {one['text']} | {_said(one)} | {_mark(one)} |" for one in asked]
    lines += ["", *bias_table(found["bias"]), ""]
    return "\n".join(lines)


def mask_table(scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    """How often the hidden word was found."""
    count = next(iter(scores.values()))["masks"]
    rows = [f"| {name} | {each['top-1']:.1%} | {each['top-5']:.1%} |" for name, each in scores.items()]
    title = f"## {count} hidden words of held-out sentences"
    return [title, "", "| model | first candidate | among five |", "|---|---|---|", *rows]


def bias_table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """How often which pronoun is more probable; always "he" is 50 %, then twice the same."""
    shares = ("stereotype preferred", "male where male is usual", "male where female is usual")
    lines = ["## WinoBias pairs: which pronoun is more probable", ""]
    lines += [f"| model | kind | pairs | {' | '.join(shares)} |", "|---|---|---|---|---|---|"]
    for model, kinds in found.items():
        for kind, each in kinds.items():
            values = " | ".join(f"{each[share]:.1%}" for share in shares)
            lines.append(f"| {model} | {kind} | {each['pairs']} | {values} |")
    return lines


def _mark(one: Mapping[str, Any]) -> str:
    return "yes" if one["is_right"] else "**no**"


def _said(one: Mapping[str, Any]) -> str:
    said = ", ".join(one["said"])
    return f"{said}; negated: {', '.join(one['negated'])}" if "negated" in one else said


def write_cards(models: Path, found: Mapping[str, Any], options: argparse.Namespace) -> None:
    """A card for each adapter, and at the end of the encoder's what it was asked."""
    of_bias = "\n".join(bias_table({ENCODER: found["bias"][ENCODER]}))
    for name, scores in found["tasks"].items():
        write_text(models / f"{ENCODER}-{name}" / "card.md", adapter_card(name, scores, of_bias))
    # Of the folder it was made of: a second call must not write the tables twice.
    cards = (place / "card.md" for place in (options.model.parent, options.model))
    source = next((card for card in cards if card.is_file()), None)
    card = source.read_text(encoding="utf-8") if source else f"# {ENCODER}\n"
    card = re.sub(r"^# .*$", f"# {ENCODER}", card, count=1, flags=re.MULTILINE)
    tasks = [
        f"- {name}: {each['metric']} {each['median']:.1%}, spread {each['spread']:.1%}"
        for name, each in found["tasks"].items()
    ]
    adapted = "## Adapters over it, on dev\n" + "\n".join(tasks)
    asked = "\n".join([ORIGIN, adapted, "", *mask_table(found["masked words"]), "", of_bias, ""])
    write_text(models / ENCODER / "card.md", f"{card.rstrip()}\n\n{asked}")


def adapter_card(name: str, scores: Mapping[str, Any], of_bias: str) -> str:
    """What there is to know of an adapter."""
    task, listed = TASKS[name], ", ".join(f"{each:.1%}" for each in scores["scores"])
    settings = " ".join(scores["settings"])
    metric, seeds = scores["metric"].replace("_", " "), len(scores["scores"])
    parts = {
        "Data": task.data,
        "Recipe": f"`bertsmith finetune {task.task} --model {ENCODER}` with `{settings}`, as "
        "`bench/embedded_models.py` gives it.",
        "Scores on dev": f"{metric}: median {scores['median']:.1%} of {seeds} seeds ({listed}), spread "
        f"{scores['spread']:.1%}. The adapter is that of the first seed.",
        "Limits": f"{task.limits} It reflects its texts, mistakes and prejudices included; those of its "
        f"encoder are below.\n\n{of_bias}",
    }
    size = f"{scores['bytes'] / 1e6:.1f} MB"
    opening = (
        f"# {ENCODER}-{name}\n\n{task.purpose} A LoRA adapter in peft's format over {ENCODER}, {size}.\n"
    )
    return opening + "".join(f"\n## {title}\n{text}\n" for title, text in parts.items())


if __name__ == "__main__":
    main()
