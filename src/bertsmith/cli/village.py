"""The demonstration's sample text about a village, and a task that requires knowledge from this text.

The labelled sentences for training and for development do not share a tool, material or product. Only the
text shows which trade a word of the development set belongs to.
"""

import csv
import io
import random
from dataclasses import dataclass
from pathlib import Path

from bertsmith.core.files import write_text

SEED = 0
RECIPE = """\
name = "village"

[model]  # pre-norm, which learns from its first steps on; transformers opens it as a ModernBERT
type = "modernbert"
layers = 2
width = 96
heads = 4
inner = 192
positions = 128
segments = 0
dropout = 0.0
attention_dropout = 0.0
global_layers = 1

[examples]
pairs = "doc-sentences"
held_out_fraction = 0.02
stages = [{ fraction = 1.0, length = 64, predictions = 20 }]

[masking]
rate = 0.3

[batch]
sequences = 16

[optim]
algorithm = "muon"
peak_lr = 0.02
warmup_fraction = 0.05
"""
"""Recipe of a tiny BERT for the text below, trained for some hundred steps."""
DOCUMENTS, LABELLED = 900, 96
SENTENCES = (5, 9)
NAMES = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Ida", "Jonas", "Karla", "Leo")


@dataclass(frozen=True, slots=True)
class Trade:
    """A trade, and the words that belong to it."""

    worker: str
    place: str
    work: str
    tools: tuple[str, ...]
    materials: tuple[str, ...]
    products: tuple[str, ...]


TRADES = (
    Trade(
        *("smith", "forge", "beats"),
        ("hammer", "anvil", "furnace", "poker"),
        ("iron", "steel", "brass", "copper"),
        ("nails", "horseshoes", "chains", "kettles"),
    ),
    Trade(
        *("baker", "bakery", "kneads"),
        ("oven", "whisk", "sieve", "spoon"),
        ("flour", "dough", "yeast", "butter"),
        ("bread", "cakes", "rolls", "pies"),
    ),
    Trade(
        *("fisher", "harbour", "catches"),
        ("net", "boat", "hook", "oar"),
        ("herring", "salmon", "trout", "cod"),
        ("fillets", "mussels", "oysters", "crabs"),
    ),
    Trade(
        *("tailor", "workshop", "sews"),
        ("needle", "thimble", "bobbin", "ruler"),
        ("silk", "linen", "cotton", "velvet"),
        ("coats", "shirts", "gowns", "trousers"),
    ),
    Trade(
        *("gardener", "garden", "waters"),
        ("spade", "rake", "hoe", "trowel"),
        ("soil", "compost", "seed", "clover"),
        ("roses", "tulips", "cabbages", "carrots"),
    ),
    Trade(
        *("carpenter", "yard", "cuts"),
        ("vice", "chisel", "plane", "drill"),
        ("oak", "pine", "timber", "plywood"),
        ("tables", "chairs", "doors", "ladders"),
    ),
)

ABOUT = (
    "{name} is the {worker} of the village.",
    "The {worker} works at the {place}.",
    "At the {place} {name} {work} the {material} every morning.",
    "{name} takes the {tool} and {work} the {material}.",
    "The {worker} keeps the {tool} beside the {other_tool}.",
    "With the {tool} the {worker} turns {material} into {product}.",
    "On market day {name} sells {product} and {other_product}.",
    "People ask the {worker} for {product}.",
    "The {tool} is old, but {name} still makes {product} with it.",
    "There is {material} and {other_material} at the {place}.",
)
ASKED = (
    "Somebody left the {tool} beside the {material}.",
    "The {tool} was there, and so were the {product}.",
    "We saw {material}, and then {product}.",
    "I need the {tool} for the {product}.",
)


def write_village(folder: Path) -> None:
    """Write the text, the recipe and the tables of the task into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "village.txt", village_text())
    write_text(folder / "village.toml", RECIPE)
    for split, table in labelled_sentences().items():
        write_text(folder / f"{split}.csv", table)


def village_text() -> str:
    """Return documents about the people of the village, separated by empty lines."""
    chance = random.Random(SEED)
    return "\n".join(_document(chance) for _ in range(DOCUMENTS))


def labelled_sentences() -> dict[str, str]:
    """Return the task as CSV tables, train and dev; the label is the worker that a sentence is about."""
    chance = random.Random(SEED + 1)
    return {"train": _table(chance, slice(0, 2)), "dev": _table(chance, slice(2, 4))}


def _document(chance: random.Random) -> str:
    trade, name = chance.choice(TRADES), chance.choice(NAMES)
    words = [_words(trade, chance, slice(None)) for _ in range(chance.randint(*SENTENCES))]
    return "".join(chance.choice(ABOUT).format(name=name, **each) + "\n" for each in words)


def _table(chance: random.Random, part: slice) -> str:
    written = io.StringIO()
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow(("sentence", "worker"))
    for number in range(LABELLED):
        trade = TRADES[number % len(TRADES)]
        rows.writerow((chance.choice(ASKED).format(**_words(trade, chance, part)), trade.worker))
    return written.getvalue()


def _words(trade: Trade, chance: random.Random, part: slice) -> dict[str, str]:
    """Return a word for each blank of a sentence, from this part of a trade's words."""
    tool, other_tool = chance.sample(trade.tools[part], 2)
    material, other_material = chance.sample(trade.materials[part], 2)
    product, other_product = chance.sample(trade.products[part], 2)
    return {
        **{"worker": trade.worker, "place": trade.place, "work": trade.work},
        **{"tool": tool, "other_tool": other_tool},
        **{"material": material, "other_material": other_material},
        **{"product": product, "other_product": other_product},
    }
