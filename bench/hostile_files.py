"""Files made to take a command down: what reading each of them costs, and how the command ends.

    python bench/hostile_files.py                    # a table; exit status 1 where a file did harm
    python bench/hostile_files.py --src ../old/src   # the commands of another checkout
    python bench/hostile_files.py --only fifo cell   # some of them

Each file is given to the command that a user would give it to, in a process that may take at most 8 GB and a
minute. Held: exit status 2 (0 if the file is only tedious), one line of error of about 2,000 characters at
most, no traceback, and memory beside that of an ordinary start below twice the size of the model or of the
reader's window (100 MB).
"""

import argparse
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import zstandard

from bertsmith.inference.embedded_models import default_model
from bertsmith.interchange.bundle import crc32c, masked

MAX_SECONDS, MAX_MEMORY, MAX_LINE, MAX_GROWTH = 60.0, 8 << 30, 2200, 100.0
FILL = ("fill", "the [MASK] of France", "--device", "cpu", "--model")
OWN = ("--text", "text", "--label", "label", "--out")
Words = tuple[str | Path, ...]


def model_with(folder: Path, **tokenizer: Any) -> Path:
    """A copy of the small own model, with something else in its tokenizer.json."""
    shutil.copytree(default_model(), folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **tokenizer}))
    return folder


def huge_id(place: Path) -> Words:
    """A vocabulary with the id 4,294,967,295."""
    folder = model_with(place / "model")
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["model"]["vocab"]["zzzz"] = 2**32 - 1
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return (*FILL, folder)


def replacing(place: Path) -> Words:
    """Ten normalizers that each make ten letters of one."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    return (*FILL, model_with(place / "model", normalizer={"type": "Sequence", "normalizers": [step] * 10}))


def expression(place: Path) -> Words:
    """A regular expression that reads a text in exponentially many ways."""
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a|aa)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    folder = model_with(place / "model", pre_tokenizer=split)
    return ("fill", f"{'a' * 60}b [MASK]", "--device", "cpu", "--model", folder)


def template(place: Path) -> Words:
    """A template whose segment no model has."""
    whole = json.loads((default_model() / "tokenizer.json").read_text())["post_processor"]
    whole["single"][0]["SpecialToken"]["type_id"] = 70_000
    return (*FILL, model_with(place / "model", post_processor=whole))


def missing_token(place: Path) -> Words:
    """A template with a special token that it does not define."""
    whole = json.loads((default_model() / "tokenizer.json").read_text())["post_processor"]
    whole["special_tokens"] = {}
    return (*FILL, model_with(place / "model", post_processor=whole))


def stride_0(place: Path) -> Words:
    """Weights of one number that claim to be eight billion."""
    folder = model_with(place / "model")
    (folder / "model.safetensors").unlink()
    weights = {"bert.embeddings.word_embeddings.weight": torch.zeros(1).expand(2**25, 256)}
    torch.save(weights, folder / "pytorch_model.bin")
    return (*FILL, folder)


def deflated(place: Path) -> Words:
    """A few hundred kilobytes of weights that unpack to 256 MB."""
    folder = model_with(place / "model")
    (folder / "model.safetensors").unlink()
    name = "bert.embeddings.word_embeddings.weight"
    torch.save({name: torch.zeros(1 << 26)}, place / "plain.bin")
    with (
        zipfile.ZipFile(place / "plain.bin") as plain,
        zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for each in plain.namelist():
            packed.writestr(each, plain.read(each))
    (place / "plain.bin").unlink()
    return (*FILL, folder)


def fifo(place: Path) -> Words:
    """A config.json that is a pipe to which nobody writes."""
    folder = model_with(place / "model")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    return (*FILL, folder)


def long_value(place: Path) -> Words:
    """A config with a value of a megabyte."""
    folder = model_with(place / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "x" * 1_000_000}))
    return (*FILL, folder)


def named_again(place: Path) -> Words:
    """A TensorFlow index that names one block without records 60,000 times."""

    def varint(value: int) -> bytes:
        groups = b""
        while value > 0x7F:
            groups, value = groups + bytes([value & 0x7F | 0x80]), value >> 7
        return groups + bytes([value])

    def stored(content: bytes) -> bytes:
        return content + b"\0" + struct.pack("<I", masked(crc32c(content + b"\0")))

    table = stored(bytes(4 * 200_000) + struct.pack("<I", 200_000))
    handle = varint(0) + varint(len(table) - 5)
    names = (f"{number:06}".encode() for number in range(60_000))
    records = b"".join(b"\0\6" + varint(len(handle)) + name + handle for name in names)
    footer = b""
    for content in (bytes(4) + b"\1\0\0\0", records + bytes(4) + b"\1\0\0\0"):
        footer += varint(len(table)) + varint(len(stored(content)) - 5)
        table += stored(content)
    table += footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)
    (place / "x.ckpt.index").write_bytes(table)
    (place / "x.ckpt.data-00000-of-00001").write_bytes(b"")
    (place / "bert_config.json").write_text((default_model() / "config.json").read_text())
    shutil.copy(default_model() / "vocab.txt", place)
    return ("import-tf", place, "--out", place / "out")


def packed_line(place: Path) -> Words:
    """16 KB of Zstandard that are one line of half a gigabyte."""
    writer = zstandard.ZstdCompressor(level=19).compressobj()
    with (place / "table.csv.zst").open("wb") as file:
        file.write(writer.compress(b"text,label\n"))
        for _ in range(512):
            file.write(writer.compress(b"a" * 2**20))
        file.write(writer.flush())
    return ("finetune", "custom", "--data", place / "table.csv.zst", *OWN, place / "run")


def cell(place: Path) -> Words:
    """A cell of 50 MB."""
    (place / "table.csv").write_text(f'text,label\n"{"a b " * (50 << 18)}",x\n')
    return ("finetune", "custom", "--data", place / "table.csv", *OWN, place / "run")


def columns(place: Path) -> Words:
    """A million columns, none of them the one that is asked for."""
    (place / "table.csv").write_text(",".join(f"c{number}" for number in range(1_000_000)) + "\n")
    return ("finetune", "custom", "--data", place / "table.csv", *OWN, place / "run")


def labels(place: Path) -> Words:
    """Labels of a megabyte, and such that a terminal obeys."""
    rows = [f"text {number},{'x' * 1_000_000}" for number in range(4)] + ["other,\x1b[2J"] * 4
    (place / "table.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return ("finetune", "custom", "--data", place / "table.csv", *OWN, place / "run")


def infinite(place: Path) -> Words:
    """Numbers to learn whose spread is beyond any float."""
    rows = [f"text {number},{'-' * (number % 2)}1e308" for number in range(64)]
    (place / "table.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    words = ("finetune", "custom", "--kind", "regress", "--epochs", "1", "--set", "run.device=cpu")
    return (*words, "--data", place / "table.csv", *OWN, place / "run")


def titles(place: Path) -> Words:
    """A page of Wikipedia whose tag begins 60,000 titles and ends none."""
    (place / "wiki_00").write_text("<doc " + 'title="' * 60_000 + "x>\na\n</doc>\n")
    return corpus_of(place, place / "wiki_00", "--format", "wiki")


def returns(place: Path) -> Words:
    """A text of carriage returns."""
    (place / "text.txt").write_text("a" + "\r" * 400_000 + "b")
    return corpus_of(place, place / "text.txt")


def open_quotes(place: Path) -> Words:
    """A line of quotes that are never closed."""
    (place / "text.txt").write_text("\u201ca. B" * 80_000)
    return corpus_of(place, place / "text.txt")


def word_and_spaces(place: Path) -> Words:
    """A text to leave out that looks like a word with a tag behind 60,000 spaces."""
    (place / "task.txt").write_text("x" + " " * 60_000 + "y")
    return corpus_of(place, text_of(place), "--exclude", place / "task.txt")


def endless_mention(place: Path) -> Words:
    """A mention whose name has 400,000 letters and is never closed."""
    (place / "mentions.conll").write_text("a 0 0 b NN - " + "a" * 400_000 + "\n")
    words = ("look", "coref", "--data", place / "mentions.conll", "--device", "cpu", "--out", place / "out")
    return (*words, "--model", default_model())


def array_header(place: Path) -> Words:
    """A store with a bracket in the header of an array that no Python value has."""
    run(corpus_of(place, text_of(place)), None)
    file = place / "out" / "sentence_starts.npy"
    file.write_bytes(file.read_bytes().replace(b"}", b"("))
    return ("pretrain", "bert-tiny", "--store", place / "out", "--out", place / "run")


def parquet_bytes(place: Path) -> Words:
    """A Parquet table with bytes that are no UTF-8."""
    table = pyarrow.table({"text": ["some words"] * 64, "label": ["x", "y"] * 32})
    pyarrow.parquet.write_table(table, place / "table.parquet", compression="none", use_dictionary=False)
    file = place / "table.parquet"
    file.write_bytes(file.read_bytes().replace(b"some words", b"some\xffwords"))
    return ("finetune", "custom", "--data", file, *OWN, place / "run")


def nobody(place: Path) -> Words:
    """A model in the home of a user who does not exist."""
    del place  # it needs no file
    return (*FILL, "~nosuchuser/x")


def odd_name(place: Path) -> Words:
    """A folder to write whose name is not UTF-8."""
    return corpus_of(place / os.fsdecode(b"caf\xe9"), text_of(place))


def text_of(place: Path) -> Path:
    (place / "text.txt").write_text("A text of some words. And another one.\n\n" * 99)
    return place / "text.txt"


def corpus_of(place: Path, text: Path, *options: str | Path) -> Words:
    return ("corpus", text, "--vocab", default_model(), "--out", place / "out", *options)


ATTACKS: dict[str, Callable[[Path], Words]] = {
    attack.__name__: attack
    for attack in (
        *(huge_id, replacing, expression, template, missing_token, stride_0, deflated, fifo, long_value),
        *(named_again, packed_line, cell, columns, labels, infinite),
        *(titles, returns, open_quotes, word_and_spaces, endless_mention),
        *(array_header, parquet_bytes, nobody, odd_name),
    )
}


TEDIOUS = ("titles", "returns", "open_quotes", "word_and_spaces")
"""Files that can be read."""


@dataclass(frozen=True)
class Ending:
    """What a command took, and how it ended."""

    code: int | None
    """None where it had to be killed."""
    seconds: float
    cpu_seconds: float
    megabytes: float
    error: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--src", type=Path, help="of the checkout whose commands are run; else this one's")
    parser.add_argument("--only", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    options = parser.parse_args()
    usual = run(("fill", "the [MASK] of France", "--device", "cpu", "--model", default_model()), options.src)
    print(f"an ordinary command: {usual.cpu_seconds:.1f} s of CPU, {usual.megabytes:.0f} MB", flush=True)
    print(
        "| file | seconds (CPU) | MB beside an ordinary start | exit | error, bytes | held | its beginning |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    all_held = True
    for name in options.only:
        with tempfile.TemporaryDirectory() as place:
            found = run(ATTACKS[name](Path(place)), options.src)
            written = (Path(place) / "run" / "model").exists()
        grown = found.megabytes - usual.megabytes
        held = (
            found.code == (0 if name in TEDIOUS else 2)
            and found.error.count("\n") <= 1
            and len(found.error) < MAX_LINE
        )
        held &= grown < MAX_GROWTH and not written and "Traceback" not in found.error
        all_held &= held
        taken = f"{found.seconds:.1f} ({found.cpu_seconds:.1f})"
        beginning = " ".join(found.error.replace("|", "/").split())[-110:]
        ended = "killed" if found.code is None else str(found.code)
        verdict = "yes" if held else "NO"
        print(
            f"| {name} | {taken} | {grown:.0f} | {ended} | {len(found.error)} | {verdict} | {beginning} |",
            flush=True,
        )
    sys.exit(0 if all_held else 1)


def run(words: Words, src: Path | None) -> Ending:
    """Run a command of bertsmith, and see what it takes."""
    environment = dict(os.environ) if src is None else {**os.environ, "PYTHONPATH": str(src.resolve())}

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))

    with tempfile.TemporaryFile() as errors:
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "bertsmith", *map(str, words)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            preexec_fn=bounded,
        )
        killed, most = False, 0.0
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            most = max(most, peak(process.pid))
            if time.monotonic() - begin > MAX_SECONDS and not killed:
                killed = True
                with suppress(ProcessLookupError):
                    os.kill(process.pid, 9)
            time.sleep(0.02)
        seconds, (_, status, used) = time.monotonic() - begin, ended
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        error = errors.read().decode(errors="replace")
    code = None if killed else process.returncode
    return Ending(code, seconds, used.ru_utime + used.ru_stime, most, error)


def peak(process: int) -> float:
    """The most megabytes that a process has had in memory so far; what wait4 tells counts its parent's in."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    return 0.0


if __name__ == "__main__":
    main()
