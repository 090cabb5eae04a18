"""The base of all verbs: options that take several words, and usage errors in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from bertsmith.cli.spelling import as_options, spelling_as
from bertsmith.core.errors import UserError

SEVERAL: dict[str, str] = {"cost": "--models", "layers": "--models"}
"""Option that takes all words up to the next option, by verb."""
UsageError = cast("type[BadParameter]", BadParameter.__mro__[1])
"""Click's usage error, which Typer does not export."""


class Verb(TyperCommand):
    """A command whose options may take several words and whose paths may begin with ~ (`--out=~/run`).

    Its usage errors take one line.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after repeating the option's name before each of its several values."""
        end = args.index("--") if "--" in args else len(args)  # only arguments follow
        words = [*_named_each(args[:end], SEVERAL.get(self.name or "")), *args[end:]]
        with mistakes_as_one_line(ctx):
            rest = super().parse_args(ctx, words)
        ctx.params = {name: _expanded(value) for name, value in ctx.params.items()}
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; its errors name options."""
        with spelling_as(as_options(self)):
            return super().invoke(ctx)


class Verbs(TyperGroup):
    """A group of commands with usage errors in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; without any, Click raises its error that prints the help."""
        if not args:
            return super().parse_args(ctx, args)
        with mistakes_as_one_line(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of this name."""
        with mistakes_as_one_line(ctx):
            return super().resolve_command(ctx, args)


@contextmanager
def mistakes_as_one_line(ctx: Any) -> Iterator[None]:
    """Turn Click's error, which it prints in four lines, into a user error."""
    try:
        yield
    except UsageError as error:
        remedy = f"see {ctx.command_path} --help"
        # Typer checks choices by pydantic, which puts the kind of its error first.
        what = error.format_message().rstrip(".").replace("Value error, ", "")
        raise UserError(what, remedy=remedy) from error


def _expanded(value: Any) -> Any:
    """Return a path, or a list of paths, with ~ replaced by the home folder, and other values as they are."""
    if isinstance(value, list | tuple):
        return type(value)(map(_expanded, value))
    return value.expanduser() if isinstance(value, Path) else value


def _named_each(words: list[str], option: str | None) -> list[str]:
    """Return the words with this option repeated before each of its values, as in `--models A B`."""
    named: list[str] = []
    follows = False
    for word in words:
        if word.startswith("-"):
            follows = word == option
        elif follows and named[-1] != option:
            named.append(str(option))
        named.append(word)
    return named
