"""How fast does text become a token store? Ours beside the straightforward way: same text, one core each.

    python bench/corpus_speed.py --data part-0.txt.xz part-1.txt.xz --vocab bert-base-uncased/

The straightforward way reads lines, splits each with sentencex, encodes with `encode_batch` of `tokenizers`
on one thread, and writes the ids with numpy. Printed are, for the first file, the speed of tokenisation alone
and of the whole command, and whether every token is equal; with several files also that peak memory does not
grow with them. Exit status 1 if a token differs or a target is missed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

# Before the library is imported, for it reads them once.
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

import numpy as np
from sentencex import segment
from tokenizers import Tokenizer as Library
from typer import Typer

from bertsmith.cli.corpus import corpus
from bertsmith.core.files import open_text_bytes
from bertsmith.corpus.token_store import TokenStore
from bertsmith.text.fast_encoder import FastEncoder, smallest_id_type
from bertsmith.text.tokenizer import Tokenizer

SENTENCES_AT_ONCE = 8000
TOKENISATION_TARGET, COMMAND_TARGET, MEMORY_TARGET = 5.0, 3.0, 1.1


def main() -> None:
    options = parse()
    if options.write_plainly or options.write_store:
        work_and_tell_the_peak(options)
        return
    held = [
        compare_tokenisation(options.data[0], options.vocab),
        *compare_commands(options.data, options.vocab),
    ]
    sys.exit(0 if all(held) else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="plain text, compressed or not")
    parser.add_argument("--vocab", type=Path, required=True, help="folder with tokenizer files")
    for compared in ("--write-plainly", "--write-store"):  # what the compared processes do
        parser.add_argument(compared, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- tokenisation alone ---


def compare_tokenisation(source: Path, vocab: Path) -> bool:
    """Print the speed of both on the sentences of a file; whether ours is fast enough and exact."""
    tokenizer = Tokenizer.load(vocab)
    library, encoder = plain_library(tokenizer), FastEncoder(tokenizer)
    plain_seconds = our_seconds = megabytes = 0.0
    tokens = different = 0
    for sentences in batches(sentences_of(source)):
        begin = time.process_time()
        plain = [encoding.ids for encoding in library.encode_batch(sentences, add_special_tokens=False)]
        middle = time.process_time()
        ours = encoder.encode_many(sentences)
        our_seconds += time.process_time() - middle
        plain_seconds += middle - begin
        rows = np.split(ours.ids, np.cumsum(ours.lengths))[:-1]
        different += sum(row.tolist() != ids for row, ids in zip(rows, plain, strict=True))
        tokens += len(ours.ids)
        megabytes += sum(len(sentence.encode()) for sentence in sentences) / 1e6
    ratio = plain_seconds / our_seconds
    say("tokenisation", f"{megabytes:,.1f} MB, {tokens:,} tokens, {different:,} sentences differ")
    say("", f"plainly {megabytes / plain_seconds:.2f} MB, ours {megabytes / our_seconds:.2f} MB a CPU second")
    say("", f"ours is {ratio:.1f} times as fast (target {TOKENISATION_TARGET})")
    return ratio >= TOKENISATION_TARGET and not different


def plain_library(tokenizer: Tokenizer) -> Library:
    """The library's own tokenizer, told like ours that special tokens in a text are ordinary characters."""
    library = Library.from_str(tokenizer.spec.pipeline)
    library.encode_special_tokens = True
    return library


def sentences_of(source: Path) -> Iterator[str]:
    """The sentences of a file, line by line."""
    with open_text_bytes(source) as file:
        for line in file:
            if text := line.decode().strip():
                yield from segment("en", text)


def batches(sentences: Iterator[str]) -> Iterator[list[str]]:
    """The sentences, some thousands at once."""
    while batch := list(islice(sentences, SENTENCES_AT_ONCE)):
        yield batch


# --- the whole command ---


@dataclass(frozen=True, slots=True)
class Run:
    """What a process took."""

    wall_seconds: float
    cpu_seconds: float
    peak_megabytes: float


def compare_commands(sources: list[Path], vocab: Path) -> list[bool]:
    """Print the cost of both as processes of their own; whether the targets were met."""
    with tempfile.TemporaryDirectory() as name:
        ids, store = Path(name, "ids.bin"), Path(name, "store")
        plain = run(sources[:1], vocab, "--write-plainly", str(ids))
        ours = run(sources[:1], vocab, "--write-store", str(store))
        ratio, wall_ratio = plain.cpu_seconds / ours.cpu_seconds, plain.wall_seconds / ours.wall_seconds
        is_equal = equal_tokens(ids, TokenStore.open(store))
        say("command", f"plainly {plain.cpu_seconds:.1f} s CPU, {plain.wall_seconds:.1f} s wall")
        say("", f"ours {ours.cpu_seconds:.1f} s CPU, {ours.wall_seconds:.1f} s wall")
        say(
            "", f"ours takes {ratio:.1f} times less CPU (target {COMMAND_TARGET}), {wall_ratio:.1f} less wall"
        )
        say("", "every token is equal" if is_equal else "TOKENS DIFFER")
        say("memory", f"plainly {plain.peak_megabytes:.0f} MB at most, ours {ours.peak_megabytes:.0f} MB")
        held = [is_equal, ratio >= COMMAND_TARGET]
        if len(sources) > 1:
            together = run(sources, vocab, "--write-store", str(Path(name, "all")))
            growth = together.peak_megabytes / ours.peak_megabytes
            peak = f"{together.peak_megabytes:.0f} MB over {len(sources)} files"
            say("", f"ours {peak}, {growth:.2f} times as much (target {MEMORY_TARGET})")
            held.append(growth <= MEMORY_TARGET)
    return held


def run(sources: list[Path], vocab: Path, *action: str) -> Run:
    """What a fresh interpreter takes for this."""
    begin = time.perf_counter()
    command = [sys.executable, __file__, "--data", *map(str, sources), "--vocab", str(vocab), *action]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{action[0]} failed")
    # Not the peak that wait4 tells: it begins with that of the process that starts the other.
    peak = float(told.splitlines()[-1])
    return Run(time.perf_counter() - begin, used.ru_utime + used.ru_stime, peak)


def work_and_tell_the_peak(options: argparse.Namespace) -> None:
    """What a compared process does: its work, and to say how many megabytes it took at most."""
    if options.write_plainly:
        write_plainly(options.data[0], options.vocab, options.write_plainly)
    else:
        write_store(options.data, options.vocab, options.write_store)
    status = Path("/proc/self/status").read_text()
    print(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024)


def write_plainly(source: Path, vocab: Path, out: Path) -> None:
    """The straightforward way."""
    tokenizer = Tokenizer.load(vocab)
    library = plain_library(tokenizer)
    id_type = smallest_id_type(tokenizer.vocabulary_size)
    with out.open("wb") as file:
        for sentences in batches(sentences_of(source)):
            for encoding in library.encode_batch(sentences, add_special_tokens=False):
                np.array(encoding.ids, id_type).tofile(file)


def write_store(sources: list[Path], vocab: Path, out: Path) -> None:
    """Our way: the command itself."""
    app = Typer()
    app.command()(corpus)
    options = ["--vocab", str(vocab), "--out", str(out), "--workers", "1", "--json"]
    app([*map(str, sources), *options], standalone_mode=False)


def equal_tokens(ids: Path, store: TokenStore) -> bool:
    """Whether a file holds exactly the tokens of a store."""
    plain = np.fromfile(ids, store.manifest.token_type)
    return np.array_equal(plain, store.gather(np.array([0]), np.array([store.tokens])))


def say(what: str, figures: str) -> None:
    print(f"{what:14}{figures}", flush=True)


if __name__ == "__main__":
    main()
