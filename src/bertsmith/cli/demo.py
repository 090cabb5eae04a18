"""`bertsmith demo`: try the embedded models, then train a tiny BERT from a text to a table of scores."""

import shlex
import tempfile
from pathlib import Path
from typing import Annotated

from typer import Exit, Option, echo, style

from bertsmith.cli.presenting import console
from bertsmith.cli.village import write_village
from bertsmith.core.files import check_not_taken, read_json
from bertsmith.inference.embedded_models import embedded_models_for

PASSAGE = (
    "Alyssa had never seen the sea. In the spring of 2019 she went to Miami because her sister Ruth had "
    "opened a bakery there and needed help. They baked bread at night and swam in the morning."
)
QUESTIONS = {
    "answer": ("answer", "Why did Alyssa go to Miami?", "--passage-text", PASSAGE),
    "tag": ("tag", "Ada Lovelace met Charles Babbage in London."),
    "classify": ("classify", "A warm and funny film with a wonderful cast."),
}
"""Command for each ability of an embedded task model."""
FINETUNING = ("--text", "sentence", "--label", "worker", "--epochs", "10", "--lr", "1e-3", "--batch", "16")
UNSEEN = "I need the poker for the kettles."
"""Sentence of the development set; neither word is in a labelled sentence for training."""


def demo(
    steps: Annotated[int, Option(min=1, help="Steps of pre-training.")] = 1_000,
    out: Annotated[
        Path | None, Option(metavar="FOLDER", help="Folder for everything; else a temporary one.")
    ] = None,
) -> None:
    """See bertsmith at work: first the embedded models, then a BERT that is pre-trained before your eyes.

    Every step is a command that you can run yourself, printed before it runs. Nothing is downloaded. The
    pre-training takes about a minute, the whole demo about two on two cores.

    Example: bertsmith demo

    Example: bertsmith demo --steps 2000 --out village/
    """
    if out is not None:
        check_not_taken(out)
    folder = Path(tempfile.mkdtemp(prefix="bertsmith-demo-")) if out is None else out
    ask_embedded_models()
    _heading("From a text to a BERT")
    write_village(folder)
    echo(f"{folder / 'village.txt'} describes a village in few words:")
    with (folder / "village.txt").open(encoding="utf-8") as text:
        echo("".join(f"    {line}" for _, line in zip(range(4), text, strict=False)), nl=False)
    pretrain_on_village(folder, steps)
    finetune_for_trades(folder)
    compare(folder)


def ask_embedded_models() -> None:
    """Try the embedded models, without any training."""
    _heading("The included models")
    _bertsmith("fill", "Paris is the [MASK] of France.", "--top", "3")
    _bertsmith("fill", "The cat sat on the [MASK].", "--top", "3")
    _bertsmith("next", "The battle was lost.", "Add two spoons of sugar and stir.")
    for ability, words in QUESTIONS.items():
        if embedded_models_for(ability):
            _bertsmith(*words)


def pretrain_on_village(folder: Path, steps: int) -> None:
    """Learn a vocabulary, build a token store, pre-train, and fill a mask with the new model."""
    text, vocab, store, run = (str(folder / name) for name in ("village.txt", "vocab", "store", "pretrained"))
    _bertsmith("vocab", text, "--size", "600", "--workers", "1", "--out", vocab)
    _bertsmith("corpus", text, "--vocab", vocab, "--sentences", "line", "--workers", "1", "--out", store)
    recipe = str(folder / "village.toml")
    _bertsmith("pretrain", recipe, "--store", store, "--steps", str(steps), "--out", run)
    _bertsmith("fill", "People ask the baker for [MASK].", "--model", run, "--top", "3")


def finetune_for_trades(folder: Path) -> None:
    """Fine-tune the pre-trained model, and one of the same shape with random weights."""
    _heading("One task, with and without pre-training")
    echo("Which trade is a sentence about? 96 labelled sentences for training and 96 for development, which")
    echo("share no tool, material or product: only the village's text explains the new words.")
    write_fresh_model(folder / "pretrained", folder / "fresh")
    for start in ("fresh", "pretrained"):
        data = ("--data", str(folder / "train.csv"), "--dev", str(folder / "dev.csv"), *FINETUNING)
        run = str(folder / f"trades-{start}")
        _bertsmith("finetune", "custom", *data, "--model", str(folder / start), "--out", run)
    _bertsmith("classify", UNSEEN, "--model", str(folder / "trades-pretrained"))


def write_fresh_model(trained: Path, out: Path) -> None:
    """Write a model of the same shape and vocabulary with random initial weights."""
    from dataclasses import replace

    import torch

    from bertsmith.inference.loaded_model import Bert, load
    from bertsmith.model.folder.model_folder import head_outputs
    from bertsmith.model.network import new_network

    bert = load(trained, device="cpu")
    network = bert.model.network
    fresh = new_network(network.config, head_outputs(network), torch.Generator().manual_seed(0))
    Bert(replace(bert.model, network=fresh), bert.tokenizer, device="cpu").save(out)


def compare(folder: Path) -> None:
    """Print the results of both models, the files written, and the next steps."""
    from rich.table import Table

    from bertsmith.finetuning.assignment import RESULT

    remedy = "run the demonstration again"
    fresh, pretrained = (
        read_json(folder / f"trades-{start}" / RESULT, remedy=remedy) for start in ("fresh", "pretrained")
    )
    table = Table("fine-tuned from", "accuracy on unlabelled words")
    table.add_row("(the constant answer)", _percent(fresh["baselines"]))
    table.add_row("fresh weights", _percent(fresh["metrics"]))
    table.add_row("the model that has read the village", _percent(pretrained["metrics"]))
    _heading("The effect of pre-training")
    console().print(table)
    pictures = [run / "curves.png" for run in (folder / "pretrained", folder / "trades-pretrained")]
    pictures.append(folder / "trades-pretrained" / "confusion-dev.png")
    for picture in filter(Path.exists, pictures):
        echo(f"picture: {picture}")
    echo("\nYour own text in a token store, and half an hour: bertsmith chooses the recipe for this machine")
    echo("    bertsmith pretrain auto --store store/ --out runs/mine --minutes 30")
    echo("\nThe playground, a page with all of this: run one of these, and open http://127.0.0.1:8000")
    echo("    bertsmith serve")
    echo(f"    bertsmith serve --model {folder / 'pretrained'} --model {folder / 'trades-pretrained'}")


def _percent(by_split: dict[str, dict[str, float]]) -> str:
    return f"{by_split['dev']['accuracy']:.1%}"


def _heading(title: str) -> None:
    echo(style(f"\n── {title} ", bold=True))


def _bertsmith(*words: str) -> None:
    """Print a command and run it."""
    from bertsmith.cli.app import app  # here because it imports this file

    echo(style(f"\n$ bertsmith {shlex.join(words)}", fg="cyan"))
    if code := app(list(words), prog_name="bertsmith", standalone_mode=False):
        raise Exit(code)
