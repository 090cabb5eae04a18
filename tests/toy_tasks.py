"""Files of every task in their published layouts, with a rule in them that a small model can learn."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

WARM, COLD = ("sun", "warm", "hot", "tea"), ("snow", "cold", "rain", "river")
CITIES = ("london", "paris")
FILLER = ("the", "boy", "cat", "dog", "sits", "under", "tree", "walks", "and", "plays", "with", "my")
TRAIN, DEV = 160, 40


def sentence(chance: random.Random, *wanted: str) -> str:
    """A few common words with the wanted ones among them."""
    words = chance.choices(FILLER, k=chance.randint(3, 7))
    for word in wanted:
        words.insert(chance.randint(0, len(words)), word)
    return " ".join(words)


def warm_or_cold(chance: random.Random) -> tuple[str, int]:
    """A sentence that speaks of warm (1) or cold (0) things."""
    label = chance.randint(0, 1)
    return sentence(chance, chance.choice(WARM if label else COLD)), label


def write_rows(path: Path, rows: list[list[object]]) -> None:
    """Tab-separated rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")


def _both(folder: Path, write: Callable[[Path, int, random.Random], None], train: str, dev: str) -> Path:
    write(folder / train, TRAIN, random.Random(1))
    write(folder / dev, DEV, random.Random(2))
    return folder


def sst2(folder: Path) -> Path:
    """Sentences with a header."""

    def write(path: Path, count: int, chance: random.Random) -> None:
        write_rows(path, [["sentence", "label"], *(list(warm_or_cold(chance)) for _ in range(count))])

    return _both(folder, write, "train.tsv", "dev.tsv")


def cola(folder: Path) -> Path:
    """Sentences without a header, in the last of four columns."""

    def write(path: Path, count: int, chance: random.Random) -> None:
        rows = [warm_or_cold(chance) for _ in range(count)]
        write_rows(path, [["toy", label, "" if label else "*", text] for text, label in rows])

    return _both(folder, write, "train.tsv", "dev.tsv")


def rte(folder: Path) -> Path:
    """Pairs; the second sentence decides."""

    def write(path: Path, count: int, chance: random.Random) -> None:
        rows: list[list[object]] = [["index", "sentence1", "sentence2", "label"]]
        for number in range(count):
            text, label = warm_or_cold(chance)
            rows.append([number, sentence(chance), text, "entailment" if label else "not_entailment"])
        write_rows(path, rows)

    return _both(folder, write, "train.tsv", "dev.tsv")


def stsb(folder: Path) -> Path:
    """Pairs with a number from 0 to 5, by the one warm or cold word."""
    header = [
        "index",
        "genre",
        "filename",
        "year",
        "old_index",
        "source1",
        "source2",
        "sentence1",
        "sentence2",
        "score",
    ]

    def write(path: Path, count: int, chance: random.Random) -> None:
        rows: list[list[object]] = [list(header)]
        for number in range(count):
            warmth = chance.randrange(len(COLD + WARM))
            text = sentence(chance, (COLD + WARM)[warmth])
            rows.append([number, "toy", "toy", "2012", number, "none", "none", sentence(chance), text])
            rows[-1].append(f"{5 * warmth / 7:.3f}")
        write_rows(path, rows)

    return _both(folder, write, "train.tsv", "dev.tsv")


def wnut17(folder: Path) -> Path:
    """Words with tags: cities are places."""

    def write(path: Path, count: int, chance: random.Random) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        sentences = [sentence(chance, chance.choice(CITIES)).split() for _ in range(count)]
        blocks = [
            "\n".join(f"{word}\t{'B-location' if word in CITIES else 'O'}" for word in words)
            for words in sentences
        ]
        path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")

    return _both(folder, write, "wnut17train.conll", "emerging.dev.conll")


def pos(folder: Path) -> Path:
    """CoNLL-U: the part of speech follows from the word."""
    verbs = {"sits", "walks", "plays"}

    def write(path: Path, count: int, chance: random.Random) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for number in range(count):
            lines.append(f"# sent_id = {number}")
            for place, word in enumerate(sentence(chance, "cat").split(), start=1):
                tag = "VERB" if word in verbs else "NOUN" if word in ("cat", "dog", "boy", "tree") else "X"
                lines.append("\t".join([str(place), word, word, tag, tag, "_", "0", "root", "_", "_"]))
            lines.append("")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    return _both(folder, write, "en_toy-ud-train.conllu", "en_toy-ud-dev.conllu")


def squad(folder: Path) -> Path:
    """Where? The answer is the city of the passage."""

    def write(path: Path, count: int, chance: random.Random) -> None:
        _write_squad(path, count, chance, unanswerable=0.0, version="1.1")

    return _both(folder, write, "train-v1.1.json", "dev-v1.1.json")


def squad2(folder: Path) -> Path:
    """Some passages name no city."""

    def write(path: Path, count: int, chance: random.Random) -> None:
        _write_squad(path, count, chance, unanswerable=0.4, version="v2.0")

    return _both(folder, write, "train-v2.0.json", "dev-v2.0.json")


def _write_squad(path: Path, count: int, chance: random.Random, *, unanswerable: float, version: str) -> None:
    articles = []
    for number in range(count):
        city = "" if chance.random() < unanswerable else chance.choice(CITIES)
        passage = sentence(chance, *([city] if city else []))
        question: dict[str, object] = {"id": f"q{number}", "question": "where is the cat?"}
        question["answers"] = [{"text": city, "answer_start": passage.index(city)}] if city else []
        if version == "v2.0":
            question["is_impossible"] = not city
        articles.append({"title": f"a{number % 8}", "paragraphs": [{"context": passage, "qas": [question]}]})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": version, "data": articles}), encoding="utf-8")


def swag(folder: Path) -> Path:
    """Four endings, one of which is warm."""
    header = ["", "video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source"]
    header += ["ending0", "ending1", "ending2", "ending3", "label"]

    def write(path: Path, count: int, chance: random.Random) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(header)
            for number in range(count):
                right = chance.randint(0, 3)
                endings = [
                    sentence(chance, chance.choice(WARM if place == right else COLD)) for place in range(4)
                ]
                first = sentence(chance)
                table.writerow(
                    [number, f"v{number}", number, first, first, "the boy", "gold", *endings, right]
                )

    return _both(folder, write, "train.csv", "val.csv")


def race(folder: Path) -> Path:
    """Questions with four options, one of which is warm."""

    def write(path: Path, count: int, chance: random.Random) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for number in range(count):
            right = chance.randint(0, 3)
            options = [chance.choice(WARM if place == right else COLD) for place in range(4)]
            entry = {"answers": ["ABCD"[right]], "options": [options], "questions": ["my cat is _ ."]}
            lines.append(json.dumps({**entry, "article": sentence(chance), "id": f"middle{number}.txt"}))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    return _both(folder, write, "middle-train.jsonl", "middle-dev.jsonl")


TOYS: dict[str, Callable[[Path], Path]] = {
    each.__name__: each for each in (sst2, cola, rte, stsb, wnut17, pos, squad, squad2, swag, race)
}
