"""The `bertsmith` command: registers all verbs, and reports a user error in one line."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

from typer import Exit, Option, echo

from bertsmith.cli.terminal import reporting_output_errors, stops_as_interrupt
from bertsmith.cli.verb import App
from bertsmith.core.errors import UserError
from bertsmith.core.files import lone_surrogate, reporting_missing_homes
from bertsmith.core.version import VERSION

USER_ERROR = 2
PIPE_CLOSED = 141
"""Exit status if the reader closes the pipe, as a shell reports for cat or grep: 128 plus SIGPIPE."""

MEMORY_KEPT_MS = 10_000
"""Milliseconds that mimalloc, torch's allocator on ARM, keeps freed memory.

By default it soon returns memory to the system, and a seventh of a training step is spent on requesting it
again. Other allocators ignore this setting."""


app = App(
    name="bertsmith",
    epilog="Start here: bertsmith demo, or bertsmith fill 'Paris is the [MASK] of France.' "
    "A checkpoint of 2018: bertsmith import-tf uncased_L-12_H-768_A-12 --out models/bert-base. "
    "In Python: import bertsmith; bert = bertsmith.load('models/bert-base').",
)
GROUPS = {
    "Ask a model": "fill next classify tag answer choose likelihood compare embed predict evaluate",
    "Train": "demo vocab corpus examples pretrain checkpoint recipe tasks inspect finetune merge",
    "Study": "study glue blimp look features features-table cost",
    "Shrink": "distill prune trim share quantise",
    "Serve and exchange": "serve export import-tf",
    "Folders": "cache",
}
"""Verbs, and groups of verbs, in the order of the help. Each is in the file of its name, or else in:"""
HOMES = {
    "next": "fill.next_sentence",
    "evaluate": "predict.evaluate",
    "features-table": "features.features_table",
    "look": "look.group.look",
}
VERBS: dict[str, Any] = {}
"""Function, or group of verbs, by name."""
for title, names in GROUPS.items():
    for name in names.split():
        own_name = name.replace("-", "_")
        module, _, function = HOMES.get(name, f"{own_name}.{own_name}").rpartition(".")
        VERBS[name] = verb = getattr(import_module(f"bertsmith.cli.{module}"), function)
        if isinstance(verb, App):
            app.add_typer(verb, name=name, rich_help_panel=title)
        else:
            app.command(name, rich_help_panel=title)(verb)


def show_version(wanted: bool) -> None:
    """Print the version and exit, if requested."""
    if wanted:
        echo(f"bertsmith {VERSION}")
        raise Exit


@app.callback()
def bertsmith(
    version: Annotated[  # noqa: ARG001 - the callback prints it
        bool, Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Forge BERTs: from raw text to a served model."""


def check_arguments(words: Sequence[str]) -> None:
    """Raise for an argument that is not UTF-8; restart in UTF-8 mode if only the locale is the reason."""
    for number, word in enumerate(words):
        if lone_surrogate(word):
            if sys.getfilesystemencoding() != "utf-8" and "utf8" not in sys._xoptions:
                os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
            remedy = "rename the file, or type the text in UTF-8"
            raise UserError("is not UTF-8", where=f"argument {number} ({word})", remedy=remedy)


def main() -> None:
    """Run the command line; exit with 0 when done, 2 for a user error, 130 if stopped, 1 for a bug.

    SIGTERM and a closed terminal stop it like Ctrl-C: with one line, and nothing half-written.

    If the reader closes the pipe early (`| head -1`), exit silently with 141, as other Unix tools do.
    """
    # Set before the verbs load torch, which reads it.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", str(MEMORY_KEPT_MS))
    try:
        with stops_as_interrupt(), reporting_output_errors():
            check_arguments(sys.argv)
            with reporting_missing_homes(" ".join(word for word in sys.argv if "~" in word)):
                app(prog_name="bertsmith")
    except UserError as error:
        print(f"bertsmith: {error.line()}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except SystemExit as ending:
        # Typer and rich exit with 1 on a closed pipe, which scripts with pipefail treat as a failure. The
        # default action of SIGPIPE would also end `serve` at the first client that disconnects.
        if isinstance(ending.__context__, BrokenPipeError):
            sys.exit(PIPE_CLOSED)
        # Typer turns an interrupt into an exit; if no verb has reported it, nothing was printed yet.
        if isinstance(getattr(ending.__context__, "__cause__", None), KeyboardInterrupt):
            print("bertsmith: stopped", file=sys.stderr)
        raise
