"""Options that several verbs have, and the recipe settings of options."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from typer import Option

from bertsmith.cli.request import Names, Place, Request, SettingsGiven
from bertsmith.cli.spelling import Setting
from bertsmith.model.folder import sentence_modules
from bertsmith.recipe.toml_text import value_text
from bertsmith.tasks.table_format import TableFormat

if TYPE_CHECKING:
    from bertsmith.cli.text_files import TextSource
    from bertsmith.inference.loaded_model import Bert

_BASE = Option(
    "--base",
    metavar="FOLDER",
    help="For an adapter folder: its base model; by default the one that it names.",
)
Base = Annotated[Path | None, _BASE]
Device = Annotated[
    str, Option("--device", help="Device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
]


_MODEL = Option(
    "--model",
    metavar="FOLDER",
    help="Model or run folder, or the name of a downloaded model; by default an embedded one.",
)
Model = Annotated[Path | None, _MODEL]
# A test compares these names with inference, which would load torch and delay --help.
Precision = Annotated[
    str,
    Option(
        "--precision",
        help="auto (bf16, or int8 for a quantised folder, if the machine supports it, else fp32), fp32, "
        "bf16, int8 (CPU).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Computing(Request):
    """The device and the precision of a model, and the base of an adapter."""

    general: ClassVar[bool] = True
    base: Annotated[Place | None, _BASE] = None
    device: Device = "auto"
    precision: Precision = "auto"


@dataclass(frozen=True, kw_only=True)
class Asked(Computing):
    """The model that is asked."""

    model: Annotated[Place | None, _MODEL] = None

    @property
    def folder(self) -> Path | None:
        """The folder of the model, if one is named."""
        return None if self.model is None else Path(self.model)

    def open(self, *abilities: str) -> "Bert":
        """Open the model, or an embedded one with the abilities."""
        from bertsmith.cli.predicting import open_model

        base = None if self.base is None else Path(self.base)
        return open_model(self.folder, *abilities, device=self.device, precision=self.precision, base=base)


@dataclass(frozen=True, kw_only=True)
class AskedExactly(Asked):
    """A model for studies, which compare small differences."""

    general: ClassVar[bool] = True
    precision: Annotated[str, Option("--precision", help="fp32, or auto, bf16, int8 (CPU).")] = "fp32"


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

# ---- of a training


@dataclass(frozen=True, kw_only=True)
class Machine(Request):
    """The device and the precision of a training."""

    general: ClassVar[bool] = True
    device: Annotated[str | None, Setting("run.device"), Option(help="auto, cpu or cuda (run.device).")] = (
        None
    )
    precision: Annotated[
        str | None, Setting("run.precision"), Option(help="auto, fp32, bf16 or fp16 (run.precision).")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Budget(Request):
    """The length of a training on text."""

    general: ClassVar[bool] = True
    steps: Annotated[
        int | None,
        Setting("run.steps", also={"run.budget": "steps"}),
        Option(help="Budget in steps (run.steps)."),
    ] = None
    minutes: Annotated[
        float | None,
        Setting("run.minutes", also={"run.budget": "minutes"}),
        Option(help="Budget in minutes (run.minutes)."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Rates(Request):
    """The length and the learning rate of a fine-tuning."""

    epochs: Annotated[
        float | None, Setting("run.epochs"), Option(help="Passes through the training data (run.epochs).")
    ] = None
    lr: Annotated[
        float | None, Setting("optim.peak_lr"), Option(help="Peak learning rate (optim.peak_lr).")
    ] = None


# ---- of a table

SkipBad = Annotated[bool, Option("--skip-bad", help="Skip bad lines and count them.")]


@dataclass(frozen=True, kw_only=True)
class Table(Request):
    """The format of a table, where the file does not show it."""

    general: ClassVar[bool] = True
    delimiter: Annotated[
        str,
        Option("--delimiter", metavar="CHAR", help="Separator of the cells, if the header does not show it."),
    ] = ""
    encoding: Annotated[
        str,
        Option(
            "--encoding", metavar="NAME", help="Encoding of a table that is not UTF-8: cp1252, utf-16 ..."
        ),
    ] = ""
    columns: Annotated[
        Names, Option("--columns", metavar="A,B,C", help="The columns of a table without a header.")
    ] = ""

    @property
    def form(self) -> TableFormat:
        """The format; raises if it is not possible."""
        return TableFormat.parse(delimiter=self.delimiter, encoding=self.encoding, columns=self.columns)


@dataclass(frozen=True, kw_only=True)
class TextTable(Table):
    """A table with a column of texts, in the place of a text on each line."""

    column: Annotated[
        str,
        Option(
            "--text", metavar="COLUMN", help="Column of the texts in a table (.csv, .tsv, .json, .parquet)."
        ),
    ] = ""
    skip_bad: SkipBad = False

    def of(self, source: Path) -> "TextSource":
        """Return the texts of a file."""
        from bertsmith.cli.text_files import TextSource

        return TextSource(source, self.column, getattr(self, "column2", ""), self.form, self.skip_bad)


@dataclass(frozen=True, kw_only=True)
class PairTable(TextTable):
    """A table with one column of texts, or two of pairs."""

    column2: Annotated[
        str, Option("--text2", metavar="COLUMN", help="Column of the second texts in a table of pairs.")
    ] = ""


def settings_of(given: Iterable[tuple[str, str, object]]) -> list[tuple[str, str]]:
    """Return the options that were given, by option, recipe key and value, each with its `key=value`."""
    return [(f"`{name}`", f"{key}={value_text(value)}") for name, key, value in given if value is not None]
