"""See what the heads of a model read in a sentence: for one word, the heads that read one other word most.

python examples/heads.py
python examples/heads.py "The animal did not cross the street because it was too tired." --word it --top 5
bertsmith look attention "The animal was tired." --out view.html     # the same as a page, with all heads
"""

import argparse
from collections.abc import Sequence
from itertools import product

import bertsmith
from bertsmith.inference.introspection import inspect_attention

SENTENCE = "The animal was tired, so it did not cross the street."
BAR = 30


def main(words: Sequence[str] | None = None) -> None:
    """Print the heads in which a word reads another one most, and how heads differ by layer."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("sentence", nargs="?", default=SENTENCE)
    parser.add_argument("--word", default="it", help="token whose attention is shown")
    parser.add_argument("--top", type=int, default=10, help="heads to show")
    parser.add_argument("--model", help="model folder; without it the included encoder")
    asked = parser.parse_args(words)

    bert = bertsmith.load(asked.model) if asked.model else bertsmith.load()
    attention = inspect_attention(bert, asked.sentence)
    if asked.word not in attention.tokens:
        parser.error(f"{asked.word!r} is not one of the tokens {', '.join(attention.tokens)}")
    row = attention.tokens.index(asked.word)
    special = {0, len(attention.tokens) - 1}  # [CLS] and [SEP], where a head without a task looks
    layers, heads = attention.weights.shape[:2]

    read = []
    for layer, head in product(range(layers), range(heads)):
        weights_N = attention.weights[layer, head, row]
        others = [index for index in range(len(attention.tokens)) if index not in {row, *special}]
        best = max(others, key=weights_N.__getitem__)
        read.append((weights_N[best].item(), layer + 1, head + 1, attention.tokens[best]))
    for weight, layer, head, token in sorted(read, reverse=True)[: asked.top]:
        print(f"head {layer}-{head}  {asked.word} reads {token:12} {weight:6.1%} {'█' * round(BAR * weight)}")

    print("\nattention to [SEP], mean over heads and tokens, by layer:")
    for layer in range(layers):
        weight = attention.weights[layer, :, :, -1].mean().item()
        print(f"layer {layer + 1:2} {weight:6.1%} {'█' * round(BAR * weight)}")


if __name__ == "__main__":
    main()
