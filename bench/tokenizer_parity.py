"""Is our tokenizer exact? Every line of a text through ours, the `tokenizers` library and transformers.

    python bench/tokenizer_parity.py --model bert-base-uncased/ --text corpus.txt

For each format found in the model folder (tokenizer.json, vocab.txt, vocab.json with merges.txt) it prints
how many lines differ in ids or offsets, and the seconds each took. Exit status 1 if any line differs.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer as Library

from bertsmith.text.tokenizer import Tokenizer

# The files of each format, and the class of transformers that reads them.
FORMATS = {
    ("tokenizer.json",): "PreTrainedTokenizerFast",
    ("vocab.txt",): "BertTokenizer",
    ("vocab.json", "merges.txt"): "RobertaTokenizer",
}
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
LINES_AT_ONCE = 10_000

Tokens = list[tuple[list[int], list[tuple[int, int]]]]  # ids and offsets of each line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder with tokenizer files")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text, compared line by line")
    arguments = parser.parse_args()
    found = [files for files in FORMATS if all((arguments.model / file).is_file() for file in files)]
    different = sum(compare(arguments.model, files, text=arguments.text) for files in found)
    sys.exit(1 if different or not found else 0)


def compare(model: Path, files: tuple[str, ...], *, text: Path) -> int:
    """Print the figures of one format; the number of lines that differ."""
    with tempfile.TemporaryDirectory() as name:
        folder = copy_of(model, [*files, *SETTINGS], into=Path(name))
        readers = make_readers(folder, FORMATS[files])
        seconds = dict.fromkeys(readers, 0.0)
        lines = tokens = different = 0
        for batch in batches(text):
            results = {who: timed(read, batch, seconds=seconds, who=who) for who, read in readers.items()}
            lines, tokens = lines + len(batch), tokens + sum(len(ids) for ids, _ in results["ours"])
            different += sum(not all_equal(line) for line in zip(*results.values(), strict=True))
    times = ", ".join(f"{who} {spent:.1f} s" for who, spent in seconds.items())
    print(
        f"{' + '.join(files)}: {lines:,} lines, {tokens:,} tokens, {different:,} lines differ; {times}",
        flush=True,
    )
    return different


def make_readers(folder: Path, class_name: str) -> dict[str, Callable[[list[str]], Tokens]]:
    """The three ways from lines to tokens, all of them with special tokens read out of the text."""
    ours = Tokenizer.load(folder)
    theirs = getattr(transformers, class_name).from_pretrained(folder)
    library = Library.from_str(theirs.backend_tokenizer.to_str())
    library.no_truncation()
    library.no_padding()
    special = tuple(ours.token(number) for number in ours.special_ids)

    def read_ours(lines: list[str]) -> Tokens:
        return [(line.ids, line.offsets) for line in ours.encode_many(lines, allow_special=special)]

    def read_library(lines: list[str]) -> Tokens:
        return [(line.ids, line.offsets) for line in library.encode_batch(lines)]

    def read_theirs(lines: list[str]) -> Tokens:
        read: Any = theirs(lines, return_offsets_mapping=True, verbose=False)
        return list(zip(read["input_ids"], read["offset_mapping"], strict=True))

    return {"ours": read_ours, "tokenizers": read_library, "transformers": read_theirs}


def timed(
    read: Callable[[list[str]], Tokens], batch: list[str], *, seconds: dict[str, float], who: str
) -> Tokens:
    """What the reader makes of the batch; its time is added to `seconds`."""
    started = time.perf_counter()
    tokens = read(batch)
    seconds[who] += time.perf_counter() - started
    return tokens


def batches(text: Path) -> Iterator[list[str]]:
    """The lines of the text, some thousands at a time."""
    with text.open(encoding="utf-8", errors="replace", newline="\n") as file:
        while batch := [line.rstrip("\n") for line in islice(file, LINES_AT_ONCE)]:
            yield batch


def all_equal(results: tuple[Any, ...]) -> bool:
    return all(result == results[0] for result in results[1:])


def copy_of(model: Path, files: list[str], *, into: Path) -> Path:
    for file in files:
        if (model / file).is_file():
            shutil.copy(model / file, into / file)
    return into


if __name__ == "__main__":
    main()
