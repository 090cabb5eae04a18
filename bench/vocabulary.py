"""Is our vocabulary as good as that of the `tokenizers` trainer, as fast, and always the same?

    python bench/vocabulary.py --data corpus/ --size 30522 --parts 0 1 2

Learns from corpus/part-{0,1,2}.txt.xz with one and with two workers, compares the files byte by byte, and
does the same with the trainer of `tokenizers` on the same documents. For each it prints minutes, peak memory,
and tokens per word and unknown words on the documents held out. Each runs in a process of its own. Exit
status 1 if the files differ or ours takes over 2 % more tokens.
"""

import argparse
import filecmp
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from bertsmith.cli.vocab import texts_of
from bertsmith.corpus.readers import read_blocks
from bertsmith.text.learn_vocabulary import VocabularySettings, learn_vocabulary
from bertsmith.text.tokenizer_files import bert_normalizer
from bertsmith.text.word_counts import Counting, count_words, held_out_of

HELD_OUT = 0.01
ALLOWED_RATIO = 1.02
KINDS = ("wordpiece", "wordpiece-frequency", "byte-bpe")
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]

Learner = Callable[[list[Path], VocabularySettings, Path], None]


@dataclass(frozen=True)
class Result:
    """What a learner took and what its vocabulary does on held-out text."""

    seconds: float
    megabytes: float
    pieces: int
    tokens_per_word: float
    unknown_rate: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of part-N.txt.xz")
    parser.add_argument("--size", type=int, default=30522)
    parser.add_argument("--kind", choices=KINDS, default="wordpiece")
    parser.add_argument("--parts", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    sources = [arguments.data / f"part-{part}.txt.xz" for part in arguments.parts]
    settings = VocabularySettings(arguments.size, arguments.kind)
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, name) for name in ("one", "two", "theirs")]
        learners: list[Learner] = [
            partial(learn_ours, workers=1),
            partial(learn_ours, workers=2),
            learn_theirs,
        ]
        names = ("ours, 1 worker", "ours, 2 workers", "tokenizers")
        results = [
            measure(name, learner, sources=sources, settings=settings, folder=folder)
            for name, learner, folder in zip(names, learners, folders, strict=True)
        ]
        same = same_files(folders[0], folders[1])
    ratio = results[0].tokens_per_word / results[2].tokens_per_word
    print(f"files of 1 and 2 workers: {'the same' if same else 'DIFFERENT'}")
    print(f"tokens per word, ours / theirs: {ratio:.4f} (at most {ALLOWED_RATIO})")
    sys.exit(0 if same and ratio <= ALLOWED_RATIO else 1)


def measure(
    name: str, learner: Learner, *, sources: list[Path], settings: VocabularySettings, folder: Path
) -> Result:
    """Run a learner in a process of its own, and print and return its figures."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        seconds, megabytes = pool.submit(run, learner, sources, settings, folder).result()
        pieces, tokens, unknown = pool.submit(score, sources, settings, folder).result()
    result = Result(seconds, megabytes, pieces, tokens, unknown)
    print(
        f"{name:16} {result.seconds / 60:5.2f} min  {result.megabytes:6,.0f} MB  {result.pieces:,} pieces  "
        f"{result.tokens_per_word:.4f} tokens a word  {result.unknown_rate:.4%} unknown",
        flush=True,
    )
    return result


def run(
    learner: Learner, sources: list[Path], settings: VocabularySettings, folder: Path
) -> tuple[float, float]:
    """Seconds, and the peak memory in MB of this process and its largest child."""
    started = time.perf_counter()
    learner(sources, settings, folder)
    seconds = time.perf_counter() - started
    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return seconds, sum(usage) / 1000


def learn_ours(sources: list[Path], settings: VocabularySettings, folder: Path, *, workers: int) -> None:
    counting = Counting(texts_of, settings.cutter(), held_out=HELD_OUT)
    counts = count_words(read_blocks(sources), counting, workers=workers)
    learn_vocabulary(counts, settings).tokenizer.save(folder)


def learn_theirs(sources: list[Path], settings: VocabularySettings, folder: Path) -> None:
    """The library's trainer on the same documents, line by line."""
    common = {"vocab_size": settings.size, "min_frequency": settings.min_count, "show_progress": False}
    trainer: trainers.Trainer
    if settings.kind == "byte-bpe":
        library = Library(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(special_tokens=ROBERTA_SPECIAL, initial_alphabet=alphabet, **common)
    else:
        library = Library(models.WordPiece(unk_token="[UNK]"))
        library.normalizer = bert_normalizer(settings.case)
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(
            special_tokens=BERT_SPECIAL, limit_alphabet=settings.characters, **common
        )
    library.train_from_iterator(lines_of(sources, held_out=False), trainer)
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))


def score(sources: list[Path], settings: VocabularySettings, folder: Path) -> tuple[int, float, float]:
    """Pieces, and tokens per word and share of unknown words on the held-out documents."""
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    cutter = settings.cutter()
    words = tokens = unknown = 0
    for line in lines_of(sources, held_out=True):
        words += sum(len(cutter.words(chunk)) for chunk in cutter.chunks(line))
        pieces = library.encode(line, add_special_tokens=False).tokens
        tokens, unknown = tokens + len(pieces), unknown + pieces.count("[UNK]")
    return library.get_vocab_size(), tokens / words, unknown / words


def lines_of(sources: list[Path], *, held_out: bool) -> Iterator[str]:
    """The lines of the documents that are held out, or of all the others."""
    for number, block in enumerate(read_blocks(sources)):
        texts = list(texts_of(block))
        for text, is_apart in zip(texts, held_out_of(number, len(texts), fraction=HELD_OUT), strict=True):
            if is_apart == held_out:
                yield from text.split("\n")


def same_files(first: Path, second: Path) -> bool:
    """Whether two folders hold the same files, byte for byte."""
    names = sorted(file.name for file in first.iterdir())
    if names != sorted(file.name for file in second.iterdir()):
        return False
    return all(filecmp.cmp(first / name, second / name, shallow=False) for name in names)


if __name__ == "__main__":
    main()
