"""Fine-tune a classifier on your own table, look at its errors, and predict for new rows.

python examples/own_csv.py                                   # a small made-up table, a minute
python examples/own_csv.py reviews.csv --text review --label stars
"""

import argparse
import csv
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import bertsmith

SUBJECTS = ("The tea is", "My day was", "The park is", "It was", "The rain is", "The room was", "The view is")
GOOD = ("warm", "cute", "lovely", "good", "a joy", "great")
BAD = ("cold", "dull", "awful", "bad", "a pain", "poor")


def made_up_table(path: Path) -> Path:
    """Write a table with a column of texts and a column of labels."""
    with path.open("w", encoding="utf-8", newline="") as file:
        labelled = [(how, "good") for how in GOOD] + [(how, "bad") for how in BAD]
        rows = [(f"{who} {how} today.", label) for who, (how, label) in product(SUBJECTS, labelled)]
        csv.writer(file).writerows([("review", "verdict"), *rows])
    return path


def main(words: Sequence[str] | None = None) -> None:
    """Fine-tune, evaluate and predict."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("table", nargs="?", type=Path, help="CSV, TSV, JSONL or Parquet")
    parser.add_argument("--text", default="review", help="column of the texts")
    parser.add_argument("--label", default="verdict", help="column of the labels")
    parser.add_argument("--model", help="model folder; without it the included encoder")
    parser.add_argument("--epochs", type=float, help="passes over the table; else as many as suit it")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/own-csv"), help="run folder; the same call resumes"
    )
    asked = parser.parse_args(words)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    table = asked.table or made_up_table(asked.out.with_suffix(".csv"))

    run = bertsmith.finetune(
        table, text=asked.text, label=asked.label, model=asked.model, out=asked.out, epochs=asked.epochs
    )
    for row in run.table():
        print(f"{row['split']:10} {row['metric']:20} {row['value']:.3f}")

    held_out = bertsmith.evaluate(run.folder, table)  # only rows that the model did not learn from
    print(*held_out.table(), sep="\n")

    (predicted,) = bertsmith.predict(run.folder, [{asked.text: "The weather was lovely."}]).table()
    print("predicted:", predicted)


if __name__ == "__main__":
    main()
