"""The base of all verbs: options that take several words, and mistakes reported in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from bertsmith.core.errors import UserError

SEVERAL: dict[str, str] = {"cost": "--models", "layers": "--models"}
"""For each verb its option that takes all words up to the next option, and not only one."""
UsageError = cast("type[BadParameter]", BadParameter.__mro__[1])
"""Click's error of all mistakes in a command's words; Typer gives no name to it."""


class Verb(TyperCommand):
    """A command whose options may take several words; what is wrong is one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after naming each value of an option that takes several."""
        end = args.index("--") if "--" in args else len(args)  # behind it stand no options
        words = [*_named_each(args[:end], SEVERAL.get(self.name or "")), *args[end:]]
        with mistakes_as_one_line(ctx):
            return super().parse_args(ctx, words)


class Verbs(TyperGroup):
    """A group of commands; what is wrong before any of them is reached is one line, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Click does it; where no word is given, that is the help, which Click takes for a mistake."""
        if not args:
            return super().parse_args(ctx, args)
        with mistakes_as_one_line(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of this name."""
        with mistakes_as_one_line(ctx):
            return super().resolve_command(ctx, args)


@contextmanager
def mistakes_as_one_line(ctx: Any) -> Iterator[None]:
    """Make Click's error an error of the user: its own way to say it takes four lines."""
    try:
        yield
    except UsageError as error:
        remedy = f"see {ctx.command_path} --help"
        raise UserError(error.format_message().rstrip("."), remedy=remedy) from error


def _named_each(words: list[str], option: str | None) -> list[str]:
    """The words with this option before each of those that follow it: `--models A B` names both."""
    named: list[str] = []
    follows = False
    for word in words:
        if word.startswith("-"):
            follows = word == option
        elif follows and named[-1] != option:
            named.append(str(option))
        named.append(word)
    return named
