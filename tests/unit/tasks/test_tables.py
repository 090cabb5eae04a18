"""Tables in every format people have, and what is said of lines that cannot be taken."""

import csv
import gzip
import io
import json
import lzma
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.tasks.example_types import BadLine
from bertsmith.tasks.table_format import TableFormat
from bertsmith.tasks.tables import ANY_COLUMNS, Columns, Row, rows_of


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def values(path: Path, columns: Columns = ANY_COLUMNS) -> list[dict[str, object]]:
    return [dict(row.values) for row in rows_of(path, columns) if isinstance(row, Row)]


def bad_lines(path: Path, columns: Columns = ANY_COLUMNS) -> list[BadLine]:
    return [row for row in rows_of(path, columns) if isinstance(row, BadLine)]


def test_quotes_in_tsv_are_characters(tmp_path) -> None:
    path = written(tmp_path, "a.tsv", 'a\tb\n"He said\tno"\n')
    assert values(path) == [{"a": '"He said', "b": 'no"'}]


def test_quotes_in_csv_hold_commas_quotes_and_line_ends(tmp_path) -> None:
    path = written(tmp_path, "a.csv", 'a,b\r\n"x, ""y""\nz",1\r\n')
    assert values(path) == [{"a": 'x, "y"\nz', "b": "1"}]


def test_a_row_of_csv_stands_where_it_begins(tmp_path) -> None:
    path = written(tmp_path, "a.csv", 'a,b\n"x\ny\nz",1\nw,2\n')
    assert [row.where for row in rows_of(path)] == [f"{path}:2", f"{path}:5"]


def test_json_lines_keep_their_types(tmp_path) -> None:
    path = written(tmp_path, "a.jsonl", '{"a": [1, 2], "b": null}\n\n{"a": "x", "b": 2.5}\n')
    assert values(path) == [{"a": [1, 2], "b": None}, {"a": "x", "b": 2.5}]


def test_parquet_is_read_row_by_row(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x", "y"], "b": [1, 2]}), path)
    assert list(rows_of(path)) == [
        Row({"a": "x", "b": 1}, f"{path}:1"),
        Row({"a": "y", "b": 2}, f"{path}:2"),
    ]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_packed_tables_are_unpacked(tmp_path, suffix, pack) -> None:
    path = written(tmp_path, f"a.csv{suffix}", pack(b'a,b\n"x,y",1\n'))
    assert values(path) == [{"a": "x,y", "b": "1"}]


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl"])
def test_a_mark_at_the_start_is_no_part_of_the_first_name(tmp_path, name) -> None:
    content = {"a.tsv": "a\tb\nx\t1\n", "a.csv": "a,b\nx,1\n", "a.jsonl": '{"a": "x", "b": "1"}\n'}[name]
    assert values(written(tmp_path, name, "\ufeff" + content)) == [{"a": "x", "b": "1"}]


def test_windows_line_ends_are_no_part_of_the_last_cell(tmp_path) -> None:
    assert values(written(tmp_path, "a.tsv", "a\tb\r\nx\t1\r\n")) == [{"a": "x", "b": "1"}]


def test_line_separators_of_unicode_do_not_end_a_line(tmp_path) -> None:
    path = written(tmp_path, "a.tsv", "a\tb\nx\u2028y\x85\x0c\t1\n")
    assert values(path) == [{"a": "x\u2028y\x85\x0c", "b": "1"}]


def test_a_table_without_header_takes_the_given_names(tmp_path) -> None:
    columns = Columns(("b",), headless=("a", "b"))
    assert values(written(tmp_path, "a.tsv", "x\t1\ny\t2\n"), columns) == [
        {"a": "x", "b": "1"},
        {"a": "y", "b": "2"},
    ]


def test_a_header_is_preferred_to_the_given_names(tmp_path) -> None:
    columns = Columns(("b",), headless=("a", "b"))
    assert values(written(tmp_path, "a.tsv", "b\tc\td\nx\t1\t2\n"), columns) == [
        {"b": "x", "c": "1", "d": "2"}
    ]


@pytest.mark.parametrize(("name", "content"), [("a.tsv", "a\tb\nx\ny\t1\n"), ("a.csv", "a,b\nx\ny,1\n")])
def test_a_ragged_line_is_reported_with_both_counts_and_the_next_is_read(tmp_path, name, content) -> None:
    path = written(tmp_path, name, content)
    (bad,) = bad_lines(path)
    assert bad.where == f"{path}:2"
    assert bad.what == "has 1 columns instead of 2 ('a', 'b')"
    assert values(path) == [{"a": "y", "b": "1"}]


def test_a_delimiter_in_the_only_column_is_answered_with_another_delimiter(tmp_path) -> None:
    (bad,) = bad_lines(written(tmp_path, "a.csv", "text\nhot, hotter\n"))
    assert bad.what == "has 2 columns instead of 1 ('text')"
    assert bad.remedy.endswith("or use another `delimiter`")


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl", "a.parquet"])
def test_a_wrong_column_is_rejected_with_the_columns_there_are(tmp_path, name) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"a": ["x"], "b": [1]}), path)
    else:
        written(tmp_path, name, {"a.tsv": "a\tb\n", "a.csv": "a,b\n", "a.jsonl": '{"a": 1, "b": 2}\n'}[name])
    with pytest.raises(UserError) as told:
        list(rows_of(path, Columns(("review",))))
    assert told.value.what == "lacks the column 'review'"
    advice = "; for a file without a header, use `columns=a,b,c`" if name in ("a.tsv", "a.csv") else ""
    assert told.value.remedy == f"its columns are 'a', 'b'{advice}"


def test_a_needed_column_that_stands_twice_is_rejected(tmp_path) -> None:
    with pytest.raises(UserError, match="two columns 'a'"):
        list(rows_of(written(tmp_path, "a.csv", "a,b,a\n"), Columns(("a",))))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{", "is not valid JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"b": 1}', "lacks 'a', it has 'b'"),
        (b'{"a": "\xff"}', "is not valid JSON"),
    ],
)
def test_a_bad_line_of_json_is_reported_and_the_next_is_read(tmp_path, line, what) -> None:
    path = written(tmp_path, "a.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    (bad,) = bad_lines(path, Columns(("a",)))
    assert bad.where == f"{path}:2"
    assert bad.what.startswith(what)
    assert len(values(path, Columns(("a",)))) == 2


@pytest.mark.parametrize("torn", [b"caf\xe9,1", b'"two\nlines, ""caf\xe9""\n",1', b"x,\xed\xa0\x80"])
def test_a_record_of_csv_that_is_no_utf8_is_reported_and_the_next_is_read(tmp_path, torn) -> None:
    path = written(tmp_path, "a.csv", b"a,b\nx,0\n" + torn + b"\ncaf\xc3\xa9,2\n")
    (bad,) = bad_lines(path)
    assert (bad.where, bad.what) == (f"{path}:3", "is not UTF-8 text")
    assert values(path) == [{"a": "x", "b": "0"}, {"a": "café", "b": "2"}]


@pytest.mark.parametrize(("header", "option"), [("text,stars", "','"), ("text;stars", "';'")])
def test_a_tsv_with_another_delimiter_is_told_which_option_helps(tmp_path, header, option) -> None:
    path = written(tmp_path, "a.tsv", f"{header}\n")
    with pytest.raises(UserError, match=f"its cells seem to be separated by .*: use `delimiter={option}`"):
        list(rows_of(path, Columns(("text",))))


@pytest.mark.parametrize("needed", [("text", "Stars"), ("Text",)])
@pytest.mark.parametrize("header", ["text;stars", 'text;stars;"a, b"'])
def test_a_missing_column_of_a_csv_is_told_beside_those_that_its_delimiter_gives(
    tmp_path, header, needed
) -> None:
    path = written(tmp_path, "a.csv", f"{header}\n")
    line = f"lacks the column '{needed[-1]}'; its columns are 'text', 'stars'"
    with pytest.raises(UserError, match=line):
        list(rows_of(path, Columns(needed)))


@pytest.mark.parametrize(
    ("mark", "word"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")], ids=["semicolon", "tab", "bar"]
)
@pytest.mark.parametrize("columns", [Columns(("text",)), ANY_COLUMNS], ids=["needed", "any"])
def test_a_csv_is_read_with_the_delimiter_that_its_header_shows(
    tmp_path, caplog, mark, word, columns
) -> None:
    lines = [f"text{mark}stars", f'"a, b{mark} ""c""\nd"{mark}1', f"2,5{mark}2"]
    path = written(tmp_path, "a.csv", "\r\n".join(lines))
    assert values(path, columns) == [
        {"text": f'a, b{mark} "c"\nd', "stars": "1"},
        {"text": "2,5", "stars": "2"},
    ]
    assert [f"a.csv: its first line has {word} between its cells" in line for line in caplog.messages] == [
        True
    ]


def test_a_header_with_commas_and_the_wanted_columns_is_read_with_commas(tmp_path, caplog) -> None:
    path = written(tmp_path, "a.csv", "text;old,text,stars\nx,y;z,1\n")
    assert values(path, Columns(("text",))) == [{"text;old": "x", "text": "y;z", "stars": "1"}]
    assert caplog.messages == []


@pytest.mark.parametrize(("name", "mark"), [("a.csv", "#"), ("a.tsv", ";"), ("a.txt", "|"), ("a.csv", "\t")])
def test_a_delimiter_that_is_given_is_taken(tmp_path, caplog, name, mark) -> None:
    path = written(tmp_path, name, f'a{mark}b\n"x{mark}y"{mark}1\n')
    rows = list(rows_of(path, Columns(("a",)), TableFormat(delimiter=mark)))
    assert [row.values for row in rows] == [{"a": f"x{mark}y", "b": "1"}]
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-8"])
def test_an_encoding_that_is_given_is_taken(tmp_path, name, encoding) -> None:
    content = {"a.tsv": "a\tb\r\ncaf\xe9 \u201c\t1\r\n", "a.csv": 'a,b\n"caf\xe9 \u201c",1\n'}.get(
        name, '{"a": "caf\xe9 \u201c", "b": "1"}\n'
    )
    path = written(tmp_path, name, content.encode(encoding))
    (row,) = rows_of(path, form=TableFormat(encoding=encoding))
    assert row.values == {"a": "caf\xe9 \u201c", "b": "1"}


def test_a_wrong_encoding_is_told_with_its_line(tmp_path) -> None:
    path = written(tmp_path, "a.csv", b"a,b\nx,1\n\xff\xff,2\n")
    with pytest.raises(UserError, match="a.csv:[0-9]: is not ascii text"):
        list(rows_of(path, form=TableFormat(encoding="ascii")))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_columns_name_the_cells_of_a_file_without_a_header(tmp_path, name) -> None:
    mark = "," if name == "a.csv" else "\t"
    path = written(tmp_path, name, f"x{mark}1\ny{mark}2\n")
    form = TableFormat(columns=("text", "stars"))
    assert [row.values["text"] for row in rows_of(path, Columns(("text",)), form)] == ["x", "y"]
    with pytest.raises(UserError, match="column 'label'; .* 'text', 'stars'"):
        list(rows_of(path, Columns(("label",)), form))


def test_a_header_is_no_row_even_where_columns_are_named(tmp_path) -> None:
    path = written(tmp_path, "a.csv", "text;stars\nx;1\n")
    (row,) = rows_of(path, form=TableFormat(columns=("text", "stars")))
    assert row.values == {"text": "x", "stars": "1"}


def test_a_headless_csv_is_read_with_the_delimiter_that_gives_its_columns(tmp_path) -> None:
    path = written(tmp_path, "a.csv", "x, and y;1\nz;2\n")
    rows = list(rows_of(path, Columns(("text",)), TableFormat(columns=("text", "stars"))))
    # Commas give two cells as well: where both fit, a .csv means commas.
    assert rows[0].values == {"text": "x", "stars": " and y;1"}
    path = written(tmp_path, "b.csv", "x;1\nz;2\n")
    rows = list(rows_of(path, Columns(("text",)), TableFormat(columns=("text", "stars"))))
    assert [row.values["stars"] for row in rows] == ["1", "2"]


def test_what_describes_itself_takes_no_delimiter_and_no_columns(tmp_path) -> None:
    path = written(tmp_path, "a.jsonl", '{"a": 1}\n')
    for form in (TableFormat(delimiter=";"), TableFormat(columns=("a",))):
        with pytest.raises(UserError, match="a .jsonl file already names its columns; remove `delimiter`"):
            list(rows_of(path, form=form))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_json_array_is_read_item_by_item(tmp_path, name) -> None:
    path = written(tmp_path, name, json.dumps([{"a": 1}, 7, {"a": "x"}], indent=2))
    found = list(rows_of(path, Columns(("a",))))
    assert [found[0], found[2]] == [Row({"a": 1}, f"{path} item 1"), Row({"a": "x"}, f"{path} item 3")]
    assert isinstance(found[1], BadLine) and found[1].what == "is not a JSON object"


def test_a_broken_json_array_is_told_as_one(tmp_path) -> None:
    with pytest.raises(UserError, match="a.json: is not valid JSON .*; write one array of objects"):
        list(rows_of(written(tmp_path, "a.json", '[\n{"a": 1},\n{"a": \n]')))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"delimiter": ";;"}, "delimiter: ';;' cannot separate cells"),
        ({"delimiter": '"'}, "cannot separate cells"),
        ({"encoding": "utf-9"}, "encoding: unknown encoding 'utf-9'"),
        ({"encoding": "hex"}, "unknown encoding 'hex'"),
        ({"columns": "a,,b"}, "columns: 'a,,b' does not name columns"),
        ({"columns": "a,a"}, "does not name columns"),
    ],
)
def test_a_format_that_cannot_be_is_refused(given, what) -> None:
    with pytest.raises(UserError, match=what):
        TableFormat.parse(**given)


def test_a_format_is_spelled_as_people_do() -> None:
    assert TableFormat.parse(delimiter="tab", columns="a, b") == TableFormat("\t", "", ("a", "b"))


def test_a_line_of_tsv_that_is_no_utf8_is_reported(tmp_path) -> None:
    path = written(tmp_path, "a.tsv", b"a\tb\nx\xff\t1\ny\t2\n")
    assert [bad.where for bad in bad_lines(path)] == [f"{path}:2"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'a,b\n"x,1\n', ":2: is not CSV"),
        (b"a\xff,b\nx,1\n", ":1: is not UTF-8"),
        ("a,b\n".encode("utf-16"), "is UTF-16"),
    ],
)
def test_csv_that_cannot_go_on_is_rejected_with_its_line(tmp_path, content, what) -> None:
    with pytest.raises(UserError, match=what):
        list(rows_of(written(tmp_path, "a.csv", content)))


def test_cells_may_be_longer_than_pythons_own_limit(tmp_path) -> None:
    assert len(str(values(written(tmp_path, "a.csv", f"a,b\n{'x' * 200_000},1\n"))[0]["a"])) == 200_000


def test_a_broken_parquet_file_is_the_users_to_mend(tmp_path) -> None:
    with pytest.raises(UserError, match="not a whole Parquet file"):
        list(rows_of(written(tmp_path, "a.parquet", b"PAR1 and then nothing")))


cells = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
tables = st.lists(st.tuples(cells, cells), max_size=5)


@given(tables)
def test_csv_as_python_writes_it_is_read_as_it_was(rows) -> None:
    with TemporaryDirectory() as folder:
        stream = io.StringIO(newline="")
        csv.writer(stream, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
        path = written(Path(folder), "a.csv", stream.getvalue())
        assert [(row["a"], row["b"]) for row in values(path)] == rows


@given(tables)
def test_json_lines_are_read_as_they_were(rows) -> None:
    with TemporaryDirectory() as folder:
        lines = [json.dumps({"a": a, "b": b}, ensure_ascii=False) for a, b in rows]
        path = written(Path(folder), "a.jsonl", "\n".join(lines))
        assert [(row["a"], row["b"]) for row in values(path)] == rows


@given(
    st.lists(st.tuples(cells, cells).filter(lambda row: not set("\t\n\r") & set("".join(row))), max_size=5)
)
def test_tsv_cells_are_what_stands_between_tabs(rows) -> None:
    with TemporaryDirectory() as folder:
        path = written(Path(folder), "a.tsv", "".join(f"{a}\t{b}\n" for a, b in [("a", "b"), *rows]))
        assert [(row["a"], row["b"]) for row in values(path)] == rows


# ---- tables that are none


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl", "a.tsv.zst"])
def test_a_line_or_cell_of_many_megabytes_is_refused(name, tmp_path) -> None:
    line = b"text\tlabel\n" + b"x" * 40_000_000 if "tsv" in name else b'text,label\n"' + b"x" * 40_000_000
    content = b'{"text": "' + b"x" * 40_000_000 if "json" in name else line
    path = written(tmp_path, name, zstandard.compress(content) if name.endswith("zst") else content)
    with pytest.raises(UserError, match="has a line of 32 MiB or more; split its texts"):
        values(path, Columns(needed=("text", "label")))


def test_a_cell_over_many_lines_is_bounded_too(tmp_path) -> None:
    path = written(tmp_path, "a.csv", 'text,label\n"' + ("x" * 10_000 + "\n") * 1700)
    with pytest.raises(UserError, match="is not CSV .field larger than field limit"):
        values(path, Columns(needed=("text", "label")))


def test_a_cell_of_very_many_lines_is_refused_before_its_end(tmp_path) -> None:
    path = written(tmp_path, "a.csv", 'text,label\nx,y\n"' + "\n" * 200_000)
    with pytest.raises(UserError, match=r"a\.csv:3: has a cell of more than 100,000 lines"):
        values(path, Columns(needed=("text", "label")))


def test_many_records_may_have_many_lines_together(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("bertsmith.tasks.tables._MAX_RECORD_LINES", 3)
    path = written(tmp_path, "a.csv", "text,label\n" + '"a\nb\nc",x\n' * 5)
    assert len(values(path, Columns(needed=("text", "label")))) == 5


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl"])
def test_a_pipe_is_no_table(name, tmp_path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="is a pipe or a device, not a file; write it to a file first"):
        values(tmp_path / name)


def test_of_a_million_columns_an_error_names_a_few(tmp_path) -> None:
    path = written(tmp_path, "a.tsv", "\t".join(f"{number}{'x' * 100}" for number in range(50_000)) + "\n1\n")
    with pytest.raises(UserError, match="and 49980 more") as told:
        values(path, Columns(needed=("text",)))
    assert len(told.value.line()) < 2000
