"""Sentence vectors beside everything a user would pick instead, interleaved.

    python bench/inference.py --device cuda --shape base --vocab minilm-l6 --texts 8192   # BERT-Base, random
    python bench/inference.py --device cuda --model minilm-l6 --texts 8192                # a real folder
    python bench/inference.py --device cpu --model minilm-l6

Texts have log-normal lengths (5 to 256 tokens, 40 on average) and are made of the vocabulary's own words, so
that no data is needed. All sides give mean-pooled vectors, compared with the fp32 ones of transformers.

On a GPU the peer is transformers in bf16, compiled, sorted by length, in batches of a token budget: modes,
budgets and cuDNN's attention are tried, and the fastest, told in the table, is the peer. Once with tokens
given, once from text, which it reads in a thread beside the GPU's work.

On a CPU sides are measured in sentences per CPU-second, and the peers are those of inference_peers.py, which
come with `pip install onnxruntime onnx onnxscript openvino nncf sentence-transformers`; those that are
missing are left out and named.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from inference_peers import PEERS, Vectors
from padded_inference import PaddedForm, PaddedPeer
from random_model import add_model, folder_of
from rounds import BROKEN, Results, Round, add_form, fastest, in_turn, narrowed, parser_of

import bertsmith
from bertsmith.inference.precision import fastest_precision

LEAST, MOST, MEAN, SIGMA = 5, 256, 40, 0.8
COMPARED_TEXTS = 256


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(options, Path(scratch))
        texts = drawn_texts(folder, options.texts)
        exact = PEERS["transformers fp32"](folder)(texts[:COMPARED_TEXTS])
        if options.by == "budgets":
            compare_budgets(folder, texts, exact, options)
        else:
            compare_peers(folder, texts, exact, options)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_form(parser)
    add_model(parser)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names of peers on a CPU")
    parser.add_argument(
        "--by", choices=["budgets", "peers"], help="the comparison: usually budgets on a GPU, peers on a CPU"
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[65_536, 32_768, 131_072])
    parser.add_argument("--modes", nargs="+", default=["dynamic", "reduce-overhead"])
    options = parser.parse_args()
    options.by = options.by or ("budgets" if options.device == "cuda" else "peers")
    if options.by == "peers" and options.device == "cuda":
        parser.error("--by peers is for --device cpu")
    return options


def drawn_texts(folder: Path, count: int) -> list[str]:
    """Texts of whole words of the vocabulary, of log-normal lengths, in any order."""
    vocabulary = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha() and word.islower())
    chance = np.random.default_rng(0)
    lengths = (
        chance.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count).round().clip(LEAST, MOST).astype(int)
    )
    return [" ".join(chance.choice(words, length - 2)) for length in lengths]


def our_vectors(bert: bertsmith.Bert) -> Callable[[Any], np.ndarray]:
    """What makes vectors of texts, or of tokenised ones."""
    embed = partial(bert.embed, pooling="mean", normalize=False)
    return lambda texts: embed(texts).numpy()


def mean_cosine(vectors: np.ndarray, exact: np.ndarray) -> str:
    """The mean cosine between the first vectors of a side and the exact ones."""
    given = vectors[: len(exact)]
    norms = np.linalg.norm(given, axis=1) * np.linalg.norm(exact, axis=1)
    return f"{((given * exact).sum(1) / norms).mean():.5f}"


def rounds_of(sides: Mapping[str, Callable[[], np.ndarray]]) -> dict[str, Round]:
    """A round makes all vectors; on the CPU, so a GPU was waited for."""
    return {side: lambda vectors=vectors: float(len(vectors())) for side, vectors in sides.items()}


# ---- on a GPU: one peer, by modes and budgets


def compare_budgets(folder: Path, texts: list[str], exact: np.ndarray, options: argparse.Namespace) -> None:
    bert = bertsmith.load(folder, device=options.device, precision=half(options.device))
    given = {"tokens in": bert.engine.reader.tokenize(texts), "from text": texts}
    results, rates, modes = Results(options.json, "texts"), {}, options.modes
    for work, ours_given in given.items():
        print(f"\n{work}", flush=True)
        from_text = work == "from text"

        def vectors_of(form: PaddedForm, from_text: bool = from_text) -> Callable[[], np.ndarray]:
            peer = PaddedPeer(folder, options.device, form)
            return partial(peer.of_texts, texts) if from_text else partial(peer.of_tokens, peer.tokens(texts))

        def make(form: PaddedForm, vectors_of=vectors_of) -> Round:
            return rounds_of({"peer": vectors_of(form)})["peer"]

        tried = rates.setdefault(work, {})
        forms = [PaddedForm(mode, options.budgets[0]) for mode in modes]
        if options.device == "cuda":
            forms.append(forms[0]._replace(cudnn=True))
        form = fastest(narrowed(forms, options.form), make, tried)
        form = fastest([form._replace(tokens=tokens) for tokens in options.budgets], make, tried)
        modes = [form.mode]  # reading texts beside it does not change which mode wins
        sides = {"ours": partial(our_vectors(bert), ours_given), "peer": vectors_of(form)}
        cosines = {side: mean_cosine(vectors(), exact) for side, vectors in sides.items()}  # and warm up
        measured = in_turn(rounds_of(sides), options.rounds)
        results.add(f"{folder.name}, {work}", measured, cosine=cosines, form={"peer": str(form)})
        results.write(forms_of_the_peer=rates)


def half(device: str) -> str:
    return "bf16" if device == "cuda" else "fp32"


# ---- on a CPU: many peers, by precision


def compare_peers(folder: Path, texts: list[str], exact: np.ndarray, options: argparse.Namespace) -> None:
    results = Results(options.json, "sentences", "CPU-second")
    for precision in (fastest_precision(torch.device("cpu")), "int8"):
        names = [peer for peer in PEERS if ("int8" in peer) == (precision == "int8")]
        makers = {"ours": our_vectors(bertsmith.load(folder, precision=precision))}
        makers |= peer_sides(folder, names, options)
        sides = {side: partial(vectors, texts) for side, vectors in makers.items()}
        cosines = {side: mean_cosine(vectors(), exact) for side, vectors in sides.items()}  # and warm up
        measured = in_turn(rounds_of(sides), options.rounds, time.process_time)
        results.add(f"{folder.name}, {precision}", measured, cosine=cosines)


def peer_sides(folder: Path, names: Sequence[str], options: argparse.Namespace) -> dict[str, Vectors]:
    sides: dict[str, Vectors] = {}
    for name in names:
        if options.only and name not in options.only:
            continue
        try:
            sides[name] = PEERS[name](folder)
        except BROKEN as error:
            print(f"{name}: left out ({type(error).__name__}: {str(error)[:200]})", flush=True)
    return sides


if __name__ == "__main__":
    main()
