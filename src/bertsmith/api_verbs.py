"""All verbs of the command line as Python functions, and results that a notebook shows as tables."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, get_args

from typer import Exit

from bertsmith.api_rows import Rows
from bertsmith.cli.app import VERBS
from bertsmith.cli.presenting import collected
from bertsmith.cli.request import with_options
from bertsmith.cli.spelling import as_arguments, spelling_as
from bertsmith.cli.verb import App

SHOWN_ROWS = 20
"""Maximum rows of a table in a notebook."""


class Shown:
    """A result that a notebook shows as a table."""

    def title(self) -> str:
        """Return the caption of the table."""
        raise NotImplementedError

    def table(self) -> Rows:
        """Return the rows of the table."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """Return the table in HTML; texts are escaped, so that nothing in them runs."""
        rows = self.table()
        shown = rows[:SHOWN_ROWS]
        names = list(dict.fromkeys(name for row in shown for name in row))
        cells = [[_cell(row.get(name)) for name in names] for row in shown]
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
        more = f" (the first {SHOWN_ROWS})" if len(rows) > SHOWN_ROWS else ""
        caption = f"<caption>{escape(self.title() + more)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: Any) -> str:
    if cell is None:
        return ""
    return f"{cell:.4f}" if isinstance(cell, float) else str(cell)


@dataclass(frozen=True, slots=True)
class VerbResult(Shown):
    """The result of a verb: what the command prints as JSON."""

    verb: str
    values: Any
    """The printed object, or the list of several; None if a verb prints none."""
    finished: bool = True
    """False if it was stopped: the same call resumes it."""

    def title(self) -> str:
        """Return the name of the verb."""
        return self.verb if self.finished else f"{self.verb} (stopped: the same call resumes it)"

    def table(self) -> Rows:
        """Return a row for each entry of a list of objects, or for each value by its path of names."""
        if isinstance(self.values, list) and all(isinstance(row, dict) for row in self.values):
            return self.values
        return [{"name": name, "value": value} for name, value in _leaves(self.values, "")]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


class Verbs:
    """The verbs of the command line, with their options as arguments: verbs.prune(model=..., heads=0.4, ...).

    Groups have their verbs: verbs.look.attention(...). Messages are printed, and results returned.
    """

    def __init__(self, verbs: Mapping[str, Any], prefix: str = "") -> None:
        self._verbs = {name.replace("-", "_"): verb for name, verb in verbs.items()}
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        if name not in self._verbs:
            raise AttributeError(f"there is no verb {self._prefix}{name}; there are {', '.join(dir(self))}")
        verb, spoken = self._verbs[name], f"{self._prefix}{name}".replace("_", "-")
        if isinstance(verb, App):
            inner = {str(each.name): each.callback for each in verb.registered_commands}
            return Verbs(inner, f"{spoken} ")
        return function_of_verb(spoken, verb)

    def __dir__(self) -> list[str]:
        return sorted(self._verbs)


def function_of_verb(name: str, verb: Callable[..., Any]) -> Callable[..., VerbResult]:
    """Return the function that does what a verb does, with its options as keyword arguments."""
    spelled_out = with_options(verb)
    signature = inspect.signature(spelled_out)
    parameters = [each for each in signature.parameters.values() if each.name != "as_json"]

    def call(**given: Any) -> VerbResult:
        bound = signature.replace(parameters=parameters).bind(**given)
        bound.apply_defaults()
        values = {key: _as_typed(value, signature.parameters[key]) for key, value in bound.arguments.items()}
        if "as_json" in signature.parameters:
            values["as_json"] = True
        with spelling_as(as_arguments(spelled_out)), collected() as printed:
            try:
                spelled_out(**values)
                finished = True
            except Exit as ending:
                finished = not ending.exit_code
        return VerbResult(name, printed[0] if len(printed) == 1 else (printed or None), finished)

    call.__name__, call.__doc__ = name, inspect.getdoc(verb)
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def _as_typed(value: Any, parameter: inspect.Parameter) -> Any:
    """Return strings as paths where the option takes paths, one or several."""
    kinds = _types_in(parameter.annotation)
    if isinstance(value, str | Path) and Path in kinds:
        path = Path(value).expanduser()
        return [path] if list in kinds else path
    if list in kinds and isinstance(value, Sequence) and not isinstance(value, str):
        return [_as_typed(each, parameter)[0] for each in value] if Path in kinds else list(value)
    return value


def _types_in(annotation: Any) -> set[Any]:
    inner = get_args(annotation)
    found = {annotation, getattr(annotation, "__origin__", None)}
    return found.union(*map(_types_in, (each for each in inner if not isinstance(each, str))))


verbs = Verbs(VERBS)
"""The verbs of the command line as functions."""
