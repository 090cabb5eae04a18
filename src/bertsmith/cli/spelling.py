"""Settings in messages, as the command line spells them (`--batch 64`) and as Python does (batch=64)."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from shlex import quote
from typing import Any, get_args

from bertsmith.core.errors import Spelling, UserError, spelled

_SPELLING: ContextVar[Spelling | None] = ContextVar("spelling", default=None)


class Setting:
    """Recipe keys that an option sets, in the option's annotation."""

    def __init__(
        self,
        *keys: str,
        value: object = None,
        also: Mapping[str, object] | None = None,
        derived: Sequence[str] = (),
    ) -> None:
        self.keys = keys
        """The key, or that of a pre-training recipe and that of a fine-tuning recipe."""
        self.value = value
        """Value that a flag sets; else the option's own."""
        self.also = also or {}
        """Keys that are set with the first one."""
        self.derived = derived
        """Those of the keys whose values the verb derives from the option."""

    def values(self, given: object, *, tuning: bool) -> list[tuple[str, object]]:
        """Return all keys that a given option sets, with their values."""
        key, value = self.keys[-1 if tuning else 0], given if self.value is None else self.value
        also = self.also.items() if key == self.keys[0] else ()
        return [] if key in self.derived else [(key, value), *also]


def names_of_keys(function: Callable[..., Any]) -> dict[str, str]:
    """Return the parameter that sets each recipe key, by the annotations of a verb or its Python function."""
    parameters = inspect.signature(function).parameters.items()
    notes = ((name, note) for name, each in parameters for note in get_args(each.annotation)[1:])
    return {
        key: name
        for name, note in notes
        if isinstance(note, Setting) and note.value is None
        for key in note.keys
    }


def as_options(command: Any) -> Spelling:
    """Return the spelling of a command of the command line."""
    keys = names_of_keys(command.callback)
    words = {each.name: _word(each) for each in command.params}
    words |= {each.opts[0][2:].replace("-", "_"): _word(each) for each in command.params if _is_option(each)}
    flags = {_word(each) for each in command.params if getattr(each, "is_flag", False)}

    def spell(key: str, value: str) -> str | None:
        if word := words.get(keys.get(key, key)):
            return word if not value or word in flags else f"{word} {quote(value)}"
        if "." not in key or "settings" not in words:
            return None
        return f"{words['settings']} {key}={quote(value)}" if value else f"{words['settings']} {key}"

    return spell


def _is_option(parameter: Any) -> bool:
    return str(parameter.opts[0]).startswith("--")


def _word(parameter: Any) -> str:
    """Return the long name of an option, or the name of an argument in the help text."""
    if not _is_option(parameter):
        return str(parameter.metavar or parameter.name.upper()).strip("[].")
    return str(parameter.opts[0])


def as_arguments(request: Callable[..., Any]) -> Spelling:
    """Return the spelling of a Python function, by the parameters of its request."""
    keys, names = names_of_keys(request), inspect.signature(request).parameters

    def spell(key: str, value: str) -> str | None:
        if (name := keys.get(key, key)) in names:
            return f"{name}={_literal(name, value) if value else ''}"
        if "." not in key or "settings" not in names:
            return None
        return f'settings={{"{key}": {_literal(key, value)}}}' if value else f'settings={{"{key}": ...}}'

    return spell


def _literal(name: str, value: str) -> str:
    """Return a value of a message as a Python expression; an example in capitals stands for any value."""
    if value.isupper():
        return "..."
    if name == "columns":
        return json.dumps(value.split(","))
    try:
        return value if value in ("True", "False") else repr(json.loads(value))
    except ValueError:
        return json.dumps(value, ensure_ascii=False)


def as_now(text: str) -> str:
    """Return a message with its settings as the command that runs spells them."""
    spelling = _SPELLING.get()
    return text if spelling is None else spelled(text, spelling)


@contextmanager
def spelling_as(spelling: Spelling) -> Iterator[None]:
    """Inside, spell settings like this, in messages and in user errors that leave."""
    before = _SPELLING.set(spelling)
    try:
        yield
    except UserError as error:
        raise error.spelled(spelling) from error
    finally:
        _SPELLING.reset(before)
