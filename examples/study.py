"""Study one setting: learning rates over the folds of your table, each with its mean and deviation.

python examples/study.py runs/own-csv.csv --label verdict            # the table of examples/own_csv.py
python examples/study.py reviews.csv --text review --label stars --rates 1e-4 3e-4 --folds 5
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import bertsmith


def main(words: Sequence[str] | None = None) -> None:
    """Cross-validate each learning rate, and print the best one."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("table", type=Path, help="CSV, TSV, JSONL or Parquet")
    parser.add_argument("--text", default="review", help="column of the texts")
    parser.add_argument("--label", default="verdict", help="column of the labels")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--folds", type=int, default=3, help="parts of the table, each developed on once")
    parser.add_argument("--metric", default="accuracy")
    parser.add_argument("--model", help="model folder; without it the included encoder")
    parser.add_argument("--epochs", type=float, help="passes over the table")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of all runs; resumes")
    asked = parser.parse_args(words)

    found: dict[float, float] = {}
    for rate in asked.rates:
        study = bertsmith.finetune(
            asked.table,
            text=asked.text,
            label=asked.label,
            model=asked.model,
            folds=asked.folds,
            lr=rate,
            epochs=asked.epochs,
            out=asked.out / f"{rate:g}",
        )
        for row in study.table():
            if row["metric"] == asked.metric:
                found[rate] = row["value"]
                print(f"rate {rate:<8g} {asked.metric} {row['value']:.3f} ± {row['deviation']:.3f}")
    best = max(found, key=found.__getitem__)
    print(f"best: {best:g}; train on the whole table with --lr {best:g}")


if __name__ == "__main__":
    main()
