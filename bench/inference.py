"""Sentence vectors beside everything a user would pick instead, interleaved, in sentences per CPU-second.

    python bench/inference.py --model minilm-l6                  # a real folder
    python bench/inference.py --shape base --texts 256           # a BERT-Base of random weights
    python bench/inference.py --model minilm-l6 --device cuda    # beside a compiled transformers

Texts have log-normal lengths (5 to 256 tokens, 40 on average) and are made of the vocabulary's own words, so
that no data is needed. All sides get texts, sort them by length and give mean-pooled vectors; each is
compared with the fp32 vectors of transformers. Peers come with `pip install onnxruntime onnx onnxscript
openvino nncf sentence-transformers`; those that are missing are left out and named.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from inference_peers import PEERS, Vectors

import bertsmith
from bertsmith.inference.precision import fastest_precision
from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.model_folder import Model, write_model
from bertsmith.model.network import new_network

LEAST, MOST, MEAN, SIGMA = 5, 256, 40, 0.8
COMPARED_TEXTS = 256
BROKEN = (ImportError, NotImplementedError, RuntimeError, OSError, ValueError, AttributeError, TypeError)
"""What a peer that does not start may raise; the others go on."""
SHAPES = {"base": (12, 768, 12), "minilm": (6, 384, 12)}


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or random_folder(Path(scratch) / "model", options.shape, options.vocab)
        texts = drawn_texts(folder, options.texts)
        exact = PEERS["transformers fp32"](folder, "cpu")(texts[:COMPARED_TEXTS])
        sides = {**our_sides(folder, options), **peer_sides(folder, options)}
        compare(sides, texts, exact, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="base", help="of random weights, without --model"
    )
    parser.add_argument("--vocab", type=Path, help="a folder with a tokenizer, for --shape")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="*", help="names of sides")
    return parser.parse_args()


def random_folder(folder: Path, name: str, vocab: Path) -> Path:
    """A model folder of a published shape with random weights."""
    layers, width, heads = SHAPES[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(vocab)
    config = EncoderConfig(
        model_type="bert",
        vocabulary=len(tokenizer),
        width=width,
        layers=layers,
        heads=heads,
        inner=4 * width,
        embedding_width=width,
        positions=512,
    )
    write_model(folder, Model(new_network(config, {"pooler": 0}, torch.Generator().manual_seed(0))))
    tokenizer.save_pretrained(folder)
    return folder


def drawn_texts(folder: Path, count: int) -> list[str]:
    """Texts of whole words of the vocabulary, of log-normal lengths, in any order."""
    vocabulary = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha() and word.islower())
    chance = np.random.default_rng(0)
    lengths = (
        chance.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count).round().clip(LEAST, MOST).astype(int)
    )
    return [" ".join(chance.choice(words, length - 2)) for length in lengths]


def our_sides(folder: Path, options: argparse.Namespace) -> dict[str, Vectors]:
    half = "bf16" if fastest_precision(torch.device(options.device)) == "bf16" else "fp32"
    sides = {}
    for precision in [half] if options.device == "cuda" else [half, "int8"]:
        bert = bertsmith.load(folder, device=options.device, precision=precision)
        embed = partial(bert.embed, pooling="mean", normalize=False)
        sides[f"ours {precision}"] = lambda texts, embed=embed: embed(texts).numpy()
    return sides


def peer_sides(folder: Path, options: argparse.Namespace) -> dict[str, Vectors]:
    sides: dict[str, Vectors] = {}
    for name, make in PEERS.items():
        if options.only and name not in options.only:
            continue
        try:
            sides[name] = make(folder, options.device)
        except BROKEN as error:
            print(f"{name}: left out ({type(error).__name__}: {str(error)[:200]})", flush=True)
    return sides


def compare(
    sides: dict[str, Vectors], texts: list[str], exact: np.ndarray, options: argparse.Namespace
) -> None:
    clock: Callable[[], float] = time.process_time if options.device == "cpu" else time.perf_counter
    unit = "CPU-second" if options.device == "cpu" else "second"
    rates: dict[str, list[float]] = {name: [] for name in sides}
    nearness = {}
    for name, side in sides.items():  # which is also the warm-up
        nearness[name] = mean_cosine(side(texts)[: len(exact)], exact)
    for _ in range(options.rounds):
        for name, side in sides.items():
            started = clock()
            side(texts)
            rates[name].append(len(texts) / (clock() - started))
    print(f"\n| side | sentences per {unit} | spread | mean cosine to fp32 |\n|---|---|---|---|")
    for name, values in sorted(rates.items(), key=lambda pair: -statistics.median(pair[1])):
        spread = f"{min(values):.0f}-{max(values):.0f}"
        print(f"| {name} | {statistics.median(values):.0f} | {spread} | {nearness[name]:.5f} |", flush=True)


def mean_cosine(vectors: np.ndarray, exact: np.ndarray) -> float:
    """The mean cosine between the vectors of a side and the exact ones."""
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(exact, axis=1)
    return float(((vectors * exact).sum(1) / norms).mean())


if __name__ == "__main__":
    main()
