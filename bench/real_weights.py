"""Real, trained BERT folders through our encoder and through transformers, on sentences of a text file.

    python bench/real_weights.py --text corpus.txt MODEL_FOLDER [MODEL_FOLDER ...]

Prints the largest difference of any hidden state over 200 sentences, and which of ten sentences is nearest to
"a cat on a mat" by mean-pooled embedding.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

import bertsmith

QUERY = "a cat on a mat"
TEN = [
    "The stock market fell sharply on Monday.",
    "He repaired the engine of his old car.",
    "A kitten is sitting on the rug.",
    "The committee will vote on the new law.",
    "She teaches mathematics at the university.",
    "Rain is expected in the north tomorrow.",
    "The recipe needs two eggs and some flour.",
    "They crossed the river in a small boat.",
    "The company hired forty engineers this year.",
    "He plays the violin in an orchestra.",
]
NEAREST = TEN[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument(
        "--text", type=Path, required=True, help="plain text; its first 200 sentences are read"
    )
    parser.add_argument("--sentences", type=int, default=200)
    options = parser.parse_args()
    sentences = [
        sentence for sentence, _ in zip(sentences_of(options.text), range(options.sentences), strict=False)
    ]
    for folder in options.models:
        bert = bertsmith.load(folder)
        best = nearest(bert)
        verdict = "right" if best == NEAREST else "WRONG"
        worst = largest_difference(folder, bert, sentences)
        print(f"{folder.name}: {len(sentences)} sentences, largest difference {worst:.2e}")
        print(f"  nearest to {QUERY!r}: {best!r} ({verdict})")


def sentences_of(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield from (part for part in re.split(r"(?<=[.!?])\s+", line.strip()) if part)


def largest_difference(folder: Path, bert: bertsmith.Bert, sentences: list[str]) -> float:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    worst = 0.0
    for sentence, ours in zip(sentences, bert.hidden_states(sentences, truncate=True), strict=True):
        inputs = tokenizer(
            sentence, return_tensors="pt", truncation=True, max_length=model.config.max_position_embeddings
        )
        with torch.no_grad():
            theirs = torch.cat(model(**inputs, output_hidden_states=True).hidden_states)
        worst = max(worst, (ours - theirs).abs().max().item())
    return worst


def nearest(bert: bertsmith.Bert) -> str:
    query, *others = bert.embed([QUERY, *TEN], pooling="mean")
    return TEN[int(torch.cosine_similarity(query, torch.stack(others)).argmax())]


if __name__ == "__main__":
    main()
