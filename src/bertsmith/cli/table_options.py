"""The options of verbs that read tables: which columns are meant, and how the file is written."""

from typing import Annotated

from typer import Option

TextColumnOption = Annotated[
    str,
    Option("--text", metavar="COLUMN", help="Of a table (.csv, .tsv, .json, .parquet): the column of texts."),
]
Text2ColumnOption = Annotated[
    str, Option("--text2", metavar="COLUMN", help="Of a table of pairs: the column of the second texts.")
]
DelimiterOption = Annotated[
    str,
    Option("--delimiter", metavar="CHAR", help="What parts the cells, where no header shows it."),
]
EncodingOption = Annotated[
    str,
    Option("--encoding", metavar="NAME", help="Of a table that is not UTF-8: cp1252, utf-16 ..."),
]
ColumnsOption = Annotated[
    str, Option("--columns", metavar="A,B,C", help="The columns of a table that has no header.")
]
SkipBadOption = Annotated[bool, Option("--skip-bad", help="Skip bad lines and count them.")]
