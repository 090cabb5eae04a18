"""What a newcomer gets from a file and nothing else: defaults, the papers' settings, a search, simple models.

    python bench/own_data.py run --data ../data --models bertsmith-small models/minilm-l6 --out runs/own \\
        --rows 100 1000 all --seeds 0 1 2 --ways probe defaults paper lora --workers 12
    python bench/own_data.py run ... --sets rules --rows all --ways defaults-passes=2 defaults-passes=4
    python bench/own_data.py table runs/own/rows.jsonl

The sets of JUDGED are judged by their own test or dev rows; the rules for the defaults come from RULES.
A cell is one set, a number of training rows, a model, a way and a seed, which draws the rows. A way
is `defaults`, `probe` (--quick), `lora`, `paper` (3e-5, three passes, the first token, the last weights),
`trial-0` to `trial-11` of `--random 12` (the best on dev is what the search finds), or `baseline`, which
needs no model. `-rate=2` and `-passes=0.5` multiply what the defaults chose, `-run.examples=16` sets a key,
and `-penalty=1` is that of the head which tuning starts from. Finished cells are lines of rows.jsonl and are
not run again.
"""

import argparse
import itertools
import json
import multiprocessing
import random
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scaling_runs import start_mps

MOST_ROWS, MOST_JUDGED = 10_000, 3_000


@dataclass(frozen=True, slots=True)
class Source:
    """Where the rows of a set stand, and what they ask."""

    train: str
    test: str
    """Nothing: the rows of the training file that no sample takes."""
    text: str
    label: str
    second: str = ""
    kind: str = "classify"


JUDGED = {
    "banking77": Source("eval/banking77/train.tsv", "eval/banking77/test.tsv", "text", "label"),
    "clinc150": Source("eval/clinc150/train.tsv", "eval/clinc150/test.tsv", "text", "label"),
    "trec": Source("eval/trec/train.tsv", "eval/trec/test.tsv", "text", "coarse"),
    "sst5": Source("eval/sst5/train.tsv", "eval/sst5/test.tsv", "text", "label"),
    "emotion": Source("eval/emotion/train.tsv", "eval/emotion/test.tsv", "text", "label"),
    "ag_news": Source("eval/ag_news/train-part.tsv", "eval/ag_news/test.tsv", "text", "label"),
    "tickets": Source("tickets", "tickets", "text", "label"),
    "snli": Source("eval/snli/train-part.tsv", "tasks/nli/test.tsv", "premise", "label", "hypothesis"),
    "mrpc": Source(
        "tasks/glue/MRPC/train.tsv", "tasks/glue/MRPC/dev.tsv", "#1 String", "Quality", "#2 String"
    ),
    "wikiann": Source("eval/wikiann-en/train.conll", "eval/wikiann-en/test.conll", "", "", kind="tags"),
    "politics": Source(
        "eval/crossner/politics-train.conll", "eval/crossner/politics-test.conll", "", "", kind="tags"
    ),
    "stsb": Source(
        "tasks/glue/STS-B/train.tsv", "tasks/glue/STS-B/dev.tsv", "sentence1", "score", "sentence2", "regress"
    ),
    "sick": Source(
        "eval/sick/train.tsv",
        "eval/sick/test.tsv",
        "sentence_A",
        "relatedness_score",
        "sentence_B",
        "regress",
    ),
}
RULES = {
    "cola": Source("tasks/glue/CoLA/train.tsv", "", "3", "1"),
    "sst2": Source("tasks/glue/SST-2/train.tsv", "tasks/glue/SST-2/dev.tsv", "sentence", "label"),
    "offensive": Source(
        "eval/tweeteval-offensive/train.tsv", "eval/tweeteval-offensive/test.tsv", "text", "label"
    ),
    "lingnli": Source(
        "eval/lingnli/train.tsv", "eval/lingnli/validation.tsv", "premise", "label", "hypothesis"
    ),
    "nli-wiki": Source("eval/nli-wiki/train.tsv", "eval/nli-wiki/test.tsv", "premise", "label", "hypothesis"),
    "titles": Source("tasks/squad/train-v1.1-part.json", "", "question", "title"),
    "conll2000": Source("eval/conll2000/train.conll", "eval/conll2000/test.conll", "", "", kind="tags"),
    "wikigold": Source("eval/wikigold/all.conll", "", "", "", kind="tags"),
}
SETS = JUDGED | RULES


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    set: str
    rows: str
    model: str
    way: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return "-".join(map(str, asdict(self).values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="run the cells that are not finished")
    runs.add_argument("--data", type=Path, required=True, help="folder with eval/ and tasks/")
    runs.add_argument("--models", nargs="+", default=["bertsmith-small"], help="names or folders")
    runs.add_argument("--sets", nargs="+", default=["judged"], help="names, judged or rules")
    runs.add_argument("--rows", nargs="+", default=["1000"])
    runs.add_argument("--ways", nargs="+", default=["defaults"])
    runs.add_argument("--seeds", nargs="+", type=int, default=[0])
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--workers", type=int, default=1)
    runs.add_argument("--minutes", type=float, default=1e6, help="no cell is begun after them")
    runs.add_argument("--keep", action="store_true", help="keep the run folders")
    table = verbs.add_parser("table", help="the table of the finished cells")
    table.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.verb == "table":
        print_table(rows_of(*options.files))
    else:
        run(options)


# ---- the rows of a set


@cache
def read(data: Path, file: str) -> list[Any]:
    """The rows of a file: dicts of a table, or words with their tags."""
    if file == "tickets":
        return list(tickets())
    path = data / file
    if path.suffix == ".json":  # SQuAD: which of the articles a question belongs to
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        parts = ((article["title"], part) for article in articles for part in article["paragraphs"])
        return [{"question": qa["question"], "title": title} for title, part in parts for qa in part["qas"]]
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    if path.suffix == ".conll":
        sentences = (block.splitlines() for block in "\n".join(lines).split("\n\n"))
        pairs = [[(line.split("\t")[0], line.split("\t")[-1]) for line in each] for each in sentences if each]
        return [{"words": [word for word, _ in each], "tags": [tag for _, tag in each]} for each in pairs]
    columns = list(map(str, range(4))) if "CoLA" in file else lines.pop(0).split("\t")
    found = [dict(zip(columns, line.split("\t"), strict=True)) for line in lines if line.count("\t")]
    for row in found:
        if "description" in row:
            row["text"] = f"{row['title']} {row['description']}"
    if "tasks/nli" in file:
        for row in found:
            row["label"] = {"0": "entailment", "1": "neutral", "2": "contradiction"}.get(row["label"], "")
    return found


def sample(data: Path, cell: Cell) -> tuple[list[Any], list[Any]]:
    """The training rows and the judged rows of a cell."""
    source = SETS[cell.set]
    rows = [row for row in read(data, source.train) if source.kind == "tags" or row[source.label]]
    order = random.Random(f"{cell.set} {cell.seed}").sample(range(len(rows)), len(rows))
    separate = source.test and source.test != source.train
    most = len(rows) if separate else len(rows) * 9 // 10
    count = min(MOST_ROWS if cell.rows == "all" else int(cell.rows), most)
    test = read(data, source.test) if separate else [rows[index] for index in order[most:]]
    known = [row for row in test if source.kind == "tags" or row[source.label]]
    if source.kind == "classify":
        labels = {row[source.label] for row in rows}
        known = [row for row in known if row[source.label] in labels]
    judged = known if len(known) <= MOST_JUDGED else random.Random(0).sample(known, MOST_JUDGED)
    return [rows[index] for index in order[:count]], judged


QUEUES = {
    "billing": [
        "I was charged {money} twice {time} for {thing}",
        "The invoice {number} shows {money} but I agreed to {other}",
        "Can you send me a receipt for {thing}? I paid {money} {time}",
        "My card was declined {time} although there is money on it",
        "Why did the price of {thing} go up to {money}",
        "The discount code did not take anything off {thing}",
    ],
    "delivery": [
        "{thing} still has not arrived, order {number}",
        "The tracking of {number} has not moved since {time}",
        "The courier left {thing} with a neighbour we do not have",
        "Can I change the address of order {number} before it leaves",
        "It said it would come {time} and nobody came",
        "Half of order {number} came, {thing} was not in the box",
    ],
    "returns": [
        "I want to send {thing} back, it is not what I ordered",
        "How do I get my {money} back for {thing}",
        "{thing} came broken, I have pictures",
        "I returned {thing} {time} and have seen no refund",
        "Is it too late to return {thing}? I bought it {time}",
        "The label you sent for order {number} does not print",
    ],
    "account": [
        "I can not log in since {time}",
        "The mail with the link to reset my password never comes",
        "Please change the address on my account",
        "Somebody logged in to my account {time} and it was not me",
        "How do I delete my account and my data",
        "My account says {number} but that is not my name",
    ],
    "technical": [
        "{thing} will not turn on after the update {time}",
        "The app crashes when I open order {number}",
        "{thing} does not connect to the network any more",
        "I get error {number} when I press save",
        "The screen of {thing} flickers since {time}",
        "It says the firmware is too old, how do I update {thing}",
    ],
    "cancellation": [
        "Please cancel order {number}, I do not need {thing} any more",
        "Stop my subscription before it renews {time}",
        "I cancelled {time} and you still took {money}",
        "How do I end the contract for {thing}",
        "I changed my mind about {thing}, can you stop it before it ships",
        "We do not want the yearly plan for {money} any longer",
    ],
}
"""Some sentences could be in two queues, as in life: a refund after a cancellation, a broken delivery."""
FILL = {
    "money": ["19.99", "$45", "129 euros", "8.50", "250 dollars", "£60"],
    "other": ["15", "$40", "99 euros", "200 dollars"],
    "time": ["yesterday", "last week", "on Monday", "two days ago", "this morning", "in March", "on the 3rd"],
    "number": ["#40213", "A-7731", "88120", "INV-2044", "10097", "B19"],
    "thing": [
        "the headphones",
        "a blue jacket",
        "the coffee machine",
        "my tablet",
        "the router",
        "the running shoes",
        "a desk lamp",
        "the premium plan",
        "the camera",
        "two chairs",
    ],
}
OPENINGS = ["", "Hi,", "Hello team,", "Good morning.", "URGENT!", "Second time I write.", "Dear all,"]
CLOSINGS = [
    "",
    "Thanks!",
    "Please help.",
    "What now?",
    "This is unacceptable.",
    "Best, J.",
    "Waiting for you.",
]


def tickets(count: int = 1_200) -> Iterator[dict[str, str]]:
    """Support tickets in six queues, some queues rarer than others; one in twelve is in the wrong one."""
    chance, seen = random.Random(7), set[str]()
    queues, weights = list(QUEUES), [28, 24, 18, 14, 10, 6]
    while len(seen) < count:
        queue = chance.choices(queues, weights)[0]
        sentences = chance.sample(QUEUES[queue], chance.choice([1, 1, 2]))
        if chance.random() < 0.3:  # people mention other things, too
            sentences.append(chance.choice(QUEUES[chance.choice(queues)]))
        body = ". ".join(each.format(**{key: chance.choice(FILL[key]) for key in FILL}) for each in sentences)
        text = " ".join([chance.choice(OPENINGS), f"{body}.", chance.choice(CLOSINGS)]).strip()
        label = chance.choice(queues) if chance.random() < 1 / 12 else queue
        if text not in seen:
            seen.add(text)
            yield {"text": text, "label": label}


def written(data: Path, cell: Cell, folder: Path) -> tuple[Path, Path]:
    """The training file or folder of a cell, and the file of the judged rows."""
    train, judged = sample(data, cell)
    folder.mkdir(parents=True)
    parts = {"test.jsonl": judged, "train.jsonl": train}
    if SETS[cell.set].kind == "tags":  # a tenth for development, as `custom` holds back by itself
        kept = max(1, len(train) // 10)
        parts |= {"train.jsonl": train[kept:], "dev.jsonl": train[:kept]}
    for name, rows in parts.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    own = folder if SETS[cell.set].kind == "tags" else folder / "train.jsonl"
    if own.is_file():  # nothing may be found beside it by its name
        (folder / "test.jsonl").rename(folder / "judged.jsonl")
        return own.rename(folder / "rows.jsonl"), folder / "judged.jsonl"
    return own, folder / "test.jsonl"


# ---- the runs


def run(options: argparse.Namespace) -> None:
    groups = {"judged": list(JUDGED), "rules": list(RULES)}
    sets = [name for each in options.sets for name in groups.get(each, [each])]
    options.out.mkdir(parents=True, exist_ok=True)
    lines = options.out / "rows.jsonl"
    done = {row["name"] for row in rows_of(lines)} if lines.exists() else set()
    # The time may end before the cells do: every way is tried with the first seed before any with the second.
    every = itertools.product(options.seeds, options.ways, options.models, sets, options.rows)
    cells = [Cell(name, rows, model, way, seed) for seed, way, model, name, rows in every]
    cells = [replace(each, model="none") if each.way == "baseline" else each for each in cells]
    cells = [each for each in dict.fromkeys(cells) if each.name not in done]
    waiting = sorted(cells, key=lambda each: each.rows != "all")  # the long ones first
    began, ends = time.monotonic(), time.monotonic() + 60 * options.minutes
    if options.workers > 1:
        start_mps()
    # A worker that is killed breaks the pool, which says so.
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        open_cells: set[Future[dict[str, Any]]] = set()
        while True:
            while waiting and len(open_cells) < options.workers and time.monotonic() < ends:
                open_cells.add(pool.submit(work, waiting.pop(0), options))
            if not open_cells:
                break
            done_cells, open_cells = wait(open_cells, return_when=FIRST_COMPLETED)
            for row in (each.result() for each in done_cells):
                with lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                told = row.get("error") or f"{100 * row['test']:.1f} (dev {100 * row['dev']:.1f})"
                told += f", {row['seconds']:.0f} s, {row.get('reason', '')}"
                print(f"{time.monotonic() - began:4.0f} s  {row['name']}: {told}", flush=True)
    print(f"{len(waiting)} cells were not begun", flush=True)


def work(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """Run one cell, in a process of its own."""
    import torch

    from bertsmith.core.errors import UserError

    if options.workers > 1:
        torch.set_num_threads(1)
    began, folder = time.monotonic(), options.out / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    row: dict[str, Any] = {"name": cell.name, **asdict(cell)}
    try:
        row |= judged(cell, options.data, folder)
    except UserError as error:
        row["error"] = error.line()
    except Exception as error:  # noqa: BLE001 - one cell must not end the others
        row["error"] = repr(error)
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return row | {"seconds": round(time.monotonic() - began, 2)}


def judged(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """Train as a cell says, and evaluate on the judged rows."""
    from quiet import Quiet

    from bertsmith.finetuning.assignment import Assignment
    from bertsmith.finetuning.finetune import finetune
    from bertsmith.finetuning.predict import Reading, predict_labelled
    from bertsmith.inference.model_path import model_folder
    from bertsmith.tasks.catalogue import task_named
    from bertsmith.tasks.custom import CustomSpec, custom_task

    source = SETS[cell.set]
    train, test = written(data, cell, folder / "data")
    spec = CustomSpec(source.text, source.label, second=source.second, kind=source.kind)
    task = task_named("tags") if source.kind == "tags" else custom_task(spec)
    if cell.way == "baseline":
        return of_simple_model(task, train, test)
    model = model_folder(cell.model)
    recipe, reason = settings(cell, task, train, model)
    began = time.monotonic()
    result = finetune(Assignment(task, recipe, model, train, folder / "run"), Quiet())
    seconds = time.monotonic() - began
    metrics = predict_labelled([folder / "run"], test, reading=Reading()).metrics()
    deciding = result.deciding
    assert deciding is not None
    probe = next(iter(result.references.get("linear probe", {}).values()), {})
    return {
        "metric": deciding[0].name,
        "dev": deciding[1],
        "test": metrics[deciding[0].name],
        "metrics": metrics,
        "probe_dev": probe.get(deciding[0].name),
        "steps": result.steps,
        "train_seconds": round(seconds, 2),
        "reason": reason,
        "rate": recipe.optim.peak_lr,
        "passes": recipe.run.epochs,
        "batch": recipe.run.examples,
    }


@cache
def usual_penalty() -> float:
    """That of the head which tuning starts from, as it is before a cell changes it."""
    from bertsmith.finetuning.linear_probe import TUNING_PENALTY

    return TUNING_PENALTY


def settings(cell: Cell, task: Any, train: Path, model: Path) -> tuple[Any, str]:
    """The recipe of a cell, and the line that a user would read."""
    from bertsmith.finetuning import linear_probe
    from bertsmith.finetuning.suited_settings import suited_recipe
    from bertsmith.studies.sweep import over_search, with_values
    from bertsmith.tasks.task_recipe import finetuning_recipe

    # A value may hold a hyphen: 3e-5, frozen-linear.
    way, *changes = re.split(r"(?<=trial)-|-(?=[a-z._]+=)", cell.way)
    number = int(changes.pop(0)) if way == "trial" else 0
    given = {
        "probe": ["head.encoder=frozen-linear"],
        "lora": ["head.encoder=lora"],
        "paper": [],
        "defaults": [],
        "trial": [],
    }[way]
    given += [f"run.seed={cell.seed}", "run.keep_state=false", "run.compile=off"]
    given += [each for each in changes if "." in each.partition("=")[0]]
    if way == "paper":
        return finetuning_recipe(task, given), ""
    recipe, reason = suited_recipe(task, train, model, given, options=())
    if way == "trial":
        from bertsmith.finetuning.assignment import Assignment

        recipe = over_search(Assignment(task, recipe, model, train, train), 12)[number].assignment.recipe
    factors = dict(each.split("=") for each in changes if "." not in each.partition("=")[0])
    linear_probe.TUNING_PENALTY = float(factors.pop("penalty", usual_penalty()))
    keys = {"rate": "optim.peak_lr", "passes": "run.epochs"}
    now = {"rate": recipe.optim.peak_lr, "passes": recipe.run.epochs}
    scaled = {keys[name]: now[name] * float(factor) for name, factor in factors.items()}
    return with_values(recipe, scaled), reason


def of_simple_model(task: Any, train: Path, test: Path) -> dict[str, Any]:
    """TF-IDF with logistic regression, or a dictionary of spans, on all training rows; none for numbers."""
    from bertsmith.finetuning.evaluation import simple_baseline
    from bertsmith.finetuning.predict import Reading, asked_for
    from bertsmith.finetuning.splits import encoded_split, read_splits, task_config_of
    from bertsmith.inference.loaded_model import load
    from bertsmith.inference.model_path import model_folder
    from bertsmith.tasks.task import read_split
    from bertsmith.tasks.task_recipe import finetuning_recipe

    if not task.kind.simple_model:
        return {"error": "numbers have no simple model"}
    splits = read_splits(task, train, skip_bad=False)
    whole = [each for part in splits.splits.values() for each in part]
    config = task_config_of(splits, finetuning_recipe(task, []))
    asked_task, split = asked_for(config, test, Reading())
    judged_examples = read_split(asked_task, test, split, skip_bad=True).examples
    tokenizer = load(model_folder("bertsmith-small"), device="cpu").tokenizer
    trained, asked = (
        encoded_split(each, config, tokenizer, cache=train.parent / "cache")
        for each in (whole, judged_examples)
    )
    metrics = simple_baseline(config, trained, {"test": asked})["test"]
    name = config.deciding_metric.name
    return {"metric": name, "dev": 0.0, "test": metrics[name], "metrics": metrics}


# ---- the table


def rows_of(*files: Path) -> list[dict[str, Any]]:
    """The finished cells; of one that was run twice the last."""
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return list({row["name"]: row for row in rows}.values())


def print_table(rows: list[dict[str, Any]]) -> None:
    """For each number of rows a table of sets by model and way: the mean over the seeds and its deviation."""
    for row in rows:
        if "error" in row and row["way"] != "baseline":
            print(f"failed: {row['name']}: {row['error']}")
    good = with_searches([row for row in rows if "error" not in row])
    for count in dict.fromkeys(row["rows"] for row in good):
        here = [row for row in good if row["rows"] == count]
        ways = sorted({(row["model"], row["way"]) for row in here})
        print(f"\n## {count} rows\n\n| set | {' | '.join(f'{Path(m).name} {w}' for m, w in ways)} |")
        print(f"|---{'|---' * len(ways)}|")
        means: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for name in [each for each in SETS if any(row["set"] == each for row in here)]:
            cells = []
            for way in ways:
                values = [
                    100 * row["test"]
                    for row in here
                    if row["set"] == name and (row["model"], row["way"]) == way
                ]
                if not values:
                    cells.append("")
                    continue
                means[way][name] = fmean(values)
                spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
                cells.append(f"{fmean(values):.1f}{spread}")
            print(f"| {name} | {' | '.join(cells)} |")
        common = set.intersection(*(set(each) for each in means.values()))
        last = [f"{fmean(means[way][name] for name in common):.1f}" if common else "" for way in ways]
        print(f"| mean of {len(common)} | {' | '.join(last)} |")
        times = [fmean(r.get("train_seconds", 0) for r in here if (r["model"], r["way"]) == w) for w in ways]
        print(f"| seconds | {' | '.join(f'{each:.0f}' for each in times)} |")


def with_searches(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with the trials of each search replaced by the one that is best on dev."""
    trials: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["way"].startswith("trial-"):
            trials[tuple(row[key] for key in ("set", "rows", "model", "seed"))].append(row)
    best = [max(each, key=lambda row: row["dev"]) for each in trials.values()]
    others = [row for row in rows if not row["way"].startswith("trial-")]
    return [*others, *({**row, "way": "search"} for row in best)]


if __name__ == "__main__":
    main()
