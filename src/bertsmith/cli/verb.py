"""The base of all verbs: options that take several words, and usage errors in one line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from typer import BadParameter, Typer
from typer.core import TyperCommand, TyperGroup

from bertsmith.cli.request import with_options
from bertsmith.cli.spelling import as_options, spelling_as
from bertsmith.core.errors import UserError

SEVERAL = {"--model", "--teacher"}
"""Options that take all words up to the next option, in verbs that take several."""
RENAMED = {"--search": "--random", "--ensemble": "--model A B"}
"""New names of options."""
Function = TypeVar("Function", bound=Callable[..., Any])
UsageError = cast("type[BadParameter]", BadParameter.__mro__[1])
"""Click's usage error, which Typer does not export."""


class Verb(TyperCommand):
    """A command with options of several words and paths that may begin with ~ (`--out=~/run`).

    Its usage errors take one line.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after repeating the option's name before each of its several values."""
        end = args.index("--") if "--" in args else len(args)  # only arguments follow
        several = {each.opts[0] for each in self.params if getattr(each, "multiple", False)} & SEVERAL
        words = [*_named_each(args[:end], several), *args[end:]]
        with mistakes_as_one_line(ctx):
            rest = super().parse_args(ctx, words)
        ctx.params = {name: _expanded(value) for name, value in ctx.params.items()}
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; its errors name options."""
        with spelling_as(as_options(self)):
            return super().invoke(ctx)


class App(Typer):
    """A group of verbs; the fields of their requests are options."""

    def __init__(self, **settings: Any) -> None:
        # Plain help and plain tracebacks: rich would double the time of `bertsmith --help`.
        super().__init__(
            cls=Verbs,
            no_args_is_help=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        """Return the decorator of a verb."""
        register = super().command(name, cls=Verb, **settings)

        def registered(verb: Function) -> Function:
            register(with_options(verb))
            return verb

        return registered


class Verbs(TyperGroup):
    """A group of commands with usage errors in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; without any, Click raises its error that prints the help."""
        if not args:
            return super().parse_args(ctx, args)
        with mistakes_as_one_line(ctx):
            return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs by group."""
        groups: dict[str, list[tuple[str, Any]]] = {}
        for name in self.list_commands(ctx):
            verb: Any = self.get_command(ctx, name)
            groups.setdefault(verb.rich_help_panel or "Commands", []).append((name, verb))
        room = formatter.width - 6 - max(map(len, self.commands))
        for title, verbs in groups.items():
            with formatter.section(title):
                formatter.write_dl([(name, verb.get_short_help_str(room)) for name, verb in verbs])

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
        renamed = RENAMED.get(getattr(error, "option_name", ""), "")
        if any(option in renamed.split() for each in ctx.command.params for option in each.opts):
            remedy = f"use {renamed}"
        # Typer checks choices by pydantic, which puts the kind of its error first.
        what = error.format_message().rstrip(".").replace("Value error, ", "")
        raise UserError(what, remedy=remedy) from error


def _expanded(value: Any) -> Any:
    """Return a path, or a list of paths, with ~ replaced by the home folder, and other values as they are."""
    if isinstance(value, list | tuple):
        return type(value)(map(_expanded, value))
    return value.expanduser() if isinstance(value, Path) else value


def _named_each(words: list[str], several: set[str]) -> list[str]:
    """Return the words with such an option repeated before each of its values, as in `--model A B`."""
    named: list[str] = []
    option = ""
    for word in words:
        if word.startswith("-"):
            option = word if word in several else ""
        elif option and named[-1] != option:
            named.append(option)
        named.append(word)
    return named
