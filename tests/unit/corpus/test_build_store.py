"""Building stores from text: the same bytes whoever works, and one clear line when it cannot be done."""

import json
import lzma
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bertsmith.core.errors import UserError
from bertsmith.core.processes import Workers
from bertsmith.corpus.build_store import CorpusReport, CorpusSettings, build_store
from bertsmith.corpus.clean import Cleaning
from bertsmith.corpus.token_store import TokenStore
from tests.tokenizer_makers import PARAGRAPH, uncased_wordpiece

ALONE = Workers(1)
WORDS = [word for word in PARAGRAPH.split() if word.isascii()]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uncased_wordpiece(tmp_path_factory.mktemp("vocabulary"))


def some_text(documents: int, *, seed: int = 0) -> str:
    """Documents of three lines, of which every tenth stands there twice."""
    draws = np.random.default_rng(seed)
    lines = [" ".join(draws.choice(WORDS, 12)) + "." for _ in range(3 * documents)]
    texts = ["\n".join(lines[start : start + 3]) for start in range(0, len(lines), 3)]
    return "\n\n".join(text for number, text in enumerate(texts) for _ in range(1 + (number % 10 == 9)))


def build(
    tmp_path: Path, vocabulary: Path, *, workers: Workers = ALONE, out: str = "store", **settings
) -> CorpusReport:
    sources = [str(tmp_path / "text*")]
    return build_store(
        sources, tmp_path / out, vocabulary=vocabulary, settings=CorpusSettings(**settings), workers=workers
    )


def content_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def several_sources(tmp_path: Path) -> None:
    """Plain and packed files, so that there are several blocks; the last repeats the first."""
    for number, seed in enumerate((1, 2, 3, 1)):
        text = some_text(30, seed=seed).encode()
        (tmp_path / f"text-{number}.txt").write_bytes(text)
        (tmp_path / f"text-{number}.txt.xz").write_bytes(lzma.compress(text[: len(text) // 2]))


def test_the_report_counts_what_the_store_holds(tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_text("The iron is hot. It was.\n\nThe 🜁 smith.\n", encoding="utf-8")
    report = build(tmp_path, vocabulary)
    store = TokenStore.open(tmp_path / "store")
    store.verify()
    assert (report.documents, report.sentences, report.tokens) == (2, 3, 14)
    assert (store.tokens, len(store.sentence_starts), len(store.document_starts)) == (14, 4, 3)
    assert report.tokens_per_word == 14 / 12
    assert report.unknown_rate == 1 / 14
    assert report.dropped == {}


def test_the_store_does_not_depend_on_the_number_of_workers(tmp_path, vocabulary) -> None:
    several_sources(tmp_path)
    for workers in (1, 3):
        build(tmp_path, vocabulary, workers=Workers(workers), out=f"store-{workers}", duplicates="near")
    alone, together = (content_of(tmp_path / f"store-{workers}") for workers in (1, 3))
    assert alone == together
    assert TokenStore.open(tmp_path / "store-1").manifest.summary["dropped"]["duplicate"] > 90


def test_the_store_does_not_depend_on_ray(tmp_path, vocabulary) -> None:
    pytest.importorskip("ray")
    several_sources(tmp_path)
    build(tmp_path, vocabulary, out="store-here", duplicates="exact")
    handler = signal.getsignal(signal.SIGTERM)
    build(tmp_path, vocabulary, workers=Workers(2, "ray"), out="store-ray", duplicates="exact")
    assert signal.getsignal(signal.SIGTERM) is handler
    assert content_of(tmp_path / "store-here") == content_of(tmp_path / "store-ray")


@pytest.mark.parametrize("kind", ["exact", "near"])
def test_of_equal_documents_the_first_is_kept(kind, tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_text(some_text(40), encoding="utf-8")
    report = build(tmp_path, vocabulary, duplicates=kind)
    assert (report.documents, report.dropped) == (40, {"duplicate": 4})
    (tmp_path / "text.txt").write_text(
        "\n\n".join(dict.fromkeys(some_text(40).split("\n\n"))), encoding="utf-8"
    )
    build(tmp_path, vocabulary, out="without")
    first, second = (TokenStore.open(tmp_path / name) for name in ("store", "without"))
    everything = np.array([0]), np.array([first.tokens])
    assert np.array_equal(first.gather(*everything), second.gather(*everything))


def test_what_is_excluded_is_reported_with_what_is_too_short(tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_text(some_text(20), encoding="utf-8")
    document = some_text(20).split("\n\n")[3].replace("\n", " ")
    (tmp_path / "task.txt").write_text(f"{document}\nThe iron.\n", encoding="utf-8")
    report = build(tmp_path, vocabulary, exclude=(tmp_path / "task.txt",))
    assert report.dropped == {f"contaminated: {tmp_path / 'task.txt'}": 1}
    assert report.task_files == {str(tmp_path / "task.txt"): {"texts": 1, "too_short": 1}}


def test_a_lexicon_puts_units_into_the_store(tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_text("The iron is hot.\n", encoding="utf-8")
    (tmp_path / "lexicon.txt").write_text("the iron\n", encoding="utf-8")
    build(tmp_path, vocabulary, lexicons=(tmp_path / "lexicon.txt",))
    store = TokenStore.open(tmp_path / "store")
    assert store.gather_units(np.array([0]), np.array([5])).tolist() == [4, 5, 0, 0, 0]


def test_marked_phrases_and_entities_are_counted_without_those_of_duplicates(tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_text(
        "The iron is hot. The iron was hot.\n\nThe iron is hot. The iron was hot.\n"
    )
    (tmp_path / "lexicon.txt").write_text("the iron\nis hot\tphrase\n", encoding="utf-8")
    report = build(tmp_path, vocabulary, lexicons=(tmp_path / "lexicon.txt",), duplicates="exact")
    assert report.marked == {"phrase": 1, "entity": 2}
    assert TokenStore.open(tmp_path / "store").manifest.summary["marked"] == report.marked
    assert build(tmp_path, vocabulary, out="without").marked == {}


def test_added_words_are_counted_without_known_ones(tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_text("The iron is hot.\n", encoding="utf-8")
    for name, words in (("a", "anvilry\n\nthe\n"), ("b", "tongs\nAnvilry\n")):
        (tmp_path / name).write_text(words, encoding="utf-8")
    report = build(tmp_path, vocabulary, add_words=(tmp_path / "a", tmp_path / "b"))
    assert report.added_words == 2
    assert build(tmp_path, vocabulary, out="without").added_words == 0


def test_the_manifest_states_settings_and_counts_and_no_path_of_this_machine(tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_text(some_text(20), encoding="utf-8")
    build(tmp_path, vocabulary, duplicates="exact", cleaning=Cleaning(minimum_characters=3), language="de")
    text = (tmp_path / "store" / "manifest.json").read_text()
    manifest = json.loads(text)
    assert manifest["settings"]["sources"] == ["text.txt"]
    assert manifest["settings"]["language"] == "de"
    assert manifest["settings"]["cleaning"]["minimum_characters"] == 3
    assert manifest["summary"]["dropped"] == {"duplicate": 2}
    assert str(tmp_path) not in text


def complaint(tmp_path: Path, vocabulary: Path, **settings) -> str:
    with pytest.raises(UserError) as caught:
        build(tmp_path, vocabulary, **settings)
    assert not (tmp_path / "store").exists()
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
    return str(caught.value)


def test_text_that_is_dropped_altogether_is_no_store(tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_text("Hot.\n\nIron.\n", encoding="utf-8")
    told = complaint(tmp_path, vocabulary, cleaning=Cleaning(minimum_characters=100))
    assert told.endswith("there is nothing to store; all documents were dropped: short 2")


def test_no_text_is_no_store(tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_text("\n\n", encoding="utf-8")
    assert complaint(tmp_path, vocabulary).endswith("there is nothing to store; the sources contain no text")


def test_a_mistake_in_the_text_is_reported_by_any_worker(tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_bytes(some_text(30).encode() + b"\nZ\xfcrich")
    alone, together = (complaint(tmp_path, vocabulary, workers=Workers(workers)) for workers in (1, 2))
    assert alone == together
    assert "text.txt:132: is not UTF-8 text" in alone


def test_a_wrong_language_is_reported_before_the_work(tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_text("Hot.", encoding="utf-8")
    assert "'English' is not a language code" in complaint(tmp_path, vocabulary, language="English")


def test_too_small_a_disk_is_reported_before_the_work(tmp_path, vocabulary, monkeypatch) -> None:
    (tmp_path / "text.txt").write_text(some_text(100), encoding="utf-8")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "are needed there and 0.000 GB are free; make room" in complaint(tmp_path, vocabulary)


def test_a_place_without_any_size_is_not_called_full(tmp_path, vocabulary, monkeypatch) -> None:
    (tmp_path / "text.txt").write_text(some_text(10), encoding="utf-8")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(total=0, free=0))  # as /proc says
    assert build(tmp_path, vocabulary).documents > 0


def test_a_disk_that_fills_up_is_one_clear_line(tmp_path, vocabulary) -> None:
    (tmp_path / "text.txt").write_text(some_text(2000), encoding="utf-8")
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from tests.unit.corpus.test_build_store import build\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"  # no file can grow any further
        f"build(Path({str(tmp_path)!r}), Path({str(vocabulary)!r}))\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.stderr.splitlines()[-1].endswith(
        "store: cannot be written (File too large); choose a writable place"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
