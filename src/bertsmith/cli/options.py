"""Options that several verbs have, and the recipe settings of options."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from typer import Option

from bertsmith.cli.request import Names, SettingsGiven
from bertsmith.model.folder import sentence_modules
from bertsmith.recipe.toml_text import value_text

Model = Annotated[
    Path | None,
    Option(
        "--model",
        metavar="FOLDER",
        help="Model or run folder, or the name of a downloaded model; by default an embedded one.",
    ),
]
Base = Annotated[
    Path | None,
    Option(
        "--base",
        metavar="FOLDER",
        help="For an adapter folder: its base model; by default the one that it names.",
    ),
]
Device = Annotated[
    str, Option("--device", help="Device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
]
# A test compares these names with inference, which would load torch and delay --help.
Precision = Annotated[
    str,
    Option(
        "--precision",
        help="auto (bf16, or int8 for a quantised folder, if the machine supports it, else fp32), fp32, "
        "bf16, int8 (CPU).",
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON, for machines.")]
JsonLines = Annotated[bool, Option("--json", help="Print JSON lines, for machines.")]
Settings = Annotated[
    SettingsGiven, Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable.")
]
Truncate = Annotated[
    bool, Option("--truncate", help="Cut texts that are too long for the model; else they are rejected.")
]
Pooling = Annotated[
    sentence_modules.Pooling | None,
    Option(
        "--pooling",
        help="Vector of a text: the mean, first (cls) or largest of its tokens' vectors, ..., the pooler's "
        "output, or the mean without the direction of an empty text (centred); by default as the folder "
        "defines, else centred.",
    ),
]
Prompt = Annotated[
    str | None,
    Option("--prompt", metavar="TEXT", help='Put before each text; "" turns off the one of the folder.'),
]

# ---- of a table

TextColumn = Annotated[
    str,
    Option("--text", metavar="COLUMN", help="Column of the texts in a table (.csv, .tsv, .json, .parquet)."),
]
Text2Column = Annotated[
    str, Option("--text2", metavar="COLUMN", help="Column of the second texts in a table of pairs.")
]
Delimiter = Annotated[
    str,
    Option("--delimiter", metavar="CHAR", help="Separator of the cells, if the header does not show it."),
]
Encoding = Annotated[
    str,
    Option("--encoding", metavar="NAME", help="Encoding of a table that is not UTF-8: cp1252, utf-16 ..."),
]
Columns = Annotated[
    Names, Option("--columns", metavar="A,B,C", help="The columns of a table without a header.")
]
SkipBad = Annotated[bool, Option("--skip-bad", help="Skip bad lines and count them.")]


def settings_of(given: Iterable[tuple[str, str, object]]) -> list[tuple[str, str]]:
    """Return the options that were given, by option, recipe key and value, each with its `key=value`."""
    return [(f"`{name}`", f"{key}={value_text(value)}") for name, key, value in given if value is not None]
