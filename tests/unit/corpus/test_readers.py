import gzip
import io
import json
import lzma
import pickle
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.corpus import readers
from bertsmith.corpus.documents import DOCUMENT_BYTES
from bertsmith.corpus.readers import documents_of, find_sources, read_blocks, size_on_disk


def read(*paths, **options) -> list[str]:
    return [document.text for document in documents(*paths, **options)]


def documents(*paths, **options):
    sources = find_sources([str(path) for path in paths])
    return [document for block in read_blocks(sources, **options) for document in documents_of(block)]


def complaint(*paths, **options) -> str:
    with pytest.raises(UserError) as caught:
        documents(*paths, **options)
    return caught.value.line()


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def reference_documents(text: str) -> list[str]:
    """Plain text, read the slow and plain way: line by line."""
    found, lines = [], []
    for line in [*text.replace("\r\n", "\n").split("\n"), ""]:
        if line.strip():
            lines.append(line.strip())
        elif lines:
            found.append("\n".join(lines))
            lines = []
    return found


# Which files


def test_a_folder_gives_its_text_files_in_order_and_no_hidden_ones(tmp_path):
    for name in [
        "b.txt",
        "a.jsonl.gz",
        "deep/AA/wiki_00",
        "deep/c.parquet",
        ".hidden.txt",
        ".git/x.txt",
        "x.png",
    ]:
        written(tmp_path / name, "")
    found = [str(path.relative_to(tmp_path)) for path in find_sources([str(tmp_path)])]
    assert found == ["a.jsonl.gz", "b.txt", "deep/AA/wiki_00", "deep/c.parquet"]


def test_arguments_keep_their_order_and_patterns_are_sorted(tmp_path):
    for name in ["b.txt", "a.txt", "c.dat"]:
        written(tmp_path / name, "")
    found = find_sources([str(tmp_path / "c.dat"), str(tmp_path / "*.txt"), "-"])
    assert [path.name for path in found] == ["c.dat", "a.txt", "b.txt", "-"]


def test_a_pattern_across_folders_gives_each_file_once(tmp_path):
    files = [written(tmp_path / "deep" / "a.txt", ""), written(tmp_path / "deep" / "er" / "b.txt", "")]
    assert find_sources([str(tmp_path / "**")]) == files


def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path):
    path = written(tmp_path / "a[1].txt", "Text.")
    assert find_sources([str(path)]) == [path]


@pytest.mark.parametrize("name", ["missing.txt", "*.none", "empty"])
def test_what_names_no_text_is_rejected(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="name the files themselves"):
        find_sources([str(tmp_path / name)])


def test_no_path_at_all_is_rejected():
    with pytest.raises(UserError, match="missing input texts"):
        find_sources([])


# Plain text


def test_an_empty_line_parts_documents_and_where_they_stand_is_reported(tmp_path):
    path = written(tmp_path / "a.txt", "\nOne.\n  Two. \n \t\n\nThree.")
    assert [(document.text, document.where) for document in documents(path)] == [
        ("One.\nTwo.", f"{path}:2"),
        ("Three.", f"{path}:6"),
    ]


def test_an_empty_file_has_no_documents(tmp_path):
    assert read(written(tmp_path / "a.txt", "")) == []
    assert read(written(tmp_path / "a.txt.gz", gzip.compress(b""))) == []


@pytest.mark.parametrize("line_end", ["\r\n", "\r\r\n", "\r"])
def test_line_ends_of_other_systems_are_line_ends(tmp_path, line_end):
    ends = line_end.join(["One.", "Two.", "", "Three."])
    assert read(written(tmp_path / "a.txt", ends)) == ["One.\nTwo.", "Three."]


def test_the_mark_of_an_editor_and_nul_are_skipped(tmp_path):
    assert read(written(tmp_path / "a.txt", "\ufeffO\0ne.\n\0\nTwo.")) == ["One.", "Two."]


def test_invalid_utf8_is_rejected_with_its_line_and_byte(tmp_path):
    content = b"\xef\xbb\xbfFine.\n\nsch\xf6n\n"
    path = written(tmp_path / "a.txt", content)
    assert complaint(path).startswith(f"{path}:3: is not UTF-8 text (byte {content.index(0xF6)}); convert it")
    assert "`encoding_errors=replace`" in complaint(path)


def test_invalid_utf8_in_a_later_block_is_rejected_with_its_line_in_the_file(tmp_path):
    path = written(tmp_path / "a.txt", b"A line of text.\n\n" * 50 + b"\xff\n")
    assert complaint(path, block_bytes=64).startswith(f"{path}:101: is not UTF-8 text (byte 850)")


def test_invalid_utf8_is_replaced_if_asked(tmp_path):
    assert read(written(tmp_path / "a.txt", b"sch\xf6n"), errors="replace") == ["sch\ufffdn"]


def test_files_of_other_kinds_are_distinguished(tmp_path):
    assert "is UTF-16 text; convert it" in complaint(written(tmp_path / "a.txt", "Text".encode("utf-16")))
    assert "use `format=parquet`" in complaint(written(tmp_path / "b.txt", b"PAR1..."))
    twice = written(tmp_path / "c.txt.gz", gzip.compress(lzma.compress(b"Text")))
    assert "is compressed inside; unpack it first" in complaint(twice)


def test_standard_input_is_read(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"One.\n\nTwo.")))
    assert [(found.text, found.where) for found in documents("-")] == [
        ("One.", "standard input:1"),
        ("Two.", "standard input:3"),
    ]


def test_parquet_on_standard_input_is_rejected():
    assert complaint("-", format="parquet").endswith("unpack it into a file first")


# Blocks


TEXTS = st.text(st.sampled_from("ab é\n\n\n\t\r\u3000"), max_size=300)


@given(text=TEXTS, block_bytes=st.integers(1, 80))
def test_blocks_of_any_size_hold_the_documents_of_the_whole_text(tmp_path_factory, text, block_bytes):
    text = text.replace("\r", "\r\n")
    path = written(tmp_path_factory.getbasetemp() / "blocks.txt", text)
    assert read(path, block_bytes=block_bytes) == reference_documents(text)


@given(text=TEXTS, block_bytes=st.integers(1, 80))
def test_blocks_together_are_the_file(tmp_path_factory, text, block_bytes):
    path = written(tmp_path_factory.getbasetemp() / "blocks.txt", text)
    blocks = list(read_blocks([path], block_bytes=block_bytes))
    assert b"".join(block.content for block in blocks) == text.encode()
    assert sum(block.file_bytes for block in blocks) == size_on_disk([path])


def test_blocks_are_about_as_large_as_asked_and_can_be_sent_to_a_worker(tmp_path):
    path = written(tmp_path / "a.txt", "A sentence of a text.\n\n" * 5000)
    blocks = list(read_blocks([path], block_bytes=10_000))
    assert all(10_000 <= len(block.content) < 10_100 for block in blocks[:-1])
    assert [*documents_of(pickle.loads(pickle.dumps(blocks[3])))] == [*documents_of(blocks[3])]


def test_a_packed_file_gives_the_blocks_of_the_plain_one(tmp_path):
    text = ("A sentence of a text.\n\n" * 5000).encode()
    plain = read_blocks([written(tmp_path / "a.txt", text)], block_bytes=1000)
    packed = read_blocks([written(tmp_path / "a.txt.xz", lzma.compress(text))], block_bytes=1000)
    assert [block.content for block in plain] == [block.content for block in packed]


# Documents without end


def test_a_document_longer_than_the_limit_is_cut_at_line_ends(tmp_path):
    lines = [f"Line {number} of a long book." for number in range(2 * DOCUMENT_BYTES // 20)]
    path = written(tmp_path / "a.txt", "Short.\n\n" + "\n".join(lines) + "\n\nLast.")
    first, *pieces, last = read(path)
    assert (first, last) == ("Short.", "Last.")
    assert "\n".join(pieces).split("\n") == lines
    assert len(pieces) > 1
    assert all(DOCUMENT_BYTES - 100 < len(piece) <= DOCUMENT_BYTES for piece in pieces[:-1])


def test_a_line_longer_than_the_limit_is_cut_at_spaces(tmp_path):
    words = ["word"] * (DOCUMENT_BYTES // 4)
    pieces = read(written(tmp_path / "a.txt", " ".join(words)))
    assert " ".join(pieces).split(" ") == words
    assert max(map(len, pieces)) <= DOCUMENT_BYTES


def test_text_without_any_space_is_cut_between_characters(tmp_path):
    text = "語" * (DOCUMENT_BYTES // 2)
    pieces = read(written(tmp_path / "a.txt", text))
    assert "".join(pieces) == text
    assert len(pieces) == 2


def test_memory_stays_flat_in_a_text_without_a_single_line_end(tmp_path):
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        for _ in range(48):
            file.write(b"word " * (1 << 18))
    tracemalloc.start()
    try:
        size = sum(len(document.text) for block in read_blocks([path]) for document in documents_of(block))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 0.99 * path.stat().st_size
    assert peak < 40 << 20


# JSON lines


def test_json_lines_give_a_document_each(tmp_path):
    rows = [{"text": "One.\n\nMore."}, {"text": ""}, {"text": None}, {"text": "Two.", "id": 1}]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert [(found.text, found.where) for found in documents(path)] == [
        ("One.\nMore.", f"{path}:1"),
        ("Two.", f"{path}:4"),
    ]


@pytest.mark.parametrize("name", ["wiki_00", "records", "a.txt"])
def test_json_lines_are_known_by_how_they_begin(tmp_path, name):
    path = written(tmp_path / name, '\n {"id": "1", "text": "One."}\n{"text": "Two."}\n')
    assert read(path) == ["One.", "Two."]
    assert len(read(path, format="text")) == 1


def test_json_lines_on_standard_input_are_known(monkeypatch):
    content = b'{"text": "One."}\n\n{"text": "Two."}'
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert [found.text for found in documents("-")] == ["One.", "Two."]


def test_a_first_json_line_longer_than_a_block_is_known(tmp_path):
    text = "word " * 1000
    path = written(tmp_path / "records", json.dumps({"text": text}))
    assert read(path, block_bytes=64) == [text.strip()]


@pytest.mark.parametrize("text", ["{braces} are prose.", '{"So" he said.', "[1, 2]", '"Well:"'])
def test_prose_that_begins_a_little_like_json_is_prose(tmp_path, text):
    assert read(written(tmp_path / "a", text)) == [text]


def test_what_only_begins_as_json_lines_is_not_read_as_prose(tmp_path):
    path = written(tmp_path / "a.txt", '{\n  "text": "Spread over lines."\n}\n')
    assert complaint(path).endswith(
        'write one object per line: {"text": "..."}, or use `format=text` if it is prose'
    )


def test_another_field_can_hold_the_text(tmp_path):
    path = written(tmp_path / "a.json.gz", gzip.compress(b'{"body": "Text."}'))
    assert read(path, field="body") == ["Text."]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"text": ', "is not valid JSON"),
        ('["text"]', "is not a JSON object"),
        ('{"body": "x", "id": 1}', "lacks the field 'text'; choose one of its fields with `text`: body, id"),
        ('{"text": 3}', "field 'text' is not text"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"text": "\\ud83d"}', "character 0 is a lone surrogate ('\\ud83d'); use `encoding_errors=replace`"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, what):
    path = written(tmp_path / "a.jsonl", '{"text": "Fine."}\n' + line)
    assert complaint(path, block_bytes=8).startswith(f"{path}:2: {what}")


def test_half_a_character_in_json_is_replaced_if_asked(tmp_path):
    path = written(tmp_path / "a.jsonl", r'{"text": "a\ud83db \ud83d\ude00"}')
    assert read(path, errors="replace") == ["a\ufffdb \U0001f600"]


def test_a_long_text_in_json_is_cut_too(tmp_path):
    text = "\n".join(["A line of a book."] * (DOCUMENT_BYTES // 10))
    assert "\n".join(read(written(tmp_path / "a.jsonl", json.dumps({"text": text})))) == text


def test_a_json_line_without_end_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "RECORD_BYTES", 1 << 20)
    path = written(tmp_path / "a.jsonl", "{" + " " * (4 << 20))
    assert complaint(path).startswith(f"{path}: has a record longer than 1 MiB")


# Parquet


def parquet(path: Path, **columns) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=100)
    return path


def test_parquet_rows_are_documents(tmp_path):
    path = parquet(tmp_path / "a.parquet", text=["One.\n\nMore.", None, "", "Zwei ö."], id=[1, 2, 3, 4])
    assert [(found.text, found.where) for found in documents(path)] == [
        ("One.\nMore.", f"{path}:1"),
        ("Zwei ö.", f"{path}:4"),
    ]


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_any_kind_of_text_column_is_read_in_blocks(tmp_path, kind):
    texts = [f"Text {number}." for number in range(1000)]
    column = pyarrow.array(texts)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
    path = parquet(tmp_path / "a.pq", body=column)
    blocks = list(read_blocks([path], format="auto", field="body", block_bytes=1000))
    assert len(blocks) > 2
    assert [document.text for block in blocks for document in documents_of(block)] == texts
    assert abs(sum(block.file_bytes for block in blocks) - path.stat().st_size) <= len(blocks)


def test_a_column_that_is_missing_or_no_text_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", body=["x"], id=[1])
    assert complaint(path).endswith(
        "lacks the column 'text'; choose one of its columns with `text`: body, id"
    )
    assert "column 'id' is not text" in complaint(path, field="id")


def test_a_broken_parquet_file_is_named(tmp_path):
    whole = parquet(tmp_path / "a.parquet", text=["One."]).read_bytes()
    for broken in (whole[:-20], b"junk", b""):
        assert "b.parquet: is not a whole Parquet file" in complaint(written(tmp_path / "b.parquet", broken))


def test_pyarrow_that_is_not_installed_is_asked_for(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", text=["One."])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert complaint(path).endswith("pip install 'bertsmith[data]'")


# Wikipedia


WIKI = """<doc id="1" url="https://x.org/?curid=1" title="Salt &amp; &quot;Pepper&quot;">
Salt &amp; "Pepper"

Salt &lt; pepper.

More.

</doc>
<doc id="2" url="u" title="Empty">
Empty

</doc>
<doc id="3" url="u" title="Third">
It starts without its title.
Third
</doc>
"""


@pytest.mark.parametrize("block_bytes", [1, 150, 1 << 20])
def test_pages_of_wikiextractor_are_documents_without_titles(tmp_path, block_bytes):
    path = written(tmp_path / "wiki_00", WIKI)
    assert [(found.text, found.where) for found in documents(path, block_bytes=block_bytes)] == [
        ("Salt < pepper.\nMore.", f"{path}:1"),
        ("It starts without its title.\nThird", f"{path}:13"),
    ]


def test_a_page_that_was_cut_off_is_still_a_document(tmp_path):
    assert read(written(tmp_path / "a.txt", '<doc title="A">\nA\n\nText.')) == ["Text."]


def test_text_outside_of_pages_is_named(tmp_path):
    path = written(tmp_path / "a.txt", "Just text.")
    assert complaint(path, format="wiki").startswith(f"{path}:1: is outside <doc ...> and </doc>")


def test_a_text_that_mentions_doc_can_be_read_as_text(tmp_path):
    assert read(written(tmp_path / "a.txt", "<doc is a tag."), format="text") == ["<doc is a tag."]
